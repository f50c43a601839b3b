"""GPT-NeoX (Pythia): one projection, head by head; rotates part of each head; biases."""

from __future__ import annotations

from typing import Any

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel

from .family import Family, register
from .projections import Fused
from .traits import AttentionTraits


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    heads, bias = config.num_attention_heads, attention.query_key_value.bias is not None
    return AttentionTraits(
        width=config.hidden_size,
        query_heads=heads,
        key_value_heads=heads,
        head_dim=attention.head_size,
        rotary_dim=attention.rotary_ndims,
        scaling=attention.scaling,
        dropout=attention.attention_dropout,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=attention.dense.bias is not None,
    )


GPT_NEOX = register(
    Family(
        __name__,
        GPTNeoXConfig,
        GPTNeoXModel,
        GPTNeoXForCausalLM,
        traits,
        Fused("query_key_value", "dense", by_head=True),
        attention="attention",
    )
)
