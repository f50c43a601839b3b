"""Phi-1 to Phi-2: rotates part of each head, biases; heads may be normed."""

from __future__ import annotations

from typing import Any

from transformers import PhiConfig, PhiForCausalLM, PhiModel

from .family import Family, register
from .projections import Separate
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(
        attention,
        config,
        layer,
        output="dense",
        rotary_dim=attention.rotary_ndims,
        query_norm=attention.qk_layernorm,
        key_norm=attention.qk_layernorm,
    )


PHI = register(
    Family(
        __name__, PhiConfig, PhiModel, PhiForCausalLM, traits, Separate(o="dense", norms=("q_layernorm", "k_layernorm"))
    )
)
