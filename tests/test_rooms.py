"""The folders of the package import each other only in the direction that CONTRIBUTING.md gives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {
    "model": (),
    "checkpoint": ("model",),
    "text": ("model", "checkpoint"),
    "analysis": ("model", "checkpoint", "text"),
    "convert": ("model", "checkpoint", "text", "analysis"),
    "finetune": ("model", "checkpoint", "text", "analysis"),
    "cli": ("model", "checkpoint", "text", "analysis", "convert", "finetune"),
}


def imported_rooms(path: Path, root: Path = ROOT) -> set[str]:
    """The folders that a module imports from, other than its own."""
    module = path.relative_to(root).parts[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = list(module[: len(module) - node.level + 1]) if 0 < node.level <= len(module) else []
            full = [*base, *(node.module or "").split(".")] if node.module else base
            names = [full] if full else [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        for name in names:
            inside = name[1:] if name[0] == "kvfold" else name if getattr(node, "level", 0) else []
            rooms |= set(inside[:1]) & BELOW.keys()
    return rooms - {module[0]}


@pytest.mark.parametrize("room", BELOW)
def test_imports_point_downward(room: str) -> None:
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths
    upward = {str(path.relative_to(ROOT)): imported_rooms(path) - set(BELOW[room]) for path in paths}
    assert {path: rooms for path, rooms in upward.items() if rooms} == {}


def test_imports_are_seen(tmp_path: Path) -> None:
    module = tmp_path / "convert" / "methods" / "some.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from ...finetune.loss import x\nfrom ... import cli\nfrom ..options import y\nimport kvfold.text.mixture\n"
    )
    assert imported_rooms(module, tmp_path) == {"finetune", "cli", "text"}


def test_no_two_modules_share_a_name() -> None:
    """A module's name says what it holds; commands are called as the functions that they call."""
    modules = [path for room in BELOW if room != "cli" for path in (ROOT / room).rglob("*.py")]
    names = [path.stem for path in modules if path.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
