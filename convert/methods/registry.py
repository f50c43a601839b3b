"""The merge methods by name. To add one, write a file that makes a ``Method`` and name it here."""

from __future__ import annotations

from ...model import KvfoldError
from .base import Method
from .closed_form import CALIBRATED, SVD
from .mean import MEAN
from .procrustes import PROCRUSTES

METHODS: dict[str, Method] = {entry.name: entry for entry in (MEAN, PROCRUSTES, SVD, CALIBRATED)}


def method(name: str) -> Method:
    """The method called ``name``. Raises KvfoldError."""
    if name not in METHODS:
        raise KvfoldError(f"method {name!r} is unknown: use one of {', '.join(METHODS)}")
    return METHODS[name]
