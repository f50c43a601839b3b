"""Cohere's Command R7B and A: neighbouring rotary pairs; layers without a sliding window do not rotate."""

from __future__ import annotations

from typing import Any

from transformers import Cohere2Config, Cohere2ForCausalLM, Cohere2Model

from .family import Family, register
from .projections import Interleaved, Separate
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    rotates = attention.sliding_window is not None
    return separate(attention, config, layer, rotary_dim=attention.head_dim if rotates else 0)


COHERE2 = register(
    Family(
        __name__,
        Cohere2Config,
        Cohere2Model,
        Cohere2ForCausalLM,
        traits,
        Interleaved(Separate()),
        rotary_layout="interleaved",
    )
)
