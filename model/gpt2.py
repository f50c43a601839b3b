"""GPT-2: learned positions, full multi-head attention, one projection stored the other way round."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from .family import Family, register
from .projections import Fused
from .traits import AttentionTraits


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return AttentionTraits(
        width=config.hidden_size,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_attention_heads,
        head_dim=attention.head_dim,
        rotary_dim=0,
        scaling=attention.scaling,
        dropout=config.attn_pdrop,
        output_dropout=config.resid_pdrop,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
    )


def refusal(config: Any) -> str | None:
    return "it attends to an encoder" if config.add_cross_attention else None


GPT2 = register(
    Family(
        __name__,
        GPT2Config,
        GPT2Model,
        GPT2LMHeadModel,
        traits,
        Fused("c_attn", "c_proj", transposed=True),
        layers="h",
        attention="attn",
        rotary=None,
        refusal=refusal,
    )
)
