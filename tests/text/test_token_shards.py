"""Text into shards and out again: nothing lost, nothing twice, resumable, and damage is found out."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils.data import DataLoader, DistributedSampler

from kvfold.model import KvfoldError
from kvfold.text import prepare as preparing
from kvfold.text.packing import collate, tokenizer_identity
from kvfold.text.prepare import PrepareOptions, prepare
from kvfold.text.token_shards import TOKENIZER, Index, Sequences, write_shard
from kvfold.text.tokenizers import named_tokenizer

pytestmark = pytest.mark.usefixtures("caches")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A hundred documents, of which some are longer than a piece."""
    path = tmp_path / "documents.jsonl"
    lines = [
        f"Document {number}. " + f"It says {number % 7} of {number}. " * (10 + 300 * (number % 9 == 0))
        for number in range(100)
    ]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def options(**changes: Any) -> PrepareOptions:
    return PrepareOptions(**({"tokenizer": "train:300", "shard_tokens": 8000, "validation": 0.1} | changes))


def tokens(folder: Path, shards: list[tuple[str, int]]) -> np.ndarray:
    return np.concatenate([load_file(folder / name)["tokens"] for name, _ in shards])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_all_of_the_text_is_there_in_its_order(documents: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(preparing, "PIECE", 64)
    out = tmp_path / "out"
    index = prepare(str(documents), str(out), options())
    tokenizer = named_tokenizer(str(out / TOKENIZER), preparing.DEFAULT_ACCESS)
    assert index == Index.read(out)
    assert index.documents == 100
    assert index.tokenizer == tokenizer_identity(tokenizer)
    assert len(index.train) > 2
    train, validation = tokens(out, index.train), tokens(out, index.validation)
    assert train.dtype == np.uint16
    assert 0.05 < len(validation) / (len(train) + len(validation)) < 0.15
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    expected = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    assert len(train) + len(validation) == sum(map(len, expected))
    pieces = [ids[start : start + 64] for ids in expected for start in range(0, len(ids), 64)]
    held_out = [bool(int((n + 1) * 0.1 + 0.5) > int(n * 0.1 + 0.5)) for n in range(len(pieces))]
    for part, chosen in ((train, False), (validation, True)):
        assert part.tolist() == [i for piece, out in zip(pieces, held_out, strict=True) if out is chosen for i in piece]


def test_interrupted_and_resumed_is_the_same(documents: Path, tmp_path: Path, monkeypatch: Any) -> None:
    prepare(str(documents), str(tmp_path / "whole"), options())
    write, written = preparing.write_shard, []

    def failing(path: Path, *rest: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *rest)

    with monkeypatch.context() as context:
        context.setattr(preparing, "write_shard", failing)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(documents), str(tmp_path / "out"), options())
    assert not (tmp_path / "out").exists()
    with pytest.raises(KvfoldError, match=r"begun with other settings \(shard_tokens 8000 → 9000\)"):
        prepare(str(documents), str(tmp_path / "out"), options(resume=True, shard_tokens=9000))
    prepare(str(documents), str(tmp_path / "out"), options(resume=True, workers=2))
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_loses_nothing(documents: Path, tmp_path: Path, monkeypatch: Any) -> None:
    prepare(str(documents), str(tmp_path / "whole"), options())
    write = preparing.write_shard

    def full(path: Path, *rest: Any) -> None:
        if path.name == "train-00001.safetensors":
            raise OSError(errno.ENOSPC, "no space left on device")
        write(path, *rest)

    with monkeypatch.context() as context:
        context.setattr(preparing, "write_shard", full)
        with pytest.raises(KvfoldError, match="cannot be written: no space left on the disk"):
            prepare(str(documents), str(tmp_path / "out"), options())
    prepare(str(documents), str(tmp_path / "out"), options(resume=True))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_readers_never_see_the_same_sequence(documents: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    index = prepare(str(documents), str(out), options())
    sequences: Any = Sequences(out, index.train, 32, index.tokenizer)
    assert len(sequences) == sum(count // 32 for _, count in index.train)
    every = [tuple(sequences[number]["input_ids"]) for number in range(len(sequences))]
    numbers = list(range(len(sequences)))
    seen: list[int] = []
    for rank in range(2):
        sampler: Any = DistributedSampler(numbers, 2, rank, shuffle=True, seed=7, drop_last=True)
        loader = DataLoader(sequences, batch_size=4, sampler=sampler, num_workers=2, collate_fn=collate)
        order = list(sampler)
        read = torch.cat([batch["input_ids"] for batch in loader])
        assert [tuple(row.tolist()) for row in read] == [every[number] for number in order]
        seen += order
    assert len(set(seen)) == len(seen) == len(sequences) // 2 * 2


def test_limits_and_large_vocabularies(documents: Path, tmp_path: Path) -> None:
    index = prepare(str(documents), str(tmp_path / "some"), options(tokens=5000))
    total = sum(count for _, count in [*index.train, *index.validation])
    assert 5000 <= total < 5000 + 10_000
    assert index.documents < 100
    write_shard(tmp_path / "large.safetensors", np.array([70_000]), 100_000, "x")
    assert load_file(tmp_path / "large.safetensors")["tokens"].tolist() == [70_000]


def test_bad_shards_are_found_out(documents: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    index = prepare(str(documents), str(out), options())
    name, count = index.train[1]

    def refused(says: str, shards: list[tuple[str, int]] = index.train, tokenizer: str = index.tokenizer) -> None:
        with pytest.raises(KvfoldError, match=says):
            Sequences(out, shards, 32, tokenizer)

    refused(r"has \[\d+\] tokens, the index says 5", [(name, 5)])
    refused("was made by another tokenizer", tokenizer="another")
    path = out / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    refused("is missing, damaged or cut short")
    path.unlink()
    refused("is missing, damaged or cut short")
    path.write_bytes(whole)
    (out / "index.json").write_text("{}")
    with pytest.raises(KvfoldError, match=r"index\.json is missing or damaged"):
        Index.read(out)
    assert count


def test_bad_input(documents: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(KvfoldError, match="tokenizer 'train:9' is not understood: train:4096, say"):
        options(tokenizer="train:9")
    with pytest.raises(KvfoldError, match=r"validation 1\.0 is no share"):
        options(validation=1.0)
    with pytest.raises(KvfoldError, match="text 'self' is written by a model"):
        prepare("self", out, options())
    with pytest.raises(KvfoldError, match="tokenizer /nowhere: there is no such folder"):
        prepare(str(documents), out, options(tokenizer="/nowhere"))
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(KvfoldError, match="is too short to be divided into training and validation"):
        prepare(str(short), out, options(validation=0.01))
    (tmp_path / "out").mkdir()
    with pytest.raises(KvfoldError, match="out exists: give another OUT, or --overwrite"):
        prepare(str(documents), out, options())
    shutil.rmtree(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
