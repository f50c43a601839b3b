"""Which frequency pairs of a layer's keys stay rotated, and which KV heads share a window of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...analysis.energy import WeightedLayer, signal
from ...model import AttentionTraits, FoldedLayout

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Windows:
    """The key windows of one layer.

    Attributes:
        pairs: for each window the frequency pairs in it, ascending; a pair that is in none is not rotated.
        groups: for each window the KV heads of the source that read it.
        aligned: heads that share a window are first aligned, pair by pair; else the window is their mean.
        whole: for a model without RoPE, whose windows have no pairs: a head's window is all of its key nonetheless.
    """

    pairs: tuple[tuple[int, ...], ...]
    groups: Groups
    aligned: bool = True
    whole: bool = False

    @property
    def shared(self) -> bool:
        """Whether any KV heads share a window."""
        return any(len(heads) > 1 for heads in self.groups)

    def of_head(self, head: int) -> int:
        """The window that a KV head reads."""
        return next(window for window, heads in enumerate(self.groups) if head in heads)

    def kept(self, traits: AttentionTraits) -> torch.Tensor:
        """Whether a pair of a KV head is rotated, bool ``[KV, P]``."""
        kept = torch.zeros(traits.key_value_heads, traits.rotary_dim // 2, dtype=torch.bool)
        for pairs, heads in zip(self.pairs, self.groups, strict=True):
            for head in heads:
                kept[head, list(pairs)] = True
        return kept

    def order(self, head: int, traits: AttentionTraits) -> tuple[list[int], list[int]]:
        """The dimensions of a KV head that are in its window, in that order, and the others."""
        if self.whole:
            return list(range(traits.head_dim)), []
        half = traits.rotary_dim // 2
        pairs = self.pairs[self.of_head(head)]
        inside = [*pairs, *(pair + half for pair in pairs)]
        return inside, [dim for dim in range(traits.head_dim) if dim not in set(inside)]

    def layout(self, width: int, span: str, traits: AttentionTraits) -> FoldedLayout:
        """The layout of a latent of ``width`` columns with these windows."""
        heads, group = traits.key_value_heads, traits.query_heads // traits.key_value_heads
        if self.whole:
            return FoldedLayout(width, heads, heads, span, key_span="head")
        whole = all(2 * len(pairs) == traits.rotary_dim for pairs in self.pairs)
        pairs = None if whole else self.pairs
        if not self.shared:
            return FoldedLayout(width, heads, heads, span, pairs)
        window_of = tuple(self.of_head(head) for head in range(heads))
        if not (whole and traits.rotary_dim == traits.head_dim):
            return FoldedLayout(width, heads, heads, span, pairs, key_to_window=window_of)
        # Nothing but the window tells the keys of a group apart: it is one key head.
        count = len(self.groups)
        usual = tuple(query * count // traits.query_heads for query in range(traits.query_heads))
        assigned = tuple(window_of[query // group] for query in range(traits.query_heads))
        query_to_key = None if assigned == usual else assigned
        if span == "head":
            return FoldedLayout(width, count, count, span, None, query_to_key, query_to_key)
        return FoldedLayout(width, count, heads, span, None, query_to_key)


def own_groups(heads: int) -> Groups:
    """Every KV head with a window of its own."""
    return tuple((head,) for head in range(heads))


def even_groups(heads: int, count: int) -> Groups:
    """``heads`` KV heads, in order, in ``count`` groups that are as equal as can be."""
    return tuple(tuple(head for head in range(heads) if head * count // heads == group) for group in range(count))


def full_windows(traits: AttentionTraits) -> Windows:
    """Every KV head with a window of its own, in which all pairs stay rotated."""
    heads = traits.key_value_heads
    return Windows((tuple(range(traits.rotary_dim // 2)),) * heads, own_groups(heads))


def whole_heads(traits: AttentionTraits) -> Windows:
    """Every KV head of a model without RoPE with its whole key as its window."""
    return replace(full_windows(traits), whole=True)


def cluster(layer: WeightedLayer, count: int) -> Groups:
    """``count`` groups of KV heads that share a window well.

    Groups are merged two by two, those first whose keys lose least of their weighted energy by it.
    """
    grams = _pair_grams(layer)
    groups = list(own_groups(layer.heads))
    lost = dict.fromkeys(groups, 0.0)
    while len(groups) > count:
        best: tuple[float, tuple, tuple] | None = None
        for first, one in enumerate(groups):
            for other in groups[first + 1 :]:
                merged = tuple(sorted(one + other))
                if merged not in lost:
                    lost[merged] = float(_misaligned(grams, merged).sum())
                more = lost[merged] - lost[one] - lost[other]
                if best is None or more < best[0]:
                    best = (more, one, other)
        assert best is not None
        groups = [group for group in groups if group not in best[1:]] + [tuple(sorted(best[1] + best[2]))]
    return tuple(sorted(groups))


def choose_windows(
    layer: WeightedLayer, groups: Groups, count: int, equally: bool = False, aligned: bool = True
) -> Windows:
    """The windows with ``count`` pairs in all that lose least: pairs are kept where not rotating them costs most.

    Args:
        layer: the layer with all its pairs rotated. groups: KV heads of each window.
        equally: equally many pairs in every window. aligned: see ``Windows``.

    Where queries or keys are normed every window has the same pairs: the norm's weights are those of all heads.
    """
    costs = layer.pair_costs()
    gains = torch.stack([costs[list(heads)].sum(0) for heads in groups])  # [windows, P]
    if aligned and any(len(heads) > 1 for heads in groups):
        grams = _pair_grams(layer)
        gains = gains - torch.stack([_misaligned(grams, heads) for heads in groups])
    windows, pairs = gains.shape
    if layer.queries.normed:
        gains, equally = gains.sum(0).expand(windows, -1), True
    if equally:
        kept = torch.zeros_like(gains, dtype=torch.bool)
        kept.scatter_(1, gains.topk(min(count // windows, pairs), dim=1).indices, True)
    else:
        kept = torch.zeros(windows * pairs, dtype=torch.bool)
        kept[gains.flatten().topk(min(count, windows * pairs)).indices] = True
        kept = kept.view(windows, pairs)
    return Windows(tuple(tuple(row.nonzero().flatten().tolist()) for row in kept), groups, aligned)


def query_scales(layer: WeightedLayer) -> torch.Tensor:
    """Root mean square of the queries that meet each KV head's pairs, with the key norm's gains, ``[KV, P]``."""
    queries = layer.queries
    meant = (queries.gains.square() * queries.moment.diagonal(dim1=1, dim2=2)).clamp(min=0)
    floor = 1e-6 * meant.amax(1, keepdim=True).clamp(min=1e-300)
    meant = meant + floor
    return ((meant[:, : queries.pairs] + meant[:, queries.pairs : 2 * queries.pairs]) / 2).sqrt()


def weighted_pairs(layer: WeightedLayer) -> torch.Tensor:
    """The keys' signal, pair by pair as complex numbers, each head's weighted by its queries, ``[KV, P, D + 1]``."""
    keys, pairs = signal(layer.key, layer.moment_root), layer.queries.pairs
    return query_scales(layer)[..., None] * torch.complex(keys[:, :pairs], keys[:, pairs : 2 * pairs])


def _pair_grams(layer: WeightedLayer) -> torch.Tensor:
    """For every pair the inner products of the heads' weighted keys as complex numbers, ``[P, KV, KV]``."""
    by_pair = weighted_pairs(layer).transpose(0, 1)
    return by_pair @ by_pair.mH


def _misaligned(grams: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """Energy of each pair that one complex signal for all of ``heads`` cannot hold, ``[P]``."""
    own = grams[:, list(heads)][:, :, list(heads)]
    energies = torch.linalg.eigvalsh(own)
    return energies[:, :-1].sum(-1).clamp(min=0)
