"""kvfold pretrain"""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    CheckpointActivations,
    Compile,
    Device,
    EvaluateEvery,
    Fsdp,
    Json,
    Overwrite,
    Patience,
    ReportTo,
    ResumeRun,
    Seed,
    Shards,
    Size,
    Token,
    Tokenizer,
    Workers,
)
from .output import check_json, console, track, write_json
from .training import watching


def pretrain(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    size: Size = "3m",
    variant: Annotated[
        str, typer.Option(help="Projections that are one: qkv, q=k-v, q=k-v+, q-k=v, q=k=v or q=k=v+.")
    ] = "qkv",
    kv_heads: Annotated[
        int | None, typer.Option(help="Heads of keys and values (qkv, q-k=v). Default: as many as query heads.")
    ] = None,
    text: Shards = "docs",
    tokenizer: Tokenizer = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="To train on. Default: the size's.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences at a time, on each device; the tokens of a step stay.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell the model's figures, and train nothing.")] = False,
    checkpoint_activations: CheckpointActivations = False,
    compile: Compile = False,
    fsdp: Fsdp = False,
    evaluate_every: EvaluateEvery = None,
    patience: Patience = None,
    report_to: ReportTo = "none",
    workers: Workers = 1,
    resume: ResumeRun = False,
    overwrite: Overwrite = False,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    token: Token = None,
) -> None:
    """Train a model of the study from scratch, and write it to the folder OUT.

    Example: kvfold pretrain scratch/ --size 3m --variant q-k=v --text mine.txt --tokens 2M
    """
    check_json(json, out)
    from dataclasses import asdict

    from ..checkpoint.hub import Access
    from ..checkpoint.option_checks import token_count
    from ..finetune.pretrain import PretrainOptions
    from ..finetune.pretrain import pretrain as run
    from ..finetune.sizes import figures, size_named

    options = PretrainOptions(
        size=size_named(size),
        variant=variant,
        key_value_heads=kv_heads,
        text=text,
        tokenizer=tokenizer,
        tokens=None if tokens is None else token_count(tokens),
        batch=batch,
        checkpoint_activations=checkpoint_activations,
        compile=compile,
        fsdp=fsdp,
        evaluate_every=None if evaluate_every is None else token_count(evaluate_every),
        patience=patience,
        report_to=report_to,
        workers=workers,
        overwrite=overwrite,
        resume=resume,
        seed=seed,
        device=device,
        access=Access(None, token),
    )
    if dry_run:
        told = asdict(figures(options.size, options.projections, options.heads))
        for name, value in told.items():
            console.print(f"{name}: {value:,}", highlight=False)
        write_json(json, told)
        return
    with watching() as watch:
        result = run(out, options, track, watch)
    if result is None:  # one of several processes, not the first
        return
    record = result.record
    console.print(
        f"{record.variant}, {record.parameters:,} parameters: held-out perplexity {record.perplexity:.3f} after "
        f"{record.tokens:,} tokens, in {record.seconds:.0f} s\n"
        f"written to {result.out} (train_log.jsonl, training.png)",
        highlight=False,
        soft_wrap=True,
    )
    write_json(json, asdict(record) | {"out": str(result.out), "log": result.log})
