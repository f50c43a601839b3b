"""What a conversion and a plan read first: the checkpoint in safetensors, and calibration text."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from ..checkpoint.atomic_output import copy_beside, whole_folder
from ..checkpoint.hub import DEFAULT_ACCESS, Access, quiet
from ..checkpoint.lazy_source import LazySource, Stored
from ..checkpoint.loading import Location, load, load_tokenizer, locate
from ..checkpoint.progress import Track
from ..checkpoint.source_identity import identity
from ..text.generated import Writer, usual_texts
from ..text.mixture import mixed_tokens, named_texts
from .options import ConvertOptions, calibration_window

MEMORY_SHARE = 0.7  # of the free memory that the weights may take


def staged(location: Location, folder: Path, dtype: str = "auto", access: Access = DEFAULT_ACCESS) -> Location:
    """A checkpoint in safetensors: the source itself, or ``folder`` with what a GGUF file or pickles hold in it."""
    if not (location.gguf or location.pickled):
        return location
    if not folder.is_dir():
        checkpoint = load(location.path, dtype, access=access)
        with quiet(), whole_folder(folder) as partial:
            checkpoint.model.save_pretrained(partial)
            if checkpoint.tokenizer is not None:
                checkpoint.tokenizer.save_pretrained(partial)
            copy_beside(location.folder, partial, tokenizer=not location.gguf)
        del checkpoint
        gc.collect()
    return locate(str(folder))


def with_texts(options: ConvertOptions, source: LazySource) -> ConvertOptions:
    """The options with texts to calibrate on: the usual ones (see ``usual_texts``) where none is named.

    To write some of these, the model must be whole in memory; where it does not fit, ``docs`` is what remains.
    """
    if options.calibrate:
        return options
    if not _fits(source.tensors, source.device):
        return replace(options, calibrate=("docs",))
    return replace(options, calibrate=usual_texts(load_tokenizer(source.location)))


def _fits(tensors: Sequence[Stored], device: torch.device, itemsize: int = 0) -> bool:
    """Whether a whole model is no more than its share of the free memory, stored as it is or in a wider dtype."""
    size = sum(each.bytes // each.dtype.itemsize * max(itemsize, each.dtype.itemsize) for each in tensors)
    return size <= MEMORY_SHARE * _free_memory(device)


def _free_memory(device: torch.device) -> int:
    """Bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def calibration_tokens(
    source: LazySource, described: dict[str, Any], options: ConvertOptions, track: Track
) -> torch.Tensor:
    """Token ids ``[n]`` to calibrate on. Only to write text itself (``self``, ``chat``) the whole model is loaded.

    Args:
        source: the model. described: it, as in ``kvfold.json``. options: which texts, how many tokens, in which
            windows, with which seed. track: shows how writing goes on.
    """
    tokenizer = load_tokenizer(source.location)

    def model() -> Any:
        # Few CPUs are fast in 16 bits.
        wide = source.device.type == "cpu" and _fits(source.tensors, source.device, 4)
        return load(source.location.path, "float32" if wide else "auto", str(source.device), options.access).model

    writer = Writer(model, tokenizer, options.seed, identity(described), track)
    window = calibration_window(options, source.config)
    return mixed_tokens(named_texts(options.calibrate), tokenizer, options.calibrate_tokens, window, writer)
