"""Uptraining: a converted checkpoint in, one of the same kind out, closer to its source."""

from __future__ import annotations

import math
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..checkpoint.atomic_output import copy_beside, require_free, whole_folder
from ..checkpoint.loading import DTYPES, Checkpoint, load, load_tokenizer, locate, quiet
from ..checkpoint.progress import Track, silent
from ..checkpoint.record import Recipe
from ..checkpoint.source_identity import describe_source, identity
from ..checkpoint.training_record import Pretrained, is_pretrained
from ..model import KvfoldError, family_to_fold, is_folded
from ..text.generated import WRITTEN, Writer, usual_texts
from ..text.mixture import WeightedText, named_texts, shares
from ..text.packing import Packed, Packing, packed_texts
from ..text.sources import EVALUATE, TextSource
from .distillation import teach
from .session import Session, is_sharded, session
from .teacher import load_teacher, shard_teacher
from .trainable import choose, share_frozen, trained_parameters
from .training import EVALUATIONS, FoldedTrainer, Schedule, Watch, compile_layers, train, write_course
from .uptrain_options import TOKENS, UptrainOptions


class NoGain(KvfoldError):
    """No evaluation of an uptraining was better than its start, so that there is nothing to write."""


@dataclass(frozen=True)
class Uptraining:
    """What came out: the folder, the recipe written into it, and the training log."""

    out: Path
    recipe: Recipe | Pretrained
    log: list[dict[str, Any]]


def uptrain(
    path: str, out: str, options: UptrainOptions, track: Track = silent, watch: Watch = lambda moment: None
) -> Uptraining | None:
    """Train the converted checkpoint at ``path`` against its source, and write the result into the folder ``out``.

    Run by several processes (torchrun, accelerate), all of them call this; the first one writes and returns what came
    out, the others return None. An interruption leaves ``.OUT.unfinished``, from which ``options.resume`` goes on.

    Raises KvfoldError for bad input, for a loss that is no number any more, or a full disk; NoGain where training did
    not help.
    """
    target = Path(out).expanduser()
    require_free(target, options.overwrite, Path(path).expanduser())
    evaluate = None if options.evaluate is None else TextSource(options.evaluate, EVALUATE)
    location = locate(path, options.access)
    config = None if location.gguf else AutoConfig.from_pretrained(location.folder)
    if config is None or not is_folded(config):
        if config is not None:
            family_to_fold(config)  # what cannot be converted is told so
        raise KvfoldError(f"{path} is not folded: convert it first, then uptrain the result")
    recipe = Pretrained.read(location.folder) if is_pretrained(location.folder) else Recipe.read(location.folder)
    if recipe.source is None and options.teacher is None and options.loss != "lm":
        raise KvfoldError(f"{path} was trained from scratch and has no source: give --teacher, or use --loss lm")
    if not options.texts:
        usual = ("docs",) if options.loss == "lm" else usual_texts(load_tokenizer(location))
        options = replace(options, texts=usual)
    texts = named_texts(options.texts)
    started = time.monotonic()
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in location.files}
    settings = options.decisive() | {"model": str(location.folder), "files": files}
    del settings["keep_adapter"]  # (what is written besides)
    with session(target, settings, options.resume, options.device, "uptraining") as opened:
        run = _Run(path, recipe, texts, evaluate, options, opened, track)
        trainer = run.train(watch)
        return run.write(trainer, target, time.monotonic() - started)


def tokens_seen(recipe: Recipe | Pretrained) -> dict[str, int]:
    """How many tokens of each TEXT a model was calibrated on and uptrained on, of those that are told."""
    read = [(run["texts"], run["tokens_trained"]) for run in recipe.uptraining]
    if isinstance(recipe, Recipe) and recipe.calibration and recipe.calibration.get("texts"):
        told = recipe.calibration
        read.append((told["texts"], told["tokens"] + told["held_out_tokens"]))
    seen: dict[str, int] = {}
    for specs, tokens in read:
        texts = named_texts(specs)
        for text, share in zip(texts, shares(texts), strict=True):
            seen[text.source.spec] = seen.get(text.source.spec, 0) + math.ceil(tokens * share)
    return seen


class _Run:
    """One run, with what it has loaded."""

    def __init__(
        self, path: str, recipe: Recipe | Pretrained, texts: list[WeightedText], evaluate: TextSource | None,
        options: UptrainOptions, opened: Session, track: Track,
    ) -> None:  # fmt: skip
        self.path, self.recipe, self.texts, self.evaluate = path, recipe, texts, evaluate
        self.options, self.folder, self.processes, self.track = options, opened.folder, opened.processes, track
        processes = opened.processes
        self.sharded = is_sharded(options.fsdp)
        device = options.device if processes.num_processes == 1 else str(processes.device)
        on_cpu = torch.device(device).type == "cpu"
        # Adapters may sit on rounded weights; weights that are trained themselves must not be rounded.
        dtype = "float32" if on_cpu or options.train != "lora" else "auto"
        self.student = load(path, dtype, device, options.access)
        self.teacher = None
        if options.loss != "lm":
            held = "float32" if on_cpu else "auto"
            self.teacher = load_teacher(options.teacher, recipe.source, self.student, held, device, options.access)
        longest = getattr(self.student.config, "max_position_embeddings", None)
        if longest and options.sequence > longest:
            raise KvfoldError(
                f"sequences of {options.sequence} tokens are longer than the {longest} positions of {path}"
            )
        if self.student.tokenizer is None:
            raise KvfoldError(f"{path} has no tokenizer, which text needs")

    def train(self, watch: Watch) -> FoldedTrainer:
        options, student = self.options, self.student.model
        self.model = choose(student, options.train, options.lora, options.seed, options.adapter)
        self.trained = trained_parameters(self.model)
        teacher = None if self.teacher is None else self.teacher.model
        self.schedule = self._schedule(teacher)
        with self.processes.main_process_first():
            self.data = self._data()
        if teacher is not None and not self.sharded:
            share_frozen(self.model, teacher)
        if options.compile:
            compile_layers(student, teacher)
        if self.sharded and teacher is not None:
            shard_teacher(teacher, self.processes.device.type, self.processes.num_processes)
        teach(student, teacher, options.weights)
        settings = options.training(self.schedule.steps)
        return train(self.model, self.data, self.schedule, settings, self.folder, watch)

    def _schedule(self, teacher: Any) -> Schedule:
        """How long to train. Minutes are turned into tokens by trying a step (once: a resumed run keeps the number)."""
        options, count = self.options, self.processes.num_processes
        step = options.sequence * options.batch * options.accumulation * count
        if options.minutes is None:
            return Schedule.of(options.tokens or TOKENS, step, options.evaluate_every)
        if count > 1:
            raise KvfoldError("--minutes is for one process: with several, give --tokens")
        told = self.folder / "tokens.txt"
        if not told.is_file():
            told.write_text(str(self._tokens_in(options.minutes, teacher)), encoding="utf-8")
        return Schedule.of(int(told.read_text(encoding="utf-8")), step, options.evaluate_every)

    def _tokens_in(self, minutes: float, teacher: Any) -> int:
        """Tokens that can be trained on in so long, evaluations included."""
        options = self.options
        size = (options.batch, options.sequence)
        ids = torch.randint(self.student.config.vocab_size, size, generator=torch.Generator().manual_seed(options.seed))
        batch = {"input_ids": ids, "position_ids": torch.arange(size[1]).expand(size), "labels": ids}
        batch = {name: tensor.to(self.student.model.device) for name, tensor in batch.items()}
        seconds = 0.0
        teach(self.student.model, teacher, options.weights)
        for _ in range(2):  # the first one is slower
            began = time.monotonic()
            self.model.train()(**batch)["loss"].backward()
            self.model.zero_grad()
            seconds = time.monotonic() - began
        for each in (self.student.model, teacher):
            if each is not None:
                del each.forward
        evaluated = EVALUATIONS + 3
        token = seconds / (options.batch * options.sequence)
        # Evaluating takes a third of the time of training on as many tokens, and a twentieth of the text is held out.
        return max(1, int(minutes * 60 / (token * (1 + evaluated / 3 / 20))))

    def _data(self) -> Packed:
        options = self.options
        packing = Packing(
            options.sequence,
            -(-self.schedule.steps * self.schedule.tokens_a_step // options.sequence),
            options.workers,
            options.seed,
        )
        with self.track("packing text", 1) as advance:
            packed = packed_texts(
                self.texts, self.evaluate, self.student.tokenizer, packing, self._writer(), tokens_seen(self.recipe)
            )
            advance(1)
        return packed

    def _writer(self) -> Writer | None:
        """Who writes text ``self`` and ``chat``: the source. None where none is wanted: to name it is to hash it."""
        wanted = [text.source for text in self.texts] + ([] if self.evaluate is None else [self.evaluate])
        if not any(each.spec in WRITTEN for each in wanted):
            return None
        source = self.teacher or self.student
        described = describe_source(source.path, source.folder, source.config)
        return Writer(lambda: source.model, source.tokenizer, self.options.seed, identity(described), self.track)

    def write(self, trainer: FoldedTrainer, target: Path, seconds: float) -> Uptraining | None:
        """Merge and write the result; None in all processes but the first."""
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if self.sharded else None
        if not self.processes.is_main_process:
            return None
        model = self.model if state is None else self._rebuilt(state)
        log, recipe = trainer.state.log_history, self._told(trainer, seconds)
        with whole_folder(target) as folder, quiet():
            if self.options.keep_adapter:
                model.save_pretrained(folder / "adapter")
            merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
            with suppress(AttributeError):
                del merged.forward
            merged.to(DTYPES[recipe.dtype]).save_pretrained(folder)
            copy_beside(self.student.folder, folder)
            if (plan := self.student.folder / "plan.yaml").is_file():
                shutil.copyfile(plan, folder / plan.name)
            recipe.write(folder)
            write_course(folder, log, self.folder)
        return Uptraining(target, recipe, log)

    def _rebuilt(self, state: dict[str, torch.Tensor]) -> Any:
        """The trained model in one piece, of the state dict that the processes have put together."""
        options = self.options
        fresh: Checkpoint = load(self.path, "float32", "cpu", options.access)
        model = choose(fresh.model, options.train, options.lora, options.seed, options.adapter)
        model.load_state_dict(state, strict=False)
        return model

    def _told(self, trainer: FoldedTrainer, seconds: float) -> Recipe | Pretrained:
        """The recipe with this run."""
        options, log = self.options, [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        best = min(log, key=lambda entry: entry["eval_loss"])
        if best is log[0]:
            raise NoGain(
                f"nothing was better than the start (held-out loss {best['eval_loss']:.4f}): try a lower learning rate "
                f"than {options.rate:g}, or more tokens"
            )
        size = self.schedule.tokens_a_step
        run: dict[str, Any] = {
            "texts": list(options.texts),
            "held_out": options.evaluate,
            "teacher": None if self.teacher is None else self.teacher.path,
            "train": options.train,
            "trained_parameters": self.trained,
            "loss": asdict(options.weights),
            "tokens": best["tokens"],
            "tokens_trained": trainer.state.global_step * size,
            "sequence": options.sequence,
            "tokens_a_step": size,
            "learning_rate": options.rate,
            "seed": options.seed,
            "seconds": seconds,
        }
        run |= {name: {"before": log[0][name], "after": best[name]} for name in ("perplexity", "ratio") if name in best}
        if options.train == "lora":
            run["lora"] = asdict(options.lora)
        return replace(self.recipe, uptraining=[*self.recipe.uptraining, run])
