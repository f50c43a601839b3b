"""Several models side by side, however they were made: what they lose, and what they cost to make and to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ..checkpoint.loading import DEFAULT_ACCESS, Access, load
from ..checkpoint.progress import Track, silent
from ..checkpoint.record import record_entries
from ..text.sources import TextSource
from .perplexity import Evaluation, evaluate_checkpoint, first_windows
from .plots import frontier
from .report import Section, Table, write_report
from .serving import BYTES, Machine, Serving, serving


@dataclass(frozen=True)
class Provenance:
    """How a model came about.

    Attributes:
        kind: ``source``, ``converted``, ``uptrained`` or ``scratch``. how: in a few words.
        tokens: trained on, from scratch and uptraining together. flops: of that training, counted. Both are None where
            they are not known, as of a source.
    """

    kind: str
    how: str
    tokens: int | None
    flops: float | None


@dataclass(frozen=True)
class Compared:
    """One model of a comparison.

    ``cached_numbers`` are those of a token, all layers; ``ratio`` is the perplexity's to the first model's, None where
    the two read the text as other tokens, so that their perplexities cannot be compared.
    """

    evaluation: Evaluation
    made: Provenance
    cached_numbers: float
    ratio: float | None
    serving: Serving

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def made(folder: Path, parameters: int) -> Provenance:
    """What a checkpoint's ``kvfold.json`` tells of how it was made; without one it is a source.

    A step of uptraining is 6 operations for each parameter and token, and 2 for its teacher, which is of about the
    same size.
    """
    recipe = record_entries(folder)
    if recipe is None:
        return Provenance("source", "", None, None)
    runs = recipe.get("uptraining") or []
    tokens = sum(run["tokens_trained"] for run in runs)
    flops = float(sum(run["tokens_trained"] * parameters * (8 if run.get("teacher") else 6) for run in runs))
    after = "".join(f", uptrained ({run['train']}) on {run['tokens_trained']:,} tokens" for run in runs)
    if recipe.get("made_by") == "pretrain":
        how = f"{recipe['variant']}, {recipe['key_value_heads']} KV heads{after}"
        return Provenance("scratch", how, recipe["tokens_trained"] + tokens, recipe["flops"] + flops)
    how = f"{recipe['method']}, span {recipe['span']}{after}"
    return Provenance("uptrained" if runs else "converted", how, tokens, flops)


def compare(
    paths: Sequence[str], text: str, window: int, count: int, context: int, machine: Machine, dtype: str = "auto",
    device: str = "cpu", track: Track = silent, access: Access = DEFAULT_ACCESS,
) -> list[Compared]:  # fmt: skip
    """Evaluate models on one text and set beside it what they cost; ratios are to the first.

    Args:
        paths: MODELs. text, window, count, dtype, device, access: see ``evaluate``. context, machine: see ``serving``.

    Raises KvfoldError for a model that cannot be loaded or a text that is too short.
    """
    source = TextSource(text)
    found: list[Compared] = []
    tokens: torch.Tensor | None = None
    for path, each in zip(paths, access.each(paths), strict=True):
        checkpoint = load(path, dtype, device, each)
        rows = first_windows(checkpoint, source, window, count)
        tokens = rows if tokens is None else tokens
        evaluation = evaluate_checkpoint(checkpoint, rows, track)
        numbers = evaluation.cache_bytes_per_token / checkpoint.model.dtype.itemsize
        first = found[0].evaluation.perplexity if found else evaluation.perplexity
        found.append(
            Compared(
                evaluation,
                made(checkpoint.folder, evaluation.parameters),
                numbers,
                evaluation.perplexity / first if torch.equal(rows, tokens) else None,
                serving(evaluation.parameters, numbers, context, machine),
            )
        )
    return found


QUALITY = ["model", "perplexity", "ratio", "cache bytes/token", "at the context"]
MAKING = ["model", "made", "parameters", "training tokens", "training FLOPs"]
SERVED = ["model", "sequences", "longest context", "tokens/s", "cost/M tokens"]


def quality_rows(models: list[Compared], context: int) -> list[list[str]]:
    """A row of ``QUALITY`` for each model; caches in 16 bits."""
    return [
        [
            each.evaluation.path,
            f"{each.evaluation.perplexity:.3f}",
            "" if each.ratio is None else f"{each.ratio:.4f}",
            f"{each.cached_numbers * BYTES:,.0f}",
            in_bytes(each.cached_numbers * BYTES * context),
        ]
        for each in models
    ]


def making_rows(models: list[Compared]) -> list[list[str]]:
    """A row of ``MAKING`` for each model."""
    return [
        [
            each.evaluation.path,
            each.made.kind,
            f"{each.evaluation.parameters:,}",
            "" if each.made.tokens is None else f"{each.made.tokens:,}",
            "" if each.made.flops is None else f"{each.made.flops:.3g}",
        ]
        for each in models
    ]


def serving_rows(models: list[Compared]) -> list[list[str]]:
    """A row of ``SERVED`` for each model."""
    return [
        [
            each.evaluation.path,
            f"{each.serving.sequences:,}",
            f"{each.serving.longest:,}",
            "" if each.serving.tokens_per_second is None else f"{each.serving.tokens_per_second:,.0f}",
            "" if each.serving.cost is None else f"{each.serving.cost:.4f}",
        ]
        for each in models
    ]


def assumptions(context: int, machine: Machine) -> str:
    """What the estimate of serving takes for granted, in a sentence or two."""
    return (
        f"Estimated, not measured: weights and caches in 16 bits, every sequence {context:,} tokens long, a memory of "
        f"{in_bytes(machine.memory)} of which {machine.reserve:.0%} is kept for all else, decoding bound by reading "
        f"weights and caches at {in_bytes(machine.bandwidth)} per second, {machine.price:g} per hour."
    )


def write_comparison(
    path: Path, models: list[Compared], text: str, window: int, count: int, context: int, machine: Machine
) -> None:
    """Write the comparison as one self-contained HTML page."""
    first = models[0].evaluation
    how = [f"{each.evaluation.path}: {each.made.kind}{', ' if each.made.how else ''}{each.made.how}" for each in models]
    sections = [
        Section(
            "Quality and cache",
            [
                f"Perplexity on {count} windows of {window} tokens of {text}, {first.tokens:,} scored; ratios are to "
                f"{first.path}. Cache in 16 bits, its size read off filled caches, and at {context:,} tokens."
            ],
            Table(QUALITY, quality_rows(models, context)),
            [("Perplexity against the cache: further left is smaller, further down is better.", _frontier(models))],
        ),
        Section("How they were made", how, Table(MAKING, making_rows(models))),
        Section("Serving", [assumptions(context, machine)], Table(SERVED, serving_rows(models))),
    ]
    write_report(path, "Models compared", sections)


def _frontier(models: list[Compared]) -> Figure:
    return frontier(
        [
            (each.evaluation.path, each.made.kind, each.cached_numbers * BYTES, each.ratio)
            for each in models
            if each.ratio is not None
        ]
    )


def in_bytes(count: float) -> str:
    """A number of bytes, for people: 88.0 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
