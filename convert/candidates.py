"""Ways to fold a layer among which a conversion finds the best: the balance, and how its windows are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..analysis.energy import DEFAULT_BALANCE, WeightedLayer
from ..model import AttentionParts, AttentionTraits
from .methods.base import LayerProblem
from .methods.key_windows import Windows, choose_windows, cluster, even_groups, full_windows, own_groups, whole_heads
from .options import ConvertOptions, cache_dtype, full_width, rounding_noise

BALANCES = (0.05, 0.1, 0.2, 0.4)  # that are compared; the best one is among them wherever tried
NARROW_BALANCES = (0.05, 0.1)
FILLS = (1.0, 0.9)
SHARED_BALANCES = (0.1, 0.3)


@dataclass(frozen=True)
class Way:
    """How to fold the layers.

    Attributes:
        balance: λ. fill: share of the latent's columns that may be windows, where not all of them fit.
        key_heads: windows of a layer; None: every KV head has its own.
    """

    balance: float
    fill: float = 1.0
    key_heads: int | None = None

    @property
    def label(self) -> str:
        """For the recipe; the balance alone where that is all there is to tell."""
        parts = [str(self.balance)]
        if self.fill != 1:
            parts.append(f"fill {self.fill}")
        if self.key_heads is not None:
            parts.append(f"{self.key_heads} key heads")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ways(
    options: ConvertOptions, layers: Sequence[AttentionTraits], widths: Sequence[int], span: str, compared: bool
) -> list[Way]:
    """The ways to be compared; one, where the options leave no choice or there is no text to compare on.

    Where the windows do not fit, they are narrowed, or shared by heads: models differ in which of the two costs less.
    """
    narrow = any(
        width < full_width(traits, options) for traits, width in zip(layers, widths, strict=True)
    ) and not isinstance(options.rotary_pairs, int)
    if not compared:
        return [plain_way(options, options.key_heads)]
    balances = (options.balance,) if options.balance is not None else NARROW_BALANCES if narrow else BALANCES
    fills = FILLS if narrow else (1.0,)
    found = [Way(balance, fill, options.key_heads) for fill in fills for balance in balances]
    heads = shared_heads(layers, widths, span) if narrow and options.key_heads is None and not options.plan else None
    if heads is not None:
        balances = (options.balance,) if options.balance is not None else SHARED_BALANCES
        found += [Way(balance, 1.0, heads) for balance in balances]
    return found


def shared_heads(layers: Sequence[AttentionTraits], widths: Sequence[int], span: str) -> int | None:
    """As many windows for the KV heads of a layer to share as fit whole; None where heads cannot share any."""
    rotating = [(traits, width) for traits, width in zip(layers, widths, strict=True) if traits.rotary_dim]
    if any(traits.query_norm or traits.key_norm for traits, _ in rotating):
        return None
    most = min(min(width // traits.rotary_dim, traits.key_value_heads - 1) for traits, width in rotating)
    if span == "all":
        return max(most, 1) if min(traits.key_value_heads for traits, _ in rotating) > 1 else None
    if any(traits.rotary_dim < traits.head_dim for traits, _ in rotating):
        return None
    whole = [heads for heads in range(most, 0, -1) if not any(width % heads for _, width in rotating)]
    return whole[0] if whole else None


def plain_way(options: ConvertOptions, key_heads: int | None) -> Way:
    """The way to fold a layer where nothing is compared."""
    return Way(options.balance or DEFAULT_BALANCE, 1.0, key_heads)


def windows_for(layer: WeightedLayer, width: int, span: str, way: Way, options: ConvertOptions) -> Windows:
    """The windows of one layer in a latent of ``width`` columns."""
    traits = layer.traits
    if traits.rotary_dim == 0:
        # Where it is possible, span head binds the keys, too, to their own head's columns: the study's Q-K=V.
        bound = span == "head" and width == traits.key_width
        return whole_heads(traits) if bound else full_windows(traits)
    heads = way.key_heads or traits.key_value_heads
    if heads == traits.key_value_heads:
        groups = own_groups(heads)
    elif options.cluster:
        groups = cluster(layer, heads)
    else:
        groups = even_groups(traits.key_value_heads, heads)
    every = heads * traits.rotary_dim // 2
    if isinstance(options.rotary_pairs, int):
        count = options.rotary_pairs * heads
    elif 2 * every <= width:
        count = every
    else:
        count = int(way.fill * width / 2)
    if count >= every and heads == traits.key_value_heads:
        return full_windows(traits)
    return choose_windows(layer, groups, count, span == "head", options.grouping == "aligned")


def layer_problem(
    parts: AttentionParts, weighted: WeightedLayer, width: int, span: str, way: Way, options: ConvertOptions,
    weights: torch.dtype,
) -> LayerProblem:  # fmt: skip
    """One layer to be folded in one way; ``weights`` is the dtype that its folded weights are to have."""
    windows = windows_for(weighted, width, span, way, options)
    noise = rounding_noise(cache_dtype(options, parts.traits, width, weights))
    return LayerProblem(parts.weights, parts.traits, weighted, width, span, windows, way.balance, noise, weights)
