"""What a folded layer caches, and which parts of it are read as keys and as values.

A layout is the per-layer entry of a converted checkpoint's ``config.json``; see ``FoldedLayout`` for its fields.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import KvfoldError

SPANS = ("all", "head")


def _spread(count: int, heads: int) -> tuple[int, ...]:
    """The usual grouped-query assignment: ``count`` query heads, in order, over ``heads`` equal groups."""
    return tuple(query * heads // count for query in range(count))


@dataclass(frozen=True)
class FoldedLayout:
    """How one layer's latent ``S`` (one vector of ``latent_width`` numbers per token) is read.

    The key windows lie one after another at the start of ``S``. A window holds the rotated frequency pairs of a key
    head, or of several that share it: first the first members of all pairs, then the second members (the order of
    ``rotate_half``). Columns after the windows belong to the maps only.

    Attributes:
        latent_width: R, numbers cached per token.
        key_heads: key heads that are read out of the latent.
        value_heads: value heads; with span ``head`` as many as key heads.
        span: ``all``: every value is a linear map of the whole latent; ``head``: the values of a head *are* its own
            window followed by its equal share of the columns after the windows (any map is absorbed in ``o_proj``).
        rotary_pairs: for each window the frequency pairs in it, ascending; None: all of them. The rest of the key is
            read through the key map and never rotated.
        query_to_key: key head of each query head; None: equal groups in order.
        query_to_value: value head of each query head; None: equal groups in order.
        key_to_window: window that each key head reads; None: every key head has its own. Heads that share a window
            have key maps of their own.
        key_span: ``all``: what is not rotated of a key is a linear map of the whole latent; ``head``, for models
            without RoPE and span ``head``: a key *is* its head's columns, as the values are (the study's Q-K=V).
    """

    latent_width: int
    key_heads: int
    value_heads: int
    span: str = "all"
    rotary_pairs: tuple[tuple[int, ...], ...] | None = None
    query_to_key: tuple[int, ...] | None = None
    query_to_value: tuple[int, ...] | None = None
    key_to_window: tuple[int, ...] | None = None
    key_span: str = "all"

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> FoldedLayout:
        """Read a layout from its ``config.json`` entry. Raises KvfoldError for an entry of another format."""
        known = {field.name for field in fields(cls)}
        if unknown := set(entry) - known:
            raise KvfoldError(f"folded layout has unknown entries {sorted(unknown)}: written by a newer kvfold?")
        values = dict(entry)
        if values.get("rotary_pairs") is not None:
            values["rotary_pairs"] = tuple(tuple(pairs) for pairs in values["rotary_pairs"])
        for name in ("query_to_key", "query_to_value", "key_to_window"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The layout as plain lists and numbers; entries that are None, or new and not used, are left out."""
        entries = {name: value for name, value in asdict(self).items() if value is not None}
        if self.key_span == "all":
            del entries["key_span"]
        return entries

    def key_assignment(self, query_heads: int) -> tuple[int, ...]:
        """Key head of each of the ``query_heads`` query heads."""
        return self.query_to_key or _spread(query_heads, self.key_heads)

    def value_assignment(self, query_heads: int) -> tuple[int, ...]:
        """Value head of each of the ``query_heads`` query heads."""
        return self.query_to_value or _spread(query_heads, self.value_heads)

    def window_assignment(self) -> tuple[int, ...]:
        """The window that each key head reads."""
        return self.key_to_window or tuple(range(self.key_heads))

    def window_pairs(self, all_pairs: int) -> tuple[tuple[int, ...], ...]:
        """The rotated frequency pairs of every window, where the model rotates ``all_pairs`` pairs a head."""
        if self.rotary_pairs is not None:
            return self.rotary_pairs
        return (tuple(range(all_pairs)),) * (max(self.window_assignment()) + 1)

    def pairs(self, all_pairs: int) -> tuple[tuple[int, ...], ...]:
        """The rotated frequency pairs of every key head."""
        windows = self.window_pairs(all_pairs)
        return tuple(windows[window] for window in self.window_assignment())

    def window_width(self, all_pairs: int) -> int:
        """Columns at the start of the latent that are windows, or whole keys (``key_span``)."""
        if self.key_span == "head":
            return self.latent_width
        return sum(2 * len(pairs) for pairs in self.window_pairs(all_pairs))

    def value_width(self, head_dim: int, all_pairs: int) -> int:
        """Numbers per value head."""
        return head_dim if self.span == "all" else self.latent_width // self.key_heads

    def validate(self, query_heads: int, head_dim: int, all_pairs: int) -> None:
        """Check the layout against the model that it is for. Raises KvfoldError."""
        if self.span not in SPANS:
            raise KvfoldError(f"span {self.span!r} is unknown: use one of {', '.join(SPANS)}")
        for name, heads in (("key_heads", self.key_heads), ("value_heads", self.value_heads)):
            if not 1 <= heads <= query_heads:
                raise KvfoldError(f"{name} {heads} is out of range: 1 to {query_heads}")
        for name, heads, chosen in (
            ("query_to_key", self.key_heads, self.query_to_key),
            ("query_to_value", self.value_heads, self.query_to_value),
        ):
            if chosen is None and query_heads % heads:
                raise KvfoldError(f"{query_heads} query heads do not divide over {heads} heads: give {name}")
            if chosen is not None and (len(chosen) != query_heads or not all(0 <= head < heads for head in chosen)):
                raise KvfoldError(f"{name} must name one of {heads} heads for each of {query_heads} query heads")
        self._validate_windows(all_pairs)
        if self.span == "head":
            self._validate_head_span(all_pairs)
        if self.key_span not in SPANS:
            raise KvfoldError(f"key_span {self.key_span!r} is unknown: use one of {', '.join(SPANS)}")
        if self.key_span == "head" and (
            all_pairs or self.span != "head" or self.latent_width != self.key_heads * head_dim
        ):
            raise KvfoldError(
                f"key_span 'head' is for models without RoPE, span 'head' and a latent of {self.key_heads} heads of "
                f"{head_dim} columns"
            )

    def _validate_windows(self, all_pairs: int) -> None:
        pairs, assigned = self.window_pairs(all_pairs), self.window_assignment()
        if len(assigned) != self.key_heads or sorted(set(assigned)) != list(range(max(assigned) + 1)):
            raise KvfoldError(f"key_to_window must name a window for each of {self.key_heads} key heads: 0, 1, …")
        if len(pairs) != max(assigned) + 1:
            raise KvfoldError(f"rotary_pairs has {len(pairs)} entries for {max(assigned) + 1} windows")
        for kept in pairs:
            if list(kept) != sorted(set(kept)) or (kept and not 0 <= kept[0] <= kept[-1] < all_pairs):
                raise KvfoldError(f"rotary_pairs must be ascending pair numbers below {all_pairs}, not {list(kept)}")
        windows = self.window_width(all_pairs)
        if self.latent_width < max(windows, 1):
            raise KvfoldError(f"latent width {self.latent_width} is too small for key windows of {windows} columns")

    def _validate_head_span(self, all_pairs: int) -> None:
        if self.value_heads != self.key_heads:
            raise KvfoldError("span 'head' needs as many value heads as key heads")
        if self.key_to_window is not None:
            raise KvfoldError("span 'head' needs a window for every key head")
        if len({len(kept) for kept in self.pairs(all_pairs)}) > 1:
            raise KvfoldError("span 'head' needs windows of equal width")
        if self.latent_width % self.key_heads:
            raise KvfoldError(
                f"latent width {self.latent_width} does not divide over {self.key_heads} key heads (span 'head')"
            )
