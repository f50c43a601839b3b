"""``mean``: the latent is the average of W_k and W_v. The obvious thing to try; it destroys the model."""

from __future__ import annotations

import torch

from .base import FoldedWeights, Latent, LayerProblem, Method, assemble, whole_keys


def fold(problem: LayerProblem) -> FoldedWeights:
    """Average keys and values head by head; both are then read as they are (span ``head``)."""
    latent, key_map = whole_keys(problem, (problem.weighted.key + problem.weighted.value) / 2)
    identity = torch.eye(problem.traits.head_dim, dtype=torch.float64)
    return assemble(problem, Latent(latent, key_map, head_maps=[identity] * problem.traits.key_value_heads))


MEAN = Method("mean", "average of W_k and W_v", needs_text=False, half_only=True, fold=fold)
