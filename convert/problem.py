"""What a merge method works on, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..analysis.energy import WeightedLayer
from ..model import AttentionTraits, AttentionWeights, FoldedLayout


@dataclass(frozen=True)
class LayerProblem:
    """One layer to be folded.

    Attributes:
        weights: the source's projections. traits: its heads. weighted: its keys and values with their weights.
        width: R. span: ``all`` or ``head``. balance: λ. noise: relative variance of the cache's rounding error.
    """

    weights: AttentionWeights
    traits: AttentionTraits
    weighted: WeightedLayer
    width: int
    span: str
    balance: float
    noise: float

    @property
    def key_width(self) -> int:
        """KV·d, the width of the source's keys."""
        return self.traits.key_value_heads * self.traits.head_dim

    def layout(self) -> FoldedLayout:
        """The layout with full windows for every key head."""
        heads = self.traits.key_value_heads
        return FoldedLayout(self.width, heads, heads, self.span)


@dataclass(frozen=True)
class FoldedWeights:
    """A folded layer: its layout and the tensors of its ``FoldedAttention``, by parameter name."""

    layout: FoldedLayout
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """A way to fold a layer.

    Attributes:
        name: on the command line. summary: one line for help and README. needs_text: whether it calibrates.
        half_only: it can only reach F = 0.5 with span ``head``. fold: does it.
    """

    name: str
    summary: str
    needs_text: bool
    half_only: bool
    fold: Callable[[LayerProblem], FoldedWeights]


def assemble(
    problem: LayerProblem,
    latent: torch.Tensor,
    value_map: torch.Tensor | None,
    head_maps: list[torch.Tensor] | None = None,
) -> FoldedWeights:
    """Put a folded layer together.

    Args:
        problem: the layer. latent: map of x̃ to the latent, ``[R, D + 1]``.
        value_map: B as ``[KV·d, R]`` (span ``all``), or None.
        head_maps: for span ``head`` the map of each head's own columns to its values, ``[d, R / KV]``; it is
            absorbed into the output projection.
    """
    weights, traits = problem.weights, problem.traits
    dtype = weights.k.dtype
    tensors = {"q_proj.weight": weights.q, "latent_proj.weight": latent[:, :-1].to(dtype), "o_proj.weight": weights.o}
    if traits.query_bias and weights.q_bias is not None:
        tensors["q_proj.bias"] = weights.q_bias
    if traits.latent_bias:
        tensors["latent_proj.bias"] = latent[:, -1].to(dtype)
    if traits.output_bias and weights.o_bias is not None:
        tensors["o_proj.bias"] = weights.o_bias
    if value_map is not None:
        tensors["value_map.weight"] = value_map.to(dtype)
    if head_maps is not None:
        tensors["o_proj.weight"] = absorb(weights.o, head_maps, traits).to(dtype)
    return FoldedWeights(problem.layout(), {name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def absorb(output: torch.Tensor, head_maps: list[torch.Tensor], traits: AttentionTraits) -> torch.Tensor:
    """The output projection of values that are read through ``head_maps`` (``[d, columns]`` a head).

    Block j of ``output`` ``[D, H·d]`` becomes W_o^j B_h of query head j's KV head h: ``[D, H·columns]``.
    """
    blocks = output.detach().double().cpu().view(len(output), traits.key_value_heads, -1, traits.head_dim)
    return torch.einsum("ihgd,hdc->ihgc", blocks, torch.stack(head_maps).double()).reshape(len(output), -1)
