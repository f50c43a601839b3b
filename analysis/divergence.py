"""KL divergence of changed models from their source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch


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
        log = expected.float().log_softmax(-1)
        tokens += log.shape[0] * log.shape[1]
        for index, other in enumerate(others):  # one after another: logits are large
            log_found = next(other).float().log_softmax(-1)
            divergence = torch.nn.functional.kl_div(log_found, log, reduction="sum", log_target=True)
            totals[index] += divergence.item()
        advance(log.shape[0])
    return [total / tokens for total in totals]
