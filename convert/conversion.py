"""Convert a checkpoint: read, calibrate, fold every layer, write."""

from __future__ import annotations

import math
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..analysis.divergence import Divergence
from ..analysis.energy import DEFAULT_BALANCE, WeightedLayer, weigh_model
from ..analysis.loading import DTYPES, Checkpoint, load, quiet, require_unfolded
from ..analysis.moments import collect_moments, windows
from ..analysis.perplexity import source_cache_bytes_per_token
from ..analysis.progress import Track, silent
from ..analysis.text import CALIBRATE, TextSource
from ..model import AttentionTraits, Family, KvfoldError, family_of
from ..model.family import FORMAT
from ..model.layout import SPANS
from .methods import method
from .problem import FoldedWeights, LayerProblem, Method
from .recipe import Recipe, describe_source
from .writing import require_free, whole_folder

BALANCE_STEP = 2.0  # factor between the balances that are compared
MOST_BALANCES = 6
HELD_OUT_ROWS = 4  # windows on which the balances are compared; not calibrated on


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        method: a key of ``METHODS``.
        cache_fraction, latent_width: F or R, at most one of them; neither: F = 0.5.
        span: ``all`` or ``head``; None: ``all``, or ``head`` for the methods that know no other.
        calibrate: TEXT. calibrate_tokens: how many of its tokens. calibrate_window: tokens in one go.
        balance: λ; None: found by KL from the source on held-out windows of the text.
        cache_dtype: the coarsest dtype that the cache will have; the value map is made to stand its rounding. ``auto``:
            bfloat16, so that the model may be loaded in any dtype, but the weights' own where the fold is exact.
        dtype: of the written weights; ``auto``: the source's.
        max_shard_size: of the written files. overwrite: replace OUT. seed: of text ``self``. device: torch device.
    """

    method: str = "calibrated"
    cache_fraction: float | None = None
    latent_width: int | None = None
    span: str | None = None
    calibrate: str = "docs"
    calibrate_tokens: int = 16384
    calibrate_window: int = 512
    balance: float | None = None
    cache_dtype: str = "auto"
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    overwrite: bool = False
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Conversion:
    """What came out: the folder and the recipe written into it."""

    out: Path
    recipe: Recipe


def convert(path: str, out: str, options: ConvertOptions, track: Track = silent) -> Conversion:
    """Convert MODEL at ``path`` into the folder ``out``.

    Raises KvfoldError for bad input, in which case (as on an interruption) no folder is left behind.
    """
    chosen = method(options.method)
    check_options(chosen, options)
    text = TextSource(options.calibrate, CALIBRATE) if chosen.needs_text else None
    target = Path(out).expanduser()
    require_free(target, options.overwrite, Path(path).expanduser())
    started = time.monotonic()
    checkpoint = load(path, options.dtype, options.device)
    require_unfolded(checkpoint)
    folding = _Folding(checkpoint, chosen, options, track)
    if text is not None:
        folding.calibrate(text)
    layers = folding.fold()
    needed = sum(parameter.numel() * parameter.element_size() for parameter in checkpoint.model.parameters())
    with whole_folder(target, needed) as partial:
        source_bytes = source_cache_bytes_per_token(checkpoint.config, checkpoint.model.dtype)
        folded = build_model(checkpoint, layers)
        with quiet(), track("writing", 1) as advance:
            folded.save_pretrained(partial, max_shard_size=options.max_shard_size)
            if checkpoint.tokenizer is not None:
                checkpoint.tokenizer.save_pretrained(partial)
            _copy_licences(checkpoint.folder, partial)
            advance(1)
        recipe = folding.recipe(layers, source_bytes, time.monotonic() - started)
        recipe.write(partial)
    return Conversion(target, recipe)


def check_options(chosen: Method, options: ConvertOptions) -> None:
    """Raises KvfoldError for options that make no sense whatever the model is."""
    if options.cache_fraction is not None and options.latent_width is not None:
        raise KvfoldError("give a cache fraction or a latent width, not both")
    if options.span is not None and options.span not in SPANS:
        raise KvfoldError(f"span {options.span!r} is unknown: use one of {', '.join(SPANS)}")
    other_width = options.latent_width is not None or options.cache_fraction not in (None, 0.5)
    if chosen.half_only and (options.span == "all" or other_width):
        raise KvfoldError(f"method {chosen.name!r} folds to cache fraction 0.5 with span 'head' only")
    if options.cache_fraction is not None and not 0.5 <= options.cache_fraction <= 1:
        raise KvfoldError(f"cache fraction {options.cache_fraction} is out of range: 0.5 to 1")
    if options.balance is not None and not (math.isfinite(options.balance) and options.balance > 0):
        raise KvfoldError(f"balance {options.balance} is out of range: it is a positive number")
    if options.cache_dtype not in ("auto", *DTYPES):
        raise KvfoldError(f"cache dtype {options.cache_dtype!r} is unknown: use auto, {', '.join(DTYPES)}")
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?([KMG]i?B)", options.max_shard_size, re.IGNORECASE):
        raise KvfoldError(f"max shard size {options.max_shard_size!r} is not understood: give a size like 500MB or 5GB")
    if options.calibrate_tokens < 2 * options.calibrate_window:
        raise KvfoldError(
            f"{options.calibrate_tokens} calibration tokens are too few: use {2 * options.calibrate_window} or more "
            f"(windows of {options.calibrate_window})"
        )


def latent_width(traits: AttentionTraits, options: ConvertOptions, span: str) -> int:
    """R of a layer: from the options, for span ``head`` rounded to equally many columns a head. Raises KvfoldError."""
    heads, keys = traits.key_value_heads, traits.key_value_heads * traits.head_dim
    if options.latent_width is not None:
        width = options.latent_width
        if not keys <= width <= 2 * keys:
            raise KvfoldError(f"latent width {width} is out of range for this model: {keys} to {2 * keys}")
        if span == "head" and width % heads:
            raise KvfoldError(f"latent width {width} does not divide over {heads} key heads (span 'head')")
        return width
    fraction = 0.5 if options.cache_fraction is None else options.cache_fraction
    step = heads if span == "head" else 1
    return round(2 * keys * fraction / step) * step


def cache_dtype(options: ConvertOptions, traits: AttentionTraits, width: int, weights: torch.dtype) -> torch.dtype:
    """The dtype whose rounding the value map of a layer is made to stand.

    With as many columns as the input has, a latent can lose nothing at all, so there ``auto`` gives no accuracy away.
    """
    if options.cache_dtype != "auto":
        return DTYPES[options.cache_dtype]
    return weights if width >= traits.width and options.span != "head" else torch.bfloat16


def rounding_noise(dtype: torch.dtype) -> float:
    """Variance of rounding to ``dtype`` relative to the second moment of what is rounded.

    In one binade [1, 2) numbers lie eps apart, so the error has variance eps²/12 while the numbers' mean square is 7/3.
    """
    return max(torch.finfo(dtype).eps ** 2 / 28, 1e-14)


def build_model(checkpoint: Checkpoint, layers: list[FoldedWeights]) -> Any:
    """The folded model: the source's weights where nothing was folded, in the source's dtype and on its device."""
    source, family = checkpoint.model, family_of(checkpoint.config)
    config = folded_config(family, checkpoint.config, layers)
    with torch.device("meta"):
        model = family.model_class(config)
    state = dict(source.state_dict())
    for index, layer in enumerate(layers):
        prefix = f"{source.base_model_prefix}.{family.layers}.{index}.{family.attention}."
        for name in [name for name in state if name.startswith(prefix)]:
            del state[name]
        state |= {prefix + name: tensor.to(source.device) for name, tensor in layer.tensors.items()}
    model.load_state_dict(state, strict=True, assign=True)
    if family.rotary is not None:
        # Its tables are not in the state; take the source's, which are on the right device.
        family.rotary_module(model).rotary = family.rotary_module(source)
    model.tie_weights()
    model.generation_config = source.generation_config
    return model.eval()


def folded_config(family: Family, config: Any, layers: list[FoldedWeights]) -> Any:
    """The source's config with the folded layouts in it."""
    entries = config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "auto_map", "layer_types"):
        entries.pop(name, None)
    kvfold = {"format": FORMAT, "layers": [layer.layout.to_dict() for layer in layers]}
    folded = family.config_class(**entries, kvfold=kvfold, auto_map=family.auto_map())
    folded._attn_implementation = config._attn_implementation
    folded._name_or_path = ""
    return folded


class _Folding:
    """One conversion under way."""

    def __init__(self, checkpoint: Checkpoint, chosen: Method, options: ConvertOptions, track: Track) -> None:
        self.checkpoint, self.method, self.options, self.track = checkpoint, chosen, options, track
        self.family = family_of(checkpoint.config)
        self.span = options.span or ("head" if chosen.half_only else "all")
        self.balance: float | None = None if chosen.half_only else options.balance or DEFAULT_BALANCE
        self.search: dict[str, float] = {}
        self.calibration: dict[str, Any] | None = None
        model = checkpoint.model
        self.attentions = self.family.attentions(model)
        self.traits = [self.family.traits(model.config, layer) for layer in range(len(self.attentions))]
        self.widths = [latent_width(traits, options, self.span) for traits in self.traits]
        self.noise = [
            rounding_noise(cache_dtype(options, traits, width, model.dtype))
            for traits, width in zip(self.traits, self.widths, strict=True)
        ]
        self._weighted: list[WeightedLayer] | None = None

    @property
    def weighted(self) -> list[WeightedLayer]:
        if self._weighted is None:
            self._weighted = weigh_model(self.family, self.checkpoint.model, None)
        return self._weighted

    def calibrate(self, text: TextSource) -> None:
        """Collect statistics of the text, and with part of it find the balance."""
        options, model = self.options, self.checkpoint.model
        tokens = text.tokens(self.checkpoint.tokenizer, options.calibrate_tokens, model, options.seed)
        window = options.calibrate_window
        longest = getattr(model.config, "max_position_embeddings", None) or window
        window = min(window, longest)
        if len(tokens) < 2 * window:
            raise KvfoldError(
                f"text {text.spec!r} is too short to calibrate on: {len(tokens)} tokens, use {2 * window} or more"
            )
        rows = windows(tokens, window)
        # Nothing is lost, hence nothing to balance, where keys and values lie side by side, and where the latent has as
        # many columns as the input.
        lossless = all(
            width == 2 * traits.key_value_heads * traits.head_dim or (width >= traits.width and self.span == "all")
            for width, traits in zip(self.widths, self.traits, strict=True)
        )
        held_out = 0 if lossless or options.balance is not None else min(HELD_OUT_ROWS, len(rows) // 2)
        used = rows[: len(rows) - held_out]
        self._weighted = weigh_model(self.family, model, collect_moments(model, used, track=self.track))
        self.calibration = {
            "text": text.spec,
            "tokens": used.numel(),
            "window": window,
            "held_out_tokens": held_out * window,
        }
        if held_out:
            self._find_balance(rows[len(rows) - held_out :])

    def _find_balance(self, rows: torch.Tensor) -> None:
        """Step from the default balance in whichever direction brings the folded model nearer to the source.

        Nearness is the KL divergence on the held-out ``rows``; it has one minimum in the balance wherever tried.
        """
        with self.track("choosing the balance", MOST_BALANCES) as advance:
            divergence = Divergence(self.checkpoint.model, rows)

            def measure(balance: float) -> float:
                if str(balance) not in self.search:
                    self.balance = balance
                    self.search[str(balance)] = divergence.of(build_model(self.checkpoint, self.fold(silently=True)))
                    advance(1)
                return self.search[str(balance)]

            best = DEFAULT_BALANCE
            step = BALANCE_STEP if measure(best * BALANCE_STEP) < measure(best) else 1 / BALANCE_STEP
            while len(self.search) < MOST_BALANCES and measure(best * step) < measure(best):
                best *= step
        self.balance = float(min(self.search, key=lambda balance: self.search[balance]))

    def fold(self, silently: bool = False) -> list[FoldedWeights]:
        """Fold every layer with the present balance."""
        track = silent if silently else self.track
        folded = []
        with track("folding", len(self.attentions)) as advance:
            for attention, traits, weighted, width, noise in zip(
                self.attentions, self.traits, self.weighted, self.widths, self.noise, strict=True
            ):
                balance = self.balance or DEFAULT_BALANCE
                weights = self.family.weights(attention)
                problem = LayerProblem(weights, traits, weighted, width, self.span, balance, noise)
                folded.append(self.method.fold(problem))
                advance(1)
        return folded

    def recipe(self, layers: list[FoldedWeights], source_bytes: int, seconds: float) -> Recipe:
        """The record of this conversion."""
        model, options = self.checkpoint.model, self.options
        size = torch.empty(0, dtype=model.dtype).element_size()
        folded_bytes = sum(layer.layout.latent_width for layer in layers) * size
        balance = self.balance or DEFAULT_BALANCE
        kept = [
            weighted.kept_shares([width], self.span, balance)[0] if self.method.needs_text else None
            for weighted, width in zip(self.weighted, self.widths, strict=True)
        ]
        return Recipe(
            source=describe_source(self.checkpoint.path, self.checkpoint.folder, model.config),
            method=self.method.name,
            span=self.span,
            cache_fraction=folded_bytes / source_bytes,
            cache_bytes_per_token={"source": source_bytes, "folded": folded_bytes},
            balance=self.balance,
            balance_search=self.search,
            noise=max(self.noise),
            calibration=self.calibration,
            dtype=str(model.dtype).removeprefix("torch."),
            seed=options.seed,
            layers=[
                layer.layout.to_dict() | ({} if share is None else {"kept_energy": share})
                for layer, share in zip(layers, kept, strict=True)
            ],
            seconds=round(seconds, 1),
        )


def _copy_licences(source: Path | None, out: Path) -> None:
    if source is not None:
        for pattern in ("LICENSE*", "NOTICE*", "USE_POLICY*"):
            for path in source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, out / path.name)
