"""Attention whose keys and values are both read out of one cached latent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .absorbed import attend_absorbed
from .eager import eager_attention
from .layout import FoldedLayout
from .rotary import Constant, HeadRotation, RotaryTables, key_columns, window_columns
from .traits import AttentionTraits


class FoldedAttention(nn.Module):
    """Attention over one latent per token, ``S = latent_proj(x)`` ``[batch, tokens, R]``, which is all that is cached.

    Key head h is ``[RoPE(window_h), S A_h]``, value head h is ``S B_h`` (span ``all``) or the head's own columns of S
    (span ``head``). *Expanded*, keys and values are written out and attended to by transformers' attention
    interface; *absorbed*, the value map is applied once to the attention-weighted sum of the latents and the key map
    to the query. Both give the same output; the absorbed form is taken when it multiplies less, which is decoding.

    Args:
        traits: the family's attention layer. layout: how the latent is read.
        layer_idx: number of the layer in the model and in its cache.
        position_keeper: the layer whose cache keeps the token positions for this one (see ``cache``).
        config: the model's config, whose ``_attn_implementation`` names the attention to use.
        norms: the modules that norm queries and keys, as far as the traits have them.
    """

    def __init__(
        self,
        traits: AttentionTraits,
        layout: FoldedLayout,
        layer_idx: int,
        position_keeper: int,
        config: Any,
        norms: tuple[nn.Module | None, nn.Module | None] = (None, None),
    ) -> None:
        super().__init__()
        all_pairs = traits.rotary_dim // 2
        layout.validate(traits.query_heads, traits.head_dim, all_pairs)
        self.config = config
        self.traits, self.layout = traits, layout
        self.layer_idx, self.position_keeper = layer_idx, position_keeper
        self.head_dim, self.scaling, self.is_causal = traits.head_dim, traits.scaling, traits.causal
        self.value_width = layout.value_width(traits.head_dim, all_pairs)
        self.windows = layout.window_width(all_pairs)

        key_of = layout.key_assignment(traits.query_heads)
        value_of = layout.value_assignment(traits.query_heads)
        grouped = layout.key_heads == layout.value_heads and key_of == value_of and _in_equal_groups(key_of)
        # Where the grouping is not the usual one, keys and values are written out for every query head.
        self.num_key_value_groups = traits.query_heads // layout.key_heads if grouped else 1
        self._key_head, self._value_head = Constant(list(key_of)), Constant(list(value_of))
        self._key_of = None if _in_equal_groups(key_of) else self._key_head
        self._value_of = None if _in_equal_groups(value_of) else self._value_head
        self._grouped = grouped

        pairs = layout.pairs(all_pairs)
        mapped = 0 if layout.key_span == "head" else sum(traits.head_dim - 2 * len(kept) for kept in pairs)
        self._key_order = Constant(key_columns(layout, traits.head_dim, all_pairs))
        columns, window_of = window_columns(layout, all_pairs), layout.window_assignment()
        self._window_columns = Constant([columns[window] for window in window_of])
        self.rotate_keys = HeadRotation(pairs, traits.rotary_dim)
        self.rotate_queries = HeadRotation(tuple(pairs[head] for head in key_of), traits.rotary_dim)

        width, head_dim = traits.width, traits.head_dim
        self.q_proj = nn.Linear(width, traits.query_width, bias=traits.query_bias)
        self.latent_proj = nn.Linear(width, layout.latent_width, bias=traits.latent_bias)
        self.key_map = nn.Linear(layout.latent_width, mapped, bias=False) if mapped else None
        self.value_map = None
        if layout.span == "all":
            heads = layout.value_heads
            self.value_map = nn.Linear(layout.latent_width, heads * head_dim, bias=traits.value_constant("all"))
        # Values that are columns of the latent leave their constant, where they have one, to the output's bias.
        output_bias = traits.output_bias or (layout.span == "head" and traits.value_constant("head"))
        self.o_proj = nn.Linear(traits.query_heads * self.value_width, width, bias=output_bias)
        self.q_norm, self.k_norm = norms
        self.sinks = nn.Parameter(torch.zeros(traits.query_heads)) if traits.sinks else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: RotaryTables | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend. ``hidden_states`` ``[batch, tokens, D]``; returns the same shape, and the weights where asked for."""
        batch, tokens, _ = hidden_states.shape
        cache = kwargs.pop("layer_past", cache)  # what GPT-NeoX calls it
        if self.traits.rotary_dim == 0:
            position_embeddings = None
        query = self._heads(self.q_proj(hidden_states), self.q_norm)
        if position_embeddings is not None:
            query = self.rotate_queries(query, *position_embeddings)
        latent = self.latent_proj(hidden_states)
        tables: Any = position_embeddings
        if cache is not None:
            latent, tables = self._through_cache(latent, position_embeddings, cache, kwargs.get("position_ids"))

        if self._absorbs(query, latent, attention_mask):
            output, weights = self._absorbed(query, latent, tables, attention_mask)
        else:
            output, weights = self._expanded(query, latent, tables, attention_mask, **kwargs)
        output = self.o_proj(output.reshape(batch, tokens, -1))
        return nn.functional.dropout(output, self.traits.output_dropout, self.training), weights

    def _heads(self, flat: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        return split_heads(flat, self.head_dim, norm, self.traits.norm_over)

    def _through_cache(
        self,
        latent: torch.Tensor,
        tables: RotaryTables | None,
        cache: Cache,
        position_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        """Append to the cache; returns all latents ``[batch, cached, R]`` and the rotary tables of their positions."""
        batch, tokens, _ = latent.shape
        new = latent.unsqueeze(1)
        if tables is None:
            held, _ = cache.update(new, new[..., :0], self.layer_idx)
            return held.squeeze(1), None
        if position_ids is None:
            position_ids = torch.arange(tokens, device=latent.device) + cache.get_query_offset(self.layer_idx)
        position_ids = position_ids.expand(batch, tokens)
        remembered = {}
        if self.layer_idx == self.position_keeper:
            remembered["positions"] = position_ids[:, None, :, None].to(torch.int32)
        held, _ = cache.update(new, new[..., :0], self.layer_idx, **remembered)
        kept = getattr(cache.layers[self.position_keeper], "positions", None)
        if kept is not None:
            positions = kept[:, 0, :, 0].to(latent.device)
        else:
            # A cache made by hand, of transformers' own layers: take the cached tokens as consecutive.
            positions = position_ids[:, -1:] + torch.arange(1 - held.shape[2], 1, device=latent.device)
            positions = positions.clamp(min=0)
        return held.squeeze(1), tables.of_keys(self.position_keeper, positions)

    def keys(self, latent: torch.Tensor, tables: Any) -> torch.Tensor:
        """Key heads ``[batch, key_heads, tokens, head_dim]`` of latents ``[batch, tokens, R]``, normed and rotated."""
        key = latent[..., : self.windows]
        if self.key_map is not None:
            key = torch.cat((key, self.key_map(latent)), dim=-1)[..., self._key_order.on(latent.device)]
        key = self._heads(key, self.k_norm)
        return key if tables is None else self.rotate_keys(key, *tables)

    def values(self, latent: torch.Tensor) -> torch.Tensor:
        """Value heads ``[batch, value_heads, tokens, value_width]`` of latents ``[batch, tokens, R]``."""
        if self.value_map is not None:
            return self.value_map(latent).unflatten(-1, (self.layout.value_heads, -1)).transpose(1, 2)
        heads = self.layout.key_heads
        own = latent[..., : self.windows].unflatten(-1, (heads, -1))
        if latent.shape[-1] > self.windows:
            own = torch.cat((own, latent[..., self.windows :].unflatten(-1, (heads, -1))), dim=-1)
        return own.transpose(1, 2)

    def _absorbs(self, query: torch.Tensor, latent: torch.Tensor, mask: Any) -> bool:
        """Whether to attend in the absorbed form: where it is possible, and multiplies less than the expanded one."""
        if self.training or self.config._attn_implementation not in ("sdpa", "eager"):
            return False
        if query.shape[2] > 1 and not isinstance(mask, torch.Tensor):
            return False
        width = latent.shape[-1]
        # Multiply-adds per cached token: what writing out costs, and what the wider vectors cost each query.
        written, wider = 0, 0
        if self.value_map is not None:
            written += width * self.value_map.out_features
            wider += width - self.value_width
        if self.key_map is not None and self.k_norm is None:
            written += width * self.key_map.out_features
            wider += width
        return query.shape[1] * query.shape[2] * wider < written

    def _absorbed(
        self, query: torch.Tensor, latent: torch.Tensor, tables: Any, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.key_map is None or self.k_norm is not None:
            keys, mapped_query = self.keys(latent, tables), None
        else:
            keys, query, mapped_query = self._absorb_key_map(query, latent, tables)
        mixed, weights = attend_absorbed(
            query,
            keys,
            mapped_query,
            latent,
            self.values(latent) if self.value_map is None else None,
            mask,
            self.scaling,
            None if self._key_of is None else self._key_of.on(query.device),
            None if self._value_of is None else self._value_of.on(query.device),
            self.traits.softcap,
            self.sinks,
        )
        if self.value_map is not None:
            heads = self._value_head.on(query.device)
            matrix, constant = _affine(self.value_map)
            maps = matrix.unflatten(0, (self.layout.value_heads, -1))  # [value_heads, d, R]
            mixed = torch.einsum("bhqr,hvr->bhqv", mixed, maps[heads])
            if constant is not None:
                constants = constant.view(self.layout.value_heads, 1, -1)[heads]
                # The weights sum to 1 but for what sinks take.
                mixed = mixed + weights.sum(-1, keepdim=True) * constants if self.traits.sinks else mixed + constants
        return mixed.transpose(1, 2), weights if self.config._attn_implementation == "eager" else None

    def _absorb_key_map(
        self, query: torch.Tensor, latent: torch.Tensor, tables: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated windows, the query's part that meets them, and the query's other part taken through the key map."""
        assert self.key_map is not None
        heads = self.layout.key_heads
        # Query columns that meet the window are those whose key column lies in it.
        meets = self._key_order.on(query.device).view(heads, -1) < self.windows  # [key_heads, d]
        key_head = self._key_head.on(query.device)
        maps = latent.new_zeros(heads * self.head_dim, latent.shape[-1])
        maps[~meets.flatten()] = _affine(self.key_map)[0]
        mapped_query = torch.einsum("bhqd,hdr->bhqr", query, maps.view(heads, self.head_dim, -1)[key_head])
        widest = self.rotate_keys.widest
        windows = latent[..., self._window_columns.on(latent.device)].transpose(1, 2)  # [batch, heads, tokens, widest]
        if tables is not None:
            windows = self.rotate_keys(windows, *tables)
        front = query[..., :widest] * meets[key_head][:, None, :widest].to(query.dtype)
        return windows, front, mapped_query

    def _expanded(
        self, query: torch.Tensor, latent: torch.Tensor, tables: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys, values = self.keys(latent, tables), self.values(latent)
        if not self._grouped:
            keys = keys[:, self._key_head.on(keys.device)]
            values = values[:, self._value_head.on(values.device)]
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if self.traits.sliding_window is not None:
            kwargs["sliding_window"] = self.traits.sliding_window
        if self.traits.softcap is not None:
            kwargs["softcap"] = self.traits.softcap
        if self.sinks is not None:
            kwargs["s_aux"] = self.sinks
        return interface(
            self,
            query,
            keys,
            values,
            mask,
            dropout=self.traits.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )


def split_heads(flat: torch.Tensor, head_dim: int, norm: nn.Module | None, over: str) -> torch.Tensor:
    """Heads ``[batch, heads, tokens, d]`` of a projection ``[batch, tokens, heads·d]``, normed as ``over`` says.

    See ``AttentionTraits.norm_over``.
    """
    if norm is not None and over == "projection":
        flat = norm(flat)
    heads = flat.unflatten(-1, (-1, head_dim))
    if norm is not None and over == "token":
        heads = norm(heads)
    heads = heads.transpose(1, 2)
    return norm(heads) if norm is not None and over == "head" else heads


def _affine(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrix ``[out, in]`` and constant ``[out]`` that a linear layer applies, adapters and quantisation included."""
    if type(linear) is nn.Linear:
        return linear.weight, linear.bias
    unit = torch.eye(linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)
    if linear.bias is None:
        return linear(unit).T, None
    constant = linear(torch.zeros_like(unit[0]))
    return (linear(unit) - constant).T, constant


def _in_equal_groups(assignment: tuple[int, ...]) -> bool:
    """Whether query heads share heads in the usual way: equal groups, in order."""
    heads = max(assignment) + 1
    return len(assignment) % heads == 0 and assignment == tuple(
        query // (len(assignment) // heads) for query in range(len(assignment))
    )
