"""What was done to make a folded checkpoint, kept with it as ``kvfold.json`` and told in its model card."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment

from ..model import KvfoldError
from ..model.errors import one_line

FORMAT = 1
RECIPE = "kvfold.json"
Record = TypeVar("Record")


@dataclass(frozen=True)
class Recipe:
    """Everything needed to make the checkpoint again.

    ``balance_search`` has the KL divergence from the source of each way that was compared, ``way`` the one that was
    chosen, ``refinement`` the divergence without and with it, ``layers`` each layer's layout, kept energy and errors.
    ``evaluation`` is the perplexity of source and result, where it was measured. ``uptraining`` has a run each.
    """

    source: dict[str, Any]
    method: str
    span: str
    cache_fraction: float
    cache_bytes_per_token: dict[str, float]
    balance: float | None
    balance_search: dict[str, float]
    way: dict[str, Any] | None
    planned: bool
    refinement: dict[str, float]
    noise: float
    calibration: dict[str, Any] | None
    dtype: str
    seed: int
    layers: list[dict[str, Any]]
    seconds: float
    evaluation: dict[str, Any] | None = None
    uptraining: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @classmethod
    def read(cls, folder: Path) -> Recipe:
        """Read ``kvfold.json``; see ``read_record``."""
        return read_record(cls, folder)

    def write(self, folder: Path) -> None:
        """Write ``kvfold.json`` and the model card ``README.md``."""
        write_record(self, folder, "kvfold.convert", recipe=self)


def read_record(kind: type[Record], folder: Path) -> Record:
    """What ``kvfold.json`` says. Raises KvfoldError where it is missing, damaged, or of another format."""
    try:
        entries = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        if entries["format"] != FORMAT:
            raise KvfoldError(f"{folder / RECIPE} has format {entries['format']!r}: written by a newer kvfold?")
        return kind(**entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KvfoldError(f"{folder / RECIPE} is missing or damaged: {one_line(error)}") from error


def record_entries(folder: Path) -> dict[str, Any] | None:
    """The entries of ``kvfold.json``, whichever record it is; None where it is missing or damaged."""
    try:
        entries = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entries if isinstance(entries, dict) else None


def write_record(record: Any, folder: Path, package: str, **named: Any) -> None:
    """Write a dataclass as ``kvfold.json``, and the model card of ``package``, which knows it by the name given."""
    (folder / RECIPE).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    template = files(package).joinpath("model_card.md.jinja").read_text(encoding="utf-8")
    card = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True).from_string(template)
    (folder / "README.md").write_text(card.render(**named) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of what did the work."""
    packages = ("kvfold", "torch", "transformers", "safetensors", "numpy", "scipy")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}
