"""The Llama family (Llama 1 to 3, SmolLM, TinyLlama), whose attention layout many other families share."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .attention import AttentionTraits, FoldedAttention
from .family import AttentionWeights, Family, FoldedBaseMixin, FoldedCausalMixin, FoldedConfigMixin, register


def traits(config: Any, layer: int) -> AttentionTraits:
    """Attention of the common layout: grouped heads, RoPE over the whole head."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    return AttentionTraits(
        width=config.hidden_size,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        scaling=head_dim**-0.5,
        sliding_window=getattr(config, "sliding_window", None),
        dropout=config.attention_dropout,
        query_bias=bias,
        latent_bias=bias,
        output_bias=bias,
    )


def weights(attention: nn.Module) -> AttentionWeights:
    """Projections of an attention module that names them q_proj, k_proj, v_proj and o_proj."""
    q, k, v, o = (_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    return AttentionWeights(q.weight, k.weight, v.weight, o.weight, q.bias, k.bias, v.bias, o.bias)


def _linear(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name)


@strict
class KvfoldLlamaConfig(FoldedConfigMixin, LlamaConfig):
    """Config of a Llama whose keys and values are folded."""

    model_type = "kvfold_llama"
    kvfold: dict | None = None


class KvfoldLlamaModel(FoldedBaseMixin, LlamaModel):
    """A Llama without a language-model head whose keys and values are folded."""

    config_class = KvfoldLlamaConfig
    _can_record_outputs: ClassVar[dict] = {"hidden_states": LlamaDecoderLayer, "attentions": FoldedAttention}  # type: ignore[misc]


class KvfoldLlamaForCausalLM(FoldedCausalMixin, LlamaForCausalLM):
    """A Llama whose keys and values are folded."""

    config_class = KvfoldLlamaConfig


LLAMA = register(Family("llama", KvfoldLlamaConfig, KvfoldLlamaModel, KvfoldLlamaForCausalLM, traits, weights))
