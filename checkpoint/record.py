"""``kvfold.json``, the record of how a model was made, and its model card; here that of a conversion."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Self

from jinja2 import Environment

from ..model import KvfoldError
from ..model.errors import one_line

FORMAT = 1
RECIPE = "kvfold.json"


class ModelRecord:
    """A dataclass that is kept as ``kvfold.json``, and told in the model card that its template ``card`` makes."""

    card: ClassVar[str]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What ``kvfold.json`` says. Raises KvfoldError where it is missing, damaged, or of another format."""
        try:
            entries = _stored(folder)
            if entries["format"] != FORMAT:
                raise KvfoldError(f"{folder / RECIPE} has format {entries['format']!r}: written by a newer kvfold?")
            return cls(**entries)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KvfoldError(f"{folder / RECIPE} is missing or damaged: {one_line(error)}") from error

    def write(self, folder: Path) -> None:
        """Write ``kvfold.json`` and the model card ``README.md``."""
        entries = asdict(self)  # type: ignore[call-overload]  # every subclass is a dataclass
        (folder / RECIPE).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        template = files("kvfold.checkpoint").joinpath(self.card).read_text(encoding="utf-8")
        card = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True).from_string(template)
        (folder / "README.md").write_text(card.render(record=self) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Recipe(ModelRecord):
    """Everything needed to make the checkpoint again.

    ``balance_search`` has the KL divergence from the source of each way that was compared, ``way`` the one that was
    chosen, ``refinement`` the divergence without and with it, ``layers`` each layer's layout, kept energy and errors.
    ``evaluation`` is the perplexity of source and result, where it was measured. ``uptraining`` has a run each.
    """

    card = "conversion_card.md.jinja"

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


def record_entries(folder: Path) -> dict[str, Any] | None:
    """The entries of ``kvfold.json``, whichever record it is; None where it is missing or damaged."""
    try:
        entries = _stored(folder)
    except (OSError, ValueError):
        return None
    return entries if isinstance(entries, dict) else None


def versions() -> dict[str, str]:
    """Versions of what did the work."""
    packages = ("kvfold", "torch", "transformers", "safetensors", "numpy", "scipy")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def _stored(folder: Path) -> Any:
    return json.loads((folder / RECIPE).read_text(encoding="utf-8"))
