"""``kvfold study``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Compile, Device, Json, Seed, Shards, Size, Token, Tokenizer, Workers
from .output import check_json, console, table, track, write_json
from .training import watching_each

VARIANTS_HELP = "Variants, comma-separated: qkv, q=k-v, q=k-v+, q-k=v, q=k=v, q=k=v+, mqa, gqa-N, q-mqa, q-gqa-N."


def study(
    work: Annotated[str, typer.Argument(metavar="WORK", help="Folder for models and figures; goes on where it was.")],
    size: Size = "3m",
    variants: Annotated[str, typer.Option(help=VARIANTS_HELP)] = "qkv,q=k-v,q-k=v,q=k=v,q-mqa",
    seeds: Annotated[int, typer.Option(help="Trainings of each variant.")] = 2,
    text: Shards = "docs",
    tokenizer: Tokenizer = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Of each training. Default: the size's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences at a time; the tokens of a step stay.")] = None,
    compile: Compile = False,
    workers: Workers = 1,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    token: Token = None,
) -> None:
    """Train variants with the same seeds, data and steps, and print what each loses against qkv.

    Example: kvfold study work/ --size 3m --text docs
    """
    check_json(json, work)
    from dataclasses import asdict

    from ..checkpoint.hub import Access
    from ..checkpoint.option_checks import token_count
    from ..finetune.pretrain import PretrainOptions
    from ..finetune.sizes import size_named
    from ..finetune.study import PUBLISHED
    from ..finetune.study import study as run

    options = PretrainOptions(
        size=size_named(size),
        text=text,
        tokenizer=tokenizer,
        tokens=None if tokens is None else token_count(tokens),
        batch=batch,
        compile=compile,
        workers=workers,
        seed=seed,
        device=device,
        access=Access(None, token),
    )

    names = [name.strip() for name in variants.split(",") if name.strip()]
    with watching_each() as watch:
        rows = run(work, names, seeds, options, track, watch)
    table(f"{size} on {text}, {seeds} seeds", ["variant", "parameters", "in attention", "cache bytes/token"], [
        [row.name, f"{row.parameters:,}", f"{row.attention_parameters:,}", f"{row.cache_bytes_per_token:,.0f}"]
        for row in rows
    ])  # fmt: skip
    lost = [
        [
            row.name,
            f"{sum(row.perplexities) / len(row.perplexities):.2f}",
            "" if row.degradation is None else f"{row.degradation:+.1f}",
            "" if len(row.degradations) < 2 else f"{min(row.degradations):+.1f} … {max(row.degradations):+.1f}",
            *(f"{known[row.name]:+.1f}" if row.name in known else "" for known in PUBLISHED.values()),
        ]
        for row in rows
    ]
    columns = ["variant", "perplexity", "lost, %", "each seed", *(f"study, {size}" for size in PUBLISHED)]
    table("perplexity, and what is lost of it against qkv", columns, lost)
    console.print(f"written to {work} (study.json, study.png)", highlight=False, soft_wrap=True)
    write_json(json, {"variants": [asdict(row) | {"degradation": row.degradation} for row in rows]})
