"""Checks of options that several commands have, and numbers as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..model import KvfoldError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def require_least(given: Mapping[str, float | None], least: float = 1) -> None:
    """Raises KvfoldError for a number that is below ``least``; None is as well as not given."""
    for name, number in given.items():
        if number is not None and not number >= least:
            raise KvfoldError(f"{name} {number} is too little: {least} is the least")


def token_count(written: str) -> int:
    """Read a number of tokens like 200000, 200k or 2M. Raises KvfoldError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", written.strip(), re.IGNORECASE)
    if not found:
        raise KvfoldError(f"{written!r} is no number of tokens: give one like 200k or 2M")
    return round(float(found[1]) * UNITS[found[2].upper()])
