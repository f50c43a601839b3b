"""The fold in closed form: the best joint subspace of keys and values, read back as key windows and a value map."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ...analysis.energy import WeightedLayer, signal
from ...analysis.moments import pool_of
from .base import FoldedWeights, Latent, LayerProblem, Method, assemble
from .shared_windows import share


@dataclass(frozen=True)
class PartFold:
    """A latent for some KV heads: maps of x̃ to its windows and its further columns, and the values read out of it.

    Shapes (n heads, w columns of windows): windows ``[w, D + 1]``, extra ``[e, D + 1]``, values ``[n·d, w + e]`` and
    their constant ``[n·d]``. All float64. ``kept`` of the joint ``energy`` is in it. ``factors``: see ``sharing``, or
    None.
    """

    windows: torch.Tensor
    extra: torch.Tensor
    values: torch.Tensor
    constant: torch.Tensor
    kept: float
    energy: float
    factors: torch.Tensor | None = None


def fold(problem: LayerProblem) -> FoldedWeights:
    """Fold one layer; with R = 2·KV·d and full windows the latent is keys and values side by side: nothing changes."""
    width, span, plan, traits = problem.width, problem.span, problem.windows, problem.traits
    kept = plan.kept(traits)
    layer = problem.weighted if kept.all() else problem.weighted.rotating(kept)
    problem = replace(problem, weighted=layer)
    together = [list(range(len(plan.groups)))] if span == "all" else [[window] for window in range(len(plan.groups))]
    members = [sorted(head for window in part for head in plan.groups[window]) for part in together]
    side_by_side = width == problem.traits.cache_width and bool(kept.all()) and not plan.shared
    folds = [
        _side_by_side(layer, heads) if side_by_side else fold_part(problem, windows, width // len(together))
        for windows, heads in zip(together, members, strict=True)
    ]
    maps = torch.cat([part.windows for part in folds] + [part.extra for part in folds])
    factors = _query_factors(layer, kept, folds, members)
    if side_by_side:
        key_map = _side_by_side_keys(layer, len(together))
    else:
        outside = [layer.key[head][plan.order(head, traits)[1]] for head in range(layer.heads)]
        key_map, _ = regress(torch.cat(outside), maps, layer.moment_root, problem.noise, _means_free(problem))
    by_head = {
        head: (values, constant)
        for part, heads in zip(folds, members, strict=True)
        for head, values, constant in zip(
            heads, part.values.split(layer.head_dim), part.constant.split(layer.head_dim), strict=True
        )
    }
    values, constants = zip(*(by_head[head] for head in range(layer.heads)), strict=True)
    energy = sum(part.energy for part in folds)
    share = sum(part.kept for part in folds) / energy if energy > 0 else 1.0  # there may be nothing to lose
    latent = Latent(maps, key_map, constant=torch.cat(constants), factors=factors)
    read = {"head_maps": list(values)} if span == "head" else {"value_map": torch.cat(values)}
    return replace(assemble(problem, replace(latent, **read)), kept_energy=share)


def _means_free(problem: LayerProblem) -> bool:
    """Whether the means of the keys cost no direction of the latent.

    The latent's bias carries those of the rotated parts. A constant in an unrotated part is the same for all keys of a
    query, so the softmax drops it, unless a norm or a sink stands in between.
    """
    traits, plan = problem.traits, problem.windows
    in_windows = plan.whole or all(2 * len(pairs) == traits.head_dim for pairs in plan.pairs)
    return traits.latent_bias and (in_windows or not (traits.key_norm or traits.sinks))


def _query_factors(
    layer: WeightedLayer, kept: torch.Tensor, folds: list[PartFold], members: list[list[int]]
) -> torch.Tensor | None:
    """What each KV head's queries are to be multiplied with, complex ``[KV, P]``; None: with nothing."""
    if kept.all() and all(part.factors is None for part in folds):
        return None
    factors = torch.where(kept, 1.0, layer.queries.turns())
    for part, heads in zip(folds, members, strict=True):
        if part.factors is not None:
            factors[heads] = torch.where(kept[heads], part.factors.conj(), factors[heads])
    return factors


def _side_by_side(layer: WeightedLayer, heads: list[int]) -> PartFold:
    rotated = layer.traits.rotary_dim
    windows = layer.key[heads, :rotated].flatten(0, 1)
    unrotated, values = layer.key[heads, rotated:].flatten(0, 1), layer.value[heads].flatten(0, 1)
    before = len(windows) + len(unrotated)
    pick = torch.cat((values.new_zeros(len(values), before), torch.eye(len(values), dtype=values.dtype)), dim=1)
    return PartFold(windows, torch.cat((unrotated, values)), pick, values.new_zeros(len(values)), 1.0, 1.0)


def _side_by_side_keys(layer: WeightedLayer, groups: int) -> torch.Tensor:
    """The key map that picks every head's unrotated key out of the groups' further columns, keys before values."""
    heads, d, rotated = layer.heads, layer.head_dim, layer.traits.rotary_dim
    count, share = heads // groups * (d - rotated), heads // groups * (2 * d - rotated)
    columns = [heads * rotated + group * share + row for group in range(groups) for row in range(count)]
    key_map = layer.key.new_zeros(len(columns), 2 * heads * d)
    key_map[torch.arange(len(columns)), torch.tensor(columns, dtype=torch.long)] = 1
    return key_map


def fold_part(problem: LayerProblem, windows: list[int], width: int) -> PartFold:
    """Fold the keys and values of the KV heads that read ``windows`` into a latent of ``width`` columns.

    The value map is the least squares solution in the presence of the cache's rounding noise, which keeps its entries
    from growing along directions in which the latent has little energy.

    Args:
        problem: the layer, its queries weighted as its windows want it. windows: which of them. width: at least theirs.
    """
    layer, plan = problem.weighted, problem.windows
    heads = sorted(head for window in windows for head in plan.groups[window])
    part = _shared(problem, windows, heads, width) if plan.shared else _own(problem, heads, width)
    latent = torch.cat((part.windows, part.extra)) if len(part.extra) else part.windows
    affine, pools = layer.traits.value_constant(problem.span), len(layer.value_moment_roots)
    fitted = []
    for pool, sharing in groupby(heads, lambda head: pool_of(head, layer.heads, pools)):
        target = _of(layer.value, list(sharing)).flatten(0, 1)
        fitted.append(regress(target, latent, layer.value_moment_roots[pool], problem.noise, affine))
    maps, constants = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    return replace(part, values=maps, constant=constants)


def _own(problem: LayerProblem, heads: list[int], width: int) -> PartFold:
    """The latent of heads that have windows of their own; what is read out of it is still to be found.

    The joint weighted signal is projected on its top ``width`` directions. The rotated parts of its keys, unweighted,
    are the windows. They span as many dimensions of the subspace as they have columns; for the others the largest
    remaining directions of the values and of the keys' unrotated parts are taken, which are both read through maps.
    """
    layer, noise, traits = problem.weighted, problem.noise, problem.traits
    kept = _kept(problem, heads, width)
    orders = [problem.windows.order(head, traits) for head in heads]
    windows = torch.cat([keys[inside] for keys, (inside, _) in zip(kept.keys, orders, strict=True)])
    extra = windows[:0]
    if width > len(windows):
        root = layer.moment_root
        left = residual(kept.values.flatten(0, 1), windows, root, noise, traits.value_constant(problem.span))
        parts = [_per_head(layer.value_root[heads], left)]
        outside = [keys[rest] for keys, (_, rest) in zip(kept.keys, orders, strict=True)]
        if any(map(len, outside)):
            left = residual(torch.cat(outside), windows, root, noise, _means_free(problem))
            lefts = left.split([len(rows) for rows in outside])
            weighted = [
                layer.key_root[head][:, rest] @ rows for head, (_, rest), rows in zip(heads, orders, lefts, strict=True)
            ]
            parts = [*weighted, kept.factor * parts[0]]
        rest = torch.cat(parts)
        seen = signal(rest, root)
        _, basis = torch.linalg.eigh(seen @ seen.T)
        extra = basis.flip(1)[:, : width - len(windows)].T @ rest
    if _means_free(problem):  # the joint signal went without the keys' means
        windows = windows.clone()
        inside = [layer.key[head][rows] for head, (rows, _) in zip(heads, orders, strict=True)]
        windows[:, -1] += torch.cat(inside) @ layer.mean
    return PartFold(windows, extra, windows[:0], windows[:0, 0], kept.energy, kept.all_energy)


def _shared(problem: LayerProblem, windows: list[int], heads: list[int], width: int) -> PartFold:
    """The latent of heads some of which share windows (see ``sharing``)."""
    layer = problem.weighted
    # Heads that share a window have means of their own, which it cannot all have for nothing.
    rows, _ = layer.joint(heads, problem.balance, problem.span, centred_keys=False)
    found = share(layer, problem.windows, windows, rows, width)
    columns = sum(2 * len(problem.windows.pairs[window]) for window in windows)
    seen = signal(found.maps, layer.moment_root)
    whole = signal(rows, layer.moment_root)
    held = torch.linalg.qr(seen.T)[0]
    energies = float((whole @ held).square().sum()), float(whole.square().sum())
    return PartFold(
        found.maps[:columns], found.maps[columns:], seen[:0], seen[:0, 0], *energies, factors=found.factors
    )  # fmt: skip


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
    uncentred = layer.traits.latent_bias and not _means_free(problem)
    if width >= min(2 * n * layer.head_dim, layer.rank(problem.span) + uncentred):
        keys, values = layer.varying(problem.span)  # nothing is lost, hence nothing to weigh against anything
        return _Kept(_of(layer.key if uncentred else keys, heads), _of(values, heads), 1.0, 1.0, 1.0)
    rows, factor = layer.joint(heads, problem.balance, problem.span, centred_keys=not uncentred)
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


# Without statistics every direction of the input and every distance count alike; see ``analysis.moments`` for those.
SVD = Method("svd", "closed form, no data", needs_text=False, half_only=False, fold=fold)
CALIBRATED = Method("calibrated", "closed form on calibration text", needs_text=True, half_only=False, fold=fold)
