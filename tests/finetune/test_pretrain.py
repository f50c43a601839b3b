"""Training from scratch, end to end and small: it learns, goes on to the bit, and makes ordinary models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.analysis.comparison import compare, write_comparison
from kvfold.analysis.perplexity import evaluate
from kvfold.analysis.serving import Machine, serving
from kvfold.checkpoint.training_record import Pretrained
from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions
from kvfold.finetune.pretrain import PretrainOptions, pretrain
from kvfold.finetune.sizes import Size, size_named
from kvfold.finetune.study import Column, study
from kvfold.finetune.training import LEARNED_POSITIONS, Moment
from kvfold.finetune.uptrain import uptrain
from kvfold.finetune.uptrain_options import UptrainOptions
from kvfold.model import VARIANTS, KvfoldError

TINY: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "mlp": 64, "vocabulary": 320, "positions": 64, "tokenizer": "train:320",
    "sequence": 32, "batch": 4, "learning_rate": 1e-2, "final_rate": 1e-3, "tokens": 20 * 4 * 32, "warmup_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def text_file(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousand tokens, five times."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("\n".join([text_file.read_text()] * 5))
    return path


@pytest.fixture
def options(text_file: Path) -> Any:
    def make(**changes: Any) -> PretrainOptions:
        size = Size(**(TINY | {name: changes.pop(name) for name in list(changes) if name in TINY}))
        return PretrainOptions(**({"size": size, "text": str(text_file), "evaluate_every": 5 * 4 * 32} | changes))

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_and_is_a_model_like_any(
    variant: str, options: Any, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    moments: list[Moment] = []
    made = pretrain(str(out), options(variant=variant), watch=moments.append)
    assert made is not None
    record = Pretrained.read(out)
    assert record == made.record
    assert record.tokens_trained == 20 * 4 * 32
    assert record.flops == record.tokens_trained * (6 * (record.parameters - 64 * 32) + 12 * 2 * 32 * 32)
    log = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert len(losses) == 5
    assert losses[-1] < 0.8 * losses[0]
    assert 0 < (moments[-1].utilisation or 0) < 1
    (found,) = evaluate([str(out)], str(text_file), 32, 4)
    assert found.parameters == record.parameters
    assert found.cache_bytes_per_token == 2 * record.cache_bytes_per_token  # float32
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.generate(**tokenizer("Sentence", return_tensors="pt"), max_new_tokens=5).shape[1] > 5
    assert "trained from scratch" in (out / "README.md").read_text()


def test_interrupted_and_resumed_is_the_same_to_the_bit(options: Any, tmp_path: Path) -> None:
    pretrain(str(tmp_path / "whole"), options(variant="q-k=v", key_value_heads=2))

    def interrupt(moment: Moment) -> None:
        if moment.step == 12:
            raise KeyboardInterrupt

    out = str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        pretrain(out, options(variant="q-k=v", key_value_heads=2), watch=interrupt)
    assert not (tmp_path / "out").exists()
    with pytest.raises(KvfoldError, match=r"begun with other settings \(key_value_heads 2 → 1\)"):
        pretrain(out, options(variant="q-k=v", key_value_heads=1, resume=True))
    steps: list[int] = []
    pretrain(
        out, options(variant="q-k=v", key_value_heads=2, resume=True), watch=lambda moment: steps.append(moment.step)
    )
    assert min(steps) >= 10
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_seeds_differ_and_repeat(options: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        pretrain(str(tmp_path / name), options(seed=seed, tokens=4 * 4 * 32))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["transformer.wte.weight"], c["transformer.wte.weight"])


def test_weight_decay_spares_biases_norms_and_positions(options: Any, tmp_path: Path) -> None:
    """With no gradient to speak of, what decays shrinks, and the rest stays."""
    changes = {"learning_rate": 1e-3, "final_rate": 1e-3}
    size = Size(**(TINY | changes | {"weight_decay": 900.0, "clip": 1e-12}))
    pretrain(str(tmp_path / "out"), replace(options(), size=size, tokens=4 * 4 * 32, patience=None))
    trained = weights(tmp_path / "out")
    assert trained["transformer.h.0.ln_1.weight"].mean() > 0.98
    assert trained[f"transformer.{LEARNED_POSITIONS}.weight"].std() > 0.015
    assert trained["transformer.h.0.attn.q_proj.weight"].std() < 0.01


def test_scratch_models_are_converted_uptrained_and_compared(
    options: Any, source: Path, text_file: Path, tmp_path: Path
) -> None:
    paths = {name: str(tmp_path / name) for name in ("qkv", "folded", "uptrained", "scratch", "again")}
    pretrain(paths["qkv"], options())
    pretrain(paths["scratch"], options(variant="q-k=v"))
    convert(paths["qkv"], paths["folded"], ConvertOptions(method="mean", span="head"))
    short: dict[str, Any] = {
        "texts": (str(text_file),), "sequence": 32, "tokens": 10 * 4 * 32, "train": "full", "learning_rate": 1e-3,
    }  # fmt: skip
    assert uptrain(paths["folded"], paths["uptrained"], UptrainOptions(**short)) is not None
    with pytest.raises(KvfoldError, match="was trained from scratch and has no source: give --teacher"):
        uptrain(paths["scratch"], paths["again"], UptrainOptions(**short))
    assert uptrain(paths["scratch"], paths["again"], UptrainOptions(**short, loss="lm")) is not None
    assert len(Pretrained.read(Path(paths["again"])).uptraining) == 1
    machine = Machine(memory=2e6, bandwidth=1e9, price=1.0)
    found = compare(list(paths.values()), str(text_file), 32, 4, 64, machine)
    assert [each.made.kind for each in found] == ["scratch", "converted", "uptrained", "scratch", "scratch"]
    assert [each.cached_numbers for each in found] == [128, 64, 64, 64, 64]
    assert found[0].ratio == 1
    assert found[1].made.tokens == 0
    assert found[2].made.tokens == 10 * 4 * 32
    assert found[4].made.tokens == 20 * 4 * 32 + 10 * 4 * 32
    assert found[2].made.flops == 10 * 4 * 32 * found[2].evaluation.parameters * 8
    assert found[1].serving.sequences > 1.9 * found[0].serving.sequences
    other = compare([paths["qkv"], str(source)], str(text_file), 32, 4, 64, machine)[1]
    assert other.made.kind == "source"
    assert other.made.tokens is None
    assert other.ratio is None  # its tokens are others
    write_comparison(tmp_path / "page.html", found, "text", 32, 4, 64, machine)
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")


def test_serving_by_hand() -> None:
    """80 GB, a tenth reserved, 10 GB of weights: 62 GB for caches of 100 kB a token, 1,000 tokens each."""
    found = serving(5_000_000_000, 50_000, 1000, Machine(80e9, 2e12, 3.6, 0.1))
    assert found.sequences == 620
    assert found.longest == 620_000
    assert found.tokens_per_second == pytest.approx(620 / (72e9 / 2e12))
    assert found.cost == pytest.approx(3.6 / 3600 / (620 / 0.036) * 1e6)
    assert serving(50_000_000_000, 1, 1, Machine()).sequences == 0
    assert serving(5_000_000_000, 50_000, 1_000_000, Machine(80e9)).longest == 620_000


def test_other_variants_are_not_converted(options: Any, tmp_path: Path) -> None:
    pretrain(str(tmp_path / "q=k-v"), options(variant="q=k-v", tokens=128))
    pretrain(str(tmp_path / "q-k=v"), options(variant="q-k=v", tokens=128))
    for name, says in (("q=k-v", "it is of variant q=k-v, and only qkv"), ("q-k=v", "is folded already")):
        with pytest.raises(KvfoldError, match=says):
            convert(str(tmp_path / name), str(tmp_path / "out"), ConvertOptions(method="svd"))
    with pytest.raises(KvfoldError, match="cannot be folded"):
        uptrain(str(tmp_path / "q=k-v"), str(tmp_path / "out"), UptrainOptions())


def test_a_study(options: Any, tmp_path: Path) -> None:
    work, trained = tmp_path / "work", []

    def watch(name: str) -> Any:
        trained.append(name)
        return lambda moment: None

    names = ["qkv", "q-k=v", "q-mqa"]
    rows = study(str(work), names, 2, options(), watch=watch)
    assert trained[:3] == ["qkv-0", "q-k=v-0", "q-mqa-0"]
    assert [row.cache_bytes_per_token for row in rows] == [2 * 2 * 32 * 2, 2 * 32 * 2, 2 * 8 * 2]
    assert rows[0].degradations == [0, 0]
    base = [Pretrained.read(work / f"qkv-{seed}").perplexity for seed in (0, 1)]
    assert rows[1].degradations == [
        100 * (value / of - 1) for value, of in zip(rows[1].perplexities, base, strict=True)
    ]
    assert {"study.json", "study.png", "shards"} <= {path.name for path in work.iterdir()}
    before = weights(work / "qkv-0")
    assert study(str(work), names, 2, options()) == rows
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(work / "qkv-0").items())
    with pytest.raises(KvfoldError, match=r"was trained with other settings \(tokens 2560 → 5120\)"):
        study(str(work), names, 2, options(tokens=2 * TINY["tokens"]))


def test_sizes_and_devices(tmp_path: Path) -> None:
    study_size = size_named("300m")
    assert study_size.for_devices(1).accumulation == 24 * 8
    assert study_size.for_devices(16, 3).accumulation == 24
    assert study_size.for_devices(16, 3).sequences_a_step == 1152
    with pytest.raises(KvfoldError, match="1152 sequences a step do not divide over 5 devices"):
        study_size.for_devices(5)
    own = tmp_path / "mine.yaml"
    own.write_text(yaml.safe_dump(TINY | {"tokens": "2M"}))
    assert size_named(str(own)).tokens == 2_000_000
    own.write_text(own.read_text() + "learning_rate: 1e-3\n")  # a string in YAML 1.1
    assert size_named(str(own)).learning_rate == 1e-3
    for changes, says in (
        ({"heads": 5}, "width 32 does not divide over 5 heads"),
        ({"sequence": 100}, "longer than the 64 positions"),
        ({"layers": "two"}, "layers 'two' is no number"),
        ({"layers": 0}, "layers 0 is no whole number above 0"),
        ({"extra": 1}, "cannot be read: .*extra.*its entries: layers, width"),
        ({"tokens": "many"}, "'many' is no number of tokens"),
    ):
        own.write_text(yaml.safe_dump(TINY | changes))
        with pytest.raises(KvfoldError, match=says):
            size_named(str(own))
    own.write_text("layers: [1")
    with pytest.raises(KvfoldError, match="cannot be read"):
        size_named(str(own))
    with pytest.raises(KvfoldError, match=r"size '7b' is unknown: use 3m, 30m, 300m, 1\.2b, or a YAML file"):
        size_named("7b")


def test_bad_input(options: Any, tmp_path: Path) -> None:
    with pytest.raises(KvfoldError, match="4 query heads do not divide over 3 key heads"):
        options(key_value_heads=3)
    with pytest.raises(KvfoldError, match="variant 'vkq' is unknown"):
        options(variant="vkq")
    with pytest.raises(KvfoldError, match="4 sequences a step do not divide over 1 devices with 3 each"):
        pretrain(str(tmp_path / "out"), replace(options(), batch=3))
    short = tmp_path / "short.txt"
    short.write_text("A short text. " * 20)
    with pytest.raises(KvfoldError, match="is too short to be divided into training and validation: 82 tokens"):
        pretrain(str(tmp_path / "out"), options(text=str(short)))
    pieces = tmp_path / "pieces.jsonl"
    pieces.write_text('{"text": "Short."}\n' * 40)
    with pytest.raises(KvfoldError, match=r"the validation part of .* is shorter than one sequence of 32 tokens"):
        pretrain(str(tmp_path / "out"), options(text=str(pieces)))
    with pytest.raises(KvfoldError, match=r"variant 'gqa' is unknown: use qkv, .*, mqa, gqa-N, q-mqa or q-gqa-N"):
        Column.parse("gqa")
    assert {path.name for path in tmp_path.iterdir()} - {"datasets"} == {"short.txt", "pieces.jsonl"}


def test_two_processes_are_one(options: Any, text_file: Path, tmp_path: Path) -> None:
    size = tmp_path / "size.yaml"
    size.write_text(yaml.safe_dump(TINY | {"tokens": 6 * 4 * 32, "dropout": 0.0}))
    command = ["-m", "kvfold.cli", "pretrain"]
    more = ["--size", str(size), "--variant", "q-k=v", "--text", str(tmp_path / "shards")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "kvfold.cli", "prepare", str(text_file), str(tmp_path / "shards"), "--tokenizer",
         "train:320", "--validation", "0.1"],
        check=True, env=environment, capture_output=True,
    )  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    logs = {}
    for name, starter, flags in (("one", [], []), ("ddp", torchrun, []), ("fsdp", torchrun, ["--fsdp"])):
        out = tmp_path / name
        ran = subprocess.run(
            [sys.executable, *starter, *command, str(out), *more, "--batch", "2", *flags],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-3000:]
        lines = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
        logs[name] = [(entry["step"], entry.get("loss", entry.get("eval_loss"))) for entry in lines]
    for name in ("ddp", "fsdp"):
        assert [step for step, _ in logs["one"]] == [step for step, _ in logs[name]]
        assert max(abs(a - b) for (_, a), (_, b) in zip(logs["one"], logs[name], strict=True)) < 1e-4
        for key, tensor in weights(tmp_path / "one").items():
            torch.testing.assert_close(weights(tmp_path / name)[key], tensor, rtol=1e-3, atol=1e-4)
