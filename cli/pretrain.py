"""kvfold pretrain"""

from __future__ import annotations

from typing import Annotated

import typer

from .options import TEXT_HELP, Device, Json, Seed, Token
from .output import check_json, console, track, write_json
from .training import watching


def pretrain(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    size: Annotated[str, typer.Option(help="3m, 30m, 300m, 1.2b (the study's), or a YAML file like theirs.")] = "3m",
    variant: Annotated[
        str, typer.Option(help="Projections that are one: qkv, q=k-v, q=k-v+, q-k=v, q=k=v or q=k=v+.")
    ] = "qkv",
    kv_heads: Annotated[
        int | None, typer.Option(help="Heads of keys and values (qkv, q-k=v). Default: as many as query heads.")
    ] = None,
    text: Annotated[
        str, typer.Option(metavar="TEXT", help=f"{TEXT_HELP}, or a folder that prepare has made.")
    ] = "docs",
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder, a Hub id, or train:N, trained on TEXT. Default: the size's.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="To train on. Default: the size's.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences at a time, on each device; the tokens of a step stay.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell the model's figures, and train nothing.")] = False,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Less memory: compute activations again when needed.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the layers by torch.compile.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard over the processes of torchrun (FSDP2).")] = False,
    evaluate_every: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens between evaluations. Default: ten evaluations.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many evaluations that were no better. Default: never.")
    ] = None,
    report_to: Annotated[str, typer.Option(help="none, tensorboard or wandb.")] = "none",
    workers: Annotated[int, typer.Option(help="Processes that tokenise.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run to OUT that was interrupted.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT where it exists.")] = False,
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

    from ..analysis.hub import Access
    from ..finetune.options import token_count
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
