"""What was done to train a model from scratch, kept with it as ``kvfold.json`` and told in its model card."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .record import FORMAT, ModelRecord, record_entries, versions


@dataclass(frozen=True)
class Pretrained(ModelRecord):
    """The record of a training from scratch.

    Attributes:
        variant, key_value_heads, size: what was trained, ``size`` with all its settings. text: TEXT or shards.
        wanted_tokens: that were asked for.
        tokens: trained on until the weights that were kept; ``tokens_trained``: in all. flops: of training, counted
            (see ``sizes.Figures``). perplexity: on held-out text. seconds: it took. uptraining: runs that came after.
    """

    card = "training_card.md.jinja"

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


def is_pretrained(folder: Path) -> bool:
    """Whether a folder holds a model that ``pretrain`` has made."""
    return (record_entries(folder) or {}).get("made_by") == "pretrain"
