"""OLMo 2: queries and keys are normed as a whole, all heads together."""

from __future__ import annotations

from typing import Any

from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo2Model

from .family import Family, register
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, norm_over="projection")


OLMO2 = register(Family(__name__, Olmo2Config, Olmo2Model, Olmo2ForCausalLM, traits))
