"""Where model families keep the projections of an attention layer, and the common form that kvfold reads them into."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from .traits import AttentionTraits

OUR_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class AttentionWeights:
    """One attention layer's projections in the common form: ``y = x @ weight.T + bias``, heads one after another.

    The rotated dimensions of a head come first, members of a rotary pair half a rotary width apart (``rotate_half``).
    Shapes: q ``[H·d, D]``, k and v ``[KV·d, D]``, o ``[D, H·d]``; biases or None. ``extras`` are the layer's other
    tensors by the names that they have in a ``FoldedAttention``: ``q_norm.…``, ``k_norm.…``, ``sinks``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    extras: dict[str, torch.Tensor] = field(default_factory=dict)


class Projections(Protocol):
    """Reads a family's attention module into the common form and writes the common form back."""

    @property
    def norms(self) -> tuple[str, str]:
        """Names of the modules that norm queries and keys, where the traits say that there are any."""

    def read(self, attention: nn.Module, traits: AttentionTraits) -> AttentionWeights:
        """The module's weights in the common form."""

    def write(self, weights: AttentionWeights, traits: AttentionTraits) -> dict[str, torch.Tensor]:
        """The module's state dict with these weights."""


@dataclass(frozen=True)
class Separate:
    """One linear layer each for queries, keys, values and the output, under these names."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")

    def read(self, attention: nn.Module, traits: AttentionTraits) -> AttentionWeights:
        q, k, v, o = (_linear(attention, name) for name in (self.q, self.k, self.v, self.o))
        extras = {}
        for name, tensor in attention.state_dict(keep_vars=True).items():
            first, _, rest = name.partition(".")
            if first in self.norms:
                extras[f"{OUR_NORMS[self.norms.index(first)]}.{rest}"] = tensor
            elif first == "sinks":
                extras[name] = tensor
        return AttentionWeights(q.weight, k.weight, v.weight, o.weight, q.bias, k.bias, v.bias, o.bias, extras)

    def write(self, weights: AttentionWeights, traits: AttentionTraits) -> dict[str, torch.Tensor]:
        state = {}
        for part, name in (("q", self.q), ("k", self.k), ("v", self.v), ("o", self.o)):
            state[f"{name}.weight"] = getattr(weights, part)
            if (bias := getattr(weights, f"{part}_bias")) is not None:
                state[f"{name}.bias"] = bias
        for ours, tensor in weights.extras.items():
            first, dot, rest = ours.partition(".")
            theirs = self.norms[OUR_NORMS.index(first)] if first in OUR_NORMS else first
            state[theirs + dot + rest] = tensor
        return state


@dataclass(frozen=True)
class Fused:
    """Queries, keys and values in one linear layer, and the output in another.

    Attributes:
        qkv, o: their names.
        by_head: the rows of the fused layer are q, k and v of one head, then those of the next (GPT-NeoX), instead of
            all queries, all keys, all values.
        transposed: weights are stored ``[in, out]`` (GPT-2's ``Conv1D``).
    """

    qkv: str
    o: str
    by_head: bool = False
    transposed: bool = False
    norms: tuple[str, str] = OUR_NORMS

    def read(self, attention: nn.Module, traits: AttentionTraits) -> AttentionWeights:
        qkv, o = _linear(attention, self.qkv), _linear(attention, self.o)
        q, k, v = self._split(self._turn(qkv.weight), traits)
        q_bias = k_bias = v_bias = None
        if qkv.bias is not None:
            q_bias, k_bias, v_bias = self._split(qkv.bias, traits)
        return AttentionWeights(q, k, v, self._turn(o.weight), q_bias, k_bias, v_bias, o.bias)

    def write(self, weights: AttentionWeights, traits: AttentionTraits) -> dict[str, torch.Tensor]:
        fused = self._join([weights.q, weights.k, weights.v], traits)
        state = {f"{self.qkv}.weight": self._turn(fused), f"{self.o}.weight": self._turn(weights.o)}
        biases = [weights.q_bias, weights.k_bias, weights.v_bias]
        present = [bias for bias in biases if bias is not None]
        if len(present) == len(biases):
            state[f"{self.qkv}.bias"] = self._join(present, traits)
        elif present:
            raise ValueError("a fused projection has biases for queries, keys and values, or for none of them")
        if weights.o_bias is not None:
            state[f"{self.o}.bias"] = weights.o_bias
        return state

    def _turn(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.T if self.transposed else weight

    def _split(self, fused: torch.Tensor, traits: AttentionTraits) -> list[torch.Tensor]:
        if self.by_head:
            heads = fused.unflatten(0, (traits.query_heads, 3, traits.head_dim))
            return [heads[:, part].flatten(0, 1) for part in range(3)]
        queries, keys = traits.query_width, traits.key_width
        return list(fused.split([queries, keys, keys]))

    def _join(self, parts: list[torch.Tensor], traits: AttentionTraits) -> torch.Tensor:
        if self.by_head:
            return torch.stack([part.unflatten(0, (-1, traits.head_dim)) for part in parts], dim=1).flatten(0, 2)
        return torch.cat(parts)


@dataclass(frozen=True)
class Interleaved:
    """Another reader whose rotary pairs are neighbours (2i, 2i + 1), as in Cohere's models."""

    inner: Projections

    @property
    def norms(self) -> tuple[str, str]:
        return self.inner.norms

    def read(self, attention: nn.Module, traits: AttentionTraits) -> AttentionWeights:
        order = [*range(0, traits.rotary_dim, 2), *range(1, traits.rotary_dim, 2)]
        return self._reordered(self.inner.read(attention, traits), order, traits)

    def write(self, weights: AttentionWeights, traits: AttentionTraits) -> dict[str, torch.Tensor]:
        half = traits.rotary_dim // 2
        order = [pair + member * half for pair in range(half) for member in (0, 1)]
        return self.inner.write(self._reordered(weights, order, traits), traits)

    def _reordered(self, weights: AttentionWeights, order: list[int], traits: AttentionTraits) -> AttentionWeights:
        order = [*order, *range(traits.rotary_dim, traits.head_dim)]

        def rows(tensor: torch.Tensor | None) -> Any:
            return None if tensor is None else tensor.unflatten(0, (-1, traits.head_dim))[:, order].flatten(0, 1)

        return replace(
            weights,
            q=rows(weights.q),
            k=rows(weights.k),
            q_bias=rows(weights.q_bias),
            k_bias=rows(weights.k_bias),
            extras={
                name: tensor[..., order] if name.partition(".")[0] in OUR_NORMS else tensor
                for name, tensor in weights.extras.items()
            },
        )


def _linear(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name)
