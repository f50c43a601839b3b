"""Type-check the package by its real name, ``kvfold``, and prove that the check sees across its folders.

The folders ``model``, ``convert``, … are imported as ``kvfold.model``, ``kvfold.convert``, …, which mypy cannot know:
to it every import between them is ``Any``. ``build/typed/kvfold`` shows it the package as it is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VIEW = ROOT / "build" / "typed"
PROBE = "from kvfold.model import FoldedLayout\n\nFoldedLayout(1, 1, 1).no_such_method()\n"


def make_view() -> None:
    """Links to the folders of the package, under the names by which they are imported."""
    package = VIEW / "kvfold"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        link.unlink()
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    for name, folder in folders.items():
        if name == "kvfold":
            for path in (ROOT / folder).glob("*.py*"):
                (package / path.name).symlink_to(path)
        else:
            (package / name.removeprefix("kvfold.")).symlink_to(ROOT / folder)


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run mypy on the view."""
    command = [sys.executable, "-m", "mypy", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"MYPYPATH": str(VIEW)}, capture_output=True, text=True)


def main() -> int:
    """Returns the exit code: 0 where the package is well typed and the probe is not."""
    make_view()
    checked = mypy("-p", "kvfold")
    print(checked.stdout + checked.stderr, end="")
    if checked.returncode:
        return checked.returncode
    probe = mypy("-c", PROBE)
    if '"FoldedLayout" has no attribute "no_such_method"' not in probe.stdout:
        print(f"the type check does not see across folders; of a call that cannot work it says: {probe.stdout}")
        return 1
    print("A call that cannot work across folders is found, as it should be.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
