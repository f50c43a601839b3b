"""Gemma 2: capped scores, a scale of its own on them, every other layer with a sliding window."""

from __future__ import annotations

from typing import Any

from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma2Model

from .family import Family, register
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, softcap=attention.attn_logit_softcapping)


GEMMA2 = register(Family(__name__, Gemma2Config, Gemma2Model, Gemma2ForCausalLM, traits))
