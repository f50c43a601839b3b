"""The training loss as a model's own forward pass, so that what wraps the model (DDP, FSDP, PEFT) wraps the loss."""

from __future__ import annotations

from typing import Any

import torch

from ..text.packing import IGNORED
from .documents import document_inputs
from .loss import LossWeights, TokenLosses, token_losses, vocabulary_loss


def teach(student: Any, teacher: Any, weights: LossWeights) -> None:
    """Make ``student(input_ids, position_ids, labels)`` return its training loss against ``teacher`` (None: none).

    In evaluation mode the loss is without the layers' distance, and beside it come ``student`` and ``teacher``
    ``[rows]``, the mean next-token loss of each sequence. Both models get ``forward``s of their own, on the instance:
    inside the forward pass FSDP has a model's parameters whole, and outside it does not.
    """
    if teacher is not None:
        teacher.requires_grad_(False).eval()
        teacher.forward = _Hidden(teacher)
    student.forward = _Loss(student, teacher, weights)


class _Hidden:
    """``forward`` of a model that returns what its base model returns: the hidden states before the head."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        return self.model.base_model(use_cache=False, **inputs)


class _Loss:
    """``forward`` of the student; see ``teach``."""

    def __init__(self, student: Any, teacher: Any, weights: LossWeights) -> None:
        self.student, self.teacher, self.weights = student, teacher, weights

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, **empty: Any
    ) -> dict[str, torch.Tensor]:  # (PEFT hands on all that a language model could be given)
        inputs: dict[str, Any] = {"input_ids": input_ids, **document_inputs(self.student, position_ids)}
        if self.student.training and self.weights.hidden:
            inputs["output_hidden_states"] = True
        found: Any = self.student.base_model(use_cache=False, **inputs)
        expected: Any = None
        if self.teacher is not None:
            with torch.no_grad():
                expected = self.teacher(**inputs)
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        ours = found.last_hidden_state.flatten(0, 1)
        theirs = None if expected is None else expected.last_hidden_state.flatten(0, 1)
        if not self.student.training:
            return self._evaluation(
                token_losses(self.student, ours, following.flatten(), self.teacher, theirs), following
            )
        loss = vocabulary_loss(self.student, ours, following.flatten(), self.weights, self.teacher, theirs)
        if self.weights.hidden:
            loss = loss + self.weights.hidden * _distance(found.hidden_states[1:], expected.hidden_states[1:])
        return {"loss": loss}

    def _evaluation(self, losses: TokenLosses, following: torch.Tensor) -> dict[str, torch.Tensor]:
        counted = (following != IGNORED).sum(1).clamp(min=1)
        rows = {"student": losses.student.view_as(following).sum(1) / counted}
        loss = self.weights.lm * rows["student"].mean()
        if losses.teacher is not None and losses.divergence is not None:
            rows["teacher"] = losses.teacher.view_as(following).sum(1) / counted
            loss = loss + self.weights.distill * losses.divergence.mean()
        return {"loss": loss, **rows}


def _distance(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean over layers and tokens of ‖found − expected‖² / ‖expected‖²: large states count no more than others."""
    terms = [
        ((ours.float() - theirs.float()).square().sum(-1) / theirs.float().square().sum(-1).clamp(min=1e-12)).mean()
        for ours, theirs in zip(found, expected, strict=True)
    ]
    return torch.stack(terms).mean()
