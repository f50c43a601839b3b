"""StarCoder 2: the Llama layout with biases and a sliding window."""

from __future__ import annotations

from typing import Any

from transformers import Starcoder2Config, Starcoder2ForCausalLM, Starcoder2Model

from .family import Family, register
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, output_dropout=attention.residual_dropout)


STARCODER2 = register(Family(__name__, Starcoder2Config, Starcoder2Model, Starcoder2ForCausalLM, traits))
