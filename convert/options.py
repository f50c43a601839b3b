"""What a conversion can be told, and what follows from it for a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..analysis.moments import windows
from ..checkpoint.atomic_output import require_shard_size
from ..checkpoint.hub import DEFAULT_ACCESS, Access
from ..checkpoint.loading import DTYPES, named_dtype
from ..model import AttentionTraits, KvfoldError
from ..model.layout import SPANS
from ..text.mixture import named_texts
from .methods.base import Method

LONGEST_WINDOW = 2048  # tokens; the attention weights of a window are held as a matrix
WINDOWS = 6  # at least, where the window's length is not given

GROUPINGS = ("aligned", "mean")


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        method: a key of ``METHODS``.
        cache_fraction, latent_width: F or R, at most one of them; neither: F = 0.5.
        span: ``all`` or ``head``; None: ``all``, or ``head`` for the methods that know no other.
        rotary_pairs: frequency pairs that stay rotated, per window on average; ``auto``: as many as fit, or what is
            found by KL from the source.
        key_heads: key windows of a layer, shared by its KV heads; None: each KV head has its own.
        grouping: how heads share a window, one of ``GROUPINGS``. cluster: those that lose least by it share one, not
            neighbours.
        plan: file with each layer's width (see ``plan``), instead of F or R. auto_plan: make one first.
        calibrate: ``TEXT`` or ``TEXT:WEIGHT`` each; none: see ``with_texts``. calibrate_tokens: how many in all.
        calibrate_window: tokens in one go; None: as many as leave some windows to average over, up to
            ``LONGEST_WINDOW``.
        refine: minutes in which layers may be refined (see ``refine``); 0: not at all.
        balance: λ; None: found by KL from the source on held-out windows of the text.
        cache_dtype: the coarsest dtype that the cache will have; the value map is made to stand its rounding. ``auto``:
            bfloat16, so that the model may be loaded in any dtype.
        dtype: of the written weights; ``auto``: the source's.
        max_shard_size: of the written files. overwrite: replace OUT. seed: of written text. device: torch device.
        offload: keep the calibration text's hidden states on disk. resume: go on with an interrupted conversion.
        access: how MODEL may be read.
    """

    method: str = "calibrated"
    cache_fraction: float | None = None
    latent_width: int | None = None
    span: str | None = None
    rotary_pairs: int | str = "auto"
    key_heads: int | None = None
    grouping: str = "aligned"
    cluster: bool = False
    plan: str | None = None
    auto_plan: bool = False
    calibrate: tuple[str, ...] = ()
    calibrate_tokens: int = 16384
    calibrate_window: int | None = None
    refine: float = 0.0
    balance: float | None = None
    cache_dtype: str = "auto"
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    overwrite: bool = False
    seed: int = 0
    device: str = "cpu"
    offload: bool = False
    resume: bool = False
    access: Access = DEFAULT_ACCESS


def check_options(chosen: Method, options: ConvertOptions) -> None:
    """Raises KvfoldError for options that make no sense whatever the model is."""
    if options.cache_fraction is not None and options.latent_width is not None:
        raise KvfoldError("give a cache fraction or a latent width, not both")
    if options.span is not None and options.span not in SPANS:
        raise KvfoldError(f"span {options.span!r} is unknown: use one of {', '.join(SPANS)}")
    other_width = options.latent_width is not None or options.cache_fraction not in (None, 0.5)
    if chosen.half_only and (options.span == "all" or other_width):
        raise KvfoldError(f"method {chosen.name!r} folds to cache fraction 0.5 with span 'head' only")
    if options.cache_fraction is not None and not 0 < options.cache_fraction <= 1:
        raise KvfoldError(f"cache fraction {options.cache_fraction} is out of range: above 0, at most 1")
    if chosen.half_only and (options.key_heads is not None or options.rotary_pairs != "auto"):
        raise KvfoldError(
            f"method {chosen.name!r} keeps the keys' windows as they are: leave out --key-heads, --rotary-pairs"
        )
    if isinstance(options.rotary_pairs, str) and options.rotary_pairs != "auto":
        raise KvfoldError(f"rotary pairs {options.rotary_pairs!r} make no sense: give a number, or auto")
    if options.grouping not in GROUPINGS:
        raise KvfoldError(f"grouping {options.grouping!r} is unknown: use one of {', '.join(GROUPINGS)}")
    if options.balance is not None and not (math.isfinite(options.balance) and options.balance > 0):
        raise KvfoldError(f"balance {options.balance} is out of range: it is a positive number")
    if not (math.isfinite(options.refine) and options.refine >= 0):
        raise KvfoldError(f"{options.refine} minutes to refine are out of range: use 0 or more")
    if options.refine and not chosen.needs_text:
        raise KvfoldError(f"method {chosen.name!r} reads no text, which refining needs: use method 'calibrated'")
    if options.calibrate:
        named_texts(options.calibrate)
    if options.dtype != "auto":
        named_dtype(options.dtype)
    if options.cache_dtype not in ("auto", *DTYPES):
        raise KvfoldError(f"cache dtype {options.cache_dtype!r} is unknown: use auto, {', '.join(DTYPES)}")
    require_shard_size(options.max_shard_size)
    if options.plan is not None and (other_width or options.cache_fraction or options.span or options.key_heads):
        raise KvfoldError("the plan says widths, span and key heads: leave out the other options for them")
    if options.plan is not None and options.auto_plan:
        raise KvfoldError("give a plan or have one made, not both")
    if (options.plan is not None or options.auto_plan) and chosen.half_only:
        raise KvfoldError(f"method {chosen.name!r} has no widths to plan")
    if options.auto_plan and (options.latent_width is not None or not chosen.needs_text):
        raise KvfoldError("an automatic plan needs a cache fraction, and text to measure on (method 'calibrated')")
    window = _window(options)
    if options.calibrate_tokens < 2 * window:
        raise KvfoldError(
            f"{options.calibrate_tokens} calibration tokens are too few: use {2 * window} or more (windows of {window})"
        )


def _window(options: ConvertOptions) -> int:
    if options.calibrate_window is not None:
        return options.calibrate_window
    affordable = max(options.calibrate_tokens // WINDOWS, 64)
    return min(LONGEST_WINDOW, 1 << (affordable.bit_length() - 1))


def calibration_window(options: ConvertOptions, config: Any) -> int:
    """Tokens that a model of this config reads in one go."""
    window = _window(options)
    return min(window, getattr(config, "max_position_embeddings", None) or window)


def calibration_rows(tokens: torch.Tensor, options: ConvertOptions, config: Any) -> torch.Tensor:
    """The calibration text ``[n]`` in windows that a model of this config can read, ``[rows, window]``.

    Raises KvfoldError for fewer than two of them.
    """
    window = calibration_window(options, config)
    if len(tokens) < 2 * window:
        told = ", ".join(map(repr, options.calibrate))
        raise KvfoldError(f"text {told} is too short to calibrate on: {len(tokens)} tokens, use {2 * window} or more")
    return windows(tokens, window)


def check_heads(layers: Sequence[AttentionTraits], options: ConvertOptions, span: str) -> None:
    """Raises KvfoldError for windows that a model's layers cannot have."""
    rotating = [traits for traits in layers if traits.rotary_dim]
    if not rotating and (options.key_heads is not None or options.rotary_pairs != "auto"):
        raise KvfoldError("the model rotates no keys (no RoPE), so there are no windows to share or narrow")
    for traits in rotating:
        heads, pairs = traits.key_value_heads, traits.rotary_dim // 2
        if options.key_heads is not None and not 1 <= options.key_heads <= heads:
            raise KvfoldError(f"{options.key_heads} key heads are out of range for this model: 1 to {heads}")
        if isinstance(options.rotary_pairs, int) and not 0 <= options.rotary_pairs <= pairs:
            raise KvfoldError(f"{options.rotary_pairs} rotary pairs are out of range for this model: 0 to {pairs}")
        if options.key_heads in (None, heads):
            continue
        if traits.query_norm or traits.key_norm:
            raise KvfoldError(
                "its queries or keys are normed, so heads cannot share key windows: leave out --key-heads"
            )
        if span == "head" and (traits.rotary_dim < traits.head_dim or options.rotary_pairs not in ("auto", pairs)):
            raise KvfoldError("with span 'head', heads can share whole windows only: use span 'all'")


def full_width(traits: AttentionTraits, options: ConvertOptions) -> int:
    """Columns that a layer's windows take where all pairs stay rotated."""
    return (options.key_heads or traits.key_value_heads) * traits.rotary_dim


def latent_width(traits: AttentionTraits, options: ConvertOptions, span: str) -> int:
    """R of a layer: from the options, for span ``head`` rounded to equally many columns a head. Raises KvfoldError."""
    full = traits.cache_width
    heads = options.key_heads or traits.key_value_heads
    step = heads if span == "head" else 1
    if options.latent_width is not None:
        width = options.latent_width
        if span == "head" and width % heads:
            raise KvfoldError(f"latent width {width} does not divide over {heads} key heads (span 'head')")
    elif options.cache_fraction is None and options.key_heads is not None:
        width = heads * traits.head_dim
    else:
        fraction = 0.5 if options.cache_fraction is None else options.cache_fraction
        width = round(full * fraction / step) * step
    least = least_width(traits, options, span)
    if not least <= width <= full:
        told = "" if options.latent_width is not None else f" (cache fraction {width / full:.3g})"
        raise KvfoldError(
            f"latent width {width}{told} is out of range for this model: {least} to {full} (cache fraction "
            f"{least / full:.3g} to 1)"
        )
    return width


def least_width(traits: AttentionTraits, options: ConvertOptions, span: str) -> int:
    """The smallest R of a layer that the options allow."""
    heads = options.key_heads or traits.key_value_heads
    if span == "head" and heads < traits.key_value_heads:
        return heads * traits.head_dim  # shared windows are whole
    pairs = options.rotary_pairs if isinstance(options.rotary_pairs, int) else 0
    return max(2 * pairs * heads, 2 * heads if span == "head" else 2)


def cache_dtype(options: ConvertOptions, traits: AttentionTraits, width: int, weights: torch.dtype) -> torch.dtype:
    """The dtype whose rounding the value map of a layer is made to stand.

    ``auto`` is bfloat16, which models are served in whatever they are stored in, but where the latent holds keys and
    values whole, nothing has to stand anything.
    """
    if options.cache_dtype != "auto":
        return DTYPES[options.cache_dtype]
    whole = width >= traits.cache_width and options.span != "head"
    return weights if whole else torch.bfloat16


def rounding_noise(dtype: torch.dtype) -> float:
    """Variance of rounding to ``dtype`` relative to the second moment of what is rounded.

    In one binade [1, 2) numbers lie eps apart, so the error has variance eps²/12 while the numbers' mean square is 7/3.
    """
    return max(torch.finfo(dtype).eps ** 2 / 28, 1e-14)
