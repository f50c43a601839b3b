"""GPT-2 with the study's projection-sharing variants and any number of KV heads, trained from scratch.

The variant Q-K=V is what a conversion with span ``head`` makes: its models are this family's folded ones.
"""

from __future__ import annotations

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers import initialization as init

from .attention import FoldedAttention
from .family import Family, latent_view, register
from .traits import AttentionTraits
from .variant_attention import VariantAttention
from .variants import variant_named


@strict
class QkvGPT2Config(GPT2Config):
    """A GPT-2's config with ``variant``, ``num_key_value_heads`` (None: as many as query heads), and ``is_causal``."""

    model_type = "qkv_gpt2"
    variant: str = "qkv"
    num_key_value_heads: int | None = None
    is_causal: bool = True
    pair_channels: int = 64

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.n_head
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """The config as transformers reads it; caches, which ask for the decoder's, learn what a layer caches."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        return latent_view(config) if decoder and variant_named(self.variant).cached_tensors == 1 else config


class _Weights:
    """First weights: those into the residual stream are smaller by √(2 · layers), as in GPT-2's paper (section 2.3)."""

    config: Any

    def _initialize_weights(self, module: Any, is_custom_code: bool = False) -> None:
        # In custom code transformers passes over modules that have no tensors of their own (attention, MLP): such code
        # may overwrite what was loaded. Its ``initialization`` does not.
        super()._initialize_weights(module)  # type: ignore[misc]

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, VariantAttention | FoldedAttention):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.o_proj.weight, mean=0.0, std=std)


class QkvGPT2Model(_Weights, GPT2Model):  # type: ignore[misc]
    """GPT2Model with the attention of a variant."""

    config_class = QkvGPT2Config
    _can_record_outputs = (GPT2Model._can_record_outputs or {}) | {"attentions": VariantAttention}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        variant = variant_named(config.variant)
        for index, block in enumerate(self.h):
            layer = traits(None, config, index)
            block.attn = VariantAttention(layer, variant, index, config.pair_channels, config)
        self.post_init()


class QkvGPT2LMHeadModel(_Weights, GPT2LMHeadModel):  # type: ignore[misc]
    """GPT2LMHeadModel with the attention of a variant."""

    config_class = QkvGPT2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer = QkvGPT2Model(config)
        self.post_init()


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    head_dim = config.hidden_size // config.num_attention_heads
    return AttentionTraits(
        width=config.hidden_size,
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rotary_dim=0,
        scaling=head_dim**-0.5,
        dropout=config.attn_pdrop,
        output_dropout=config.resid_pdrop,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        causal=config.is_causal,
    )


def refusal(config: Any) -> str | None:
    if config.variant != "qkv":
        return f"it is of variant {config.variant}, and only qkv has queries, keys and values of its own"
    return None if config.is_causal else "it attends in both directions, and has no cache"


AutoConfig.register(QkvGPT2Config.model_type, QkvGPT2Config, exist_ok=True)
AutoModel.register(QkvGPT2Config, QkvGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(QkvGPT2Config, QkvGPT2LMHeadModel, exist_ok=True)
QkvGPT2Config.register_for_auto_class()
QkvGPT2Model.register_for_auto_class("AutoModel")
QkvGPT2LMHeadModel.register_for_auto_class("AutoModelForCausalLM")

QKV_GPT2 = register(
    Family(
        __name__,
        QkvGPT2Config,
        QkvGPT2Model,
        QkvGPT2LMHeadModel,
        traits,
        layers="h",
        attention="attn",
        rotary=None,
        refusal=refusal,
    )
)
