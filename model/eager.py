"""Attention written out, with what model families add to it: soft-capped scores and attention sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def attention_weights(
    scores: torch.Tensor, mask: torch.Tensor | None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of ``scores`` ``[batch, H, new, tokens]`` (already scaled), worked out in float32.

    Args:
        scores: q·k times the scale.
        mask: None (everything is seen), boolean (True is seen) or additive, ``[batch, 1, new, tokens]``.
        softcap: c of the capped scores c·tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2), or None.
        sinks: logit of each head that takes a share of the weights and gives nothing back (GPT-OSS), ``[H]``, or None.

    Returns:
        Weights in the dtype of ``scores``; rows that see nothing (padding) are uniform, never NaN.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1].to(scores.dtype)


def eager_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``eager`` implementation behind transformers' attention interface.

    Query ``[batch, H, new, d]``, key and value ``[batch, K, tokens, ·]``; returns ``[batch, new, H, ·]`` and the
    weights ``[batch, H, new, tokens]``.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    weights = attention_weights(query @ key.transpose(-1, -2) * scaling, attention_mask, softcap, s_aux)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
