"""What a conversion and a plan read first: the checkpoint in safetensors, and calibration text."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..analysis.hub import DEFAULT_ACCESS, Access, quiet
from ..analysis.loading import Location, load, load_tokenizer, locate
from ..analysis.mixture import WeightedText, mixed_tokens
from ..analysis.progress import Track
from ..analysis.written import Writer
from .options import ConvertOptions, calibration_window
from .recipe import identity
from .source import LazySource
from .writing import copy_beside, whole_folder


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


def calibration_tokens(
    texts: Sequence[WeightedText], location: Location, source: LazySource, described: dict[str, Any],
    options: ConvertOptions, track: Track,
) -> torch.Tensor:  # fmt: skip
    """Token ids ``[n]`` of the texts. Only to write them itself (``self``, ``chat``) the whole model is loaded.

    Args:
        texts: to calibrate on. location, source: the model. described: it, as in ``kvfold.json``.
        options: how many tokens, in which windows, with which seed. track: shows how writing goes on.
    """
    tokenizer = load_tokenizer(source.location)

    def model() -> Any:
        return load(location.path, options.dtype, str(source.device), options.access).model

    writer = Writer(model, tokenizer, options.seed, identity(described), track)
    window = calibration_window(options, source.config)
    return mixed_tokens(texts, tokenizer, options.calibrate_tokens, window, writer)
