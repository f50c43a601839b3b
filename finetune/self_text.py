"""Text that a model writes itself, kept on disk, so that training needs no data and a second run no second writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from safetensors.torch import load_file, save_file

from ..analysis.progress import Track
from ..analysis.text import write_text

DOCUMENT, DOCUMENTS = 512, 16  # tokens of a document, and how many are written at a time
CACHE = Path(HF_HOME) / "kvfold" / "self"


def written_documents(
    model: Any, tokenizer: Any, identity: str, tokens: int, seed: int, track: Track
) -> list[list[int]]:
    """At least ``tokens`` tokens in documents of token ids, sampled at temperature 1 unless they are on disk already.

    Args:
        model, tokenizer: what writes. identity: tells this model from all others. seed: of the sampling.
    """
    folder = CACHE / f"{identity}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    pieces = -(-tokens // (DOCUMENT * DOCUMENTS))
    documents: list[list[int]] = []
    with track("writing text", pieces) as advance:
        for number in range(pieces):
            file = folder / f"{number:06d}.safetensors"
            if not file.is_file():
                ids = write_text(model, tokenizer, DOCUMENT * DOCUMENTS, seed * 1_000_003 + number, DOCUMENT, DOCUMENTS)
                begun = file.with_suffix(f".begun-{os.getpid()}")
                save_file({"ids": ids.view(DOCUMENTS, DOCUMENT).to(torch.int32)}, begun)
                begun.rename(file)
            documents += load_file(file)["ids"].tolist()
            advance(1)
    return documents
