"""Small models, random but not trivial, and real ones where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest
import torch
from helpers import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvfold.text import generated

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(autouse=True, scope="session")
def written_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What models write themselves is kept for these tests only."""
    folder = tmp_path_factory.mktemp("written")
    generated.cache_folder = lambda: folder


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is packed anew in the test that asks for this: nothing of other runs is found, and nothing is left."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-readme", action="store_true", help="write the measured figures into README.md")


TEXT = " ".join(
    f"Sentence {number} tells of {animal}s that {verb} near the {place}."
    for number in range(40)
    for animal in ("cat", "dog", "heron", "otter")
    for verb, place in (("sleep", "river"), ("run", "old mill"), ("sing", "garden"))
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", pad_token="<pad>", padding_side="left")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The random Llama as a checkpoint folder with a tokenizer and a licence."""
    folder = tmp_path_factory.mktemp("models") / "source"
    llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("as you like it")
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousand tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def folded(tmp_path_factory: pytest.TempPathFactory, source: Path, text_file: Path) -> Path:
    """The random Llama at half its cache, span all."""
    from kvfold.convert.conversion import convert
    from kvfold.convert.options import ConvertOptions

    out = tmp_path_factory.mktemp("models") / "folded"
    convert(
        str(source), str(out), ConvertOptions(calibrate=(str(text_file),), calibrate_tokens=2048, calibrate_window=64)
    )
    return out


@pytest.fixture(scope="session")
def stories() -> Path:
    """stories260K, a small pretrained Llama, where the machine has it."""
    path = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
    if not path.is_dir():
        pytest.skip("stories260K is not at hand")
    return path


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 20 token ids."""
    return torch.randint(2, 320, (2, 20), generator=torch.Generator().manual_seed(3))
