"""Seed-OSS: the Llama layout with biases."""

from __future__ import annotations

from typing import Any

from transformers import SeedOssConfig, SeedOssForCausalLM, SeedOssModel

from .family import Family, register
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, output_dropout=attention.residual_dropout)


SEED_OSS = register(Family(__name__, SeedOssConfig, SeedOssModel, SeedOssForCausalLM, traits))
