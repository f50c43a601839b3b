"""The fold in closed form: the best joint subspace of keys and values, read back as key windows and a value map."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..analysis.energy import WeightedLayer, signal
from ..analysis.moments import pool_of
from .problem import FoldedWeights, Latent, LayerProblem, assemble


@dataclass(frozen=True)
class HeadFold:
    """A latent for some heads: maps of x̃ to its windows and its further columns, and the values read out of it.

    Shapes (n heads that rotate r of d dimensions): windows ``[n·r, D + 1]``, extra ``[e, D + 1]``, values
    ``[n·d, n·r + e]`` and their constant ``[n·d]``. All float64. ``kept`` of the joint ``energy`` is in it.
    """

    windows: torch.Tensor
    extra: torch.Tensor
    values: torch.Tensor
    constant: torch.Tensor
    kept: float
    energy: float


def fold(problem: LayerProblem) -> FoldedWeights:
    """Fold one layer; with R = 2·KV·d the latent is keys and values side by side, and nothing changes."""
    layer, width, span = problem.weighted, problem.width, problem.span
    groups, rotated = layer.head_groups(span), layer.traits.rotary_dim
    side_by_side = width == 2 * problem.key_width
    folds = [
        _side_by_side(layer, group) if side_by_side else fold_heads(problem, group, width // len(groups))
        for group in groups
    ]
    maps = torch.cat([part.windows for part in folds] + [part.extra for part in folds])
    unrotated = layer.key[:, rotated:].flatten(0, 1)
    if side_by_side:
        key_map = _side_by_side_keys(layer, len(groups))
    else:
        # A constant in the unrotated part of a key is the same for all keys of a query, so the softmax drops it, unless
        # a norm or a sink stands in between.
        free = not (layer.traits.key_norm or layer.traits.sinks)
        key_map, _ = regress(unrotated, maps, layer.moment_root, problem.noise, free and layer.traits.latent_bias)
    constant = torch.cat([part.constant for part in folds])
    energy = sum(part.energy for part in folds)
    kept = sum(part.kept for part in folds) / energy if energy > 0 else 1.0  # there may be nothing to lose
    if span == "head":
        latent = Latent(maps, key_map, head_maps=[part.values for part in folds], constant=constant)
    else:
        latent = Latent(maps, key_map, value_map=folds[0].values, constant=constant)
    return replace(assemble(problem, latent), kept_energy=kept)


def _side_by_side(layer: WeightedLayer, heads: list[int]) -> HeadFold:
    rotated = layer.traits.rotary_dim
    windows = layer.key[heads, :rotated].flatten(0, 1)
    unrotated, values = layer.key[heads, rotated:].flatten(0, 1), layer.value[heads].flatten(0, 1)
    before = len(windows) + len(unrotated)
    pick = torch.cat((values.new_zeros(len(values), before), torch.eye(len(values), dtype=values.dtype)), dim=1)
    return HeadFold(windows, torch.cat((unrotated, values)), pick, values.new_zeros(len(values)), 1.0, 1.0)


def _side_by_side_keys(layer: WeightedLayer, groups: int) -> torch.Tensor:
    """The key map that picks every head's unrotated key out of the groups' further columns, keys before values."""
    heads, d, rotated = layer.heads, layer.head_dim, layer.traits.rotary_dim
    count, share = heads // groups * (d - rotated), heads // groups * (2 * d - rotated)
    columns = [heads * rotated + group * share + row for group in range(groups) for row in range(count)]
    key_map = layer.key.new_zeros(len(columns), 2 * heads * d)
    key_map[torch.arange(len(columns)), torch.tensor(columns, dtype=torch.long)] = 1
    return key_map


def fold_heads(problem: LayerProblem, heads: list[int], width: int) -> HeadFold:
    """Fold the keys and values of ``heads`` into a latent of ``width`` columns.

    The joint weighted signal is projected on its top ``width`` directions. The rotated parts of its keys, unweighted,
    are the windows. They span ``n·r`` dimensions of the subspace; for the others the largest remaining directions of
    the values and of the keys' unrotated parts are taken, which are both read through maps. The value map is the least
    squares solution in the presence of the cache's rounding noise, which keeps its entries from growing along
    directions in which the latent has little energy.

    Args:
        problem: the layer. heads: which of its heads. width: n·r … 2·n·d.
    """
    layer, noise = problem.weighted, problem.noise
    n, d, rotated = len(heads), layer.head_dim, layer.traits.rotary_dim
    affine = layer.traits.value_constant(problem.span)
    kept = _kept(problem, heads, width)
    windows = kept.keys[:, :rotated].flatten(0, 1)
    extra = windows[:0]
    if width > n * rotated:
        root = layer.moment_root
        left = residual(kept.values.flatten(0, 1), windows, root, noise, affine)
        parts = [_per_head(layer.value_root[heads], left)]
        if rotated < d:
            left = residual(kept.keys[:, rotated:].flatten(0, 1), windows, root, noise, layer.traits.latent_bias)
            weighted = layer.key_root[heads][:, :, rotated:] @ left.unflatten(0, (n, d - rotated))
            parts = [weighted.flatten(0, 1), kept.factor * parts[0]]
        rest = torch.cat(parts)
        seen = signal(rest, root)
        _, basis = torch.linalg.eigh(seen @ seen.T)
        extra = basis.flip(1)[:, : width - n * rotated].T @ rest
    if layer.traits.latent_bias:  # the joint signal went without the keys' means
        windows = windows.clone()
        windows[:, -1] += layer.key[heads, :rotated].flatten(0, 1) @ layer.mean
    latent = torch.cat((windows, extra)) if len(extra) else windows
    pools = len(layer.value_moment_roots)
    fitted = []
    for pool, sharing in groupby(heads, lambda head: pool_of(head, layer.heads, pools)):
        target = _of(layer.value, list(sharing)).flatten(0, 1)
        fitted.append(regress(target, latent, layer.value_moment_roots[pool], noise, affine))
    maps, constants = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    return HeadFold(windows, extra, maps, constants, kept.energy, kept.all_energy)


@dataclass(frozen=True)
class _Kept:
    """Keys and values ``[n, d, D + 1]`` as far as a latent keeps them, without their means, and √(λ·scale)."""

    keys: torch.Tensor
    values: torch.Tensor
    factor: float
    energy: float
    all_energy: float


def _kept(problem: LayerProblem, heads: list[int], width: int) -> _Kept:
    """The joint signal of ``heads`` on its top ``width`` directions, no longer weighted."""
    layer, n = problem.weighted, len(heads)
    if width >= min(2 * n * layer.head_dim, layer.rank(problem.span)):
        keys, values = layer.varying(problem.span)  # nothing is lost, hence nothing to weigh against anything
        return _Kept(_of(keys, heads), _of(values, heads), 1.0, 1.0, 1.0)
    rows, factor = layer.joint(heads, problem.balance, problem.span)
    energies, directions = layer.spectrum(rows)
    top = directions[:, :width]
    projected = (top @ (top.T @ rows)).unflatten(0, (2, n, -1))
    keys, values = layer.key_unroot[heads] @ projected[0], layer.value_unroot[heads] @ projected[1] / factor
    return _Kept(keys, values, factor, float(energies[:width].sum()), float(energies.sum()))


def _of(every: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """The entries of some heads, without a copy where that is all of them; of a large model each copy counts."""
    return every if heads == list(range(len(every))) else every[heads]


def _per_head(matrices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Apply ``[n, d, d]`` to the rows ``[n·d, D + 1]`` of each head."""
    return (matrices @ rows.unflatten(0, matrices.shape[:2])).flatten(0, 1)


def regress(
    target: torch.Tensor, latent: torch.Tensor, moment_root: torch.Tensor | None, noise: float, affine: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares B and c with target ≈ B·latent + c (both maps of x̃), the latent's entries carrying relative noise.

    Args:
        target: ``[t, D + 1]``. latent: ``[R, D + 1]``. moment_root: factor of the second moment of x̃.
        noise: variance of the noise relative to the second moment of each latent entry: a ridge.
        affine: whether there is a constant c; else it is 0.
    """
    constant = target.new_zeros(len(target))
    if not len(target) or not (len(latent) or affine):
        return target.new_zeros(len(target), len(latent)), constant
    columns = signal(latent, moment_root).T  # [D + 1, R]
    size = columns.norm(dim=0)
    scale = torch.where(size > 0, 1 / size.clamp(min=1e-150), 0.0)
    inputs, count = len(columns), len(latent)
    stacked = target.new_zeros(inputs + count, count + affine)
    torch.mul(columns, scale, out=stacked[:inputs, :count])
    stacked[inputs:, :count].fill_diagonal_(noise**0.5)
    if affine:
        stacked[:inputs, -1] = 0 if moment_root is None else moment_root[-1]
        if moment_root is None:
            stacked[inputs - 1, -1] = 1
    del columns
    orthogonal, triangle = torch.linalg.qr(stacked)
    del stacked
    seen = orthogonal[:inputs].T @ signal(target, moment_root).T  # the ridge wants 0
    fitted = torch.linalg.solve_triangular(triangle, seen, upper=True).T
    return fitted[:, :count] * scale, fitted[:, -1] if affine else constant


def residual(
    target: torch.Tensor, latent: torch.Tensor, moment_root: torch.Tensor | None, noise: float, affine: bool
) -> torch.Tensor:
    """What ``regress`` leaves of ``target``, as a map of x̃."""
    maps, constant = regress(target, latent, moment_root, noise, affine)
    left = target - maps @ latent
    left[:, -1] -= constant
    return left
