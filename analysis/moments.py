"""Calibration statistics: what a layer's keys and values are made of, weighted by what errors in them would do.

The output of query head j at position q is Σ_k p_qk v_k W_o^j. To first order

* an error δv of the value map moves it by δv applied to the attention-weighted input Σ_k p_qk x_k, so the second
  moment of that sum is what the value map is fitted on;
* an error δs in the logit of key k moves it by p_qk (v_k − o_q) W_o^j δs, so key errors count by the square of that,
  and meet the query rotated by the distance q − k. Where keys are normed, an error of the key before the norm counts by
  what the norm makes of it.

Plain moments of x weigh all tokens and all distances alike instead; on SmolLM2 at half the cache that costs three times
the excess loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.progress import Track, silent
from ..model import AttentionParts, KvfoldError, family_to_fold
from .streaming import Stream

VALUE_MOMENTS_BYTES = 1 << 29  # of the value moments of one layer; heads share them where each one's would take more

UNSEEN = 1e-5


@dataclass(frozen=True)
class LayerMoments:
    """Statistics of one layer over the calibration text. x̃ is the layer's input with a 1 appended. All float64, CPU.

    Attributes:
        inputs: E[x̃ᵀx̃], ``[D + 1, D + 1]``.
        keys: the same, each token weighted by what an error in its keys does, summed over the heads.
        values: E[x̄ᵀx̄] of the attention-weighted inputs, ``[pools, D + 1, D + 1]``. Each KV head has its own unless that
            takes too much memory; then neighbours share one (``pool_of``).
        distances: for each KV head the weight of key errors at each distance q − k, ``[KV, window]``, sum 1.
        queries: E[qᵀq] of the queries of each KV head, normed, not rotated, ``[KV, d, d]``.
        gains: how much the key norm enlarges each number of a key, ``[KV, d]``; 1 where keys are not normed.
    """

    inputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    distances: torch.Tensor
    queries: torch.Tensor
    gains: torch.Tensor


def unseen_directions(moments: LayerMoments) -> float:
    """Share of the input's directions that the calibration text left (almost) empty, a number from 0 to 1.

    ``UNSEEN`` of the mean energy is far below what text of any kind has in its weakest directions, and far above the
    rounding of directions in which there is nothing.
    """
    energies = torch.linalg.eigvalsh(moments.inputs[:-1, :-1])
    return float((energies < UNSEEN * energies.mean()).double().mean())


def pool_of(head: int, heads: int, pools: int) -> int:
    """Which of ``pools`` value moments KV head ``head`` of ``heads`` shares."""
    return head * pools // heads


def windows(tokens: torch.Tensor, window: int) -> torch.Tensor:
    """Cut ``[n]`` token ids into rows, ``[n // window, window]``. Raises KvfoldError for too short a text."""
    if window < 2:
        raise KvfoldError(f"a window of {window} tokens is too short: use 2 or more")
    rows = tokens.numel() // window
    if rows == 0:
        raise KvfoldError(f"the text has {tokens.numel()} tokens, fewer than one window of {window}")
    return tokens[: rows * window].view(rows, window)


@torch.inference_mode()
def collect_moments(
    model: Any, rows: torch.Tensor, batch: int | None = None, track: Track = silent
) -> list[LayerMoments]:
    """Statistics of every layer while ``model`` reads ``rows``.

    Args:
        model: a causal-LM model of a supported family. rows: token ids ``[rows, window]``. batch: rows a pass, see
            ``Stream``.
        track: shows progress.
    """
    family = family_to_fold(model.config)
    layers = list(model.base_model.get_submodule(family.layers))
    stream, moments = Stream(family, model, rows, batch, weights=True).enter(), []
    with track("reading calibration text", len(layers)) as advance:
        for index, layer in enumerate(layers):
            moments.append(moments_of_layer(stream, layer, index))
            advance(1)
    return moments


def moments_of_layer(stream: Stream, layer: Any, index: int) -> LayerMoments:
    """Statistics of one decoder layer, through which they put the stream (one with attention weights)."""
    collector = _Collector(stream.family.parts_of(stream.model, index))
    handle = getattr(layer, stream.family.attention).register_forward_hook(collector, with_kwargs=True)
    try:
        stream.through(layer, index)
    finally:
        handle.remove()
    return collector.moments()


class _Collector:
    """Accumulates one layer's moments: products in float32, sums in float64."""

    def __init__(self, parts: AttentionParts) -> None:
        self.parts = parts
        self.kv, self.d = parts.traits.key_value_heads, parts.traits.head_dim
        self.group = parts.traits.query_heads // self.kv
        # Values measured as the output projection sees them: |v W_o^j| = |v root_j|, root_j [d, d].
        blocks = parts.weights.o.detach().float().view(-1, parts.traits.query_heads, self.d).permute(1, 2, 0)
        energies, basis = torch.linalg.eigh(blocks @ blocks.transpose(1, 2))
        self.roots = basis * energies.clamp(min=0).sqrt()[:, None]
        self.pools = min(self.kv, max(1, VALUE_MOMENTS_BYTES // (8 * (parts.traits.width + 1) ** 2)))
        self.tokens = 0
        self.sums: dict[str, torch.Tensor] = {}

    def _add(self, name: str, part: torch.Tensor) -> None:
        part = part.to(torch.float64) if part.device.type != "mps" else part.cpu().double()
        self.sums[name] = self.sums[name] + part if name in self.sums else part

    def __call__(self, module: Any, args: tuple, kwargs: dict, output: tuple) -> None:
        x = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).float()
        weights = output[1].float()  # [batch, H, T, T]
        batch, tokens, _ = x.shape
        ones = torch.cat((x, x.new_ones(batch, tokens, 1)), dim=-1)
        value, sensitivity = self.parts.values(x), self._norm_sensitivity(x)
        importance = x.new_zeros(batch, tokens)
        averaged: list[Any] = [0] * self.pools
        distances = []
        for head in range(self.kv):
            effect = x.new_zeros(tokens, tokens)
            mean = []
            for query in range(head * self.group, (head + 1) * self.group):
                p = weights[:, query]
                mean.append((p @ ones).flatten(0, 1))
                squared = _effect(p, value[:, head] @ self.roots[query]).mul_(p).mul_(p)
                if self.parts.key_norm is not None:
                    squared.mul_(sensitivity[:, head, None])
                importance += squared.sum(1)
                effect += squared.sum(0)
            flat, pool = torch.cat(mean), pool_of(head, self.kv, self.pools)
            averaged[pool] = averaged[pool] + flat.T @ flat
            distances.append(_by_distance(effect))
        flat, weight = ones.flatten(0, 1), importance.flatten()
        self._add("inputs", flat.T @ flat)
        self._add("keys", (flat * weight[:, None]).T @ flat)
        self._add("values", torch.stack(averaged))
        self._add("distances", torch.stack(distances))
        queries = self.parts.queries(x).unflatten(1, (self.kv, self.group)).permute(1, 0, 2, 3, 4).flatten(1, 3)
        self._add("queries", queries.transpose(1, 2) @ queries / self.group)
        self.tokens += batch * tokens

    def _norm_sensitivity(self, x: torch.Tensor) -> torch.Tensor:
        """How much the key norm enlarges each token's keys, squared, ``[batch, KV, tokens]``; sums up the gains."""
        if self.parts.key_norm is None:
            return x.new_ones(x.shape[0], self.kv, x.shape[1])
        before, after = self.parts.keys(x, normed=False), self.parts.keys(x)
        self._add("before", before.square().sum((0, 2)))
        self._add("after", after.square().sum((0, 2)))
        return after.square().sum(-1) / before.square().sum(-1).clamp(min=1e-20)

    def moments(self) -> LayerMoments:
        """The collected moments, scaled so that their last entry, E[1·1], is 1."""
        if not self.tokens:
            raise KvfoldError("no calibration text was read")
        sums = {name: total.cpu() for name, total in self.sums.items()}
        scaled = {name: sums[name] for name in ("inputs", "keys", "values")}
        for name, total in scaled.items():
            scaled[name] = total / total[..., -1:, -1:].clamp(min=1e-300)
        gains = torch.ones(self.kv, self.d, dtype=torch.float64)
        if "before" in sums:
            gains = (sums["after"] / sums["before"].clamp(min=1e-300)).sqrt()
        return LayerMoments(
            **scaled,
            distances=sums["distances"] / sums["distances"].sum(1, keepdim=True).clamp(min=1e-300),
            queries=sums["queries"] / self.tokens,
            gains=gains,
        )


def _effect(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """|v_k − o_q|² with o = p·v: ``[batch, q, k]`` from ``p`` ``[batch, q, k]`` and ``value`` ``[batch, k, d]``."""
    output = p @ value
    sizes = value.square().sum(-1)[:, None] + output.square().sum(-1)[:, :, None]
    # In place: these are by far the largest matrices of a layer, and memory is what they wait for.
    return sizes.baddbmm_(output, value.transpose(1, 2), alpha=-2).clamp_(min=0)


def _by_distance(effect: torch.Tensor) -> torch.Tensor:
    """Sum ``[q, k]`` over the diagonals q − k = 0, 1, …: ``[tokens]``."""
    tokens = len(effect)
    # Rows of 2·tokens numbers, read as rows of one number more: each begins one earlier than the row before, so that
    # column k − q (counted from the end where q > k) is a diagonal.
    padded = torch.nn.functional.pad(effect, (0, tokens)).flatten()
    sums = torch.nn.functional.pad(padded, (0, tokens)).view(tokens, 2 * tokens + 1).sum(0)
    return torch.cat((sums[:1], sums[tokens + 2 :].flip(0)))
