"""Rotation of keys when they are read: tables for cached positions, and which latent columns form a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .layout import FoldedLayout


class RotaryTables:
    """cos and sin of one forward pass, each ``[batch, tokens, rotary_dim]``: of its own tokens, and of cached ones.

    Unpacks like the ``(cos, sin)`` that transformers' layers pass around. The tables of cached keys are worked out by
    the first layer that asks for them and shared by the others.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, at: Callable[[torch.Tensor], tuple]) -> None:
        self.cos, self.sin = cos, sin
        self._at = at
        self._of_keys: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.cos, self.sin))

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.cos, self.sin)[index]

    def to(self, device: torch.device, non_blocking: bool = False) -> RotaryTables:
        """The tables on another device; accelerate asks for it where a model is spread over several."""
        moved = RotaryTables(
            self.cos.to(device, non_blocking=non_blocking), self.sin.to(device, non_blocking=non_blocking), self._at
        )
        moved._of_keys = self._of_keys
        return moved

    def of_keys(self, keeper: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at ``positions`` ``[batch, tokens]``, the same for all layers that share the layer ``keeper``."""
        wanted = (keeper, positions.device)
        if wanted not in self._of_keys:
            self._of_keys[wanted] = self._at(positions)
        return self._of_keys[wanted]


TABLE_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "halves": lambda table: table,  # as in Llama: every frequency, and all of them once more
    "single": lambda table: torch.cat((table, table), dim=-1),
    "interleaved": lambda table: torch.cat((table[..., ::2], table[..., ::2]), dim=-1),
}


class SharedRotary(nn.Module):
    """Stands in a model for its rotary embedding and returns ``RotaryTables``.

    Args:
        rotary: the model's own. layout: how its tables lie, a key of ``TABLE_LAYOUTS``; ours are always ``halves``.
    """

    def __init__(self, rotary: nn.Module, layout: str = "halves") -> None:
        super().__init__()
        self.rotary = rotary
        self.layout = layout

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> RotaryTables:
        """Tables of the tokens at ``position_ids``; further arguments are the model's own (a layer type)."""

        def at(positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = self.rotary(like, positions, *args, **kwargs)
            arrange = TABLE_LAYOUTS[self.layout]
            return arrange(cos), arrange(sin)

        dtype = x.dtype
        return RotaryTables(
            *at(position_ids, x), lambda keys: at(keys, torch.empty(0, dtype=dtype, device=keys.device))
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[..., 2p]`` (first members of p pairs, then the second ones) by tables of the same trailing width."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Constant:
    """A table of whole numbers that is part of the architecture, on whichever device it is asked for.

    Not a buffer: transformers builds models on the meta device, where a table's contents would be lost.
    """

    def __init__(self, table: list) -> None:
        self._table = table
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._on:
            self._on[device] = torch.tensor(self._table, dtype=torch.long, device=device)
        return self._on[device]


class HeadRotation(nn.Module):
    """Rotates, in every head, the leading columns that hold the head's kept frequency pairs.

    Args:
        pairs: kept frequency pairs of each head of the tensors to come.
        rotary_dim: width of the model's cos and sin tables (two entries per frequency pair; 0: no RoPE).
    """

    def __init__(self, pairs: tuple[tuple[int, ...], ...], rotary_dim: int) -> None:
        super().__init__()
        self.widest = 2 * max((len(kept) for kept in pairs), default=0)
        self.whole = all(2 * len(kept) == rotary_dim for kept in pairs)
        self.same = len(set(pairs)) == 1
        columns, partners, signs = [], [], []
        for kept in pairs:
            p = len(kept)
            idle = list(range(2 * p, self.widest))  # columns of a shorter window that do not turn
            columns.append([*kept, *kept, *(0 for _ in idle)])
            partners.append([*range(p, 2 * p), *range(p), *idle])
            signs.append([-1] * p + [1] * p + [0] * len(idle))
        self._columns, self._partners, self._signs = Constant(columns), Constant(partners), Constant(signs)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` ``[batch, heads, tokens, head_dim]`` by tables ``[batch, tokens, rotary_dim]``."""
        if self.widest == 0:
            return x
        front, rest = x[..., : self.widest], x[..., self.widest :]
        if self.whole:
            turned = rotate(front, cos.unsqueeze(1), sin.unsqueeze(1))
        elif self.same:
            columns = self._columns.on(x.device)[0]
            turned = rotate(front, cos[..., columns].unsqueeze(1), sin[..., columns].unsqueeze(1))
        else:
            turned = self._rotate_each(front, cos, sin)
        turned = turned.to(x.dtype)  # some families (OLMo) have their tables in float32 whatever the model's dtype
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)

    def _rotate_each(self, front: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Every head with pairs of its own; zero sign marks the columns that do not turn."""
        columns, partners = self._columns.on(front.device), self._partners.on(front.device)
        signs = self._signs.on(front.device)[:, None].to(front.dtype)  # [heads, 1, widest]
        turns = signs.abs()
        cos_of = cos[..., columns].transpose(1, 2) * turns + (1 - turns)  # [batch, heads, tokens, widest]
        sin_of = sin[..., columns].transpose(1, 2) * signs
        return front * cos_of + front.gather(-1, partners[:, None].expand(front.shape)) * sin_of


def key_columns(layout: FoldedLayout, head_dim: int, all_pairs: int) -> list[int]:
    """Order in which the columns of ``[windows, key map]`` make up the key heads, head by head, window first."""
    columns = window_columns(layout, all_pairs)
    mapped = layout.window_width(all_pairs)
    order: list[int] = []
    for pairs, window in zip(layout.pairs(all_pairs), layout.window_assignment(), strict=True):
        width = 2 * len(pairs)
        order += columns[window][:width]
        order += range(mapped, mapped + head_dim - width)
        mapped += head_dim - width
    return order


def window_columns(layout: FoldedLayout, all_pairs: int) -> list[list[int]]:
    """Latent columns of each window, ``[windows, widest]``; shorter ones repeat column 0, to meet a 0."""
    pairs = layout.window_pairs(all_pairs)
    widest = 2 * max((len(kept) for kept in pairs), default=0)
    columns, start = [], 0
    for kept in pairs:
        columns.append([*range(start, start + 2 * len(kept)), *(0 for _ in range(widest - 2 * len(kept)))])
        start += 2 * len(kept)
    return columns
