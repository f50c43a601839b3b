"""What the tests of training share: text that is packed anew, and a source that a folded model learns from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions
from kvfold.finetune.uptrain_options import UptrainOptions


@pytest.fixture(autouse=True)
def packed_anew(caches: None) -> None:
    """No training finds text that another one has packed."""


@pytest.fixture(scope="session")
def folded(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The random Llama at half its cache, folded without regard to text, so that there is much to learn."""
    out = tmp_path_factory.mktemp("models") / "folded"
    convert(str(source), str(out), ConvertOptions(method="svd"))
    return out


@pytest.fixture
def options(text_file: Path) -> Callable[..., UptrainOptions]:
    """Settings of a short run: 10 steps of 4 sequences of 32 tokens, three evaluations."""

    def make(**changes: Any) -> UptrainOptions:
        short: dict[str, Any] = {
            "texts": (str(text_file),), "sequence": 32, "batch": 4, "tokens": 10 * 4 * 32, "evaluate_every": 5 * 4 * 32,
            "learning_rate": 2e-3,
        }  # fmt: skip
        return UptrainOptions(**(short | changes))

    return make
