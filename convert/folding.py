"""The folding of a checkpoint layer by layer: calibrate, fold, keep what came out, go on with the next."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..analysis.divergence import divergences
from ..analysis.energy import WeightedLayer, weigh
from ..analysis.moments import moments_of_layer, unseen_directions
from ..analysis.streaming import Stream
from ..checkpoint.lazy_source import LazySource
from ..checkpoint.loading import DTYPES
from ..checkpoint.progress import Track
from ..model import AttentionParts, AttentionTraits, Family, FoldedAttention, FoldedLayout, KvfoldError
from .candidates import Way, layer_problem, ways
from .layer_store import FOLDED, REFINED, LayerStore
from .methods.base import FoldedWeights, Method
from .options import (
    ConvertOptions,
    cache_dtype,
    calibration_rows,
    check_heads,
    full_width,
    latent_width,
    rounding_noise,
)
from .planning.plan import Plan
from .refine import recorded_outputs, refine_output

HELD_OUT_ROWS, HELD_OUT_TOKENS = 4, 2048  # at most, to compare the ways on; not calibrated on

UNSEEN = "unseen_directions"


class Folding:
    """One conversion under way.

    Attributes:
        span: of every layer. ways: in which layers are folded side by side. chosen: which of them is best.
        search: KL divergence from the source of each way, where there are several.
        refined: whether the layers are to be written as refined. refinement: KL divergence without and with it.
        calibration: what was calibrated on, for the recipe.
    """

    def __init__(
        self, source: LazySource, method: Method, options: ConvertOptions, work: LayerStore, track: Track,
        plan: Plan | None = None,
    ) -> None:  # fmt: skip
        self.source, self.method, self.options, self.work, self.track = source, method, options, work, track
        self.family = source.family
        self.plan = plan
        self.span = plan.span if plan else options.span or ("head" if method.half_only else "all")
        self.chosen = 0
        self.refined = False
        self.refinement: dict[str, float] = {}
        self.search: dict[str, float] = {}
        self.calibration: dict[str, Any] | None = None
        self.traits = self.family.traits_of(source.model)
        check_heads(self.traits, options, self.span)
        self.widths = [
            latent_width(traits, self._of_layer(index), self.span) for index, traits in enumerate(self.traits)
        ]
        self.ways: list[Way] = ways(options, self.traits, self.widths, self.span, compared=False)
        self.dtype = source.dtype if options.dtype == "auto" else DTYPES[options.dtype]

    def _of_layer(self, index: int) -> ConvertOptions:
        """The options as they are for one layer."""
        if self.plan is None:
            return self.options
        planned, traits = self.plan.layers[index], self.traits[index]
        options = replace(
            self.options, cache_fraction=None, latent_width=planned.latent_width, key_heads=planned.key_heads
        )
        try:
            check_heads([traits], options, self.span)
            latent_width(traits, options, self.span)
        except KvfoldError as error:
            raise KvfoldError(f"plan, layer {index}: {error}") from error
        return options

    @property
    def balance(self) -> float | None:
        """λ of what came out; None for a method that has none."""
        return None if self.method.half_only else self.ways[self.chosen].balance

    @property
    def noise(self) -> float:
        """Largest relative variance of the cache's rounding error that a layer is made to stand."""
        layers = zip(self.traits, self.widths, strict=True)
        return max(rounding_noise(cache_dtype(self.options, traits, width, self.dtype)) for traits, width in layers)

    @property
    def way(self) -> dict[str, Any] | None:
        """How the layers were folded; None for a method that knows one way only."""
        return None if self.method.half_only else self.ways[self.chosen].to_dict()

    def described(self) -> list[tuple[FoldedLayout, float | None, tuple[float, float] | None]]:
        """Layout and kept energy of every layer as it came out, and its errors before and after refinement."""
        return [self.work.described(index, *self._outcome(index)) for index in range(self.source.layers)]

    def folded_tensors(self, index: int) -> list[tuple[str, list[int], Callable[[], torch.Tensor]]]:
        """Name, shape and reader of a layer's tensors as they came out."""
        return self.work.tensors(index, *self._outcome(index))

    def _outcome(self, index: int) -> tuple[int, str]:
        """Way and stage of what came out of a layer."""
        return (0, REFINED) if self.refined and self.work.has_layer(index, REFINED) else (self.chosen, FOLDED)

    def without_text(self) -> None:
        """Fold every layer by its weights alone."""
        with self.track("folding", self.source.layers) as advance:
            for index in range(self.source.layers):
                if not self.work.has_layer(index):
                    with self.source.attention(index):
                        parts = self.family.parts_of(self.source.model, index)
                        self.work.save_layer(index, self._fold(index, parts, weigh(parts, None)))
                advance(1)

    def with_text(self, tokens: torch.Tensor) -> None:
        """Fold every layer by its statistics on ``tokens`` ``[n]``, some of which are held out to find the best way.

        Raises KvfoldError for too short a text.
        """
        rows, held_out = self._rows(tokens)
        states = self.work.states(self.options.offload)
        with self.source.ends() as model:
            text = Stream(self.family, model, rows, states=states.of("text"), weights=True).enter()
            source, ways = None, []
            if len(held_out):
                source = Stream(self.family, model, held_out, 1, states.of("source")).enter()
                ways = [source.fork(states.of(f"way-{way}")) for way in range(len(self.ways))]
        done = self.work.restore(states)
        with self.track("calibrating and folding", self.source.layers) as advance:
            advance(done)
            for index in range(done, self.source.layers):
                with self.source.layer(index) as layer:
                    self._layer(layer, index, text, source, ways)
                states.keep(index + 1)
                advance(1)
        assert self.calibration is not None
        self.calibration[UNSEEN] = self.work.recall(UNSEEN)
        if source is not None:
            self._choose(source, ways)
            if self.options.refine:
                self._refine(rows, held_out)

    def _rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows to calibrate on, and rows to compare balances on (none, where there is nothing to compare)."""
        options = self.options
        rows = calibration_rows(tokens, options, self.source.config)
        window = rows.shape[1]
        lossless = all(self._lossless(width, traits) for width, traits in zip(self.widths, self.traits, strict=True))
        compared = [] if lossless else ways(options, self.traits, self.widths, self.span, compared=True)
        wanted = min(HELD_OUT_ROWS, max(1, HELD_OUT_TOKENS // window), len(rows) // 2)
        held_out = wanted if len(compared) > 1 or (compared and options.refine) else 0
        if held_out:
            self.ways = compared
        self.calibration = {
            "texts": list(options.calibrate),
            "tokens": (len(rows) - held_out) * window,
            "window": window,
            "held_out_tokens": held_out * window,
        }
        return rows[: len(rows) - held_out], rows[len(rows) - held_out :]

    def _lossless(self, width: int, traits: AttentionTraits) -> bool:
        """Whether a layer loses nothing, hence has nothing to balance or refine.

        That is so where keys and values lie side by side, and where the latent has as many columns as the input, as
        long as the keys may have whole windows of their own.
        """
        if self.options.key_heads is not None or self.options.rotary_pairs != "auto":
            return False
        beside = width == traits.cache_width
        wide = width >= max(traits.width, full_width(traits, self.options)) and self.span == "all"
        return beside or wide

    def _layer(self, layer: Any, index: int, text: Stream, source: Stream | None, ways: list[Stream]) -> None:
        moments = moments_of_layer(text, layer, index)
        if index == self.source.layers // 2:
            self.work.remember(UNSEEN, unseen_directions(moments))
        parts = self.family.parts_of(self.source.model, index)
        folds = self._fold(index, parts, weigh(parts, moments))
        del moments
        self.work.save_layer(index, folds)
        if source is not None:
            source.through(layer, index)
        for fold, way in zip(folds, ways, strict=bool(ways)):
            with folded_attention(self.family, layer, parts, fold, index, self.source.config):
                way.through(layer, index)

    def _fold(self, index: int, parts: AttentionParts, weighted: WeightedLayer) -> list[FoldedWeights]:
        width, options = self.widths[index], self._of_layer(index)
        ways = (replace(way, key_heads=options.key_heads or way.key_heads) for way in self.ways)
        problems = (layer_problem(parts, weighted, width, self.span, way, options, self.dtype) for way in ways)
        return [self.method.fold(problem) for problem in problems]

    def _choose(self, source: Stream, ways: list[Stream]) -> None:
        with self.source.ends(), self.track("choosing the best way", len(source.rows)) as advance:
            found = divergences(source.logits(), [way.logits() for way in ways], advance)
        self.search = {way.label: value for way, value in zip(self.ways, found, strict=True)}
        self.chosen = min(range(len(found)), key=lambda way: found[way])

    def _refine(self, rows: torch.Tensor, held_out: torch.Tensor) -> None:
        """Refine the chosen way layer by layer, and take what comes out if the held-out rows say so."""
        states = self.work.states(self.options.offload, REFINED)
        with self.source.ends() as model:
            sources = [
                Stream(self.family, model, part, 1, states.of(f"source-{kind}")).enter()
                for kind, part in (("text", rows), ("held", held_out))
            ]
        folded = [each.fork(states.of(f"folded-{kind}")) for kind, each in enumerate(sources)]
        done = self.work.restore(states)
        stop = time.monotonic() + 60 * self.options.refine
        with self.track("refining", self.source.layers) as advance:
            advance(done)
            for index in range(done, self.source.layers):
                with self.source.layer(index) as layer:
                    self._refine_layer(layer, index, sources, folded, time.monotonic() < stop)
                states.keep(index + 1)
                advance(1)
        with self.source.ends():
            (found,) = divergences(sources[1].logits(), [folded[1].logits()])
        before = self.search[self.ways[self.chosen].label]
        self.refinement = {"before": before, "after": found}
        self.refined = found < before

    def _refine_layer(
        self, layer: Any, index: int, sources: list[Stream], folded: list[Stream], in_time: bool
    ) -> None:  # fmt: skip
        attention = getattr(layer, self.family.attention)
        targets = []
        for stream in sources:
            with recorded_outputs(attention) as outputs:
                stream.through(layer, index)
            targets.append(outputs)
        parts, fold = self.family.parts_of(self.source.model, index), self.work.fold(index, self.chosen)
        with folded_attention(self.family, layer, parts, fold, index, self.source.config) as attention:
            if in_time:
                found = refine_output(layer, index, attention, folded, targets)
                weight = attention.o_proj.weight.detach().to(self.dtype).cpu()
                fold = replace(
                    fold, tensors=fold.tensors | {"o_proj.weight": weight}, refined=(found.before, found.after)
                )
                self.work.save_layer(index, [fold], REFINED)
            for stream in folded:
                stream.through(layer, index)


@contextmanager
def folded_attention(
    family: Family, layer: Any, parts: AttentionParts, fold: FoldedWeights, index: int, config: Any
) -> Iterator[FoldedAttention]:
    """Put folded attention into a decoder layer for a while; it computes in the dtype of the layer's own."""
    norms = (copy.deepcopy(parts.query_norm), copy.deepcopy(parts.key_norm))
    with torch.device("meta"):
        attention = FoldedAttention(parts.traits, fold.layout, index, index, config, norms)
    like = parts.weights.q
    attention.load_state_dict({name: tensor.to(like) for name, tensor in fold.tensors.items()}, assign=True)
    own = getattr(layer, family.attention)
    setattr(layer, family.attention, attention.eval())
    try:
        yield attention
    finally:
        setattr(layer, family.attention, own)
