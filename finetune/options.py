"""What an uptraining can be told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..analysis.hub import DEFAULT_ACCESS, Access
from ..model import KvfoldError
from .loss import LossWeights
from .trainable import WAYS, LoraSettings
from .training import TrainingSettings, require_report

LOSSES = ("distill", "lm", "mixed")
LEARNING_RATES = {"lora": 1e-4, "attention": 2e-5, "full": 1e-5}
TOKENS = 200_000  # where neither tokens nor minutes are given
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class UptrainOptions:
    """How to uptrain.

    Attributes:
        texts: ``TEXT`` or ``TEXT:WEIGHT`` each, to train on. evaluate: TEXT to evaluate on; None: the end of each text.
        train: what is trained, of ``WAYS``. lora: for ``lora``. adapter: PEFT folder to go on from. keep_adapter: write
            the adapter, too, before it is merged.
        loss: of ``LOSSES``. lm_share: of the next-token loss in ``mixed``. hidden: weight of the layers' distance.
        teacher: MODEL; None: the source that the recipe names.
        tokens, minutes: how much to train, at most one of them; neither: ``TOKENS``.
        sequence: tokens. batch: sequences a step and device. accumulation: batches a step.
        learning_rate: at its highest; None: ``LEARNING_RATES``. warmup: share of the steps in which it rises; then it
            falls as a cosine. clip: largest norm of the gradient.
        checkpoint_activations: recompute activations in the backward pass. compile: the layers, by torch.compile.
        fsdp: shard parameters, gradients and optimiser over the processes (torchrun); else each has all of them.
        evaluate_every: tokens; None: ten in all. patience: evaluations without a gain after which to stop.
        report_to: none, tensorboard or wandb. workers: processes that tokenise.
        overwrite: replace OUT. resume: go on with an interrupted run. seed: of data order, adapters and text ``self``.
        device: torch device. access: how models may be read.
    """

    texts: tuple[str, ...] = ("docs",)
    evaluate: str | None = None
    train: str = "lora"
    lora: LoraSettings = field(default_factory=LoraSettings)
    adapter: str | None = None
    keep_adapter: bool = False
    loss: str = "distill"
    lm_share: float = 0.5
    hidden: float = 0.0
    teacher: str | None = None
    tokens: int | None = None
    minutes: float | None = None
    sequence: int = 256
    batch: int = 1
    accumulation: int = 1
    learning_rate: float | None = None
    warmup: float = 0.05
    clip: float = 1.0
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
        for name, value, known in (
            ("what to train", self.train, WAYS), ("loss", self.loss, LOSSES)
        ):  # fmt: skip
            if value not in known:
                raise KvfoldError(f"{name} {value!r} is unknown: use {', '.join(known)}")
        if self.tokens is not None and self.minutes is not None:
            raise KvfoldError("give tokens or minutes, not both")
        lowest: dict[str, tuple[float | None, float]] = {
            "tokens": (self.tokens, 1), "sequence": (self.sequence, 2), "batch": (self.batch, 1),
            "accumulation": (self.accumulation, 1), "lora-rank": (self.lora.rank, 1), "workers": (self.workers, 1),
            "evaluate-every": (self.evaluate_every, 1), "patience": (self.patience, 1), "hidden": (self.hidden, 0),
        }  # fmt: skip
        for name, (given, least) in lowest.items():
            if given is not None and not given >= least:
                raise KvfoldError(f"{name} {given} is too little: {least} is the least")
        positive = {"minutes": self.minutes, "learning-rate": self.learning_rate, "clip": self.clip}
        for name, given in (positive | {"lora-alpha": self.lora.alpha}).items():
            if given is not None and not 0 < given < float("inf"):
                raise KvfoldError(f"{name} {given} must be a number above 0")
        if not 0 <= self.warmup < 1 or not 0 <= self.lm_share <= 1:
            raise KvfoldError("warmup and lm-share are shares: 0 to 1")
        if self.train != "lora" and (self.adapter or self.keep_adapter or self.lora.mlp):
            raise KvfoldError("adapters are for --train lora")
        require_report(self.report_to)
        if self.loss == "lm" and self.hidden:
            raise KvfoldError("--hidden needs a teacher, which loss lm does without")

    @property
    def weights(self) -> LossWeights:
        """Of the terms of the loss."""
        lm = {"distill": 0.0, "lm": 1.0, "mixed": self.lm_share}[self.loss]
        return LossWeights(1.0 - lm, lm, self.hidden)

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return self.learning_rate or LEARNING_RATES[self.train]

    def training(self, steps: int) -> TrainingSettings:
        """What the trainer is told, for a run of so many steps."""
        return TrainingSettings(
            learning_rate=self.rate,
            warmup_steps=round(self.warmup * steps),
            batch=self.batch,
            accumulation=self.accumulation,
            clip=self.clip,
            checkpoint_activations=self.checkpoint_activations,
            fsdp=self.fsdp,
            patience=self.patience,
            report_to=self.report_to,
            seed=self.seed,
            device=self.device,
        )


def token_count(written: str) -> int:
    """Read a number of tokens like 200000, 200k or 2M. Raises KvfoldError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", written.strip(), re.IGNORECASE)
    if not found:
        raise KvfoldError(f"{written!r} is no number of tokens: give one like 200k or 2M")
    return round(float(found[1]) * UNITS[found[2].upper()])
