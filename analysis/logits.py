"""Logits from a model's last hidden states, so that only as many as wanted are made at a time."""

from __future__ import annotations

from typing import Any

import torch

# Entries of the [tokens, vocabulary] logits of a model that are worked on together. Tensors of more than 32 MB are new
# memory each time (glibc gives theirs back at once), and clearing that many pages takes longer than the arithmetic.
LOGITS_AT_ONCE = 1 << 22


def output_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[…, vocabulary]`` of hidden states ``[…, D]`` that ``model``'s base model gave, in the model's dtype.

    They are those of the model's own ``forward``: scaled (Cohere, Granite) and capped (Gemma 2) as its config says.
    """
    logits = model.get_output_embeddings()(hidden)
    config = model.config
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
