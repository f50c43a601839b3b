"""What a conversion and a plan read first: the checkpoint in safetensors, and calibration text."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from ..analysis.hub import DEFAULT_ACCESS, Access, quiet
from ..analysis.loading import Location, load, load_tokenizer, locate
from ..analysis.text import TextSource
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
    text: TextSource, location: Location, source: LazySource, count: int, seed: int, dtype: str = "auto",
    access: Access = DEFAULT_ACCESS,
) -> torch.Tensor:  # fmt: skip
    """``count`` token ids of a text. Only to write it itself (TEXT ``self``) the whole model is loaded."""
    tokenizer = load_tokenizer(source.location)
    model = load(location.path, dtype, str(source.device), access).model if text.spec == "self" else None
    return text.tokens(tokenizer, count, model, seed)
