"""``kvfold export``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from .options import AllowPickle, Device, Dtype, Json, Model, Revision, Token
from .output import check_json, console, track, write_json


def export(
    model: Model,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    format: Annotated[
        str,
        typer.Option(
            help="native: a plain checkpoint of the source's own architecture, for any engine (it saves the cache of "
            "grouped heads, not that of folding); merged: MODEL is a PEFT adapter, which is merged into its base."
        ),
    ] = "native",
    base: Annotated[
        str | None, typer.Option(help="The model that an adapter belongs to. Default: the one it names.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of the weight files.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace OUT where it exists.")] = False,
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Write a folded MODEL, or an adapter with its model, as a checkpoint that other programs read.

    Example: kvfold export folded/ plain/ --format native
    """
    from ..checkpoint.loading import Access
    from ..convert.export import ExportOptions
    from ..convert.export import export as run

    check_json(json, model, out)
    options = ExportOptions(
        format=format,
        base=base,
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        device=device,
        access=Access(revision, token, allow_pickle),
    )
    result = run(model, out, options, track)
    console.print(
        f"{result.architecture}, {result.parameters:,} parameters; logits differ by {result.difference:.1e} of the "
        f"largest\nwritten to {result.out}",
        highlight=False,
        soft_wrap=True,
    )
    write_json(json, asdict(result) | {"out": str(result.out)})
