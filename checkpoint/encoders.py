"""Encoders: models without a KV cache, whose keys and values can be compared but not folded.

A new one is an entry of ``ENCODERS``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BERT = ("encoder.layer.{}.attention.self.key", "encoder.layer.{}.attention.self.value")
_VIT = ("layers.{}.attention.k_proj", "layers.{}.attention.v_proj")
_CLIP = ("encoder.layers.{}.self_attn.k_proj", "encoder.layers.{}.self_attn.v_proj")

# model_type → where the base model keeps the key and the value projection of a layer
ENCODERS: dict[str, tuple[str, str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "deberta-v2": ("encoder.layer.{}.attention.self.key_proj", "encoder.layer.{}.attention.self.value_proj"),
    "distilbert": ("transformer.layer.{}.attention.k_lin", "transformer.layer.{}.attention.v_lin"),
    "vit": _VIT,
    "deit": _VIT,
    "beit": _VIT,
    "dinov2": ("encoder.layer.{}.attention.k_proj", "encoder.layer.{}.attention.v_proj"),
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "wav2vec2": ("encoder.layers.{}.attention.k_proj", "encoder.layers.{}.attention.v_proj"),
}


def is_encoder(model_type: str) -> bool:
    """Whether models of this ``model_type`` are encoders that can be analyzed."""
    return model_type in ENCODERS


def keys_and_values(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """W_k and W_v of every layer of an encoder, each ``[heads·d, D]``."""
    return [
        (_weight(model.get_submodule(key.format(layer))), _weight(model.get_submodule(value.format(layer))))
        for key, value in (ENCODERS[model.config.model_type],)
        for layer in range(model.config.num_hidden_layers)
    ]


def _weight(projection: nn.Module) -> torch.Tensor:
    weight = projection.weight
    assert isinstance(weight, torch.Tensor)
    return weight
