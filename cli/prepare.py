"""kvfold prepare"""

from __future__ import annotations

from typing import Annotated

import typer

from .options import TEXT_HELP, Json, Overwrite, Token, Workers
from .output import check_json, console, track, write_json


def prepare(
    text: Annotated[str, typer.Argument(metavar="TEXT", help=f"{TEXT_HELP}, or slimpajama, what the study had.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    tokenizer: Annotated[
        str, typer.Option(help="A folder, a Hub id, or train:N: one of N tokens, trained on TEXT.")
    ] = "train:4096",
    tokens: Annotated[str | None, typer.Option(metavar="N", help="To prepare: 2M, 10B, … Default: all.")] = None,
    validation: Annotated[float, typer.Option(help="Share that is set apart for validation.")] = 0.01,
    shard_tokens: Annotated[str, typer.Option(metavar="N", help="Of a shard, about.")] = "100M",
    workers: Workers = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was interrupted.")] = False,
    overwrite: Overwrite = False,
    json: Json = None,
    token: Token = None,
) -> None:
    """Tokenise TEXT into shards that pretrain reads, in the folder OUT.

    Example: kvfold prepare slimpajama shards/ --tokenizer openai-community/gpt2 --tokens 10B --workers 16
    """
    check_json(json, out)
    from dataclasses import asdict

    from ..checkpoint.hub import Access
    from ..checkpoint.option_checks import token_count
    from ..text.prepare import SLIMPAJAMA, PrepareOptions
    from ..text.prepare import prepare as run

    options = PrepareOptions(
        tokenizer=tokenizer,
        tokens=None if tokens is None else token_count(tokens),
        validation=validation,
        shard_tokens=token_count(shard_tokens),
        workers=workers,
        overwrite=overwrite,
        resume=resume,
        access=Access(None, token),
    )
    index = run(SLIMPAJAMA if text == "slimpajama" else text, out, options, track)
    counts = [sum(tokens for _, tokens in part) for part in (index.train, index.validation)]
    console.print(
        f"{index.documents:,} documents: {counts[0]:,} tokens to train on, {counts[1]:,} for validation, vocabulary "
        f"{index.vocabulary:,}\nwritten to {out}",
        highlight=False,
        soft_wrap=True,
    )
    write_json(json, asdict(index) | {"out": out})
