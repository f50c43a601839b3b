"""Several documents in one sequence: what a model must be given so that no token sees another document."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

# transformers tells documents by positions that start anew; these families' models do not hand positions to it.
UNAWARE = {"opt": False, "gpt_oss": True}  # and whether they take a mask for each kind of layer


def document_inputs(model: Any, position_ids: torch.Tensor) -> dict[str, Any]:
    """Inputs of ``model``'s base model for packed documents, ``position_ids`` ``[batch, tokens]`` from 0 for each."""
    inputs: dict[str, Any] = {"position_ids": position_ids}
    kind = model.config.model_type.removeprefix("kvfold_")
    if kind in UNAWARE:
        shape = {"inputs_embeds": torch.empty(*position_ids.shape, 0, dtype=model.dtype, device=position_ids.device)}
        told = {"config": model.config, "attention_mask": None, "cache": None, "position_ids": position_ids, **shape}
        inputs["attention_mask"] = create_causal_mask(**told)
        if UNAWARE[kind]:
            inputs["attention_mask"] = {
                "full_attention": inputs["attention_mask"],
                "sliding_attention": create_sliding_window_causal_mask(**told),
            }
    return inputs
