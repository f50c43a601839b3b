"""``kvfold compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import TEXT_HELP, AllowPickle, Device, Dtype, Json, Revision, Token
from .output import check_json, console, table, track, write_json


def compare(
    models: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Source, converted, uptrained, scratch-trained models.")
    ],
    text: Annotated[str, typer.Option(metavar="TEXT", help=f"{TEXT_HELP}; of docs the second half.")] = "docs",
    window: Annotated[int, typer.Option(help="Tokens in a window; the first one is not scored.")] = 256,
    windows: Annotated[int, typer.Option(help="How many windows, from the start of the text.")] = 24,
    context: Annotated[int, typer.Option(help="Tokens of a sequence, for the cache and for serving.")] = 32768,
    memory: Annotated[float, typer.Option(help="Of the machine that serves, GB.")] = 80.0,
    bandwidth: Annotated[float, typer.Option(help="Of its memory, GB per second.")] = 3350.0,
    price: Annotated[float, typer.Option(help="Of the machine, per hour.")] = 2.5,
    reserve: Annotated[float, typer.Option(help="Share of the memory for all but weights and caches.")] = 0.1,
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="The page to write.")] = Path("comparison.html"),
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """What models lose, cache and cost, side by side: a table and an HTML page; ratios are to the first.

    Example: kvfold compare source/ folded/ uptrained/ scratch/ --text mine.txt --context 32768 --memory 80
    """
    from dataclasses import asdict

    from ..analysis import comparison
    from ..analysis.serving import Machine
    from ..checkpoint.hub import Access
    from ..model import KvfoldError

    check_json(json, *models)
    check_json(html, *models)
    if context < 1:
        raise KvfoldError(f"context {context} is too short: 1 is the least")
    machine = Machine(memory * 1e9, bandwidth * 1e9, price, reserve)
    access = Access(revision, token, allow_pickle)
    found = comparison.compare(models, text, window, windows, context, machine, dtype, device, track, access)
    for title, columns, rows in (
        (f"{text}: {windows} windows of {window} tokens", comparison.QUALITY, comparison.quality_rows(found, context)),
        ("how they were made", comparison.MAKING, comparison.making_rows(found)),
        (f"serving at {context:,} tokens", comparison.SERVED, comparison.serving_rows(found)),
    ):
        table(title, columns, rows)
    console.print(comparison.assumptions(context, machine), highlight=False)
    comparison.write_comparison(html, found, text, window, windows, context, machine)
    console.print(f"written to {html}", highlight=False, soft_wrap=True)
    write_json(json, {"models": [each.to_dict() for each in found], "machine": asdict(machine), "context": context})
