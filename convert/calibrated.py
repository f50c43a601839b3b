"""``calibrated``: the closed form with statistics of calibration text (see ``analysis.moments``)."""

from __future__ import annotations

from .closed_form import fold
from .problem import Method

CALIBRATED = Method("calibrated", "closed form on calibration text", needs_text=True, half_only=False, fold=fold)
