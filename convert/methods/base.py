"""What a merge method works on, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...analysis.energy import WeightedLayer
from ...model import AttentionTraits, AttentionWeights, FoldedLayout
from ...model.projections import OUR_NORMS
from .key_windows import Windows


@dataclass(frozen=True)
class LayerProblem:
    """One layer to be folded.

    Attributes:
        weights: the source's projections. traits: its heads. weighted: its keys and values with their weights.
        width: R. span: ``all`` or ``head``. windows: what of the keys stays rotated, and who shares it. balance: λ.
        noise: relative variance of the cache's rounding error. dtype: of the folded weights.
    """

    weights: AttentionWeights
    traits: AttentionTraits
    weighted: WeightedLayer
    width: int
    span: str
    windows: Windows
    balance: float
    noise: float
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.traits.query_heads // self.traits.key_value_heads

    def layout(self) -> FoldedLayout:
        """How the latent is read."""
        return self.windows.layout(self.width, self.span, self.traits)


@dataclass(frozen=True)
class FoldedWeights:
    """A folded layer: its layout and the tensors of its ``FoldedAttention``, by parameter name.

    ``kept_energy`` is the share of the joint weighted energy that the latent keeps, where the method knows it;
    ``refined`` the relative error of the layer's output on held-out rows before and after refinement.
    """

    layout: FoldedLayout
    tensors: dict[str, torch.Tensor]
    kept_energy: float | None = None
    refined: tuple[float, float] | None = None


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


@dataclass(frozen=True)
class Latent:
    """A latent and how it is read, as maps in float64.

    Attributes:
        maps: x̃ to the latent, ``[R, D + 1]``.
        key_map: A, latent to the parts of the keys that are in no window, ``[Σ(d − 2p), R]``.
        value_map: B, ``[KV·d, R]`` (span ``all``), or None.
        head_maps: for span ``head`` the map of the columns that are a KV head's own (or its group's) to its values,
            ``[d, R / key heads]``; it is absorbed into the output projection.
        constant: what is added to the values, ``[KV·d]``, or None.
        factors: what the queries of each KV head are multiplied with, pair by pair, complex ``[KV, P]``; None: nothing.
    """

    maps: torch.Tensor
    key_map: torch.Tensor
    value_map: torch.Tensor | None = None
    head_maps: list[torch.Tensor] | None = None
    constant: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def assemble(problem: LayerProblem, latent: Latent) -> FoldedWeights:
    """The tensors of a folded layer."""
    weights, traits = _as_read(problem, latent), problem.traits
    tensors: dict[str, torch.Tensor | None] = {
        "q_proj.weight": weights.q,
        "q_proj.bias": weights.q_bias,
        "latent_proj.weight": latent.maps[:, :-1],
        "latent_proj.bias": latent.maps[:, -1] if traits.latent_bias else None,
        "key_map.weight": latent.key_map if len(latent.key_map) else None,
        "value_map.weight": latent.value_map,
        "o_proj.weight": weights.o,
        "o_proj.bias": weights.o_bias,
    }
    if latent.head_maps is not None:
        tensors["o_proj.weight"] = absorb(weights.o, latent.head_maps, traits)
    if traits.value_constant(problem.span):
        constant = latent.maps.new_zeros(problem.traits.key_width) if latent.constant is None else latent.constant
        if latent.head_maps is None:
            tensors["value_map.bias"] = constant
        else:
            by_query = constant.view(traits.key_value_heads, -1).repeat_interleave(problem.group, 0).flatten()
            passed = weights.o.detach().double().cpu() @ by_query
            tensors["o_proj.bias"] = passed if weights.o_bias is None else passed + weights.o_bias.double().cpu()
    kept = {name: tensor for name, tensor in (tensors | weights.extras).items() if tensor is not None}
    return FoldedWeights(
        problem.layout(), {name: tensor.detach().to(problem.dtype).cpu().contiguous() for name, tensor in kept.items()}
    )


def _as_read(problem: LayerProblem, latent: Latent) -> AttentionWeights:
    """The layer's weights with queries that meet the keys as they are read: turned, and window dimensions first."""
    weights, traits, windows, heads = problem.weights, problem.traits, problem.windows, problem.traits.key_value_heads
    orders = [[*inside, *rest] for inside, rest in map(partial(windows.order, traits=traits), range(heads))]
    if latent.factors is None and all(order == list(range(traits.head_dim)) for order in orders):
        return weights

    def queries(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        by_head = tensor.detach().double().cpu().unflatten(0, (heads, problem.group, traits.head_dim))
        if latent.factors is not None:
            by_head = torch.stack([_turned(each, factor) for each, factor in zip(by_head, latent.factors, strict=True)])
        return torch.cat([each[:, order].flatten(0, 1) for each, order in zip(by_head, orders, strict=True)])

    # Norms have the same weights for all heads, or each head's own; where there are any, all heads have one order.
    def of_heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(-1, (-1, traits.head_dim))[..., orders[0]].flatten(-2)

    q, q_bias = queries(weights.q), queries(weights.q_bias)
    assert q is not None
    extras = {
        name: of_heads(tensor) if name.partition(".")[0] in OUR_NORMS else tensor
        for name, tensor in weights.extras.items()
    }
    return replace(weights, q=q, q_bias=q_bias, extras=extras)


def _turned(heads: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply the pairs of query heads ``[n, d, …]`` with complex factors ``[P]``."""
    pairs = len(factors)
    numbers = torch.complex(heads[:, :pairs], heads[:, pairs : 2 * pairs])
    numbers = numbers * factors.view(1, pairs, *(1,) * (heads.dim() - 2))
    return torch.cat((numbers.real, numbers.imag, heads[:, 2 * pairs :]), dim=1)


def whole_keys(problem: LayerProblem, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay maps of whole heads, ``[KV, d, D + 1]``, out as a latent: windows first, then the rest of each head.

    Returns the latent's maps ``[KV·d, D + 1]`` and the key map that reads the keys' other parts back out of it.
    """
    rotated = problem.traits.head_dim if problem.windows.whole else problem.traits.rotary_dim
    front, rest = heads[:, :rotated].flatten(0, 1), heads[:, rotated:].flatten(0, 1)
    key_map = torch.zeros(len(rest), len(front) + len(rest), dtype=heads.dtype)
    key_map[:, len(front) :] = torch.eye(len(rest), dtype=heads.dtype)
    return torch.cat((front, rest)), key_map


def absorb(output: torch.Tensor, head_maps: list[torch.Tensor], traits: AttentionTraits) -> torch.Tensor:
    """The output projection of values that are read through ``head_maps`` (``[d, columns]`` a head).

    Block j of ``output`` ``[D, H·d]`` becomes W_o^j B_h of query head j's KV head h: ``[D, H·columns]``.
    """
    blocks = output.detach().double().cpu().view(len(output), traits.key_value_heads, -1, traits.head_dim)
    return torch.einsum("ihgd,hdc->ihgc", blocks, torch.stack(head_maps).double()).reshape(len(output), -1)
