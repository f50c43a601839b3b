"""GPT-OSS: attention sinks, biases, every other layer with a sliding window."""

from __future__ import annotations

from typing import Any

from transformers import GptOssConfig, GptOssForCausalLM, GptOssModel

from .family import Family, register
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, sinks=True)


GPT_OSS = register(Family(__name__, GptOssConfig, GptOssModel, GptOssForCausalLM, traits, rotary_layout="single"))
