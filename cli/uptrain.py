"""``kvfold uptrain``."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    TEXT_HELP,
    WRITTEN_HELP,
    AllowPickle,
    CheckpointActivations,
    Compile,
    Device,
    EvaluateEvery,
    Fsdp,
    Json,
    Model,
    Overwrite,
    Patience,
    ReportTo,
    ResumeRun,
    Seed,
    Token,
    Workers,
)
from .output import check_json, console, track, write_json
from .training import watching


def uptrain(
    model: Model,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT[:WEIGHT]",
            help=f"To train on, again for a mixture. {TEXT_HELP}, {WRITTEN_HELP}. Default: docs and chat (self "
            "without a chat template).",
        ),
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Held-out text. Default: the end of each text is held out.")
    ] = None,
    train: Annotated[
        str,
        typer.Option(help="lora: adapters on the attention; attention: it and the norms in full; full: everything."),
    ] = "lora",
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 32,
    lora_alpha: Annotated[
        float | None, typer.Option(help="Their scale, times the rank. Default: twice the rank.")
    ] = None,
    lora_mlp: Annotated[bool, typer.Option("--lora-mlp", help="Adapters on the MLPs, too.")] = False,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="Go on from this PEFT adapter of MODEL.")] = None,
    keep_adapter: Annotated[bool, typer.Option("--keep-adapter", help="Write the adapter, too: OUT/adapter.")] = False,
    loss: Annotated[
        str, typer.Option(help="distill: KL from the teacher; lm: next tokens, no teacher; mixed: both.")
    ] = "distill",
    lm_share: Annotated[float, typer.Option(help="Share of the next-token loss in mixed.")] = 0.5,
    hidden: Annotated[float, typer.Option(help="Weight of the distance between the layers' outputs.")] = 0.0,
    teacher: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Default: the source that kvfold.json names.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="To train on: 200k, 2M, … Default: 200k.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Train for about so long, instead of a number of tokens.")
    ] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences a step, on each device.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Batches whose gradients make a step.")] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(help="At its highest. Default: 1e-4; attention 2e-5, full 1e-5.")
    ] = None,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the rate rises; then a cosine.")] = 0.05,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
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
    allow_pickle: AllowPickle = False,
) -> None:
    """Train the converted checkpoint MODEL against its source, and write the result to the folder OUT.

    Example: kvfold uptrain folded/ uptrained/ --text mine.jsonl --tokens 2M
    """
    check_json(json, model, out)
    from ..checkpoint.hub import Access
    from ..checkpoint.option_checks import token_count
    from ..finetune.trainable import LoraSettings
    from ..finetune.uptrain import uptrain as run
    from ..finetune.uptrain_options import UptrainOptions

    options = UptrainOptions(
        texts=tuple(text or ()),
        evaluate=evaluate,
        train=train,
        lora=LoraSettings(lora_rank, 2.0 * lora_rank if lora_alpha is None else lora_alpha, lora_mlp),
        adapter=adapter,
        keep_adapter=keep_adapter,
        loss=loss,
        lm_share=lm_share,
        hidden=hidden,
        teacher=teacher,
        tokens=None if tokens is None else token_count(tokens),
        minutes=minutes,
        sequence=sequence,
        batch=batch,
        accumulation=accumulation,
        learning_rate=learning_rate,
        warmup=warmup,
        clip=clip,
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
        access=Access(None, token, allow_pickle),
    )
    with watching() as watch:
        result = run(model, out, options, track, watch)
    if result is None:  # one of several processes, not the first
        return
    (*_, last) = result.recipe.uptraining
    name = "ratio" if "ratio" in last else "perplexity"
    what = "held-out perplexity against the teacher's" if name == "ratio" else "held-out perplexity"
    console.print(
        f"{what} {last[name]['before']:.4f} → {last[name]['after']:.4f} after {last['tokens']:,} tokens, "
        f"in {last['seconds']:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"written to {result.out} (train_log.jsonl, training.png)", highlight=False, soft_wrap=True)
    write_json(json, last | {"out": str(result.out), "log": result.log})
