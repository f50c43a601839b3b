"""StableLM: rotates part of each head; some sizes norm every head with weights of its own."""

from __future__ import annotations

from typing import Any

from transformers import StableLmConfig, StableLmForCausalLM, StableLmModel

from .family import Family, register
from .projections import Separate
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    normed = attention.qk_layernorm
    return separate(
        attention, config, layer, rotary_dim=attention.rotary_ndims, query_norm=normed, key_norm=normed
    )  # fmt: skip


STABLELM = register(
    Family(
        __name__,
        StableLmConfig,
        StableLmModel,
        StableLmForCausalLM,
        traits,
        Separate(norms=("q_layernorm", "k_layernorm")),
    )
)
