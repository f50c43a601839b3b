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

TEXT_HELP = "TEXT: a .txt, .jsonl or .parquet file, hf:NAME[:CONFIG[:SPLIT]], docs (Python's manual)"
