"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id or .gguf file.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON, too.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of whatever is random.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
Revision = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a Hub id. Default: its main branch.")
]
Token = Annotated[
    str | None,
    typer.Option(
        help="Hub token for private and gated models. Default: the variable HF_TOKEN (which, unlike an option, other "
        "users of the machine cannot see) or a login."
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Read pytorch_model.bin where there are no safetensors: tensors only."),
]

TEXT_HELP = "TEXT: a .txt, .jsonl or .parquet file, hf:NAME[:CONFIG[:SPLIT]], docs (Python's manual)"
WRITTEN_HELP = "self (the model writes it) or chat (it writes chats)"
CALIBRATE_HELP = (
    f"To calibrate on, again for a mixture. {TEXT_HELP}, {WRITTEN_HELP}. Default: docs and chat (self without a chat "
    "template), half of each."
)

# Of several commands that train or prepare training:
CheckpointActivations = Annotated[
    bool, typer.Option("--checkpoint-activations", help="Less memory: compute activations again when needed.")
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the layers by torch.compile.")]
Fsdp = Annotated[bool, typer.Option("--fsdp", help="Shard over the processes of torchrun (FSDP2).")]
EvaluateEvery = Annotated[
    str | None, typer.Option(metavar="N", help="Tokens between evaluations. Default: ten evaluations.")
]
Patience = Annotated[
    int | None, typer.Option(help="Stop after so many evaluations that were no better. Default: never.")
]
ReportTo = Annotated[str, typer.Option(help="none, tensorboard or wandb.")]
Workers = Annotated[int, typer.Option(help="Processes that tokenise.")]
ResumeRun = Annotated[bool, typer.Option("--resume", help="Go on with the run to OUT that was interrupted.")]
Overwrite = Annotated[bool, typer.Option(help="Replace OUT where it exists.")]
Size = Annotated[str, typer.Option(help="3m, 30m, 300m, 1.2b (the study's), or a YAML file like theirs.")]
Shards = Annotated[str, typer.Option(metavar="TEXT", help=f"{TEXT_HELP}, or a folder that prepare has made.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="A folder, a Hub id, or train:N, trained on TEXT. Default: the size's.")
]
