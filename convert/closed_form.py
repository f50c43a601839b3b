"""The fold in closed form: the best joint subspace of keys and values, read back as key windows and a value map."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..analysis.energy import WeightedLayer
from .problem import FoldedWeights, LayerProblem, assemble


@dataclass(frozen=True)
class HeadFold:
    """A latent for some heads: maps of x̃ to its windows and its further columns, and the value map out of it.

    Shapes (n heads): windows ``[n·d, D + 1]``, extra ``[e, D + 1]``, values ``[n·d, n·d + e]``. All float64.
    """

    windows: torch.Tensor
    extra: torch.Tensor
    values: torch.Tensor


def fold(problem: LayerProblem) -> FoldedWeights:
    """Fold one layer; with R = 2·KV·d the latent is keys and values side by side, and nothing changes."""
    layer, width = problem.weighted, problem.width
    if width == 2 * problem.key_width:
        folds = [_side_by_side(layer, group) for group in layer.head_groups(problem.span)]
    else:
        groups = layer.head_groups(problem.span)
        folds = [fold_heads(layer, group, width // len(groups), problem.balance, problem.noise) for group in groups]
    latent = torch.cat([part.windows for part in folds] + [part.extra for part in folds])
    if problem.span == "head":
        return assemble(problem, latent, None, [part.values for part in folds])
    return assemble(problem, latent, folds[0].values)


def _side_by_side(layer: WeightedLayer, heads: list[int]) -> HeadFold:
    keys, values = layer.key[heads].flatten(0, 1), layer.value[heads].flatten(0, 1)
    pick = torch.cat((torch.zeros(len(values), len(keys)), torch.eye(len(values))), dim=1)
    return HeadFold(keys, values, pick.double())


def fold_heads(layer: WeightedLayer, heads: list[int], width: int, balance: float, noise: float) -> HeadFold:
    """Fold the keys and values of ``heads`` into a latent of ``width`` columns.

    The joint weighted signal is projected on its top ``width`` directions. Its keys, unweighted, are the windows; they
    span ``n·d`` dimensions of the subspace, so its values are a linear map of them and, where ``width`` is larger, of
    as many further columns, for which the largest remaining directions of the values are taken.

    Args:
        layer: the weighted layer. heads: which of its heads. width: n·d … 2·n·d. balance: λ, weight of the values.
        noise: variance of the cache's rounding error relative to an entry's second moment; the value map is the least
            squares solution in the presence of that noise, which keeps its entries from growing along directions in
            which the latent has little energy.
    """
    n, d = len(heads), layer.head_dim
    rows, factor = layer.joint(heads, balance)
    _, directions = layer.spectrum(rows)
    top = directions[:, :width]
    kept = top @ (top.T @ rows)  # [2·n·d, D + 1], the projected signal
    windows = _per_head(layer.key_unroot[heads], kept[: n * d])
    extra = windows[:0]
    if width > n * d:
        values = _per_head(layer.value_unroot[heads], kept[n * d :] / factor)
        residual = values - _regress(values, windows, layer.moment_root, noise) @ windows
        weighted = _per_head(layer.value_root[heads], residual)
        signal = weighted @ layer.moment_root
        _, basis = torch.linalg.eigh(signal @ signal.T)
        extra = basis.flip(1)[:, : width - n * d].T @ weighted
    latent = torch.cat((windows, extra))
    fitted = [_regress(layer.value[head], latent, layer.value_moment_roots[head], noise) for head in heads]
    return HeadFold(windows, extra, torch.cat(fitted))


def _per_head(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Apply ``[n, d, d]`` to the rows ``[n·d, D + 1]`` of each head."""
    return (matrices @ rows.unflatten(0, matrices.shape[:2])).flatten(0, 1)


def _regress(target: torch.Tensor, latent: torch.Tensor, moment_root: torch.Tensor, noise: float) -> torch.Tensor:
    """Least squares B with target ≈ B·latent (both maps of x̃), the latent's entries carrying relative noise.

    Args:
        target: ``[t, D + 1]``. latent: ``[R, D + 1]``. moment_root: factor of the second moment of x̃.
        noise: variance of the noise relative to the second moment of each latent entry: a ridge.
    """
    columns = (latent @ moment_root).T  # [D + 1, R]
    size = columns.norm(dim=0)
    scale = torch.where(size > 0, 1 / size.clamp(min=1e-150), 0.0)
    ridge = noise**0.5 * torch.eye(len(latent), dtype=latent.dtype)
    wanted = torch.cat(((target @ moment_root).T, latent.new_zeros(len(latent), len(target))))
    solution = torch.linalg.lstsq(torch.cat((columns * scale, ridge)), wanted, driver="gels").solution
    return solution.T * scale
