"""Make a plan: measure every layer's cost curve, and share the cache budget out."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.lazy_source import LazySource
from ...checkpoint.loading import locate
from ...checkpoint.progress import Track, silent
from ...checkpoint.source_identity import describe_source
from ...model import AttentionTraits, KvfoldError
from ..calibration import calibration_tokens, staged, with_texts
from ..methods.closed_form import CALIBRATED
from ..options import ConvertOptions, calibration_rows, check_heads, check_options, least_width
from .allocation import CostPoint, allocate, interpolate
from .costs import measure_costs
from .plan import LayerPlan, Plan

POINTS = (0.4, 0.7, 1.0, 1.5)  # widths at which costs are measured, relative to the uniform one
HELD_OUT_TOKENS = 512
STEPS = 48  # in which the full width is shared out


@dataclass(frozen=True)
class PlanOptions:
    """How to plan: the conversion that it is for, and what the layers may get.

    Attributes:
        conversion: its cache fraction, span, calibration text and so on.
        min_width, max_width: limits of R; None: 0.4 of the uniform width, and keys and values side by side.
        key_heads: numbers of key windows to choose from; None: one for each KV head.
    """

    conversion: ConvertOptions
    min_width: int | None = None
    max_width: int | None = None
    key_heads: tuple[int, ...] | None = None


def make_plan(path: str, options: PlanOptions, track: Track = silent) -> Plan:
    """Plan MODEL at ``path``. Raises KvfoldError for bad input, and for a budget that cannot be reached."""
    conversion = options.conversion
    check_options(CALIBRATED, conversion)
    location = locate(path, conversion.access)
    with tempfile.TemporaryDirectory() as folder:
        source = LazySource(staged(location, Path(folder) / "source", access=conversion.access), conversion.device)
        described = describe_source(path, location.folder, source.config)
        conversion = with_texts(conversion, source)
        tokens = calibration_tokens(source, described, conversion, track)
        return plan_source(source, described, tokens, replace(options, conversion=conversion), track)


def plan_source(
    source: LazySource, described: dict[str, Any], tokens: torch.Tensor, options: PlanOptions, track: Track = silent
) -> Plan:  # fmt: skip
    """Plan an opened model (``described`` as in ``kvfold.json``) on the calibration text ``tokens`` ``[n]``."""
    conversion = options.conversion
    span = conversion.span or "all"
    layers = source.family.traits_of(source.model)
    for heads in options.key_heads or ():
        check_heads(layers, replace(conversion, key_heads=heads), span)
    fraction = 0.5 if conversion.cache_fraction is None else conversion.cache_fraction
    full = [traits.cache_width for traits in layers]
    candidates = [_candidates(traits, fraction, span, options) for traits in layers]
    budget = round(fraction * sum(full))
    least = sum(min(width for width, _ in points) for points in candidates)
    if least > budget:
        raise KvfoldError(
            f"cache fraction {fraction} is out of reach: with these widths and key heads the least is "
            f"{least / sum(full):.3g}"
        )
    rows = calibration_rows(tokens, conversion, source.config)
    window = rows.shape[1]
    held = max(1, min(HELD_OUT_TOKENS // window, len(rows) // 2))
    held_out = rows[-held:][:, : max(HELD_OUT_TOKENS // held, 2)]
    measured = [[point for point in points if point[0] < whole] for points, whole in zip(candidates, full, strict=True)]
    curves = measure_costs(source, conversion, measured, rows[:-held], held_out, track)
    for points, asked, whole in zip(curves, candidates, full, strict=True):
        # Keys and values side by side lose nothing, whichever windows there are elsewhere.
        points += [CostPoint(whole, None, 0.0)] * any(width == whole for width, _ in asked)
    step = max(1, round(min(full) / STEPS))
    if span == "head":
        shares = max(options.key_heads or (layers[0].key_value_heads,))
        step = max(shares, step // shares * shares)
    chosen = allocate(curves, budget, step)
    return Plan(
        source=described,
        cache_fraction=sum(choice.width for choice in chosen) / sum(full),
        span=span,
        full_width=max(full),
        uniform_cost=round(sum(_at(points, fraction * whole) for points, whole in zip(curves, full, strict=True)), 6),
        layers=[LayerPlan(choice.width, choice.key_heads, round(choice.cost, 6)) for choice in chosen],
        curves=[[[point.width, point.key_heads, round(point.cost, 6)] for point in points] for points in curves],
    )


def _at(points: list[CostPoint], width: float) -> float:
    """The least cost at a width, whatever the number of windows."""
    by_heads = {point.key_heads for point in points}
    curves = [sorted((point.width, point.cost) for point in points if point.key_heads == heads) for heads in by_heads]
    return min(interpolate(curve, round(width)) for curve in curves)


def _candidates(
    traits: AttentionTraits, fraction: float, span: str, options: PlanOptions
) -> list[tuple[int, int | None]]:  # fmt: skip
    """Widths and numbers of key windows of one layer that are measured, ascending."""
    full = traits.cache_width
    found = []
    for heads in options.key_heads or (None,):
        own = None if heads == traits.key_value_heads else heads
        least = least_width(traits, replace(options.conversion, key_heads=own), span)
        low = max(options.min_width or round(POINTS[0] * fraction * full), least)
        high = min(options.max_width or full, full)
        if low > high or high > full or (options.min_width or low) < least:
            raise KvfoldError(
                f"widths {options.min_width or low} to {options.max_width or high} are out of range for this model: "
                f"{least} to {full}"
            )
        step = (own or traits.key_value_heads) if span == "head" else 1
        wanted = {low, high, *(round(point * fraction * full) for point in POINTS)}
        widths = sorted({-(-min(max(width, low), high) // step) * step for width in wanted})
        found += [(width, own) for width in widths]
    return sorted(set(found), key=lambda point: (point[0], point[1] or 0))
