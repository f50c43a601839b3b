"""Losses over a large vocabulary, a few tokens at a time: the logits of all tokens are never in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..analysis.logits import LOGITS_AT_ONCE, output_logits
from ..text.packing import IGNORED


@dataclass(frozen=True)
class LossWeights:
    """``distill`` · KL(teacher ‖ student) + ``lm`` · next-token loss + ``hidden`` · distance of the layers' outputs."""

    distill: float = 1.0
    lm: float = 0.0
    hidden: float = 0.0


def vocabulary_loss(
    student: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weights: LossWeights,
    teacher: Any = None,
    teacher_hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean loss per token, in nats, of logits that exist for ``LOGITS_AT_ONCE`` entries at a time.

    KL(teacher ‖ student) over the vocabulary (Hinton et al. 2015, arXiv 1503.02531, temperature 1) counts at every
    token; the next-token loss where there is a label.

    Args:
        student, teacher: models with an output head. hidden, teacher_hidden: their last hidden states ``[tokens, D]``.
        labels: ``[tokens]``, the token that follows each, or ``IGNORED``. weights: of the terms (not of ``hidden``).
    """
    head = student.get_output_embeddings().parameters() if torch.is_grad_enabled() else ()
    head = [parameter for parameter in head if parameter.requires_grad]
    return _VocabularyLoss.apply(student, teacher, teacher_hidden, labels, weights, hidden, *head)


@dataclass(frozen=True)
class TokenLosses:
    """Losses of single tokens ``[tokens]`` in nats: KL(teacher ‖ student), and −log p of the tokens that follow.

    The latter are 0 where there is no label; what needs a teacher is None without one.
    """

    divergence: torch.Tensor | None
    student: torch.Tensor
    teacher: torch.Tensor | None


@torch.no_grad()
def token_losses(
    student: Any, hidden: torch.Tensor, labels: torch.Tensor, teacher: Any, teacher_hidden: torch.Tensor | None
) -> TokenLosses:
    """What ``vocabulary_loss`` is made of, token by token and without gradients. Arguments: see there."""
    size = max(1, LOGITS_AT_ONCE // student.config.vocab_size)
    divergence, ours, theirs = [], [], []
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        log = output_logits(student, hidden[part]).float().log_softmax(-1)
        ours.append(_following(log, labels[part]))
        if teacher_hidden is not None:
            expected = output_logits(teacher, teacher_hidden[part]).float().log_softmax(-1)
            theirs.append(_following(expected, labels[part]))
            divergence.append((expected.exp() * (expected - log)).sum(-1))
    if teacher_hidden is None:
        return TokenLosses(None, torch.cat(ours), None)
    return TokenLosses(torch.cat(divergence), torch.cat(ours), torch.cat(theirs))


def _following(log: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = -log.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return found.masked_fill(labels == IGNORED, 0.0)


class _VocabularyLoss(torch.autograd.Function):
    """The gradients are made in the forward pass, chunk by chunk, while the logits are there.

    dKL/dlogits = p_student − p_teacher, and dCE/dlogits = p_student − onehot; autograd takes them through the head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Any,
        teacher: Any,
        teacher_hidden: torch.Tensor | None,
        labels: torch.Tensor,
        weights: LossWeights,
        hidden: torch.Tensor,
        *head: torch.nn.Parameter,
    ) -> torch.Tensor:
        wanted = [hidden.requires_grad, *(True for _ in head)]
        # Every chunk adds a gradient as large as a trained head to it: as large may the chunk's logits be, too.
        at_once = max(LOGITS_AT_ONCE, *(each.numel() for each in head), 0)
        size = max(1, at_once // student.config.vocab_size)
        scales = (weights.distill / len(labels), weights.lm / max(1, int((labels != IGNORED).sum())))
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradients = [
            torch.zeros_like(each) if is_wanted else None
            for each, is_wanted in zip((hidden, *head), wanted, strict=True)
        ]
        gradient: Any
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            with torch.enable_grad():
                piece = hidden[part].detach().requires_grad_(wanted[0])
                logits = output_logits(student, piece)
            expected = None if teacher_hidden is None else output_logits(teacher, teacher_hidden[part])
            loss, gradient = _chunk(logits.detach(), expected, labels[part], scales)
            total += loss
            if not any(wanted):
                continue
            sources = [each for each, is_wanted in zip((piece, *head), wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(logits, sources, gradient.to(logits.dtype)))
            if gradients[0] is not None:
                gradients[0][part] = next(found)
            for kept in gradients[1:]:
                kept += next(found)  # type: ignore[operator]
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        return (None,) * 5 + tuple(None if each is None else each.mul_(upstream) for each in gradients)


def _chunk(
    logits: torch.Tensor, expected: torch.Tensor | None, labels: torch.Tensor, scales: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of some tokens and its gradient by their logits ``[tokens, vocabulary]`` (float32)."""
    distill, lm = scales
    log = logits.float().log_softmax(-1)
    loss = log.new_zeros(())
    factor = torch.full_like(log[:, :1], distill if expected is not None else 0.0)
    if lm:
        counted = labels != IGNORED
        loss = loss + lm * _following(log, labels).sum()
        factor = factor + lm * counted[:, None]
    teacher = None
    if expected is not None:
        teacher_log = expected.float().log_softmax(-1)
        teacher = teacher_log.exp()
        # KL = Σ p log p − Σ p log q, in two sums that need no tensor of their own.
        loss = loss + distill * (torch.linalg.vecdot(teacher, teacher_log) - torch.linalg.vecdot(teacher, log)).sum()
    gradient = log.exp_().mul_(factor)
    if teacher is not None:
        gradient.sub_(teacher, alpha=distill)
    if lm:
        gradient.scatter_add_(1, labels.clamp(min=0)[:, None], -lm * counted[:, None].to(gradient.dtype))
    return loss, gradient
