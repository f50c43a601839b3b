"""Phi-3 and Phi-4: queries, keys and values in one projection; some sizes rotate only part of a head."""

from __future__ import annotations

from typing import Any

from transformers import Phi3Config, Phi3ForCausalLM, Phi3Model

from .family import Family, register
from .projections import Fused
from .traits import AttentionTraits, sliding_window


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    head_dim, kv = attention.head_dim, attention.num_key_value_heads
    rotated = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return AttentionTraits(
        width=attention.qkv_proj.in_features,
        query_heads=kv * attention.num_key_value_groups,
        key_value_heads=kv,
        head_dim=head_dim,
        rotary_dim=int(head_dim * rotated),
        scaling=attention.scaling,
        sliding_window=sliding_window(config, layer),
        dropout=attention.attention_dropout,
    )


PHI3 = register(Family(__name__, Phi3Config, Phi3Model, Phi3ForCausalLM, traits, Fused("qkv_proj", "o_proj")))
