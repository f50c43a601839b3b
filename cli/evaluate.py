"""``kvfold evaluate``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import TEXT_HELP, AllowPickle, Device, Dtype, Json, Revision, Seed, Token
from .output import check_json, ratio, table, track, write_json


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders, Hub ids or .gguf files.")],
    text: Annotated[str, typer.Option(metavar="TEXT", help=f"{TEXT_HELP}; of docs the second half.")] = "docs",
    window: Annotated[int, typer.Option(help="Tokens in a window; the first one is not scored.")] = 512,
    windows: Annotated[int, typer.Option(help="How many windows, from the start of the text.")] = 12,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Perplexity, cached bytes per token (read off a filled cache) and size of models; ratios are to the first.

    Example: kvfold evaluate source/ folded/ --text docs --window 512 --windows 12
    """
    from ..analysis.perplexity import evaluate as run
    from ..checkpoint.loading import Access

    check_json(json, *models)
    results = run(models, text, window, windows, dtype, device, track, Access(revision, token, allow_pickle))
    first = results[0]
    rows = [
        [
            result.path,
            f"{result.perplexity:.3f}",
            ratio(result.perplexity, first.perplexity),
            f"{result.cache_bytes_per_token:,.0f}",
            f"{result.cache_fraction:.3f}",
            f"{result.parameters:,}",
        ]
        for result in results
    ]
    columns = ["model", "perplexity", "ratio", "cache bytes/token", "cache fraction", "parameters"]
    table(f"{text}: {windows} windows of {window} tokens, {first.tokens:,} scored", columns, rows)
    write_json(json, {"models": [result.to_dict() for result in results]})
