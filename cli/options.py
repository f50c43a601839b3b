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
