"""``svd``: the closed form without data; every direction of the input and every distance counts alike."""

from __future__ import annotations

from .closed_form import fold
from .problem import Method

SVD = Method("svd", "closed form, no data", needs_text=False, half_only=False, fold=fold)
