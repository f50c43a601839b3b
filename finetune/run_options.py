"""What any training can be told, whatever it is for."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

from ..checkpoint.hub import DEFAULT_ACCESS, Access
from ..checkpoint.option_checks import require_least
from ..model import KvfoldError

REPORTS = ("none", "tensorboard", "wandb")
# What may be otherwise when an interrupted run goes on: it ends in the same weights.
UNDECISIVE = ("overwrite", "resume", "access", "report_to", "workers", "device")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a training runs.

    Attributes:
        tokens: to train on; None: as many as the kind of training takes.
        checkpoint_activations: recompute activations in the backward pass. compile: the layers, by torch.compile.
        fsdp: shard parameters, gradients and optimiser over the processes (torchrun); else each has all of them.
        evaluate_every: tokens; None: ten in all. patience: evaluations without a gain after which to stop.
        report_to: none, tensorboard or wandb. workers: processes that tokenise.
        overwrite: replace OUT. resume: go on with an interrupted run.
        seed: of all that is drawn at random. device: torch device. access: how models and text may be read.
    """

    tokens: int | None = None
    checkpoint_activations: bool = False
    compile: bool = False
    fsdp: bool = False
    evaluate_every: int | None = None
    patience: int | None = None
    report_to: str = "none"
    workers: int = 1
    overwrite: bool = False
    resume: bool = False
    seed: int = 0
    device: str = "cpu"
    access: Access = DEFAULT_ACCESS

    def __post_init__(self) -> None:
        require_report(self.report_to)
        require_least(
            {"tokens": self.tokens, "evaluate-every": self.evaluate_every, "patience": self.patience,
             "workers": self.workers}
        )  # fmt: skip

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the result, as plain values."""
        return {name: value for name, value in asdict(self).items() if name not in UNDECISIVE}


def require_report(report_to: str) -> None:
    """Raises KvfoldError for a report that is unknown, or whose package is not there."""
    if report_to not in REPORTS:
        raise KvfoldError(f"report {report_to!r} is unknown: use {', '.join(REPORTS)}")
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        raise KvfoldError(f"--report-to {report_to} needs the package of this name: pip install {report_to}")
