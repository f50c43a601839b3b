"""Perplexity over fixed windows, and what a model's cache really holds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..checkpoint.loading import DEFAULT_ACCESS, Access, Checkpoint, load
from ..checkpoint.progress import Track, silent
from ..model import KvfoldError, family_of
from ..text.sources import TextSource
from .logits import LOGITS_AT_ONCE, output_logits
from .moments import windows

CACHE_PROBE = 32  # tokens


@dataclass(frozen=True)
class Evaluation:
    """Figures of one model; ``cache_bytes_per_token`` is read off a filled cache, before any sliding window is full."""

    path: str
    perplexity: float
    tokens: int
    cache_bytes_per_token: float
    cache_fraction: float
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    paths: list[str], text: str, window: int, count: int, dtype: str = "auto", device: str = "cpu",
    track: Track = silent, access: Access = DEFAULT_ACCESS,
) -> list[Evaluation]:  # fmt: skip
    """Evaluate models one after another on the first ``count`` windows of ``window`` tokens of ``text``.

    ``access`` holds for all of them; its revision for the Hub ids, of which there must be one then. Raises KvfoldError
    for a model that cannot be loaded or a text that is too short.
    """
    source = TextSource(text)
    results = []
    for path, each in zip(paths, access.each(paths), strict=True):
        checkpoint = load(path, dtype, device, each)
        results.append(evaluate_checkpoint(checkpoint, first_windows(checkpoint, source, window, count), track))
    return results


def first_windows(checkpoint: Checkpoint, source: TextSource, window: int, count: int) -> torch.Tensor:
    """The first ``count`` windows of a text, token ids ``[count, window]``.

    Raises KvfoldError for a text that is too short, or windows that the model has no positions for.
    """
    if count < 1:
        raise KvfoldError(f"{count} windows are too few: use 1 or more")
    longest = getattr(checkpoint.config, "max_position_embeddings", None)
    if longest and window > longest:
        raise KvfoldError(f"a window of {window} tokens is longer than the {longest} positions of {checkpoint.path}")
    rows = windows(source.tokens(checkpoint.tokenizer, window * count), window)
    if len(rows) < count:
        raise KvfoldError(
            f"text {source.spec!r} has only {len(rows)} windows of {window} tokens, {count} were asked for"
        )
    return rows


def evaluate_checkpoint(checkpoint: Checkpoint, rows: torch.Tensor, track: Track = silent) -> Evaluation:
    """Evaluate a loaded model on token ids ``[rows, window]``."""
    model = checkpoint.model
    with track(f"evaluating {checkpoint.path}", len(rows)) as advance:
        loss, scored = 0.0, 0
        for row in rows:
            total, tokens = negative_log_likelihood(model, row[None])
            loss, scored = loss + total, scored + tokens
            advance(1)
    measured = cache_bytes_per_token(model, rows[0, :CACHE_PROBE])
    return Evaluation(
        path=checkpoint.path,
        perplexity=math.exp(min(loss / scored, 700.0)),
        tokens=scored,
        cache_bytes_per_token=measured,
        cache_fraction=measured / source_cache_bytes_per_token(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


@torch.inference_mode()
def negative_log_likelihood(model: Any, rows: torch.Tensor) -> tuple[float, int]:
    """Summed −log p of every token but the first of each row, in nats, and how many tokens that were."""
    rows = rows.to(model.device)
    hidden = model.base_model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = rows[:, 1:].flatten()
    step = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    total = 0.0
    for start in range(0, len(targets), step):
        logits = output_logits(model, hidden[start : start + step]).float()
        total += torch.nn.functional.cross_entropy(logits, targets[start : start + step], reduction="sum").item()
    return total, len(targets)


@torch.inference_mode()
def cache_bytes_per_token(model: Any, tokens: torch.Tensor) -> float:
    """Bytes a token takes in the cache that ``model`` fills with ``tokens`` ``[n]``: all layers, one sequence."""
    cache = model(input_ids=tokens[None].to(model.device), use_cache=True, logits_to_keep=1).cache
    return cached_bytes(cache) / len(tokens)


def cached_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache holds (not of room it has in reserve)."""
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    )


def source_cache_bytes_per_token(model: Any) -> int:
    """Bytes a token would take with separate keys and values in every layer of ``model`` (a source or a folded one)."""
    numbers = sum(traits.cache_width for traits in family_of(model.config).traits_of(model))
    return numbers * torch.empty(0, dtype=model.dtype).element_size()
