"""Convert a checkpoint: read piece by piece, calibrate and fold every layer, write."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save

from ..checkpoint.atomic_output import copy_beside, disk_errors, require_free, require_room, whole_folder
from ..checkpoint.hub import quiet
from ..checkpoint.lazy_source import LazySource, Stored, finite
from ..checkpoint.loading import DTYPES, Location, locate
from ..checkpoint.progress import Track, silent
from ..checkpoint.record import Recipe
from ..checkpoint.source_identity import describe_source
from ..checkpoint.weight_shards import Tensor, shard_bytes, write_shards
from .calibration import calibration_tokens, staged, with_texts
from .folding import Folding
from .layer_store import LayerStore
from .methods.registry import method
from .options import ConvertOptions, check_options
from .planning.plan import Plan
from .planning.planner import PlanOptions, plan_source

TEXTS = "texts"


@dataclass(frozen=True)
class Conversion:
    """What came out: the folder and the recipe written into it."""

    out: Path
    recipe: Recipe


def convert(path: str, out: str, options: ConvertOptions, track: Track = silent) -> Conversion:
    """Convert MODEL at ``path`` into the folder ``out``, with no more than a layer of it in memory.

    Raises KvfoldError for bad input; nothing is left behind then. An interruption leaves ``.OUT.unfinished``, a folder
    from which ``options.resume`` goes on.
    """
    chosen = method(options.method)
    check_options(chosen, options)
    target = Path(out).expanduser()
    require_free(target, options.overwrite, Path(path).expanduser())
    started = time.monotonic()
    location = locate(path, options.access)
    work = LayerStore(target, _settings(location, options), options.resume)
    with work.kept_where_worthwhile(work.begun, "what is done so far"), disk_errors(target):
        source = LazySource(staged(location, work.folder / "source", options.dtype, options.access), options.device)
        require_room(target, _room(source, options))
        described = describe_source(path, location.folder, source.config)
        tokens = None
        if chosen.needs_text:
            known = tuple(work.recall(TEXTS) or options.calibrate)
            options = with_texts(replace(options, calibrate=known), source)
            work.remember(TEXTS, options.calibrate)
            tokens = calibration_tokens(source, described, options, track)
        plan = _plan(path, source, described, tokens, options, work, track)
        folding = Folding(source, chosen, options, work, track, plan)
        if tokens is None:
            folding.without_text()
        else:
            folding.with_text(tokens)
        with whole_folder(target) as folder:
            _write(folder, source, folding, options, track)
            recipe = _recipe(described, folding, options, time.monotonic() - started)
            if plan is not None:
                plan.write(folder / "plan.yaml")
            recipe.write(folder)
    return Conversion(target, recipe)


def _settings(location: Location, options: ConvertOptions) -> dict[str, Any]:
    """What decides the result of a conversion, and whether an interrupted one may go on."""
    entries = asdict(options)
    for name in ("overwrite", "resume", "access"):
        del entries[name]
    if options.plan is not None and Path(options.plan).expanduser().is_file():
        entries["plan"] = Path(options.plan).expanduser().read_text(encoding="utf-8", errors="replace")
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in location.files}
    return entries | {"source": str(location.folder), "files": files}


def _plan(
    path: str, source: LazySource, described: dict[str, Any], tokens: torch.Tensor | None, options: ConvertOptions,
    work: LayerStore, track: Track,
) -> Plan | None:  # fmt: skip
    """The plan to be obeyed: that of the user, or one made now (or before an interruption)."""
    if options.auto_plan and tokens is not None:
        made = work.folder / "plan.yaml"
        if not made.is_file():
            plan_source(source, described, tokens, PlanOptions(options), track).write(made)
        return Plan.read(str(made))
    if options.plan is None:
        return None
    plan = Plan.read(options.plan)
    plan.require_for(path, described, source.layers)
    return plan


def _room(source: LazySource, options: ConvertOptions) -> int:
    """Bytes that the conversion takes on the disk at most, to within the hidden states of the calibration text."""
    whole = sum(each.bytes for each in source.tensors)
    outside = sum(each.bytes for each in source.outside_attention())
    if options.dtype != "auto":
        ratio = DTYPES[options.dtype].itemsize / source.dtype.itemsize
        whole, outside = int(whole * ratio), int(outside * ratio)
    return whole + (whole - outside)


def _write(folder: Path, source: LazySource, folding: Folding, options: ConvertOptions, track: Track) -> None:
    """Write the converted checkpoint: the folded layers, all else as the source has it, and what lies beside."""
    family, layouts = source.family, [layout for layout, *_ in folding.described()]
    config = family.folded_config(source.config, layouts, auto_map=family.auto_map())
    config.dtype = folding.dtype
    with torch.device("meta"), quiet():
        model = family.model_class(config)
    config.architectures = [type(model).__name__]
    custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    copy_beside(source.location.folder, folder)
    tensors = _tensors(source, folding, options)
    with track("writing", len(tensors)) as advance:
        write_shards(folder, tensors, shard_bytes(options.max_shard_size), advance)


def _tensors(source: LazySource, folding: Folding, options: ConvertOptions) -> list[Tensor]:
    """Everything to be written; of each layer what is folded comes first."""
    tensors = []
    for index in range(source.layers):
        prefix = source.stored_prefix(index)
        tensors += [
            Tensor(prefix + name, tuple(shape), folding.dtype, make)
            for name, shape, make in folding.folded_tensors(index)
        ]
    for stored in source.outside_attention():
        target = stored.dtype if options.dtype == "auto" or not stored.dtype.is_floating_point else folding.dtype
        tensors.append(Tensor(stored.name, stored.shape, target, partial(_read, stored, target)))
    return tensors


def _read(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    return finite(stored, stored.read()).to(dtype)


def _recipe(described: dict[str, Any], folding: Folding, options: ConvertOptions, seconds: float) -> Recipe:
    """The record of the conversion."""
    layers = folding.described()
    size = folding.dtype.itemsize
    folded_bytes = sum(layout.latent_width for layout, *_ in layers) * size
    source_bytes = sum(traits.cache_width for traits in folding.traits) * size
    return Recipe(
        source=described,
        method=folding.method.name,
        span=folding.span,
        cache_fraction=folded_bytes / source_bytes,
        cache_bytes_per_token={"source": source_bytes, "folded": folded_bytes},
        balance=folding.balance,
        balance_search=folding.search,
        way=folding.way,
        planned=folding.plan is not None,
        refinement=folding.refinement,
        noise=folding.noise,
        calibration=folding.calibration,
        dtype=str(folding.dtype).removeprefix("torch."),
        seed=options.seed,
        layers=[
            layout.to_dict()
            | ({} if kept is None else {"kept_energy": kept})
            | ({} if refined is None else {"refined": refined})
            for layout, kept, refined in layers
        ],
        seconds=round(seconds, 1),
    )
