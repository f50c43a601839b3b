"""How redundant a model's keys and values are: of the weights alone, and on calibration text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.linalg import orthogonal_procrustes, subspace_angles

from ..checkpoint.encoders import keys_and_values
from ..checkpoint.progress import Track, silent
from ..model import KvfoldError, family_to_fold
from .energy import WeightedLayer, weigh
from .moments import LayerMoments

WIDTH_STEPS = 9  # widths from KV·d to 2·KV·d at which the kept energy is measured


@dataclass(frozen=True)
class HeadRedundancy:
    """One KV head.

    Attributes:
        layer, head: which.
        cosine: cosine similarity of W_k and W_v, all entries as one vector.
        aligned_cosine: the same after the orthogonal map of the head that aligns V best with K.
        principal_cosine: mean cosine of the principal angles between the row spaces of W_k and W_v.
        key_rank, value_rank: effective ranks of W_k and W_v (exponential of the entropy of the squared singular
            values; Roy and Vetterli 2007), out of head_dim.
        cka: linear centred kernel alignment of the head's keys and values on the text (Kornblith et al. 2019), or None.
    """

    layer: int
    head: int
    cosine: float
    aligned_cosine: float
    principal_cosine: float
    key_rank: float
    value_rank: float
    cka: float | None = None


@dataclass(frozen=True)
class LayerRedundancy:
    """One layer: the whole matrices' cosine, its heads, and on text the energy that narrower latents keep.

    Attributes:
        fractions: cache fractions F = R / (2·KV·d) from 0.5 to 1.
        kept_all, kept_head: share of the query- and output-weighted energy kept at those, for span ``all`` and
            ``head``; 1 − share predicts how badly the layer folds. Empty without text.
    """

    layer: int
    cosine: float
    heads: list[HeadRedundancy]
    fractions: list[float]
    kept_all: list[float]
    kept_head: list[float]


def analyze(model: Any, moments: list[LayerMoments] | None = None, track: Track = silent) -> list[LayerRedundancy]:
    """Measure every layer of a model of a supported family; ``moments`` come from ``collect_moments``."""
    family = family_to_fold(model.config)
    layers = family.traits_of(model)
    results = []
    with track("comparing keys and values", len(layers)) as advance:
        for index, traits in enumerate(layers):
            parts = family.parts_of(model, index)
            result = _layer(index, parts.weights.k, parts.weights.v, traits.head_dim)
            if moments is not None:
                result = _on_text(result, weigh(parts, moments[index]), moments[index].inputs)
            results.append(result)
            advance(1)
    return results


def analyze_encoder(model: Any, track: Track = silent) -> list[LayerRedundancy]:
    """Measure every layer of an encoder (see ``encoders``) by its weights."""
    layers, heads = keys_and_values(model), model.config.num_attention_heads
    if not layers:
        raise KvfoldError("the model has no layers")
    results = []
    with track("comparing keys and values", len(layers)) as advance:
        for index, (key, value) in enumerate(layers):
            results.append(_layer(index, key, value, len(key) // heads))
            advance(1)
    return results


def _layer(index: int, key: torch.Tensor, value: torch.Tensor, head_dim: int) -> LayerRedundancy:
    k, v = (part.detach().double().cpu().numpy() for part in (key, value))
    heads = []
    for head in range(len(k) // head_dim):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        heads.append(_head(index, head, k[rows], v[rows]))
    return LayerRedundancy(index, _cosine(k, v), heads, [], [], [])


def _on_text(result: LayerRedundancy, weighted: WeightedLayer, inputs: torch.Tensor) -> LayerRedundancy:
    """Add what text tells: CKA, and the energy that latents of several widths keep."""
    heads = [
        replace(head, cka=_cka(weighted.key[head.head], weighted.value[head.head], inputs)) for head in result.heads
    ]
    fractions = [0.5 + 0.5 * step / (WIDTH_STEPS - 1) for step in range(WIDTH_STEPS)]
    widths = [round(fraction * 2 * weighted.heads * weighted.head_dim) for fraction in fractions]
    kept = {span: weighted.kept_shares(widths, span) for span in ("all", "head")}
    return replace(result, heads=heads, fractions=fractions, kept_all=kept["all"], kept_head=kept["head"])


def _head(layer: int, head: int, k: np.ndarray, v: np.ndarray) -> HeadRedundancy:
    rotation, _ = orthogonal_procrustes(v.T, k.T)  # v.T @ rotation ≈ k.T, [D, d]
    return HeadRedundancy(
        layer=layer,
        head=head,
        cosine=_cosine(k, v),
        aligned_cosine=_cosine(k.T, v.T @ rotation),
        principal_cosine=float(np.cos(subspace_angles(k.T, v.T)).mean()),
        key_rank=_effective_rank(k),
        value_rank=_effective_rank(v),
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float((a * b).sum() / norms) if norms > 0 else 0.0


def _effective_rank(matrix: np.ndarray) -> float:
    energy = np.linalg.svd(matrix, compute_uv=False) ** 2
    if energy.sum() == 0:
        return 0.0
    share = energy / energy.sum()
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))


def _cka(key: torch.Tensor, value: torch.Tensor, inputs: torch.Tensor) -> float:
    """Linear CKA of keys and values (maps of x̃), from the input's second moment: ‖cov(k, v)‖² / (‖cov k‖ ‖cov v‖)."""
    mean = inputs[:, -1:]
    covariance = inputs - mean @ mean.T

    def norm(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a @ covariance @ b.T).norm())

    own = norm(key, key) * norm(value, value)
    return norm(key, value) ** 2 / own if own > 0 else 0.0
