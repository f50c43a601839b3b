"""Sharing a cache budget out over layers by their cost curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_COST = 1e-6  # nats; measured costs below are rounding


@dataclass(frozen=True)
class CostPoint:
    """The cost of folding one layer alone, in nats per token, to a latent of ``width`` columns with so many windows."""

    width: int
    key_heads: int | None
    cost: float


def interpolate(points: Sequence[tuple[int, float]], width: int) -> float:
    """Cost at ``width`` from measured ``(width, cost)``, ascending: log-linear in between, level outside.

    A cost that does not fall with the width is noise: each point counts at most what the narrower ones cost.
    """
    least, falling = math.inf, []
    for at, cost in points:
        least = min(least, max(cost, LEAST_COST))
        falling.append((at, math.log(least)))
    for (left, low), (right, high) in pairwise(falling):
        if left <= width <= right:
            return math.exp(low + (high - low) * (width - left) / (right - left))
    return math.exp(falling[0][1] if width < falling[0][0] else falling[-1][1])


def allocate(curves: Sequence[Sequence[CostPoint]], budget: int, step: int) -> list[CostPoint]:
    """Widths of all layers that cost least in sum and take at most ``budget`` columns together.

    Each layer's curve is replaced by its lower convex hull (over all numbers of windows), and the budget spent where
    it saves most per column: the optimum over the hulls to within one step.

    Args:
        curves: measured points of every layer. budget: columns, at least the sum of the narrowest points'.
        step: widths are multiples of it away from the narrowest point.
    """
    hulls = [_hull(_grid(points, step)) for points in curves]
    chosen = [0] * len(hulls)
    spent = sum(hull[0].width for hull in hulls)
    stuck: set[int] = set()
    while len(stuck) < len(hulls):
        layer = max(
            (each for each in range(len(hulls)) if each not in stuck), key=lambda each: _saving(hulls, chosen, each)
        )
        at = chosen[layer]
        if at + 1 >= len(hulls[layer]) or _saving(hulls, chosen, layer) <= 0:
            stuck.add(layer)
            continue
        more = hulls[layer][at + 1].width - hulls[layer][at].width
        if spent + more > budget:
            stuck.add(layer)
            continue
        chosen[layer], spent = at + 1, spent + more
    return [hull[at] for hull, at in zip(hulls, chosen, strict=True)]


def _saving(hulls: list[list[CostPoint]], chosen: list[int], layer: int) -> float:
    """What the next step of a layer saves per column."""
    hull, at = hulls[layer], chosen[layer]
    if at + 1 >= len(hull):
        return 0.0
    return (hull[at].cost - hull[at + 1].cost) / (hull[at + 1].width - hull[at].width)


def _grid(points: Sequence[CostPoint], step: int) -> list[CostPoint]:
    """The cheapest number of windows at every width."""
    by_heads: dict[int | None, list[tuple[int, float]]] = {}
    for point in points:
        by_heads.setdefault(point.key_heads, []).append((point.width, point.cost))
    first, last = min(point.width for point in points), max(point.width for point in points)
    grid = []
    for width in [*range(first, last, step), last]:
        options = [
            CostPoint(width, heads, interpolate(sorted(measured), width))
            for heads, measured in by_heads.items()
            if min(measured)[0] <= width
        ]
        grid.append(min(options, key=lambda choice: choice.cost))
    return grid


def _hull(grid: list[CostPoint]) -> list[CostPoint]:
    """Lower convex hull of costs over widths."""
    hull: list[CostPoint] = []
    for choice in grid:
        while len(hull) >= 2:
            one, two = hull[-2], hull[-1]
            if (two.cost - one.cost) * (choice.width - one.width) < (choice.cost - one.cost) * (two.width - one.width):
                break
            hull.pop()
        hull.append(choice)
    return hull
