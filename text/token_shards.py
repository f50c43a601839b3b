"""Tokens on disk: shards of one long stream of documents, read where they lie, and an index of them.

A shard is a safetensors file with one tensor, ``tokens`` ``[n]`` (uint16 where the vocabulary allows it, else uint32).
The header of such a file says how long it is, so that one that was cut short is found out when it is opened.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..model import KvfoldError
from ..model.errors import one_line

INDEX, FORMAT = "index.json", 1
TOKENIZER = "tokenizer"  # folder beside the shards


@dataclass(frozen=True)
class Index:
    """What a folder of shards holds.

    Attributes:
        tokenizer: hash of the one that made the tokens. vocabulary: its size. text: TEXT that it was.
        documents: read. train, validation: file name and number of tokens of each shard, in order.
    """

    tokenizer: str
    vocabulary: int
    text: str
    documents: int
    train: list[tuple[str, int]]
    validation: list[tuple[str, int]]
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read ``index.json``. Raises KvfoldError where it is missing, damaged, or of another format."""
        try:
            index = cls(**json.loads((folder / INDEX).read_text(encoding="utf-8")))
            for part in (index.train, index.validation):
                part[:] = [(str(name), int(tokens)) for name, tokens in part]
            if index.format != FORMAT:
                raise KvfoldError(f"{folder / INDEX} has format {index.format!r}: written by a newer kvfold?")
            return index
        except (OSError, ValueError, TypeError) as error:
            raise KvfoldError(f"{folder / INDEX} is missing or damaged: {one_line(error)}") from error

    def write(self, folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def is_prepared(spec: str) -> bool:
    """Whether TEXT is a folder that ``prepare`` has made."""
    return (Path(spec).expanduser() / INDEX).is_file()


def write_shard(path: Path, tokens: np.ndarray, vocabulary: int, tokenizer: str) -> None:
    """Write tokens ``[n]``; ``tokenizer`` is the hash of what made them. Raises OSError, SafetensorError."""
    kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    save_file({"tokens": tokens.astype(kind)}, path, metadata={"tokenizer": tokenizer})


class Sequences:
    """Sequences of equal length out of shards, for a ``DataLoader``; what is left at a shard's end is not read.

    An item has ``input_ids`` and ``position_ids``, int64 ``[sequence]``. Only what is asked for is read; a file is
    opened when it is first needed, by each process for itself.

    Args:
        folder: of shards. shards: as the index lists them. sequence: tokens. tokenizer: hash; None: not compared.

    Raises:
        KvfoldError: for a shard that is missing, cut short, of another length or another tokenizer than the index says.
    """

    def __init__(self, folder: Path, shards: list[tuple[str, int]], sequence: int, tokenizer: str | None) -> None:
        self.folder, self.sequence = folder, sequence
        self.names = [name for name, _ in shards]
        self.ends = [int(end) for end in np.cumsum([tokens // sequence for _, tokens in shards])]
        self._opened: dict[int, Any] = {}
        for name, tokens in shards:
            _check(folder / name, tokens, tokenizer)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = bisect.bisect_right(self.ends, number)
        within = number - (self.ends[shard - 1] if shard else 0)
        if shard not in self._opened:
            self._opened[shard] = safe_open(self.folder / self.names[shard], framework="np").get_slice("tokens")
        ids = self._opened[shard][within * self.sequence : (within + 1) * self.sequence]
        return {"input_ids": ids.astype(np.int64), "position_ids": np.arange(self.sequence)}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}  # open files do not travel to other processes


def _check(path: Path, tokens: int, tokenizer: str | None) -> None:
    try:
        with safe_open(path, framework="np") as file:
            found = file.get_slice("tokens").get_shape()
            made_by = (file.metadata() or {}).get("tokenizer")
    except (OSError, SafetensorError) as error:
        raise KvfoldError(
            f"shard {path} is missing, damaged or cut short ({one_line(error)}): prepare again"
        ) from error
    if found != [tokens]:
        raise KvfoldError(f"shard {path} has {found} tokens, the index says {tokens}: prepare again")
    if tokenizer is not None and made_by != tokenizer:
        raise KvfoldError(f"shard {path} was made by another tokenizer than the index says: prepare again")
