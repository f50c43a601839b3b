"""Text becomes sequences: whole, in the right proportions, nothing of the held-out part among them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import llama

from kvfold.model import KvfoldError
from kvfold.text.generated import Writer
from kvfold.text.mixture import WeightedText
from kvfold.text.packing import HELD_OUT_MOST, IGNORED, Packing, collate, packed_texts
from kvfold.text.sources import CALIBRATE, EVALUATE, TextSource

pytestmark = pytest.mark.usefixtures("caches")


def write_rows(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return str(path)


def rows_of(data: Any) -> list[tuple[int, ...]]:
    return [tuple(row["input_ids"]) for row in data]


def test_documents_are_packed_whole_and_positions_start_anew(tmp_path: Path, tokenizer: Any) -> None:
    documents = [f"Document {number} tells of {'cats and dogs ' * (number % 5)}." for number in range(60)]
    text = WeightedText.parse(write_rows(tmp_path / "rows.jsonl", documents))
    packed = packed_texts([text], None, tokenizer, Packing(16, 10**4), None)
    rows = sorted([*packed.train, *packed.held_out], key=lambda row: row["input_ids"])
    stream = [token for document in documents for token in tokenizer(document).input_ids]
    starts = [position for document in documents for position in range(len(tokenizer(document).input_ids))]
    unique = {tuple(row["input_ids"]): row["position_ids"] for row in rows}
    expected = {tuple(stream[at : at + 16]): starts[at : at + 16] for at in range(0, len(stream) - 15, 16)}
    assert unique.keys() == expected.keys()
    for ids, positions in unique.items():
        told = expected[ids]
        begins = [at for at in range(16) if told[at] == 0]
        assert positions[0] == 0
        assert [at for at in range(1, 16) if positions[at] == 0] == [at for at in begins if at]
        assert all(after == before + 1 or after == 0 for before, after in itertools.pairwise(positions))


def test_held_out_is_the_end_and_is_not_trained_on(text_file: Path, tokenizer: Any) -> None:
    packed = packed_texts([WeightedText.parse(str(text_file))], None, tokenizer, Packing(32, 100))
    assert len(packed.train) == 100
    assert len(packed.held_out) == 5
    stream = TextSource(str(text_file)).tokens(tokenizer).tolist()
    in_order = [tuple(stream[at : at + 32]) for at in range(0, 105 * 32, 32)]
    assert rows_of(packed.held_out) == in_order[100:]
    assert sorted(rows_of(packed.train)) == sorted(in_order[:100])


def test_what_was_not_seen_comes_first(text_file: Path, tokenizer: Any) -> None:
    text = WeightedText.parse(str(text_file))
    stream = text.source.tokens(tokenizer).tolist()
    in_order = [tuple(stream[at : at + 32]) for at in range(0, len(stream) - 31, 32)]
    packed = packed_texts([text], None, tokenizer, Packing(32, 20), seen={str(text_file): 5 * 32 - 7, "another": 64})
    assert sorted(rows_of(packed.train)) == sorted(in_order[5:25])
    assert rows_of(packed.held_out) == in_order[25:26]
    kept = len(in_order) - 1
    packed = packed_texts([text], None, tokenizer, Packing(32, 20), seen={str(text_file): (kept - 6) * 32})
    assert sorted(rows_of(packed.train)) == sorted([*in_order[kept - 6 : kept], *in_order[:14]])
    packed = packed_texts([text], None, tokenizer, Packing(32, 20), seen={str(text_file): 10**6})
    assert sorted(rows_of(packed.train)) == sorted(in_order[:20])


def test_weights_are_shares_and_short_texts_are_repeated(tmp_path: Path, text_file: Path, tokenizer: Any) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Nothing here but owls. " * 12)
    texts = [WeightedText.parse(f"{text_file}:0.75"), WeightedText.parse(f"{short}:.25")]
    packed = packed_texts(texts, TextSource("docs", EVALUATE), tokenizer, Packing(32, 80), None)
    own = set(rows_of(packed_texts(texts[1:], TextSource("docs"), tokenizer, Packing(32, 4), None).train))
    counted = sum(row in own for row in rows_of(packed.train))
    assert len(packed.train) == 80
    assert len(packed.held_out) == HELD_OUT_MOST
    every = packed.repeated[str(short)]
    assert every > 1
    assert packed.repeated[str(text_file)] == 1
    assert counted <= 20
    assert len(set(rows_of(packed.train))) <= 60 + 20 / every + 1


def test_the_same_again_from_the_cache_and_another_text_anew(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    texts = [WeightedText.parse(write_rows(path, ["Cats run near the river. " * 30] * 5))]
    first = packed_texts(texts, None, tokenizer, Packing(32, 8, seed=3), None)
    with monkeypatch.context() as context:
        context.setattr(TextSource, "documents", None)  # it is not read again
        again = packed_texts(texts, None, tokenizer, Packing(32, 8, seed=3), None)
    assert rows_of(first.train) == rows_of(again.train)
    texts = [WeightedText.parse(write_rows(path, ["Owls sing near the old mill. " * 30] * 5))]
    assert rows_of(packed_texts(texts, None, tokenizer, Packing(32, 8, seed=3), None).train) != rows_of(first.train)


def test_workers_give_the_same(tmp_path: Path, tokenizer: Any) -> None:
    texts = [
        WeightedText.parse(write_rows(tmp_path / "a.jsonl", [f"Herons sing {number}. " * 9 for number in range(50)]))
    ]
    other = [
        WeightedText.parse(write_rows(tmp_path / "b.jsonl", [f"Herons sing {number}. " * 9 for number in range(50)]))
    ]
    one, two = (
        packed_texts(each, None, tokenizer, Packing(32, 20, workers), None)
        for each, workers in ((texts, 1), (other, 2))
    )
    assert rows_of(one.train) == rows_of(two.train)


def test_batch(tokenizer: Any) -> None:
    batch = collate([{"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}])
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, 8]]
    assert batch["input_ids"].dtype == torch.int64


def test_what_the_model_writes_itself(tokenizer: Any) -> None:
    asked = []

    class Known(Writer):
        def documents(self, kind: str, tokens: int) -> list[list[int]]:
            asked.append((kind, tokens))
            return [[0, *range(2, 40)]] * 30

    packed = packed_texts([WeightedText.parse("chat")], None, tokenizer, Packing(32, 10), Known(llama, tokenizer))
    assert len(packed.train) == 10
    assert asked[0][0] == "chat"
    assert asked[0][1] >= 11 * 32
    assert any(0 in row["position_ids"][1:] for row in packed.train)


def test_weights_of_texts_are_read(text_file: Path) -> None:
    assert WeightedText.parse(f"{text_file}:2").weight == 2
    assert WeightedText.parse("hf:some/set:config:train").source.spec == "hf:some/set:config:train"
    assert WeightedText.parse("hf:some/set::train:0.5") == WeightedText(
        TextSource("hf:some/set::train", CALIBRATE), 0.5
    )
    with pytest.raises(KvfoldError, match="above 0"):
        WeightedText.parse("docs:0")


def test_too_short(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Nothing here but owls. " * 20)
    tokens = len(tokenizer(path.read_text()).input_ids)
    for sequence, told in ((tokens + 1, "shorter than one sequence"), (tokens // 2 + 1, "has one sequence")):
        with pytest.raises(KvfoldError, match=told):
            packed_texts([WeightedText.parse(str(path))], None, tokenizer, Packing(sequence, 4))
