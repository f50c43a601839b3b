"""``kvfold plan``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import CALIBRATE_HELP, AllowPickle, Device, Json, Model, Revision, Seed, Token
from .output import check_json, check_output, console, track, write_json


def plan(
    model: Model,
    cache_fraction: Annotated[float, typer.Option(help="F over all layers, the budget.")] = 0.5,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The plan; a plot of it goes beside it, as .png.")] = Path(
        "plan.yaml"
    ),
    min_width: Annotated[int | None, typer.Option(help="Least R of a layer. Default: 0.4 of the uniform one.")] = None,
    max_width: Annotated[int | None, typer.Option(help="Largest R of a layer. Default: keys and values.")] = None,
    key_heads: Annotated[
        str | None, typer.Option(metavar="N,…", help="Numbers of key windows to choose from, say 1,2,4.")
    ] = None,
    span: Annotated[str, typer.Option(help="all or head, see convert.")] = "all",
    calibrate: Annotated[list[str] | None, typer.Option(metavar="TEXT[:WEIGHT]", help=CALIBRATE_HELP)] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="Tokens to calibrate and measure on.")] = 16384,
    calibrate_window: Annotated[
        int | None, typer.Option(help="Tokens the model reads in one go. Default: up to 2,048, a sixth of all.")
    ] = None,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Find out what folding costs in each layer, and share a cache budget out so that it costs least.

    Example: kvfold plan HuggingFaceTB/SmolLM2-135M-Instruct --cache-fraction 0.5 --out plan.yaml
    """
    from ..analysis.plots import cost_curves
    from ..checkpoint.atomic_output import disk_errors
    from ..checkpoint.hub import Access
    from ..convert.options import ConvertOptions
    from ..convert.planning.planner import PlanOptions, make_plan
    from ..model import KvfoldError

    check_json(json, model)
    check_output(out, model)
    if not out.absolute().parent.is_dir():
        raise KvfoldError(f"folder {out.parent} does not exist")
    conversion = ConvertOptions(
        cache_fraction=cache_fraction,
        span=span,
        calibrate=tuple(calibrate or ()),
        calibrate_tokens=calibrate_tokens,
        calibrate_window=calibrate_window,
        seed=seed,
        device=device,
        access=Access(revision, token, allow_pickle),
    )
    result = make_plan(model, PlanOptions(conversion, min_width, max_width, _numbers(key_heads)), track)
    picture = out.with_suffix(".png")
    chosen = [(layer.latent_width, layer.cost or 0.0) for layer in result.layers]
    with disk_errors(out):
        result.write(out)
        cost_curves(result.curves or [], chosen, result.full_width).savefig(picture, dpi=120)
    widths = [layer.latent_width for layer in result.layers]
    console.print(
        f"cache fraction {result.cache_fraction:.3f}: widths {min(widths)} to {max(widths)}; the layers' costs sum to "
        f"{result.cost:.4f} nats/token, {result.uniform_cost:.4f} if all were as wide",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"written to {out} (plot: {picture}); kvfold convert {model} OUT --plan {out}", highlight=False,
                  soft_wrap=True)  # fmt: skip
    write_json(json, asdict(result))


def _numbers(listed: str | None) -> tuple[int, ...] | None:
    from ..model import KvfoldError

    if listed is None:
        return None
    try:
        return tuple(int(each) for each in listed.split(","))
    except ValueError as error:
        raise KvfoldError(f"key heads {listed!r} make no sense: give numbers, say 1,2,4") from error
