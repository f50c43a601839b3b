"""How long work tells how far it is, without knowing whether anybody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
Track = Callable[[str, int | None], AbstractContextManager[Advance]]
"""``with track("reading text", steps) as advance: advance(1)``; steps that nobody knows beforehand are None."""


@contextmanager
def silent(description: str, total: int | None) -> Iterator[Advance]:
    """A ``Track`` that shows nothing."""
    yield lambda steps: None
