"""The loss in chunks is the loss, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch.nn.functional import cross_entropy, kl_div

from kvfold.finetune import loss as chunked
from kvfold.finetune.loss import LossWeights, token_losses, vocabulary_loss
from kvfold.text.packing import IGNORED

TOKENS, WIDTH = 103, 48  # more tokens than a head is wide: two chunks and a rest at least


def states(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def labels() -> torch.Tensor:
    ids = torch.randint(320, (TOKENS,), generator=torch.Generator().manual_seed(5))
    return ids.masked_fill(torch.arange(TOKENS) % 7 == 3, IGNORED)


def plain_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits as the model itself makes them: its base model is replaced by the states."""
    base = model.base_model_prefix

    class States(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            from transformers.modeling_outputs import BaseModelOutputWithPast

            return BaseModelOutputWithPast(last_hidden_state=hidden[None])

    kept = getattr(model, base)
    setattr(model, base, States())
    try:
        return model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64)).logits[0]
    finally:
        setattr(model, base, kept)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "phi"])
@pytest.mark.parametrize(
    "weights", [LossWeights(), LossWeights(0.0, 1.0), LossWeights(0.3, 0.7)], ids=["distill", "lm", "mixed"]
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    name: str, weights: LossWeights, labels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cohere and granite scale their logits, gemma2 caps them, phi has a bias on the head.
    student, teacher = FAMILIES[name](), FAMILIES[name]()
    if name == "cohere":
        student.config.logit_scale = student.logit_scale = teacher.config.logit_scale = teacher.logit_scale = 0.25
    head = list(student.get_output_embeddings().parameters())
    teacher.requires_grad_(False)
    ours, theirs = states(1).requires_grad_(), states(2)
    logits, expected = plain_logits(student, ours).log_softmax(-1), plain_logits(teacher, theirs).log_softmax(-1)
    plain = weights.distill * kl_div(logits, expected, reduction="sum", log_target=True) / TOKENS
    plain = plain + weights.lm * cross_entropy(logits, labels, ignore_index=IGNORED)
    gradients = torch.autograd.grad(2.5 * plain, [ours, *head])

    monkeypatch.setattr(chunked, "LOGITS_AT_ONCE", 5 * 320)
    with_teacher = (teacher, theirs) if weights.distill else (None, None)
    found = vocabulary_loss(student, ours, labels, weights, *with_teacher)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    for each, other in zip(torch.autograd.grad(2.5 * found, [ours, *head]), gradients, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-6)


def test_no_gradient_where_nothing_is_trained(labels: torch.Tensor) -> None:
    model = FAMILIES["llama"]()
    model.requires_grad_(False)
    assert not vocabulary_loss(model, states(1), labels, LossWeights(0.0, 1.0)).requires_grad
    with torch.inference_mode():
        model.requires_grad_(True)
        assert vocabulary_loss(model, states(1), labels, LossWeights(0.0, 1.0)) > 0


def test_losses_of_tokens_add_up(labels: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = FAMILIES["llama"](), FAMILIES["arcee"]()
    monkeypatch.setattr(chunked, "LOGITS_AT_ONCE", 4 * 320)
    found = token_losses(student, states(1), labels, teacher, states(2))
    whole = vocabulary_loss(student, states(1), labels, LossWeights(), teacher, states(2))
    torch.testing.assert_close(found.divergence.mean(), whole)
    counted = labels != IGNORED
    assert counted.any()
    assert not counted.all()
    assert (found.student[~counted] == 0).all()
    torch.testing.assert_close(
        found.student.sum() / counted.sum(), vocabulary_loss(student, states(1), labels, LossWeights(0.0, 1.0))
    )
    torch.testing.assert_close(
        found.teacher.sum() / counted.sum(), vocabulary_loss(teacher, states(2), labels, LossWeights(0.0, 1.0))
    )
    assert token_losses(student, states(1), labels, None, None).divergence is None
