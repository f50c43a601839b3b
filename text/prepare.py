"""Text in, shards of tokens out: what training from scratch reads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.atomic_output import disk_errors, require_free, whole_folder
from ..checkpoint.hub import DEFAULT_ACCESS, Access
from ..checkpoint.option_checks import require_least
from ..checkpoint.progress import Track, silent
from ..checkpoint.resuming import Unfinished
from ..model import KvfoldError
from .generated import WRITTEN
from .packing import tokenizer_identity
from .sources import CALIBRATE, TextSource
from .token_shards import TOKENIZER, Index, write_shard
from .tokenizers import is_trained, named_tokenizer, trained_tokenizer

DOCUMENTS_AT_ONCE = 256  # that a worker is given
PIECE = 1024  # tokens; longer documents are divided between training and validation in pieces of so many
SLIMPAJAMA = "hf:cerebras/SlimPajama-627B"  # what the study trained on


@dataclass(frozen=True)
class PrepareOptions:
    """How text is prepared.

    Attributes:
        tokenizer: a folder, a Hub id, or ``train:N``. tokens: no more than so many are prepared; None: all.
        validation: share that is set apart. shard_tokens: of a shard, about. workers: processes that tokenise.
        overwrite: replace OUT. resume: go on with an interrupted preparation. access: to the Hub.
    """

    tokenizer: str
    tokens: int | None = None
    validation: float = 0.01
    shard_tokens: int = 100_000_000
    workers: int = 1
    overwrite: bool = False
    resume: bool = False
    access: Access = field(default=DEFAULT_ACCESS)

    def __post_init__(self) -> None:
        is_trained(self.tokenizer)
        if not 0 < self.validation < 1:
            raise KvfoldError(f"validation {self.validation} is no share: a number between 0 and 1")
        require_least({"tokens": self.tokens, "shard-tokens": self.shard_tokens, "workers": self.workers})


def prepare(text: str, out: str, options: PrepareOptions, track: Track = silent) -> Index:
    """Tokenise TEXT into the folder ``out``: shards for training and for validation, an index, the tokenizer.

    The order is the text's. An interruption leaves ``.OUT.unfinished``, from which ``options.resume`` goes on.

    Raises KvfoldError for bad input or a full disk.
    """
    source, target = TextSource(text, CALIBRATE), Path(out).expanduser()
    if text in WRITTEN:
        raise KvfoldError(f"text {text!r} is written by a model, and here is none yet: give another text")
    require_free(target, options.overwrite, Path(text).expanduser())
    settings = asdict(options) | {"text": text}
    for name in ("overwrite", "resume", "access", "workers"):
        del settings[name]
    unfinished = Unfinished(target, settings, options.resume, "preparation")
    with unfinished.kept_where_worthwhile(lambda: bool(unfinished.recall("progress"))):
        index = _Preparation(source, options, unfinished, track).run()
        with whole_folder(target) as folder:
            for path in [*unfinished.folder.glob("*.safetensors"), unfinished.folder / TOKENIZER]:
                path.rename(folder / path.name)
            index.write(folder)
    return index


@dataclass
class _State:
    """How far a preparation is: all of it is in shards."""

    documents: int = 0
    pieces: int = 0
    train: list[tuple[str, int]] = field(default_factory=list)
    validation: list[tuple[str, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in [*self.train, *self.validation])


class _Preparation:
    """One preparation; its state is written down with every shard."""

    def __init__(self, source: TextSource, options: PrepareOptions, unfinished: Unfinished, track: Track) -> None:
        self.source, self.options, self.unfinished, self.track = source, options, unfinished, track
        self.folder = unfinished.folder

    def run(self) -> Index:
        options = self.options
        tokenizer = self._tokenizer()
        identity, vocabulary = tokenizer_identity(tokenizer), len(tokenizer)
        state = _State(**(self.unfinished.recall("progress") or {}))
        held: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
        found, wanted = state.tokens, options.tokens
        with self.track("preparing tokens", wanted) as advance:
            advance(found)
            for document in self._tokenised(tokenizer, state.documents):
                if wanted is not None and found >= wanted:
                    break
                for start in range(0, len(document), PIECE):
                    held[self._part(state.pieces)].append(document[start : start + PIECE])
                    state.pieces += 1
                state.documents += 1
                found += len(document)
                advance(len(document))
                if sum(map(len, held["train"])) >= options.shard_tokens:
                    self._flush(state, held, vocabulary, identity)
        self._flush(state, held, vocabulary, identity)
        if not state.train or not state.validation:
            raise KvfoldError(
                f"text {self.source.spec!r} is too short to be divided into training and validation: {found} tokens"
            )
        return Index(identity, vocabulary, self.source.spec, state.documents, state.train, state.validation)

    def _part(self, piece: int) -> str:
        """Validation pieces are spread evenly: one whenever their share has grown by a whole piece."""
        share = self.options.validation
        return "validation" if int((piece + 1) * share + 0.5) > int(piece * share + 0.5) else "train"

    def _flush(self, state: _State, held: dict[str, list[np.ndarray]], vocabulary: int, identity: str) -> None:
        for part, shards in (("train", state.train), ("validation", state.validation)):
            if not held[part]:
                continue
            tokens = np.concatenate(held[part])
            name = f"{part}-{len(shards):05d}.safetensors"
            with disk_errors(self.folder):
                write_shard(self.folder / name, tokens, vocabulary, identity)
            shards.append((name, len(tokens)))
            held[part].clear()
        with disk_errors(self.folder):
            self.unfinished.remember("progress", asdict(state))

    def _tokenizer(self) -> Any:
        """The tokenizer, written beside the shards; a resumed preparation takes the one that lies there."""
        folder, spec = self.folder / TOKENIZER, self.options.tokenizer
        if not folder.is_dir():
            if is_trained(spec):
                with self.track("training the tokenizer", 1) as advance:
                    tokenizer = trained_tokenizer(spec, self.source.documents())
                    advance(1)
            else:
                tokenizer = named_tokenizer(spec, self.options.access)
            begun = self.folder / f"{TOKENIZER}.begun"
            with disk_errors(self.folder):
                tokenizer.save_pretrained(begun)
                begun.rename(folder)
        return named_tokenizer(str(folder), self.options.access)  # as whoever reads the shards will have it

    def _tokenised(self, tokenizer: Any, skipped: int) -> Iterator[np.ndarray]:
        """The documents' token ids, but for the first ``skipped`` documents, each closed by the end-of-text token."""
        documents = islice((each for each in self.source.documents() if each.strip()), skipped, None)
        batches = iter(lambda: list(islice(documents, DOCUMENTS_AT_ONCE)), [])
        with _mapping(tokenizer, self.options.workers) as mapped:
            while group := list(islice(batches, self.options.workers)):
                for ids in mapped(group):
                    yield from ids


@contextmanager
def _mapping(tokenizer: Any, workers: int) -> Iterator[Any]:
    """A function that tokenises some batches of documents, by so many processes."""
    tokenise = partial(_tokenise, tokenizer)
    if workers == 1:
        yield partial(map, tokenise)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield partial(pool.map, tokenise, chunksize=1)


def _tokenise(tokenizer: Any, documents: list[str]) -> list[np.ndarray]:
    return [
        np.asarray([*ids, tokenizer.eos_token_id], dtype=np.uint32)
        for ids in tokenizer(documents, add_special_tokens=False, verbose=False).input_ids
    ]
