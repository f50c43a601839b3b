"""What it costs to fold one layer: KL divergence of the whole model when only that layer is folded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...analysis.divergence import divergences
from ...analysis.energy import weigh
from ...analysis.moments import moments_of_layer
from ...analysis.streaming import Stream
from ...checkpoint.lazy_source import LazySource
from ...checkpoint.progress import Track
from ..candidates import layer_problem, plain_way
from ..folding import folded_attention
from ..methods.closed_form import CALIBRATED
from ..options import ConvertOptions
from .allocation import CostPoint


def measure_costs(
    source: LazySource,
    options: ConvertOptions,
    candidates: Sequence[Sequence[tuple[int, int | None]]],
    rows: torch.Tensor,
    held_out: torch.Tensor,
    track: Track,
) -> list[list[CostPoint]]:
    """Cost curves of all layers in one pass over the model.

    Args:
        source, options: the model and how it is to be folded (span, calibration, dtypes).
        candidates: for each layer the widths, and numbers of key windows, to measure.
        rows: token ids ``[rows, window]`` to calibrate on. held_out: the same, to measure on.
    """
    family, span = source.family, options.span or "all"
    with source.ends() as model:
        text = Stream(family, model, rows, weights=True).enter()
        plain = Stream(family, model, held_out, 1).enter()
    changed: list[list[Stream]] = []
    with track("folding each layer alone", source.layers) as advance:
        for index in range(source.layers):
            with source.layer(index) as layer:
                moments = moments_of_layer(text, layer, index)
                parts = family.parts_of(source.model, index)
                weighted = weigh(parts, moments)
                for streams in changed:
                    for stream in streams:
                        stream.through(layer, index)
                forks = []
                for width, heads in candidates[index]:
                    way = plain_way(options, heads)
                    fold = CALIBRATED.fold(layer_problem(parts, weighted, width, span, way, options, source.dtype))
                    forks.append(plain.fork())
                    with folded_attention(family, layer, parts, fold, index, source.config):
                        forks[-1].through(layer, index)
                plain.through(layer, index)
                changed.append(forks)
            advance(1)
    every = [stream for streams in changed for stream in streams]
    with source.ends(), track("comparing with the source", len(held_out)) as advance:
        found = divergences(plain.logits(), [stream.logits() for stream in every], advance)
    costs = iter(found)
    return [[CostPoint(width, heads, next(costs)) for width, heads in layer] for layer in candidates]
