"""``kvfold convert``."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from .options import CALIBRATE_HELP, AllowPickle, Device, Dtype, Json, Model, Revision, Seed, Token
from .output import check_json, console, track, write_json

if TYPE_CHECKING:
    from ..checkpoint.record import Recipe
    from ..convert.conversion import Conversion
    from ..convert.options import ConvertOptions

UNSEEN_SHARE = 0.1  # of the input's directions, from which on there is a warning
EVALUATE_WINDOW, EVALUATE_WINDOWS = 512, 12  # as kvfold evaluate has them


def convert(
    model: Model,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    method: Annotated[str, typer.Option(help="mean, procrustes, svd or calibrated.")] = "calibrated",
    cache_fraction: Annotated[
        float | None, typer.Option(help="F, up to 1: the folded cache against the source's. Default 0.5.")
    ] = None,
    latent_width: Annotated[
        int | None, typer.Option(help="R, instead of F: numbers cached per token and layer.")
    ] = None,
    span: Annotated[
        str | None,
        typer.Option(help="all: values read the whole latent (default); head: their own head's part of it."),
    ] = None,
    rotary_pairs: Annotated[
        str,
        typer.Option(
            metavar="P|auto",
            help="Frequency pairs a key head that stay rotated, on average; the rest is read unrotated. auto: as fits.",
        ),
    ] = "auto",
    key_heads: Annotated[
        int | None, typer.Option(help="N key windows shared by the KV heads. Default: each has its own.")
    ] = None,
    grouping: Annotated[str, typer.Option(help="How heads share a window: aligned or mean.")] = "aligned",
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Heads that share well share a window, instead of neighbours.")
    ] = False,
    calibrate: Annotated[list[str] | None, typer.Option(metavar="TEXT[:WEIGHT]", help=CALIBRATE_HELP)] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.")] = 16384,
    calibrate_window: Annotated[
        int | None, typer.Option(help="Tokens the model reads in one go. Default: up to 2,048, a sixth of all.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="FILE", help="Obey a plan (see kvfold plan) instead of one fraction for all.")
    ] = None,
    auto_plan: Annotated[
        bool, typer.Option("--auto-plan", help="Measure each layer's cost first, and give width where it helps most.")
    ] = False,
    refine: Annotated[
        float,
        typer.Option(metavar="MINUTES", help="Then fit each layer's output to the source's, for at most so long."),
    ] = 0.0,
    balance: Annotated[
        float | None, typer.Option(help="λ, weight of values against keys. Default: found by KL on held-out text.")
    ] = None,
    cache_dtype: Annotated[
        str, typer.Option(help="Coarsest dtype the cache will have; the fold is made to stand its rounding.")
    ] = "auto",
    evaluate: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Then measure the perplexity of OUT and MODEL on this text.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of the weight files.")] = "5GB",
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep the calibration text's hidden states on disk, not in memory.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the conversion to OUT that was interrupted.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT where it exists.")] = False,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Fold MODEL's keys and values into one cached tensor and write the result to the folder OUT.

    Example: kvfold convert HuggingFaceTB/SmolLM2-135M-Instruct folded/ --cache-fraction 0.5
    """
    from ..checkpoint.hub import Access
    from ..convert.conversion import convert as run
    from ..convert.options import ConvertOptions
    from ..text.sources import TextSource

    check_json(json, model, out)
    if evaluate is not None:
        TextSource(evaluate)
    options = ConvertOptions(
        method=method,
        cache_fraction=cache_fraction,
        latent_width=latent_width,
        span=span,
        rotary_pairs=int(rotary_pairs) if rotary_pairs.lstrip("+-").isdecimal() else rotary_pairs,
        key_heads=key_heads,
        grouping=grouping,
        cluster=cluster,
        calibrate=tuple(calibrate or ()),
        calibrate_tokens=calibrate_tokens,
        calibrate_window=calibrate_window,
        plan=plan,
        auto_plan=auto_plan,
        refine=refine,
        balance=balance,
        cache_dtype=cache_dtype,
        dtype=dtype,
        max_shard_size=max_shard_size,
        offload=offload,
        resume=resume,
        overwrite=overwrite,
        seed=seed,
        device=device,
        access=Access(revision, token, allow_pickle),
    )
    result = run(model, out, options, track)
    recipe = result.recipe
    cached = recipe.cache_bytes_per_token
    console.print(
        f"{recipe.method}, span {recipe.span}: cache {cached['source']:,.0f} → {cached['folded']:,.0f} bytes/token "
        f"({recipe.cache_fraction:.3f}) in {recipe.seconds:.0f} s",
        highlight=False,
    )
    if recipe.calibration:
        texts = " and ".join(recipe.calibration["texts"])
        console.print(
            f"calibrated on {recipe.calibration['tokens']:,} tokens of {texts}", highlight=False, soft_wrap=True
        )
    divergence = None
    if recipe.balance_search:
        divergence = min(recipe.balance_search.values())
        console.print(
            f"balance {recipe.balance}; KL from the source on held-out calibration text {divergence:.4f} nats/token",
            highlight=False,
            soft_wrap=True,
        )
    unseen = (recipe.calibration or {}).get("unseen_directions") or 0.0
    if unseen > UNSEEN_SHARE:
        console.print(
            f"warning: the calibration text leaves {unseen:.0%} of the directions of the model's inputs unseen, which "
            "are then treated alike: use more text, or text of more kinds",
            highlight=False,
            soft_wrap=True,
        )
    if recipe.refinement:
        refined = recipe.refinement
        taken = "refined" if refined["after"] < refined["before"] else "not refined: it would be no better"
        console.print(f"{taken}: KL {refined['before']:.4f} → {refined['after']:.4f} nats/token", highlight=False)
        divergence = min(refined.values())
    if divergence is not None:
        factor = math.exp(min(divergence, 700.0))
        console.print(f"expect a perplexity of about {factor:.3f} × the source's", highlight=False)
    if evaluate is not None:
        recipe = _evaluate(model, result, evaluate, options)
    console.print(f"written to {result.out} (recipe in kvfold.json)", highlight=False, soft_wrap=True)
    write_json(json, asdict(recipe) | {"out": str(result.out)})


def _evaluate(model: str, result: Conversion, text: str, options: ConvertOptions) -> Recipe:
    """Perplexity of the source and of what came out, also for its recipe and model card."""
    from ..analysis.perplexity import evaluate as measure

    settings = (text, EVALUATE_WINDOW, EVALUATE_WINDOWS, options.dtype, options.device, track)
    (source,), (folded,) = measure([model], *settings, options.access), measure([str(result.out)], *settings)
    console.print(
        f"measured on {text}: perplexity {source.perplexity:.2f} → {folded.perplexity:.2f}, ratio "
        f"{folded.perplexity / source.perplexity:.3f}",
        highlight=False,
        soft_wrap=True,
    )
    recipe = replace(
        result.recipe,
        evaluation={
            "text": text, "window": EVALUATE_WINDOW, "tokens": folded.tokens, "source": source.perplexity,
            "folded": folded.perplexity,
        },
    )  # fmt: skip
    recipe.write(result.out)
    return recipe
