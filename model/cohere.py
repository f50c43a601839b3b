"""Cohere's Command R: rotary pairs are neighbours; some sizes norm every head with weights of its own."""

from __future__ import annotations

from typing import Any

from transformers import CohereConfig, CohereForCausalLM, CohereModel

from .family import Family, register
from .projections import Interleaved, Separate
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, norm_over="token")


COHERE = register(
    Family(
        __name__,
        CohereConfig,
        CohereModel,
        CohereForCausalLM,
        traits,
        Interleaved(Separate()),
        rotary_layout="interleaved",
    )
)
