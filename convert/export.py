"""Folded checkpoints in forms that other programs read: the source's own architecture, or adapters merged in."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from ..checkpoint.atomic_output import copy_beside, require_free, require_shard_size, whole_folder
from ..checkpoint.hub import DEFAULT_ACCESS, Access, quiet
from ..checkpoint.loading import Checkpoint, load
from ..checkpoint.progress import Track, silent
from ..model import KvfoldError, is_folded
from ..model.errors import one_line
from .native import native_model

PROBE = 32  # random tokens on which an export is held against its model


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        format: a key of ``FORMATS``. base: the checkpoint that an adapter belongs to; None: the one that it names.
        dtype: of the written weights; ``auto``: the model's. max_shard_size: of the written files. overwrite: replace
            OUT. device: torch device. access: how MODEL may be read.
    """

    format: str = "native"
    base: str | None = None
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    overwrite: bool = False
    device: str = "cpu"
    access: Access = DEFAULT_ACCESS


@dataclass(frozen=True)
class Export:
    """What came out. ``difference``: the largest one in the logits on random tokens, relative to the largest logit."""

    out: Path
    architecture: str
    parameters: int
    difference: float


def export(path: str, out: str, options: ExportOptions, track: Track = silent) -> Export:
    """Export MODEL at ``path`` into the folder ``out``. Raises KvfoldError; no folder is left behind then."""
    if options.format not in FORMATS:
        raise KvfoldError(f"format {options.format!r} is unknown: use one of {', '.join(FORMATS)}")
    require_shard_size(options.max_shard_size)
    target = Path(out).expanduser()
    require_free(target, options.overwrite, Path(path).expanduser())
    with track("exporting", 1) as advance:
        checkpoint, model, expected = FORMATS[options.format](path, target, options)
        difference = _difference(expected, _logits(model))
        if not math.isfinite(difference):
            raise KvfoldError(f"{path} gives logits that are not finite: it is damaged, or too large for its dtype")
        needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        with whole_folder(target, needed) as partial, quiet():
            model.save_pretrained(partial, max_shard_size=options.max_shard_size)
            copy_beside(checkpoint.folder, partial)
        advance(1)
    return Export(target, type(model).__name__, sum(parameter.numel() for parameter in model.parameters()), difference)


def _native(path: str, target: Path, options: ExportOptions) -> tuple[Checkpoint, Any, torch.Tensor]:
    checkpoint = load(path, options.dtype, options.device, options.access)
    if not is_folded(checkpoint.config):
        raise KvfoldError(f"{path} is not folded: it is of its own architecture already")
    try:
        return checkpoint, native_model(checkpoint.model), _logits(checkpoint.model)
    except KvfoldError as error:
        raise KvfoldError(f"{path} cannot be said in the source's own architecture: {error}") from error


def _merged(path: str, target: Path, options: ExportOptions) -> tuple[Checkpoint, Any, torch.Tensor]:
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise KvfoldError(f"{path} has no adapter_config.json: --format merged takes the folder of a PEFT adapter")
    if not (folder / "adapter_model.safetensors").is_file():
        raise KvfoldError(f"{path} has no adapter_model.safetensors")
    try:
        base = options.base or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KvfoldError(f"{path}: adapter_config.json is damaged: {one_line(error)}") from error
    if not base:
        raise KvfoldError(f"{path} does not say what it was trained on: give --base")
    require_free(target, options.overwrite, Path(base).expanduser())
    checkpoint = load(base, options.dtype, options.device, options.access)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, about tensors that it does not know; they are refused below
            adapted = PeftModel.from_pretrained(checkpoint.model, str(folder)).eval()
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise KvfoldError(f"adapter {path} does not fit the model {base}: {one_line(error)}") from error
    strangers = _tensor_names(folder) ^ set(get_peft_model_state_dict(adapted))
    if strangers:
        raise KvfoldError(
            f"adapter {path} does not fit the model {base}: {len(strangers)} tensors, first {min(strangers)}"
        )
    expected = _logits(adapted)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise KvfoldError(f"adapter {path} is of a kind that cannot be merged into a model")
    merged: Any = adapted.merge_and_unload(safe_merge=True)
    return checkpoint, merged, expected


FORMATS: dict[str, Callable[[str, Path, ExportOptions], tuple[Checkpoint, Any, torch.Tensor]]] = {
    "native": _native,
    "merged": _merged,
}


def _tensor_names(adapter: Path) -> set[str]:
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        return set(file.keys())


@torch.inference_mode()
def _logits(model: Any) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, PROBE), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float()


def _difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
