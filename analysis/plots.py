"""Plots: heatmaps of layers × heads, how much energy narrower latents keep, costs of layers, training curves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .redundancy import LayerRedundancy

HEATMAPS = {
    "cosine": "Cosine similarity of W_k and W_v",
    "aligned_cosine": "… after the best orthogonal alignment",
    "principal_cosine": "Mean cosine of the principal angles",
    "cka": "Linear CKA of keys and values",
}


def heatmap(layers: list[LayerRedundancy], measure: str) -> Figure:
    """Layers × heads of one ``measure``, a key of ``HEATMAPS``."""
    values = np.array([[getattr(head, measure) for head in layer.heads] for layer in layers], dtype=float).T
    figure, axes = plt.subplots(figsize=(max(5.0, 0.24 * len(layers)), 1.5 + 0.3 * len(values)), layout="constrained")
    signed = bool((values < 0).any())
    limit = max(float(np.abs(values).max()), 1e-3)
    image = axes.imshow(
        values, aspect="auto", cmap="RdBu_r" if signed else "viridis", vmin=-limit if signed else 0.0, vmax=limit
    )
    axes.set(xlabel="layer", ylabel="KV head", title=HEATMAPS[measure])
    axes.set_yticks(range(len(values)))
    figure.colorbar(image, ax=axes)
    return figure


def lost_energy(layers: list[LayerRedundancy]) -> Figure:
    """Share of the weighted energy that a latent loses against the cache fraction, a line per layer and span."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.95, len(layers)))
    for axes, span in zip(panels, ("all", "head"), strict=True):
        for layer, colour in zip(layers, colours, strict=True):
            kept = np.array(layer.kept_all if span == "all" else layer.kept_head)
            axes.semilogy(layer.fractions[:-1], np.maximum(1 - kept, 1e-9)[:-1], color=colour, linewidth=1)
        axes.set(xlabel="cache fraction F", title=f"span {span}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of energy lost")
    scale = plt.cm.ScalarMappable(plt.Normalize(0, len(layers) - 1), "viridis")
    figure.colorbar(scale, ax=panels, label="layer")
    return figure


def figures(layers: list[LayerRedundancy]) -> Iterator[tuple[str, Figure]]:
    """Every plot of an analysis with its name; without calibration text those that need it are left out."""
    with_text = bool(layers[0].fractions)
    for measure in HEATMAPS:
        if measure != "cka" or with_text:
            yield measure, heatmap(layers, measure)
    if with_text:
        yield "lost_energy", lost_energy(layers)


def write_figures(layers: list[LayerRedundancy], folder: Path) -> list[Path]:
    """Write the plots as PNG files and return their paths."""
    paths = []
    for name, figure in figures(layers):
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        paths.append(path)
    return paths


def cost_curves(curves: list[list[list]], chosen: list[tuple[int, float]], unit: int) -> Figure:
    """Cost of folding each layer alone against the width of its latent, and the width that was chosen.

    Args:
        curves: for each layer its measured points ``[width, key heads, cost]``, costs in nats per token.
        chosen: for each layer width and cost. unit: 2·KV·d, the width of keys and values side by side.
    """
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(curves)))
    for layer, (points, colour) in enumerate(zip(curves, colours, strict=True)):
        best: dict[int, float] = {}
        for width, _, cost in points:
            best[width] = min(cost, best.get(width, cost))
        widths = sorted(best)
        costs = [max(best[width], 1e-6) for width in widths]
        axes.plot([width / unit for width in widths], costs, "-", color=colour, linewidth=1, alpha=0.7)
        width, cost = chosen[layer]
        axes.plot(width / unit, max(cost, 1e-6), "o", color=colour, markersize=5)
    axes.set(xlabel="cache fraction of the layer", ylabel="KL from the source, nats/token", yscale="log")
    axes.set_title("Cost of folding each layer alone, and what the plan gives it")
    axes.grid(alpha=0.3)
    bar = figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, max(len(curves) - 1, 1)), "viridis"), ax=axes)
    bar.set_label("layer")
    return figure


def training_curve(log: list[dict[str, Any]]) -> Figure:
    """Training loss, and held-out perplexity (its ratio to the teacher's, where that is known), against tokens.

    Args:
        log: entries of ``train_log.jsonl``.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    steps = [entry for entry in log if "loss" in entry]
    left.plot([entry["tokens"] for entry in steps], [entry["loss"] for entry in steps], linewidth=1)
    left.set(xlabel="tokens", ylabel="training loss, nats/token", yscale="log")
    measured = [entry for entry in log if "eval_loss" in entry]
    name = "ratio" if measured and "ratio" in measured[0] else "perplexity"
    right.plot([entry["tokens"] for entry in measured], [entry[name] for entry in measured], "o-")
    right.set(xlabel="tokens", ylabel="held-out perplexity" + (", ratio to the teacher" if name == "ratio" else ""))
    for axes in (left, right):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 50k, 100k: what a budget is given in
        axes.grid(alpha=0.3)
    return figure


MARKERS = {"source": "s", "converted": "o", "uptrained": "^", "scratch": "D"}


def frontier(points: list[tuple[str, str, float, float]]) -> Figure:
    """Perplexity ratio against cached bytes per token.

    Args:
        points: name, kind (a key of ``MARKERS``), bytes per token and ratio of each model.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = plt.get_cmap("tab10")
    for number, (kind, marker) in enumerate(MARKERS.items()):
        chosen = [point for point in points if point[1] == kind]
        if chosen:
            axes.plot([p[2] for p in chosen], [p[3] for p in chosen], marker, color=colours(number), label=kind)
    for name, _, size, ratio in points:
        axes.annotate(Path(name).name, (size, ratio), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="cache, bytes per token", ylabel="perplexity ratio")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def degradations(names: list[str], values: list[list[float]], published: dict[str, dict[str, float]]) -> Figure:
    """Perplexity lost against ``qkv``, a dot for each seed, with published figures beside.

    Args:
        names: of the variants. values: for each the degradations of its seeds, in per cent. published: for each size
            of the study, the degradation by variant.
    """
    figure, axes = plt.subplots(figsize=(1.5 + 1.1 * len(names), 4.2), layout="constrained")
    for place, found in enumerate(values):
        axes.plot(
            [place] * len(found), found, "o", color="C0", label="here, a dot for each seed" if not place else None
        )
        axes.plot([place - 0.2, place + 0.2], [sum(found) / len(found)] * 2, "-", color="C0")
    for number, (size, known) in enumerate(published.items(), start=1):
        places = [place for place, name in enumerate(names) if name in known]
        if places:
            heights = [known[names[place]] for place in places]
            axes.plot(places, heights, "x", color=f"C{number}", label=f"published, {size}")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="perplexity lost against qkv, %")
    axes.axhline(0, color="grey", linewidth=1)
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return figure
