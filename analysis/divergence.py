"""KL divergence of a changed model from its source."""

from __future__ import annotations

from typing import Any

import torch


class Divergence:
    """Mean KL(source ‖ changed) per token, in nats, on fixed token ids ``[rows, window]``.

    The source's log-probabilities are worked out once and kept in float32, ``[rows, window, vocabulary]``; with a
    large vocabulary keep the rows few.
    """

    def __init__(self, source: Any, rows: torch.Tensor) -> None:
        self._rows = rows
        self._expected = [_log_probabilities(source, row) for row in rows]

    def of(self, changed: Any) -> float:
        """The divergence of ``changed``, a model with the same vocabulary."""
        total = 0.0
        for row, expected in zip(self._rows, self._expected, strict=True):
            found = _log_probabilities(changed, row)
            total += torch.nn.functional.kl_div(found, expected, reduction="sum", log_target=True).item()
        return total / self._rows.numel()


@torch.inference_mode()
def _log_probabilities(model: Any, row: torch.Tensor) -> torch.Tensor:
    return model(input_ids=row[None].to(model.device), use_cache=False).logits[0].float().log_softmax(-1)
