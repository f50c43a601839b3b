"""A run of training by one process or several: what it keeps beside OUT, and what becomes of that when it ends."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ..checkpoint.resuming import Unfinished, unfinished_folder


@dataclass(frozen=True)
class Session:
    """``processes``: accelerate's. ``folder``: ``.OUT.unfinished``, for checkpoints. ``unfinished``: the first's."""

    processes: PartialState
    folder: Path
    unfinished: Unfinished | None


@contextmanager
def session(target: Path, settings: dict[str, Any], resume: bool, device: str, what: str) -> Iterator[Session]:
    """Open ``.OUT.unfinished``; it goes when the block ends well, and stays to be resumed where there is a checkpoint.

    Args:
        target: OUT. settings: what decides the result, as plain values. resume: go on with what lies there. device:
            torch device. what: the work's name, for messages.

    Raises:
        KvfoldError: where the work that lies there had other settings.
    """
    processes = PartialState(cpu=torch.device(device).type == "cpu")
    folder, unfinished = unfinished_folder(target), None
    if processes.is_main_process:
        unfinished = Unfinished(target, settings, resume, what)
    processes.wait_for_everyone()
    keeping: AbstractContextManager[None] = nullcontext()
    if unfinished is not None:
        keeping = unfinished.kept_where_worthwhile(
            lambda: any(folder.glob("checkpoint-*")), "the last checkpoint", inputs=False
        )
    with keeping, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers, and the like
        yield Session(processes, folder, unfinished)


def is_sharded(fsdp: bool) -> bool:
    """Whether parameters are spread over the processes: torchrun with --fsdp, or accelerate's config asks for it."""
    return fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
