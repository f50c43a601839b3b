"""The absorbed form of folded attention: scores and sums taken on the latents, no keys or values written out.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) decodes this way; here the rotated part of each
key lies inside the same latent.
"""

from __future__ import annotations

import torch

from .eager import attention_weights


def attend_absorbed(
    query: torch.Tensor,
    windows: torch.Tensor,
    mapped_query: torch.Tensor | None,
    latent: torch.Tensor,
    values: torch.Tensor | None,
    mask: torch.Tensor | None,
    scaling: float,
    key_of: torch.Tensor | None,
    value_of: torch.Tensor | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with scores ``q·window + mapped_q·S`` over H query heads.

    Args:
        query: ``[batch, H, new, w]``, rotated, the part that meets the windows.
        windows: ``[batch, K, tokens, w]``, rotated key windows.
        mapped_query: ``[batch, H, new, R]``, the rest of the query taken through the key map; None: there is none.
        latent: ``[batch, tokens, R]``.
        values: ``[batch, K, tokens, v]``, read instead of the latent where the values are columns of it.
        scaling: factor on the scores. mask, softcap, sinks: see ``attention_weights``.
        key_of, value_of: head of each query head; None: equal groups in order.

    Returns:
        The weighted sums ``[batch, H, new, R or v]`` and the weights ``[batch, H, new, tokens]``.
    """
    batch, heads, new, _ = query.shape
    scores = _grouped(query, windows.transpose(-1, -2), key_of)
    if mapped_query is not None:
        scores = scores + (mapped_query.flatten(1, 2) @ latent.transpose(-1, -2)).view_as(scores)
    weights = attention_weights(scores * scaling, mask, softcap, sinks)
    if values is not None:
        return _grouped(weights, values, value_of), weights
    return (weights.flatten(1, 2) @ latent).view(batch, heads, new, -1), weights


def _grouped(left: torch.Tensor, right: torch.Tensor, head_of: torch.Tensor | None) -> torch.Tensor:
    """``left`` ``[batch, H, n, a]`` times ``right`` ``[batch, K, a, b]`` of each head's group, read once a group."""
    if head_of is not None:
        return left @ right[:, head_of]
    batch, heads, n, a = left.shape
    groups = right.shape[1]
    return (left.reshape(batch, groups, heads // groups * n, a) @ right).view(batch, heads, n, right.shape[-1])
