"""A run of training by one process or several: what it keeps beside OUT, and what becomes of that when it ends."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ..checkpoint.atomic_output import DiskError
from ..checkpoint.resuming import Unfinished


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
    unfinished = None
    if processes.is_main_process:
        unfinished = Unfinished(target, settings, resume, what)
    processes.wait_for_everyone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers, and the like
            yield Session(processes, target.parent / f".{target.name}.unfinished", unfinished)
    except BaseException as error:
        if unfinished is not None:
            _leave(unfinished, error)
        raise
    if unfinished is not None:
        unfinished.discard()


def is_sharded(fsdp: bool) -> bool:
    """Whether parameters are spread over the processes: torchrun with --fsdp, or accelerate's config asks for it."""
    return fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def _leave(unfinished: Unfinished, error: BaseException) -> None:
    """Keep what is worth going on from: there is a checkpoint. Raises DiskError with that said, for a full disk."""
    if not any(unfinished.folder.glob("checkpoint-*")):
        unfinished.discard()
        return
    unfinished.close()
    if isinstance(error, DiskError):
        raise DiskError(f"{error}; the last checkpoint is kept, and --resume goes on from it") from error
