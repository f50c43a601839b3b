"""``kvfold demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Seed
from .output import check_json, console, ratio, table, track, write_json
from .training import watching


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the models and the report.")] = Path("demo"),
    calibrate_tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.")] = 8192,
    windows: Annotated[int, typer.Option(help="Windows of 512 tokens to evaluate on.")] = 12,
    uptrain_tokens: Annotated[int, typer.Option(help="Tokens to uptrain the folded model on.")] = 12_800,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """The whole job on SmolLM2-135M-Instruct: analyse, fold to 3/4 and 1/2 of the cache, uptrain, evaluate, report.

    Example: kvfold demo --out demo
    """
    from .demonstration import DemoOptions, run_demo

    check_json(json)
    options = DemoOptions(calibrate_tokens, windows=windows, uptrain_tokens=uptrain_tokens, seed=seed)
    with watching() as watch:
        result = run_demo(out, options, track, watch)
    first = result.evaluations[0]
    rows = [
        [
            evaluation.path,
            f"{evaluation.cache_fraction:.2f}",
            f"{evaluation.cache_bytes_per_token:,.0f}",
            f"{evaluation.perplexity:.2f}",
            ratio(evaluation.perplexity, first.perplexity),
        ]
        for evaluation in result.evaluations
    ]
    columns = ["model", "cache fraction", "bytes/token", "perplexity", "ratio"]
    table("SmolLM2-135M-Instruct on the second half of Python's manual", columns, rows)
    console.print(f"“{result.continuations[0].prompt}”, continued greedily:", highlight=False)
    for evaluation, continuation in zip(result.evaluations, result.continuations, strict=True):
        text = " ".join(continuation.text.split())
        console.print(f"  {evaluation.path}: {text}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {result.report}", highlight=False, soft_wrap=True)
    write_json(json, {"models": [evaluation.to_dict() for evaluation in result.evaluations]})
