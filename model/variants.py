"""The projection-sharing variants of "Do Transformers Need Three Projections?" (arXiv 2606.04032)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import KvfoldError


@dataclass(frozen=True)
class Variant:
    """Which of the three projections of attention are one and the same.

    Attributes:
        name: as on the command line. separate_queries, separate_values: whether queries, values have a projection of
            their own, besides the keys'. pair_positions: whether the scores, which are symmetric where queries are
            keys, get a term that depends on the two positions (see ``variant_attention.PairPositions``).
    """

    name: str
    separate_queries: bool = True
    separate_values: bool = True
    pair_positions: bool = False

    @property
    def cached_tensors(self) -> int:
        """How many tensors of the size of the keys a layer caches."""
        return 2 if self.separate_values else 1

    @property
    def folded(self) -> bool:
        """Whether it is what a conversion with span ``head`` makes, so that its checkpoints are of that format."""
        return self.separate_queries and not self.separate_values

    def require_heads(self, query_heads: int, key_value_heads: int) -> None:
        """Raises KvfoldError where the variant cannot have these numbers of heads."""
        if key_value_heads < 1 or query_heads % key_value_heads:
            raise KvfoldError(f"{query_heads} query heads do not divide over {key_value_heads} key heads")
        if not self.separate_queries and key_value_heads != query_heads:
            raise KvfoldError(
                f"in {self.name} the queries are the keys, so it needs as many key heads as query heads: "
                f"{query_heads}, not {key_value_heads}"
            )


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("qkv"),
        Variant("q=k-v", separate_queries=False),
        Variant("q=k-v+", separate_queries=False, pair_positions=True),
        Variant("q-k=v", separate_values=False),
        Variant("q=k=v", separate_queries=False, separate_values=False),
        Variant("q=k=v+", separate_queries=False, separate_values=False, pair_positions=True),
    )
}


def variant_named(name: str) -> Variant:
    """The variant of this name. Raises KvfoldError for an unknown one."""
    if name not in VARIANTS:
        raise KvfoldError(f"variant {name!r} is unknown: use {', '.join(VARIANTS)}")
    return VARIANTS[name]
