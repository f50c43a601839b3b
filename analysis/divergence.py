"""KL divergence of changed models from their source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .logits import LOGITS_AT_ONCE


def divergences(
    source: Iterable[torch.Tensor],
    changed: Sequence[Iterable[torch.Tensor]],
    advance: Callable[[int], None] = lambda rows: None,
) -> list[float]:
    """Mean KL(source ‖ changed) per token, in nats, of each of several changed models.

    Args:
        source: logits of the source, ``[batch, window, vocabulary]`` a batch. changed: those of each changed model, in
            the same order. advance: shows progress, by rows.
    """
    totals, tokens = [0.0] * len(changed), 0
    others = [iter(each) for each in changed]
    for expected in source:
        log = expected.flatten(0, -2).float().log_softmax(-1)
        tokens += len(log)
        for index, other in enumerate(others):  # one after another: logits are large
            totals[index] += _divergence(log, next(other))
        advance(len(expected))
    return [total / tokens for total in totals]


def _divergence(log: torch.Tensor, logits: torch.Tensor) -> float:
    """Summed KL of tokens with log-probabilities ``log`` ``[tokens, vocabulary]`` from those that ``logits`` give."""
    size = max(1, LOGITS_AT_ONCE // log.shape[-1])
    parts = zip(log.split(size), logits.flatten(0, -2).split(size), strict=True)
    return sum(
        torch.nn.functional.kl_div(found.float().log_softmax(-1), expected, reduction="sum", log_target=True).item()
        for expected, found in parts
    )
