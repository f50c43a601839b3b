"""The training itself: transformers' ``Trainer``, told what to do, and watched."""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..analysis.plots import training_curve
from ..checkpoint.atomic_output import disk_errors
from ..checkpoint.loading import quiet
from ..model import KvfoldError, family_of
from ..text.packing import Packed, collate
from .utilization import matmul_rate

EVALUATIONS = 10  # in a run, where not said otherwise
LOG, CURVE = "train_log.jsonl", "training.png"
EVENTS = "runs"  # where Trainer puts what tensorboard is given
LEARNED_POSITIONS = "wpe"  # GPT-2's name for the embeddings of positions
STATE = "trainer_state.json"  # what Trainer writes last into a checkpoint


@dataclass(frozen=True)
class Moment:
    """How far training is.

    ``loss`` is the last one, ``ratio`` the held-out perplexity against the teacher's, ``utilisation`` the share of the
    rate of matrix multiplications on this device (see ``matmul_rate``) that the model's own operations make up.
    """

    step: int
    steps: int
    tokens: int
    loss: float | None
    perplexity: float | None
    ratio: float | None
    tokens_per_second: float
    seconds_left: float
    utilisation: float | None = None


Watch = Callable[[Moment], None]


@dataclass(frozen=True)
class Schedule:
    """Steps of a run, tokens a step (of all processes), and steps between evaluations.

    ``flops_a_token``: of a training step, where it is known.
    """

    steps: int
    tokens_a_step: int
    evaluate_steps: int
    flops_a_token: int | None = None

    @classmethod
    def of(cls, tokens: int, step: int, evaluate_every: int | None) -> Schedule:
        """That of so many tokens, ``step`` of them a step, evaluated every so many (None: ``EVALUATIONS`` in all)."""
        steps = max(1, math.ceil(tokens / step))
        every = math.ceil(steps / EVALUATIONS) if evaluate_every is None else evaluate_every // step
        return cls(steps, step, min(max(1, every), steps))


@dataclass(frozen=True)
class TrainingSettings:
    """What the trainer is told, whatever the training is for.

    Attributes:
        learning_rate, final_rate: at its highest, and where its cosine ends. warmup_steps: in which it rises.
        batch: sequences of a step and device. accumulation: batches a step.
        clip: largest norm of the gradient. weight_decay: of AdamW, not on biases, norms and learned positions.
        checkpoint_activations, fsdp, patience, report_to, seed, device: see ``RunOptions``.
    """

    learning_rate: float
    warmup_steps: int
    batch: int
    final_rate: float = 0.0
    accumulation: int = 1
    clip: float = 1.0
    weight_decay: float = 0.0
    checkpoint_activations: bool = False
    fsdp: bool = False
    patience: int | None = None
    report_to: str = "none"
    seed: int = 0
    device: str = "cpu"


def compile_layers(*models: Any) -> None:
    """Let torch.compile compile the decoder layers of models (None: no model), one graph for all that are alike."""
    for model in models:
        for layer in [] if model is None else family_of(model.config).decoder_layers(model):
            layer.compile()


def train(
    model: Any, data: Packed, schedule: Schedule, settings: TrainingSettings, folder: Path, watch: Watch
) -> FoldedTrainer:
    """Train ``model``, whose forward pass gives its loss (see ``teach``), from the last whole checkpoint in ``folder``.

    Args:
        model: as ``choose`` made it. data: to train and evaluate on. schedule: how long. settings: all else.
        folder: for checkpoints. watch: is told how far training is.

    Returns the trainer, with the weights that did best on the held-out data; its state has the log.

    Raises KvfoldError where the loss is no number any more: the last good checkpoint stays.
    """
    earlier = last_checkpoint(folder)
    with quiet():
        trainer = FoldedTrainer(
            model=model,
            args=_arguments(schedule, settings, folder, begins=earlier is None),
            train_dataset=data.train,
            eval_dataset=data.held_out,
            data_collator=collate,
            compute_metrics=_next_token_losses,
            callbacks=[_Watcher(schedule, watch, folder)],
        )
        trainer.remove_callback(PrinterCallback)
        if settings.patience is not None:
            trainer.add_callback(EarlyStoppingCallback(settings.patience))
        trainer.loss_is_scaled_for_ga = False  # ours is the mean of a batch
        trainer.model_accepts_loss_kwargs = False
        trainer.train(resume_from_checkpoint=earlier)
    return trainer


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end, or None."""
    whole = []
    for path in folder.glob("checkpoint-*"):
        try:
            whole.append((json.loads((path / STATE).read_text(encoding="utf-8"))["global_step"], str(path)))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(whole)[1] if whole else None


class FoldedTrainer(Trainer):
    """``Trainer`` that stops where the loss is no number."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if LEARNED_POSITIONS not in name]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            self._stop("the loss")
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        if not math.isfinite(metrics.get("eval_loss", 0.0)):  # before a checkpoint is made of such weights
            self._stop("the held-out loss")
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with disk_errors(Path(str(self.args.output_dir))):
            try:
                super()._save_checkpoint(*args, **kwargs)
            except RuntimeError as error:  # what torch.save makes of a full disk
                if "inline_container" not in str(error) and "PytorchStreamWriter" not in str(error):
                    raise
                raise OSError(errno.ENOSPC, "no space left on the disk") from error

    def _stop(self, what: str) -> None:
        raise KvfoldError(
            f"{what} is no number any more at step {self.state.global_step + 1}: use a lower learning rate (it was "
            f"{self.args.learning_rate:g}); the last good checkpoint is kept, and --resume goes on from it"
        )


def _next_token_losses(prediction: Any) -> dict[str, float]:
    """Mean next-token loss of the student and, where there is one, the teacher, in nats."""
    found = prediction.predictions
    rows = found if isinstance(found, tuple) else (found,)
    return {name: float(each.mean()) for name, each in zip(("student", "teacher"), rows, strict=False)}


def _arguments(schedule: Schedule, settings: TrainingSettings, folder: Path, begins: bool) -> TrainingArguments:
    device = torch.device(settings.device)
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    sharded: dict[str, Any] = {}
    if settings.fsdp:
        sharded = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT",
                "activation_checkpointing": settings.checkpoint_activations,
            },
        }  # fmt: skip
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=schedule.steps,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": settings.final_rate},
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=settings.clip,
        optim="adamw_torch_fused",
        bf16=bf16,
        activation_checkpointing=settings.checkpoint_activations and not settings.fsdp,
        activation_checkpointing_kwargs={"use_reentrant": False},
        eval_strategy="steps",
        eval_steps=schedule.evaluate_steps,
        eval_on_start=begins,
        save_strategy="steps",
        save_steps=schedule.evaluate_steps,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, schedule.steps // 200),
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to=[] if settings.report_to == "none" else [settings.report_to],
        seed=settings.seed,
        data_seed=settings.seed,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        ddp_find_unused_parameters=False,
        **sharded,
    )


class _Watcher(TrainerCallback):
    """Completes the log's entries, writes them down as they come, and tells how far training is."""

    def __init__(self, schedule: Schedule, watch: Watch, folder: Path) -> None:
        self._schedule, self._watch, self._folder = schedule, watch, folder
        self._began = self._first = 0.0
        self._loss: float | None = None
        self._measured: dict[str, float] = {}
        self._rate: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._schedule.flops_a_token is not None and state.is_world_process_zero:
            self._rate = matmul_rate(args.device, torch.bfloat16 if args.bf16 else torch.float32) * args.world_size
        self._began, self._first = time.monotonic(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        entry["tokens"] = state.global_step * self._schedule.tokens_a_step
        if "loss" in entry:
            self._loss = entry["loss"]
        if "eval_loss" in entry:
            student, teacher = entry["eval_student"], entry.get("eval_teacher")
            self._measured = {"perplexity": math.exp(min(student, 700.0))}
            if teacher is not None:
                self._measured["ratio"] = math.exp(min(student - teacher, 700.0))
            entry.update(self._measured)
            for name in [name for name in entry if name.startswith("eval_") and name != "eval_loss"]:
                del entry[name]
        if state.is_world_process_zero:
            write_log(self._folder, state.log_history)
        self._tell(state)

    def _tell(self, state: Any) -> None:
        seconds, done = time.monotonic() - self._began, state.global_step - self._first
        pace = seconds / done if done else 0.0
        if not state.is_world_process_zero:
            return
        size, steps = self._schedule.tokens_a_step, self._schedule.steps
        speed = size / pace if pace else 0.0
        self._watch(
            Moment(
                step=state.global_step,
                steps=steps,
                tokens=state.global_step * size,
                loss=self._loss,
                perplexity=self._measured.get("perplexity"),
                ratio=self._measured.get("ratio"),
                tokens_per_second=speed,
                seconds_left=pace * (steps - state.global_step),
                utilisation=speed * (self._schedule.flops_a_token or 0) / self._rate if self._rate else None,
            )
        )


def write_course(folder: Path, history: list[dict[str, Any]], unfinished: Path) -> None:
    """Write the course of a training: ``train_log.jsonl`` and its picture, ``training.png``.

    What tensorboard was given comes along from the folder of the unfinished run, where Trainer puts it.
    """
    if (unfinished / EVENTS).is_dir():
        shutil.copytree(unfinished / EVENTS, folder / EVENTS)
    write_log(folder, history)
    figure = training_curve(history)
    figure.savefig(folder / CURVE, dpi=120)
    plt.close(figure)


def write_log(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write ``train_log.jsonl``: one line for each logged step and each evaluation."""
    lines = [json.dumps(entry) + "\n" for entry in history if "loss" in entry or "eval_loss" in entry]
    (folder / LOG).write_text("".join(lines), encoding="utf-8")
