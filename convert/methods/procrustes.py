"""``procrustes``: values are first turned onto the keys by an orthogonal matrix per head, then averaged with them.

The orthogonal Procrustes problem (Schönemann 1966): min ‖Q W_v − W_k‖ over orthogonal Q. Since v = Qᵀ(Q v), the
alignment is undone in the output projection and costs nothing.
"""

from __future__ import annotations

import torch
from scipy.linalg import orthogonal_procrustes

from .base import FoldedWeights, Latent, LayerProblem, Method, assemble, whole_keys


def fold(problem: LayerProblem) -> FoldedWeights:
    """Average each head's keys with its aligned values; the latent, turned back, is the head's value."""
    latents, turns = [], []
    for key, value in zip(problem.weighted.key, problem.weighted.value, strict=True):
        rotation, _ = orthogonal_procrustes(value.T.numpy(), key.T.numpy())  # valueᵀ @ rotation ≈ keyᵀ
        turn = torch.from_numpy(rotation)
        latents.append((key + turn.T @ value) / 2)
        turns.append(turn)
    latent, key_map = whole_keys(problem, torch.stack(latents))
    return assemble(problem, Latent(latent, key_map, head_maps=turns))


PROCRUSTES = Method(
    "procrustes", "V turned onto K by an orthogonal matrix per head, then averaged", needs_text=False, half_only=True,
    fold=fold,
)  # fmt: skip
