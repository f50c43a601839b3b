"""What was done to train a model from scratch, kept with it as ``kvfold.json`` and told in its model card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ..convert.recipe import RECIPE, versions
from ..model import KvfoldError
from ..model.errors import one_line

FORMAT = 1


@dataclass(frozen=True)
class Pretrained:
    """The record of a training from scratch.

    Attributes:
        variant, key_value_heads, size: what was trained, ``size`` with all its settings. text: TEXT or shards.
        wanted_tokens: that were asked for.
        tokens: trained on until the weights that were kept; ``tokens_trained``: in all. flops: of training, counted
            (see ``sizes.Figures``). perplexity: on held-out text. seconds: it took. uptraining: runs that came after.
    """

    variant: str
    key_value_heads: int
    size: dict[str, Any]
    text: str
    parameters: int
    attention_parameters: int
    cache_bytes_per_token: int
    wanted_tokens: int
    tokens: int
    tokens_trained: int
    flops: float
    perplexity: float
    seed: int
    seconds: float
    dtype: str = "float32"
    uptraining: list[dict[str, Any]] = field(default_factory=list)
    source: None = None  # of which a conversion would be
    made_by: str = "pretrain"
    format: int = FORMAT
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @classmethod
    def read(cls, folder: Path) -> Pretrained:
        """Read ``kvfold.json``. Raises KvfoldError where it is missing, damaged, or of another format."""
        try:
            entries = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
            if entries["format"] != FORMAT:
                raise KvfoldError(f"{folder / RECIPE} has format {entries['format']!r}: written by a newer kvfold?")
            return cls(**entries)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KvfoldError(f"{folder / RECIPE} is missing or damaged: {one_line(error)}") from error

    def write(self, folder: Path) -> None:
        """Write ``kvfold.json`` and the model card ``README.md``."""
        (folder / RECIPE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        template = files("kvfold.finetune").joinpath("model_card.md.jinja").read_text(encoding="utf-8")
        card = Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True).from_string(template)
        (folder / "README.md").write_text(card.render(made=self) + "\n", encoding="utf-8")


def is_pretrained(folder: Path) -> bool:
    """Whether a folder holds a model that ``pretrain`` has made."""
    try:
        return json.loads((folder / RECIPE).read_text(encoding="utf-8")).get("made_by") == "pretrain"
    except (OSError, ValueError, AttributeError):
        return False
