"""TEXT, wherever a command wants text: a file, a Hub data set, Python's own manual, or what a model writes itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.loading import quiet
from ..model import KvfoldError
from ..model.errors import one_line
from .generated import WRITTEN, Writer

CALIBRATE, EVALUATE = "calibrate", "evaluate"
KINDS = "a .txt, .jsonl or .parquet file, hf:NAME[:CONFIG[:SPLIT]], docs, self or chat"
BETWEEN_DOCUMENTS = "\n\n"
TXT_PIECE = 1_000_000  # characters, from which on a text file is cut at a line's end where documents are wanted
CHARACTERS_A_TOKEN = 32  # more than text has; only so much of a large file is read for a number of tokens


@dataclass(frozen=True)
class TextSource:
    """One TEXT argument, checked to exist.

    Attributes:
        spec: as the user gave it. purpose: ``CALIBRATE`` or ``EVALUATE``; ``docs`` has a half for each.
    """

    spec: str
    purpose: str = EVALUATE

    def __post_init__(self) -> None:
        if self.spec == "docs" or self.spec in WRITTEN or self.spec.startswith("hf:"):
            return
        path = Path(self.spec).expanduser()
        if path.suffix not in (".txt", ".jsonl", ".parquet"):
            raise KvfoldError(f"text {self.spec!r} is not understood: give {KINDS}")
        if not path.is_file():
            raise KvfoldError(f"text file {self.spec} does not exist")
        if path.stat().st_size == 0:
            raise KvfoldError(f"text file {self.spec} is empty")

    def tokens(self, tokenizer: Any, count: int | None = None, writer: Writer | None = None) -> torch.Tensor:
        """Token ids ``[n]`` (int64) of the text, the first ``count`` of them where given.

        Args:
            tokenizer: the model's. count: tokens wanted; all where None. writer: of text ``self`` and ``chat``.

        Raises:
            KvfoldError: for empty or binary text, or a source that lacks what it needs.
        """
        if self.spec in WRITTEN:
            if writer is None or count is None:
                raise KvfoldError(f"text {self.spec!r} is for calibration and training: here another text is needed")
            return torch.tensor([each for ids in writer.documents(self.spec, count) for each in ids])[:count]
        if tokenizer is None:
            raise KvfoldError(f"the model has no tokenizer, which text {self.spec!r} needs")
        pieces: list[torch.Tensor] = []
        found = 0
        for text in self._portions(count):
            ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0].long()
            pieces.append(ids)
            found += len(ids)
            if count is not None and found >= count:
                break
        if not found:
            raise KvfoldError(f"text {self.spec!r} is empty")
        if count is not None and found < count and self._is_txt:
            return self.tokens(tokenizer)[:count]  # an unusual text: more than CHARACTERS_A_TOKEN
        tokens = torch.cat(pieces)
        return tokens if count is None else tokens[:count]

    def documents(self, characters: int | None = None) -> Iterator[str]:
        """The documents of the text, one by one: rows of a data set, chapters of the manual, pieces of a text file.

        Args:
            characters: no more than about so many are read of a text file; its pieces have about a million each.

        Raises:
            KvfoldError: for empty or binary text, or a source that lacks what it needs.
        """
        if self.spec == "docs":
            yield from python_manual(self.purpose)
        elif self._is_txt:
            yield from _txt_pieces(Path(self.spec).expanduser(), characters)
        else:
            yield from self._rows()

    @property
    def _is_txt(self) -> bool:
        return self.spec.endswith(".txt") and not self.spec.startswith("hf:")

    def _portions(self, count: int | None) -> Iterator[str]:
        """The text in portions that are tokenised one by one: a whole text file, or documents joined to some length."""
        if self.spec == "docs":
            yield BETWEEN_DOCUMENTS.join(python_manual(self.purpose))
        elif self._is_txt:
            characters = None if count is None else CHARACTERS_A_TOKEN * count
            yield "".join(_txt_pieces(Path(self.spec).expanduser(), characters))
        else:
            enough = 1 << 20 if count is None else min(1 << 20, 4 * count)
            held: list[str] = []
            size = 0
            for document in self._rows():
                held.append(document)
                size += len(document)
                if size >= enough:
                    yield BETWEEN_DOCUMENTS.join(held) + BETWEEN_DOCUMENTS
                    held, size = [], 0
            if held:
                yield BETWEEN_DOCUMENTS.join(held)

    def _rows(self) -> Iterator[str]:
        import datasets  # takes a second to import, and few commands need it

        datasets.logging.set_verbosity(logging.CRITICAL)  # what it says is in the error that it raises
        try:
            if self.spec.startswith("hf:"):
                name, *rest = self.spec[3:].split(":")
                config = rest[0] if rest and rest[0] else None
                split = rest[1] if len(rest) > 1 else "train"
                with quiet():
                    rows = datasets.load_dataset(name, config, split=split, streaming=True)
            else:
                kind = "json" if self.spec.endswith(".jsonl") else "parquet"
                path = str(Path(self.spec).expanduser())
                rows = datasets.load_dataset(kind, data_files=path, split="train", streaming=True)
            for row in rows:
                yield _text_of(row, self.spec)
        except KvfoldError:
            raise
        except Exception as error:  # datasets raises of many kinds for what the user gave
            raise KvfoldError(f"text {self.spec!r} cannot be read: {one_line(error)}") from error


def python_manual(purpose: str) -> list[str]:
    """Chapters of Python's manual, ``pydoc_data.topics``: its first half to calibrate on, its second to evaluate on."""
    from pydoc_data import topics

    texts = [topics.topics[name] for name in sorted(topics.topics)]
    middle, half = 0, sum(map(len, texts)) / 2
    while half > 0:
        half -= len(texts[middle])
        middle += 1
    return texts[:middle] if purpose == CALIBRATE else texts[middle:]


def _txt_pieces(path: Path, characters: int | None) -> Iterator[str]:
    """A text file, or so many characters of it, in pieces of about ``TXT_PIECE`` that end where a line ends."""
    read, filled = 0, False
    try:
        most = path.stat().st_size if characters is None else min(characters, path.stat().st_size)
        with path.open(encoding="utf-8") as file:
            while piece := file.read(min(TXT_PIECE, most - read)):
                piece += file.readline(most - read - len(piece))
                if "\0" in piece:
                    raise KvfoldError(f"text file {path} is binary: it has zero bytes")
                read, filled = read + len(piece), filled or not piece.isspace()
                yield piece
    except UnicodeDecodeError as error:
        raise KvfoldError(f"text file {path} is not UTF-8 text ({_undecodable(path)} cannot be read)") from error
    except OSError as error:
        raise KvfoldError(f"text file {path} cannot be read: {error.strerror}") from error
    if not filled:
        raise KvfoldError(f"text file {path} is empty")


def _undecodable(path: Path) -> str:
    """The first place that is not UTF-8, for a message."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number}, byte {error.start + 1}"
    return "a part"


def _text_of(row: dict, spec: str) -> str:
    """The row's ``text`` column, or its only column of strings."""
    if "text" in row and (row["text"] is None or isinstance(row["text"], str)):
        return row["text"] or ""
    strings = [value for value in row.values() if isinstance(value, str)]
    if len(strings) != 1:
        raise KvfoldError(f"text {spec!r} has no column 'text' (columns: {', '.join(row)})")
    return strings[0]
