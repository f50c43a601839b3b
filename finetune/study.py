"""The study at one size: variants trained with the same seeds, data and steps, and what each loses against qkv."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt

from ..analysis.perplexity import CACHE_PROBE, cache_bytes_per_token
from ..analysis.plots import degradations
from ..checkpoint.loading import load
from ..checkpoint.progress import Track, silent
from ..checkpoint.training_record import Pretrained, is_pretrained
from ..model import VARIANTS, KvfoldError, variant_named
from ..text.token_shards import Index, is_prepared
from .pretrain import PretrainOptions, pretrain, shards_of
from .sizes import CACHE_BYTES
from .training import Watch

# Perplexity lost against qkv, per cent: arXiv 2606.04032.
PUBLISHED = {
    "300M": {"q-k=v": 3.1, "q=k-v": 4.9, "q=k=v": 25.4, "q-gqa-4": 3.9, "q-mqa": 4.8},
    "1.2B": {"q-k=v": 2.48},
}


@dataclass(frozen=True)
class Column:
    """One variant of a study: its name, the projections it shares, its heads of keys and values (None: all)."""

    name: str
    variant: str
    key_value_heads: int | None

    @classmethod
    def parse(cls, name: str) -> Column:
        """Read a variant's name, or ``mqa``, ``gqa-N`` (qkv), ``q-mqa``, ``q-gqa-N`` (q-k=v). Raises KvfoldError."""
        if name in VARIANTS:
            return cls(name, name, None)
        found = re.fullmatch(r"(q-)?(mqa|gqa-([1-9]\d*))", name)
        if not found:
            raise KvfoldError(f"variant {name!r} is unknown: use {', '.join(VARIANTS)}, mqa, gqa-N, q-mqa or q-gqa-N")
        return cls(name, "q-k=v" if found[1] else "qkv", int(found[3] or 1))


@dataclass(frozen=True)
class Row:
    """A variant's figures.

    Attributes:
        name: of the variant. parameters, attention_parameters: of the model.
        cache_bytes_per_token: read off a filled cache, in 16 bits. perplexities: on held-out text, one for each seed.
        degradation: mean over the seeds of what is lost against qkv with that seed, per cent; None without qkv.
        degradations: each seed's.
    """

    name: str
    parameters: int
    attention_parameters: int
    cache_bytes_per_token: float
    perplexities: list[float]
    degradations: list[float]

    @property
    def degradation(self) -> float | None:
        return sum(self.degradations) / len(self.degradations) if self.degradations else None


def study(
    work: str,
    variants: Sequence[str],
    seeds: int,
    options: PretrainOptions,
    track: Track = silent,
    watch: Callable[[str], Watch] = lambda name: lambda moment: None,
) -> list[Row]:
    """Train variants and compare them; what is in the folder ``work`` already is not trained again.

    Args:
        work: folder for the models, the shards, ``study.json`` and ``study.png``. variants: see ``Column.parse``.
        seeds: how many, from ``options.seed`` on. options: of every training; its variant and heads are not used.
        watch: makes what is told how far the training of this name is.

    Raises KvfoldError for bad input, or a model in ``work`` that was trained in another way.
    """
    columns = [Column.parse(name) for name in variants]
    for column in columns:  # before anything is trained
        heads = options.size.heads if column.key_value_heads is None else column.key_value_heads
        variant_named(column.variant).require_heads(options.size.heads, heads)
    if seeds < 1 or not columns:
        raise KvfoldError("a study needs a variant and a seed at least")
    folder = Path(work).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    common = replace(options, text=str(_shards(folder, options, track)), tokenizer=None, overwrite=False, resume=True)
    records: dict[str, list[Pretrained]] = {}
    for seed in range(options.seed, options.seed + seeds):
        for column in columns:
            name = f"{column.name}-{seed}"
            one = replace(common, variant=column.variant, key_value_heads=column.key_value_heads, seed=seed)
            records.setdefault(column.name, []).append(_trained(folder / name, one, track, watch(name)))
    rows = _rows(folder, columns, records, options.seed)
    told = {"size": asdict(options.size), "variants": [asdict(row) for row in rows], "published": PUBLISHED}
    (folder / "study.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    compared = [row for row in rows if row.degradations]
    if compared:
        figure = degradations([row.name for row in compared], [row.degradations for row in compared], PUBLISHED)
        figure.savefig(folder / "study.png", dpi=120)
        plt.close(figure)
    return rows


def _shards(folder: Path, options: PretrainOptions, track: Track) -> Path:
    """The folder of shards that all are trained on. Raises KvfoldError where those in WORK are of another text."""
    made = folder / "shards"
    shards = shards_of(options, made, track)
    if not is_prepared(options.text) and Index.read(made).text != options.text:
        raise KvfoldError(f"{made} is of the text {Index.read(made).text!r}: give another WORK")
    return shards


def _trained(out: Path, options: PretrainOptions, track: Track, watch: Watch) -> Pretrained:
    """The record of a run, which is made where it is not there yet."""
    if not out.exists():
        made = pretrain(str(out), options, track, watch)
        if made is None:
            raise KvfoldError("a study is for one process: with several, train its variants one by one with pretrain")
        return made.record
    if not is_pretrained(out):
        raise KvfoldError(f"{out} is no model that kvfold trained: give another WORK")
    record = Pretrained.read(out)
    wanted = asdict(options.size.for_devices(1, options.batch)) | {
        "variant": options.variant, "key_value_heads": options.heads, "seed": options.seed, "text": options.text,
        "tokens": options.tokens or options.size.tokens,
    }  # fmt: skip
    had = asdict(record) | record.size | {"tokens": record.wanted_tokens}
    changed = [f"{name} {had.get(name)!r} → {value!r}" for name, value in wanted.items() if had.get(name) != value]
    if changed:
        raise KvfoldError(f"{out} was trained with other settings ({', '.join(changed)}): give another WORK")
    return record


def _rows(folder: Path, columns: list[Column], records: dict[str, list[Pretrained]], seed: int) -> list[Row]:
    reference = [record.perplexity for record in records.get("qkv", [])]
    rows = []
    for column in columns:
        found = records[column.name]
        perplexities = [record.perplexity for record in found]
        lost = [100 * (value / base - 1) for value, base in zip(perplexities, reference, strict=False)]
        cached = _cached(folder / f"{column.name}-{seed}")
        rows.append(Row(column.name, found[0].parameters, found[0].attention_parameters, cached, perplexities, lost))
    return rows


def _cached(path: Path) -> float:
    """Bytes of a token in the cache that a model fills, in 16 bits."""
    checkpoint = load(str(path))
    ids = checkpoint.tokenizer("the " * CACHE_PROBE, return_tensors="pt").input_ids[0]
    return cache_bytes_per_token(checkpoint.model, ids) / checkpoint.model.dtype.itemsize * CACHE_BYTES
