"""Tokenizers for models trained from scratch: somebody's, or one trained on the text at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..checkpoint.hub import SMALL_FILES, Access, fetch, is_hub_id
from ..checkpoint.loading import one_line_errors, quiet
from ..model import KvfoldError

END = "<|endoftext|>"
SMALLEST = 257  # the bytes, and the end of a text
CHARACTERS = 200_000_000  # of a text that a tokenizer is trained on; more changes nothing


def is_trained(spec: str) -> bool:
    """Whether a tokenizer is to be trained. Raises KvfoldError where ``train:N`` has no good N."""
    if not spec.startswith("train"):
        return False
    found = re.fullmatch(r"train:(\d+)", spec)
    if not found or int(found[1]) < SMALLEST:
        raise KvfoldError(f"tokenizer {spec!r} is not understood: train:4096, say, of at least {SMALLEST} tokens")
    return True


def named_tokenizer(spec: str, access: Access) -> Any:
    """The tokenizer of a folder or a Hub id. Raises KvfoldError where there is none, or none that ends a text."""
    from transformers import AutoTokenizer

    with one_line_errors(f"tokenizer {spec}"), quiet():
        folder = fetch(spec, SMALL_FILES, access, partly=True) if is_hub_id(spec) else Path(spec).expanduser()
        if not folder.is_dir():
            raise KvfoldError("there is no such folder")
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if tokenizer.eos_token_id is None:
            raise KvfoldError("it has no end-of-text token, which goes between documents")
    return tokenizer


def trained_tokenizer(spec: str, documents: Iterable[str]) -> Any:
    """A byte-level BPE (Radford et al. 2019, section 2.2) of the ``N`` tokens of ``train:N``, trained on documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=int(spec.partition(":")[2]),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_first(documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=END, eos_token=END, padding_side="left")


def _first(documents: Iterable[str]) -> Iterable[str]:
    read = 0
    for document in documents:
        yield document
        read += len(document)
        if read >= CHARACTERS:
            return
