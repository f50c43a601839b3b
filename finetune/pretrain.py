"""Training from scratch: a size, a variant and text in, a checkpoint out."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.atomic_output import require_free, whole_folder
from ..checkpoint.loading import quiet
from ..checkpoint.option_checks import require_least
from ..checkpoint.progress import Track, silent
from ..checkpoint.training_record import Pretrained
from ..model import KvfoldError, Variant, variant_named
from ..text.packing import Packed, tokenizer_identity
from ..text.prepare import PrepareOptions, prepare
from ..text.token_shards import TOKENIZER, Index, Sequences, is_prepared
from ..text.tokenizers import named_tokenizer
from .distillation import teach
from .loss import LossWeights
from .run_options import RunOptions
from .session import Session, is_sharded, session
from .sizes import Figures, Size, figures, model_config, new_model
from .training import (
    FoldedTrainer,
    Schedule,
    TrainingSettings,
    Watch,
    compile_layers,
    train,
    write_course,
)

EVALUATED = 65_536  # tokens of the validation shards
VALIDATION = 0.05  # of a text that is prepared on the way
PADDED = 64  # vocabularies are padded to a multiple of this, for the matrix multiplications


@dataclass(frozen=True)
class PretrainOptions(RunOptions):
    """How to train from scratch; see ``RunOptions``, too.

    Attributes:
        size: of the model, with its settings. variant: of ``VARIANTS``. key_value_heads: None: as many as query heads.
        text: TEXT, or a folder that ``prepare`` made. tokenizer: None: the size's; a prepared folder has its own.
        batch: sequences a device; None: the size's.
    """

    size: Size
    variant: str = "qkv"
    key_value_heads: int | None = None
    text: str = "docs"
    tokenizer: str | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.projections.require_heads(self.size.heads, self.heads)
        require_least({"batch": self.batch})
        if self.tokenizer is not None and is_prepared(self.text):
            raise KvfoldError(f"{self.text} is prepared, with a tokenizer of its own: leave out --tokenizer")

    @property
    def projections(self) -> Variant:
        return variant_named(self.variant)

    @property
    def heads(self) -> int:
        """Heads of keys and values."""
        return self.size.heads if self.key_value_heads is None else self.key_value_heads


@dataclass(frozen=True)
class Pretraining:
    """What came out: the folder, the record written into it, and the training log."""

    out: Path
    record: Pretrained
    log: list[dict[str, Any]]


def pretrain(
    out: str, options: PretrainOptions, track: Track = silent, watch: Watch = lambda moment: None
) -> Pretraining | None:
    """Train a model from scratch and write it into the folder ``out``.

    Run by several processes (torchrun, accelerate), all of them call this; the first one writes and returns what came
    out, the others return None. An interruption leaves ``.OUT.unfinished``, from which ``options.resume`` goes on.

    Raises KvfoldError for bad input, for a loss that is no number any more, or a full disk.
    """
    target = Path(out).expanduser()
    require_free(target, options.overwrite, Path(options.text).expanduser())
    prepared = Index.read(Path(options.text).expanduser()) if is_prepared(options.text) else None
    settings = options.decisive() | {"shards": None if prepared is None else asdict(prepared)}
    settings |= {f"size.{name}": value for name, value in settings.pop("size").items()}
    started = time.monotonic()
    with session(target, settings, options.resume, options.device, "training") as opened:
        run = _Run(options, opened, track)
        trainer = run.train(watch)
        return run.write(trainer, target, time.monotonic() - started)


def shards_of(options: PretrainOptions, made: Path, track: Track) -> Path:
    """The folder of shards: what the user gave, or ``made`` of the text, and kept for a resumed run."""
    if is_prepared(options.text):
        return Path(options.text).expanduser()
    if not is_prepared(str(made)):
        how = PrepareOptions(
            options.tokenizer or options.size.tokenizer, validation=VALIDATION, workers=options.workers,
            access=options.access, resume=True,
        )  # fmt: skip
        prepare(options.text, str(made), how, track)
    return made


class _Run:
    """One run, with what it has loaded."""

    def __init__(self, options: PretrainOptions, opened: Session, track: Track) -> None:
        self.options, self.folder, self.processes = options, opened.folder, opened.processes
        self.sharded = is_sharded(options.fsdp)
        self.size = options.size.for_devices(self.processes.num_processes, options.batch)
        with self.processes.main_process_first():
            shards = shards_of(options, self.folder / "shards", track)
        self.tokenizer = named_tokenizer(str(shards / TOKENIZER), options.access)
        self.data = self._data(shards)
        vocabulary = -(-len(self.tokenizer) // PADDED) * PADDED
        self.config = model_config(self.size, options.projections, options.heads, vocabulary)
        self.config.bos_token_id, self.config.eos_token_id = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        self.figures: Figures = figures(self.size, options.projections, options.heads, vocabulary)

    def train(self, watch: Watch) -> FoldedTrainer:
        options, size = self.options, self.size
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(options.seed)
            self.model = new_model(self.config)
        schedule = Schedule.of(options.tokens or size.tokens, self.figures.tokens_per_step, options.evaluate_every)
        self.schedule = replace(schedule, flops_a_token=self.figures.flops_per_token)
        if options.compile:
            compile_layers(self.model)
        teach(self.model, None, LossWeights(distill=0.0, lm=1.0))
        settings = TrainingSettings(
            learning_rate=size.learning_rate,
            final_rate=size.final_rate,
            warmup_steps=min(size.warmup_steps, schedule.steps // 2),
            batch=size.batch,
            accumulation=size.accumulation,
            clip=size.clip,
            weight_decay=size.weight_decay,
            checkpoint_activations=options.checkpoint_activations,
            fsdp=options.fsdp,
            patience=options.patience,
            report_to=options.report_to,
            seed=options.seed,
            device=options.device,
        )
        return train(self.model, self.data, self.schedule, settings, self.folder, watch)

    def _data(self, shards: Path) -> Packed:
        index, sequence = Index.read(shards), self.size.sequence
        found = tokenizer_identity(self.tokenizer)
        if index.tokenizer != found:
            raise KvfoldError(f"the tokenizer in {shards} is not the one that made its shards: prepare again")
        train, held_out = (
            Sequences(shards, part, sequence, index.tokenizer) for part in (index.train, index.validation)
        )
        for name, part in (("training", train), ("validation", held_out)):
            if not len(part):
                raise KvfoldError(f"the {name} part of {shards} is shorter than one sequence of {sequence} tokens")
        held_out = torch.utils.data.Subset(held_out, range(min(len(held_out), -(-EVALUATED // sequence))))  # type: ignore[arg-type, assignment]
        return Packed(train, held_out, {})

    def write(self, trainer: FoldedTrainer, target: Path, seconds: float) -> Pretraining | None:
        """Write the result; None in all processes but the first."""
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if self.sharded else None
        if not self.processes.is_main_process:
            return None
        model = self.model
        if state is not None:
            model = new_model(self.config)
            model.load_state_dict(state, strict=False)
        with suppress(AttributeError):
            del model.forward
        record, log = self._record(trainer, seconds), trainer.state.log_history
        with whole_folder(target) as folder, quiet():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            record.write(folder)
            write_course(folder, log, self.folder)
        return Pretraining(target, record, log)

    def _record(self, trainer: FoldedTrainer, seconds: float) -> Pretrained:
        options, told = self.options, self.figures
        best = min(
            (entry for entry in trainer.state.log_history if "eval_loss" in entry), key=lambda entry: entry["eval_loss"]
        )
        tokens = trainer.state.global_step * self.schedule.tokens_a_step
        return Pretrained(
            variant=options.variant,
            key_value_heads=options.heads,
            size=asdict(self.size),
            text=options.text,
            parameters=told.parameters,
            attention_parameters=told.attention_parameters,
            cache_bytes_per_token=told.cache_bytes_per_token,
            wanted_tokens=options.tokens or self.size.tokens,
            tokens=int(best["tokens"]),
            tokens_trained=tokens,
            flops=float(tokens * told.flops_per_token),
            perplexity=best["perplexity"],
            seed=options.seed,
            seconds=round(seconds, 1),
        )
