"""What an uptraining can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checkpoint.option_checks import require_least
from ..model import KvfoldError
from .loss import LossWeights
from .run_options import RunOptions
from .trainable import WAYS, LoraSettings
from .training import TrainingSettings

LOSSES = ("distill", "lm", "mixed")
LEARNING_RATES = {"lora": 1e-4, "attention": 2e-5, "full": 1e-5}
TOKENS = 200_000  # where neither tokens nor minutes are given


@dataclass(frozen=True, kw_only=True)
class UptrainOptions(RunOptions):
    """How to uptrain; see ``RunOptions``, too.

    Attributes:
        texts: ``TEXT`` or ``TEXT:WEIGHT`` each, to train on; none: ``usual_texts``, or without a teacher that could
            write, ``docs``. evaluate: TEXT to evaluate on; None: the end of each text.
        train: what is trained, of ``WAYS``. lora: for ``lora``. adapter: PEFT folder to go on from. keep_adapter: write
            the adapter, too, before it is merged.
        loss: of ``LOSSES``. lm_share: of the next-token loss in ``mixed``. hidden: weight of the layers' distance.
        teacher: MODEL; None: the source that the recipe names.
        minutes: how long to train, instead of a number of tokens; neither: ``TOKENS``.
        sequence: tokens. batch: sequences a step and device. accumulation: batches a step.
        learning_rate: at its highest; None: ``LEARNING_RATES``. warmup: share of the steps in which it rises; then it
            falls as a cosine. clip: largest norm of the gradient.
    """

    texts: tuple[str, ...] = ()
    evaluate: str | None = None
    train: str = "lora"
    lora: LoraSettings = field(default_factory=LoraSettings)
    adapter: str | None = None
    keep_adapter: bool = False
    loss: str = "distill"
    lm_share: float = 0.5
    hidden: float = 0.0
    teacher: str | None = None
    minutes: float | None = None
    sequence: int = 256
    batch: int = 1
    accumulation: int = 1
    learning_rate: float | None = None
    warmup: float = 0.05
    clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (
            ("what to train", self.train, WAYS), ("loss", self.loss, LOSSES)
        ):  # fmt: skip
            if value not in known:
                raise KvfoldError(f"{name} {value!r} is unknown: use {', '.join(known)}")
        if self.tokens is not None and self.minutes is not None:
            raise KvfoldError("give tokens or minutes, not both")
        require_least({"batch": self.batch, "accumulation": self.accumulation, "lora-rank": self.lora.rank})
        require_least({"sequence": self.sequence}, 2)
        require_least({"hidden": self.hidden}, 0)
        positive = {"minutes": self.minutes, "learning-rate": self.learning_rate, "clip": self.clip}
        for name, given in (positive | {"lora-alpha": self.lora.alpha}).items():
            if given is not None and not 0 < given < float("inf"):
                raise KvfoldError(f"{name} {given} must be a number above 0")
        if not 0 <= self.warmup < 1 or not 0 <= self.lm_share <= 1:
            raise KvfoldError("warmup and lm-share are shares: 0 to 1")
        if self.train != "lora" and (self.adapter or self.keep_adapter or self.lora.mlp):
            raise KvfoldError("adapters are for --train lora")
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
