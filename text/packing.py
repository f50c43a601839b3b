"""Text to train on: tokenised and packed into sequences by ``datasets``, which keeps the result on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..checkpoint.loading import quiet
from ..model import KvfoldError
from .generated import WRITTEN, Writer
from .mixture import WeightedText, shares
from .sources import TextSource

CHARACTERS_A_TOKEN = 8  # more than text has on average; so much of a source is read for the tokens wanted of it
HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 64  # of a source's sequences, where no other text is given to evaluate on
IGNORED = -100  # label of a position whose next token is not predicted, as transformers has it
DOCUMENTS_AT_ONCE = 1000  # tokenised and packed together


@dataclass(frozen=True)
class Packed:
    """Sequences of one length: data sets with ``input_ids`` and ``position_ids``, int32 lists ``[sequence]`` a row.

    Attributes:
        train, held_out: to train and to evaluate on. repeated: for each text how often its sequences are gone through.
    """

    train: Any
    held_out: Any
    repeated: dict[str, float]


@dataclass(frozen=True)
class Packing:
    """How text becomes sequences.

    Attributes:
        sequence: tokens each. sequences: to train on, in all. workers: processes that tokenise. seed: of the choice.
    """

    sequence: int
    sequences: int
    workers: int = 1
    seed: int = 0


def packed_texts(
    texts: list[WeightedText],
    evaluate: TextSource | None,
    tokenizer: Any,
    packing: Packing,
    writer: Writer | None = None,
    seen: Mapping[str, int] = MappingProxyType({}),
) -> Packed:
    """Sequences of several texts, in the proportion of their weights.

    What the model has not seen of a text comes first; a text that is too short for its share is gone through again.
    Positions start anew with every document, by which transformers keeps attention inside documents.

    Args:
        texts: to train on. evaluate: held-out text; None: the last sequences of each text are held out. tokenizer: the
            model's. packing: see there. writer: of text ``self`` and ``chat``. seen: of each text so many tokens, the
            first ones, have had their effect on the model already.

    Raises:
        KvfoldError: for a text that is shorter than one sequence (two, where one of them is to be held out).
    """
    import datasets

    train, held_out, repeated = [], [], {}
    for number, (text, part) in enumerate(zip(texts, shares(texts), strict=True)):
        share = max(1, round(packing.sequences * part))
        extra = 0 if evaluate else held_out_sequences(share)
        old = -(-seen.get(text.source.spec, 0) // packing.sequence)
        rows = _sequences(text.source, tokenizer, packing, old + share + extra, writer)
        kept = len(rows) if evaluate else len(rows) - min(extra, held_out_sequences(len(rows)))
        if kept < 1:
            raise KvfoldError(
                f"text {text.source.spec!r} has one sequence of {packing.sequence} tokens: give more text"
            )
        if kept < len(rows):
            held_out.append(rows.select(range(kept, len(rows))))
        repeated[text.source.spec] = share / min(share, kept)
        order = [*range(old, kept), *range(min(old, kept))]
        train.append(_repeat(rows.select(order[:share]), share, packing.seed + number))
    if evaluate is not None:
        held_out.append(_sequences(evaluate, tokenizer, packing, HELD_OUT_MOST, writer))
    with quiet(), no_bars():
        return Packed(datasets.concatenate_datasets(train), datasets.concatenate_datasets(held_out), repeated)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch ``[rows, sequence]`` (int64); the first token of a document is nothing that could be predicted."""
    ids, positions = (
        torch.from_numpy(np.stack([np.asarray(row[name], dtype=np.int64) for row in rows]))
        for name in ("input_ids", "position_ids")
    )
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORED)}


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash that tells a tokenizer from others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return _hash(told, type(tokenizer).__name__, tokenizer.eos_token_id)


def held_out_sequences(sequences: int) -> int:
    """How many of a text's sequences are held out to evaluate on, where so many are wanted to train on."""
    return min(HELD_OUT_MOST, max(1, round(sequences * HELD_OUT_SHARE)))


def _repeat(rows: Any, count: int, seed: int) -> Any:
    """``count`` rows: all of them in one order, then in another, …"""
    import datasets

    rounds = [rows.shuffle(seed=seed + number, keep_in_memory=True) for number in range(-(-count // len(rows)))]
    return datasets.concatenate_datasets(rounds).select(range(count))


def _sequences(text: TextSource, tokenizer: Any, packing: Packing, wanted: int, writer: Writer | None) -> Any:
    """The first ``wanted`` sequences of a text, or all where it has fewer."""
    import datasets

    tokens = (wanted + 1) * packing.sequence
    with quiet(), no_bars():
        if text.spec in WRITTEN:
            if writer is None:
                raise KvfoldError(f"text {text.spec!r} needs a model that writes it: here another text is needed")
            rows = datasets.Dataset.from_dict({"ids": writer.documents(text.spec, tokens)})
        else:
            told = {"text": text, "characters": CHARACTERS_A_TOKEN * tokens}
            documents = datasets.Dataset.from_generator(
                _documents, gen_kwargs=told, fingerprint=_hash(_identity(text), told["characters"])
            )
            if not len(documents):
                raise KvfoldError(f"text {text.spec!r} is empty")
            workers = min(packing.workers, len(documents))
            rows = documents.map(
                partial(_tokenise, tokenizer=tokenizer),
                batched=True,
                batch_size=DOCUMENTS_AT_ONCE,
                num_proc=workers if workers > 1 else None,
                remove_columns=["text"],
                new_fingerprint=_hash(_identity(text), told["characters"], tokenizer_identity(tokenizer)),
            )
        packed = rows.map(
            partial(_pack, sequence=packing.sequence),
            batched=True,
            batch_size=DOCUMENTS_AT_ONCE,
            remove_columns=["ids"],
        )
    if not len(packed):
        raise KvfoldError(f"text {text.spec!r} is shorter than one sequence of {packing.sequence} tokens")
    return packed.select(range(min(wanted, len(packed))))


def _documents(text: TextSource, characters: int) -> Iterator[dict[str, str]]:
    """The first documents of a text, of so many characters together."""
    read = 0
    for document in text.documents(characters):
        if document.strip():
            yield {"text": document}
        read += len(document)
        if read >= characters:
            return


def _tokenise(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Token ids of documents, each closed by the end-of-text token where there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return {"ids": [[*ids, *end] for ids in tokenizer(batch["text"], verbose=False).input_ids]}


def _pack(batch: dict[str, list[list[int]]], sequence: int) -> dict[str, Any]:
    """Documents one after another, cut into sequences; what is left over at the end is dropped."""
    ids = np.concatenate([np.asarray(document, dtype=np.int32) for document in batch["ids"]])
    starts = np.concatenate([np.arange(len(document), dtype=np.int32) for document in batch["ids"]])
    count = len(ids) // sequence
    ids = ids[: count * sequence].reshape(count, sequence)
    positions = starts[: count * sequence].reshape(count, sequence)
    # A document that goes on from the sequence before begins here at position 0, but for the first predicted token.
    first = positions[:, :1]
    begins = np.cumsum(positions == 0, axis=1)
    continued = begins == (first == 0)
    return {"input_ids": ids, "position_ids": np.where(continued, positions - first, positions)}


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the bars of ``datasets`` off the terminal."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _identity(text: TextSource) -> list[Any]:
    """What tells a text from another one: its name, and of a file its size and time."""
    path = Path(text.spec).expanduser()
    stat = path.stat() if path.is_file() else None
    return [text.spec, text.purpose, *([] if stat is None else [str(path.resolve()), stat.st_size, stat.st_mtime_ns])]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
