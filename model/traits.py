"""What an attention layer of a model family is, apart from where its keys and values come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionTraits:
    """An attention layer's properties.

    Attributes:
        width: D, size of the hidden states.
        query_heads: H. key_value_heads: KV heads of the source. head_dim: d, numbers per head.
        rotary_dim: leading dimensions of a head that RoPE rotates (0: no RoPE).
        scaling: factor on the scores.
        sliding_window: W, tokens a query sees, or None.
        dropout, output_dropout: of the attention weights and of the layer's output, while training.
        query_bias, key_bias, value_bias, output_bias: which projections of the source have one.
        query_norm, key_norm: whether queries and keys are normed before they are rotated.
        norm_over: what the norm is given: ``head`` ``[batch, heads, tokens, d]``, ``token``
            ``[batch, tokens, heads, d]`` or ``projection`` ``[batch, tokens, heads·d]``.
        softcap, sinks: see ``eager.attention_weights``; whether the layer has sinks.
        causal: whether a token sees only what came before it.
    """

    width: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int
    scaling: float
    sliding_window: int | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    query_norm: bool = False
    key_norm: bool = False
    norm_over: str = "head"
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True

    @property
    def query_width(self) -> int:
        """H·d, numbers of a token's queries."""
        return self.query_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """KV·d, numbers of a token's keys, or of its values, in the source."""
        return self.key_value_heads * self.head_dim

    @property
    def cache_width(self) -> int:
        """2·KV·d, numbers that the source caches of a token."""
        return 2 * self.key_width

    @property
    def latent_bias(self) -> bool:
        """Whether the latent needs a bias."""
        return self.key_bias or self.value_bias

    def value_constant(self, span: str) -> bool:
        """Whether values of this span may have a constant beside their map of the latent.

        Attention weights sum to 1, so a constant passes into the output's bias; with sinks they do not, and only a
        value map can carry it.
        """
        return self.value_bias and (span == "all" or not self.sinks)


def separate(attention: Any, config: Any, layer: int, output: str = "o_proj", **changes: Any) -> AttentionTraits:
    """Traits of an attention module of the common layout: four linear layers, grouped heads, RoPE over the whole head.

    Args:
        attention: the module; its projections are called q_proj, k_proj, v_proj and as ``output`` says.
        config: the model's. layer: its number. changes: traits that are different.
    """
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, getattr(attention, output)
    common = {
        "width": q.in_features,
        "query_heads": q.out_features // attention.head_dim,
        "key_value_heads": k.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "rotary_dim": attention.head_dim,
        "scaling": attention.scaling,
        "sliding_window": sliding_window(config, layer),
        "dropout": attention.attention_dropout,
        "query_bias": q.bias is not None,
        "key_bias": k.bias is not None,
        "value_bias": v.bias is not None,
        "output_bias": o.bias is not None,
        "query_norm": getattr(attention, "q_norm", None) is not None,
        "key_norm": getattr(attention, "k_norm", None) is not None,
        "causal": attention.is_causal,
    }
    return AttentionTraits(**(common | changes))


def sliding_window(config: Any, layer: int) -> int | None:
    """W of a layer's sliding window as transformers' caches understand a source's config, or None."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
