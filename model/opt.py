"""OPT: learned positions, full multi-head attention, biases."""

from __future__ import annotations

from typing import Any

from transformers import OPTConfig, OPTForCausalLM, OPTModel

from .family import Family, register
from .projections import Separate
from .traits import AttentionTraits


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    bias = attention.enable_bias
    return AttentionTraits(
        width=attention.embed_dim,
        query_heads=attention.num_heads,
        key_value_heads=attention.num_heads,
        head_dim=attention.head_dim,
        rotary_dim=0,
        scaling=attention.scaling,
        dropout=attention.dropout,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
    )


OPT = register(
    Family(
        __name__,
        OPTConfig,
        OPTModel,
        OPTForCausalLM,
        traits,
        Separate(o="out_proj"),
        layers="decoder.layers",
        rotary=None,
    )
)
