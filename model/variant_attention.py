"""Attention with projections that are shared as a variant says, without RoPE: what the study trained from scratch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .eager import eager_attention
from .errors import KvfoldError
from .traits import AttentionTraits
from .variants import Variant


class VariantAttention(nn.Module):
    """Attention of one layer. Keys that are values are cached once, as the one tensor that they are.

    Args:
        traits: sizes, biases and dropout of the layer. variant: which projections are one.
        layer_idx: number of the layer in the model and in its cache. pair_channels: see ``PairPositions``.
        config: the model's, whose ``_attn_implementation`` names the attention to use.
    """

    def __init__(
        self, traits: AttentionTraits, variant: Variant, layer_idx: int, pair_channels: int, config: Any
    ) -> None:
        super().__init__()
        variant.require_heads(traits.query_heads, traits.key_value_heads)
        self.config, self.traits, self.variant, self.layer_idx = config, traits, variant, layer_idx
        self.head_dim, self.scaling, self.is_causal = traits.head_dim, traits.scaling, traits.causal
        self.num_key_value_groups = traits.query_heads // traits.key_value_heads
        width, queries = traits.width, traits.query_width
        keys = traits.key_width
        self.q_proj = nn.Linear(width, queries, bias=traits.query_bias) if variant.separate_queries else None
        self.k_proj = nn.Linear(width, keys, bias=traits.key_bias)
        self.v_proj = nn.Linear(width, keys, bias=traits.value_bias) if variant.separate_values else None
        self.o_proj = nn.Linear(queries, width, bias=traits.output_bias)
        self.pair_positions = PairPositions(pair_channels) if variant.pair_positions else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend. ``hidden_states`` ``[batch, tokens, D]``; returns the same shape, and the weights where asked for."""
        batch, tokens, _ = hidden_states.shape
        shared = self.k_proj(hidden_states)
        query = self._heads(shared if self.q_proj is None else self.q_proj(hidden_states))
        if self.v_proj is not None:
            key, value = self._heads(shared), self._heads(self.v_proj(hidden_states))
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx)
        else:
            if cache is not None:
                latent = shared.unsqueeze(1)
                shared = cache.update(latent, latent[..., :0], self.layer_idx)[0].squeeze(1)
            key = value = self._heads(shared)
        if self.pair_positions is not None:
            attention_mask = self._with_positions(query, key, attention_mask, position_ids, cache is not None)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.traits.dropout if self.training else 0.0
        output, weights = interface(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        output = self.o_proj(output.reshape(batch, tokens, -1))
        return nn.functional.dropout(output, self.traits.output_dropout, self.training), weights

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _with_positions(
        self, query: torch.Tensor, key: torch.Tensor, mask: Any, position_ids: torch.Tensor | None, cached: bool
    ) -> torch.Tensor:
        """The mask as something to add to the scores ``[batch, 1, new, tokens]``, with the positions' term in it."""
        assert self.pair_positions is not None
        if self.config._attn_implementation not in ("sdpa", "eager"):
            raise KvfoldError(f"variant {self.variant.name} adds to the scores: use attention sdpa or eager")
        new, tokens = query.shape[2], key.shape[2]
        if position_ids is None:
            position_ids = torch.arange(tokens - new, tokens, device=query.device)[None]
        key_positions = position_ids
        if cached:  # which does not keep positions: cached tokens are consecutive, padding apart
            key_positions = position_ids[:, -1:] + torch.arange(1 - tokens, 1, device=query.device)
        added = self.pair_positions(position_ids, key_positions.clamp(min=0)).to(query.dtype)[:, None]
        if mask is None and self.is_causal and new > 1:
            mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
        if mask is None:
            return added
        if mask.dtype == torch.bool:
            return added.masked_fill(~mask, torch.finfo(added.dtype).min)
        return added + mask


class PairPositions(nn.Module):
    """A number for each pair of positions (i, j): the "+" of (Q=K-V)+ and (Q=K=V)+, which makes scores asymmetric.

    A fixed sinusoidal encoding of the pair, half its channels for i and half for j (Vaswani et al. 2017, arXiv
    1706.03762, section 3.5, for each of the two), is mapped by a learned linear layer to one number. The layer being
    linear, that number is a part of i plus a part of j, and is worked out as such.

    Args:
        channels: of the encoding, a multiple of 4.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels < 4 or channels % 4:
            raise KvfoldError(f"pair_channels {channels} is no multiple of 4")
        self.channels = channels
        self.proj = nn.Linear(channels, 1)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The numbers ``[batch, queries, keys]``, float32, of positions ``[batch, queries]`` and ``[batch, keys]``."""
        of_query, of_key = self.proj.weight[0].split(self.channels // 2)
        rows, columns = self._encode(queries) @ of_query.float(), self._encode(keys) @ of_key.float()
        return rows[:, :, None] + columns[:, None, :] + self.proj.bias.float()

    def _encode(self, positions: torch.Tensor) -> torch.Tensor:
        """Sinusoids ``[batch, tokens, channels / 2]`` of the wavelengths 2π … 10000 · 2π."""
        count = self.channels // 4
        steps = torch.arange(count, device=positions.device, dtype=torch.float32) / count
        angles = positions[..., None].float() * torch.exp(-math.log(10000.0) * steps)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)
