"""Uptraining end to end on a small model: better than before, whole, resumable to the bit, refused in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import llama, relative
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold.checkpoint.option_checks import token_count
from kvfold.checkpoint.record import Recipe
from kvfold.finetune import training
from kvfold.finetune.trainable import ADAPTED, folded_layers
from kvfold.finetune.training import Moment, last_checkpoint, write_course
from kvfold.finetune.uptrain import NoGain, tokens_seen, uptrain
from kvfold.finetune.uptrain_options import UptrainOptions
from kvfold.model import KvfoldError
from kvfold.text import generated


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(before: Path, after: Path) -> set[str]:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.parametrize("train", ["lora", "attention", "full"])
def test_comes_closer_to_its_source(folded: Path, tmp_path: Path, options: Any, train: str) -> None:
    result = uptrain(str(folded), str(tmp_path / "out"), options(train=train))
    assert result is not None
    (run,) = result.recipe.uptraining
    log = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert len(losses) == 3
    assert min(losses[1:]) < 0.9 * losses[0]
    assert run["ratio"]["before"] != run["ratio"]["after"]
    assert run["tokens_trained"] == 10 * 4 * 32
    names = {name.partition("self_attn.")[2].partition(".")[0] for name in changed(folded, tmp_path / "out")}
    if train == "lora":
        assert names == set(ADAPTED) - {"key_map"}
    elif train == "attention":
        assert names == {"q_proj", "latent_proj", "value_map", "o_proj", ""}  # "": norms beside the attention
        assert not any("mlp" in name or "embed" in name for name in changed(folded, tmp_path / "out"))
    else:
        assert any("mlp" in name for name in changed(folded, tmp_path / "out"))


def test_result_is_a_checkpoint_of_the_same_kind(folded: Path, tmp_path: Path, options: Any) -> None:
    out = tmp_path / "out"
    uptrain(str(folded), str(out), options(keep_adapter=True))
    assert {path.name for path in folded.iterdir()} <= {path.name for path in out.iterdir()}
    assert {"train_log.jsonl", "training.png", "adapter"} <= {path.name for path in out.iterdir()}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (folded, out))
    assert {name: before[name] for name in ("kvfold", "auto_map", "dtype", "architectures")} == {
        name: after[name] for name in ("kvfold", "auto_map", "dtype", "architectures")
    }
    assert "Uptrained (lora) on 1,280 tokens" in (out / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True); "
        "assert 'kvfold' not in sys.modules; print(model(torch.arange(2, 30)[None]).logits.double().sum().item())"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    merged = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        assert float(ran.stdout) == pytest.approx(merged(ids).logits.double().sum().item(), rel=1e-4)
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folded), out / "adapter").eval()
        assert relative(merged(ids).logits, adapted(input_ids=ids).logits) < 1e-4


def test_rounded_checkpoints_stay_rounded(folded: Path, tmp_path: Path, options: Any) -> None:
    rounded = tmp_path / "rounded"
    shutil.copytree(folded, rounded)
    save_file({name: each.bfloat16() for name, each in weights(folded).items()}, rounded / "model.safetensors")
    for name, entry in (("config.json", "dtype"), ("kvfold.json", "dtype")):
        told = json.loads((rounded / name).read_text())
        (rounded / name).write_text(json.dumps(told | {entry: "bfloat16"}))
    uptrain(str(rounded), str(tmp_path / "out"), options())
    assert {each.dtype for each in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert all("self_attn" in name for name in changed(rounded, tmp_path / "out"))


@pytest.mark.parametrize("loss", ["lm", "mixed"])
def test_other_losses(folded: Path, tmp_path: Path, options: Any, loss: str) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folded, moved)
    if loss == "lm":  # needs no teacher
        told = json.loads((moved / "kvfold.json").read_text())
        told["source"]["path"] = "/nowhere"
        (moved / "kvfold.json").write_text(json.dumps(told))
    result = uptrain(str(moved), str(tmp_path / "out"), options(loss=loss, hidden=0.0 if loss == "lm" else 0.1))
    assert result is not None
    (run,) = result.recipe.uptraining
    assert run["perplexity"]["after"] < 0.9 * run["perplexity"]["before"]
    assert ("ratio" in run) == (loss == "mixed")


def test_text_that_the_source_writes(folded: Path, tmp_path: Path, options: Any) -> None:
    result = uptrain(str(folded), str(tmp_path / "out"), options(texts=("self",)))
    assert result is not None
    assert list((generated.cache_folder() / "written").glob("*-self-0/*.safetensors"))


def test_what_a_model_has_seen_is_told_by_its_recipe(folded: Path) -> None:
    recipe = Recipe.read(folded)
    assert tokens_seen(recipe) == {}
    calibrated = {"texts": ["docs:3", "chat"], "tokens": 100, "held_out_tokens": 20}
    run = {"texts": ["docs"], "tokens_trained": 50}
    assert tokens_seen(replace(recipe, calibration=calibrated, uptraining=[run])) == {"docs": 140, "chat": 30}


@pytest.mark.parametrize(("loss", "texts"), [("distill", ["docs", "self"]), ("lm", ["docs"])])
def test_text_where_none_is_named(folded: Path, tmp_path: Path, options: Any, loss: str, texts: list[str]) -> None:
    result = uptrain(str(folded), str(tmp_path / "out"), options(texts=(), loss=loss))
    assert result is not None
    assert result.recipe.uptraining[0]["texts"] == texts


def test_goes_on_from_an_adapter_and_adds_a_run(folded: Path, tmp_path: Path, options: Any) -> None:
    first = uptrain(str(folded), str(tmp_path / "first"), options(keep_adapter=True))
    second = uptrain(str(folded), str(tmp_path / "second"), options(adapter=str(tmp_path / "first" / "adapter")))
    third = uptrain(str(tmp_path / "first"), str(tmp_path / "third"), options())
    assert first is not None
    assert second is not None
    assert third is not None
    after = first.recipe.uptraining[0]["ratio"]["after"]
    assert second.recipe.uptraining[0]["ratio"]["before"] == pytest.approx(after, rel=1e-4)
    assert len(third.recipe.uptraining) == 2


class Stop(Exception):
    """An interruption in the middle of a run."""


def interrupted_at(step: int) -> Any:
    def watch(moment: Moment) -> None:
        if moment.step == step:
            raise Stop

    return watch


@pytest.mark.parametrize("train", ["lora", "attention"])
def test_resumed_is_uninterrupted_to_the_bit(folded: Path, tmp_path: Path, options: Any, train: str) -> None:
    chosen = options(train=train, accumulation=2, tokens=2 * 10 * 4 * 32)
    whole = uptrain(str(folded), str(tmp_path / "whole"), chosen)
    with pytest.raises(Stop):
        uptrain(str(folded), str(tmp_path / "out"), chosen, watch=interrupted_at(8))
    assert last_checkpoint(tmp_path / ".out.unfinished") is not None
    assert not (tmp_path / "out").exists()
    resumed = uptrain(str(folded), str(tmp_path / "out"), replace(chosen, resume=True))
    assert not changed(tmp_path / "whole", tmp_path / "out")
    assert whole is not None
    assert resumed is not None

    def told(log: list[dict[str, Any]]) -> list[tuple[int, float]]:
        return [
            (entry["step"], entry.get("loss", entry.get("eval_loss"))) for entry in log if "train_loss" not in entry
        ]

    assert told(whole.log) == told(resumed.log)


def test_killed_without_notice(folded: Path, text_file: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "kvfold.cli", "uptrain", str(folded), "--text", str(text_file), "--sequence", "32",
        "--tokens", "3840", "--evaluate-every", "384",
    ]  # fmt: skip
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    unfinished = tmp_path / ".out.unfinished"
    with subprocess.Popen([*command[:5], str(tmp_path / "out"), *command[5:]], env=environment) as process:
        deadline = time.monotonic() + 120
        while last_checkpoint(unfinished) is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    for out, more in (("out", ["--resume"]), ("whole", [])):
        ran = subprocess.run([*command[:5], str(tmp_path / out), *command[5:], *more], env=environment, check=False)
        assert ran.returncode == 0
    assert not changed(tmp_path / "whole", tmp_path / "out")


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    for step, told in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"global_st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(told)
    (tmp_path / "checkpoint-14").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_full_disk_leaves_the_checkpoint_before(
    folded: Path, tmp_path: Path, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = training.Trainer._save_optimizer_and_scheduler, []

    def full(self: Any, folder: str) -> None:
        if saved:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(folder)
        save(self, folder)

    with monkeypatch.context() as context:
        context.setattr(training.Trainer, "_save_optimizer_and_scheduler", full)
        with pytest.raises(KvfoldError, match=r"no space left on the disk.*--resume"):
            uptrain(str(folded), str(tmp_path / "out"), options())
    assert last_checkpoint(tmp_path / ".out.unfinished") == saved[0]
    whole, resumed = uptrain(str(folded), str(tmp_path / "whole"), options()), None
    resumed = uptrain(str(folded), str(tmp_path / "out"), options(resume=True))
    assert whole is not None
    assert resumed is not None
    assert not changed(tmp_path / "whole", tmp_path / "out")


def test_no_number_stops_and_keeps_the_last_good_checkpoint(
    folded: Path, tmp_path: Path, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training.Trainer.training_step

    def poisoned(self: Any, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 7:
            with torch.no_grad():
                next(each for each in model.parameters() if each.requires_grad).fill_(float("nan"))
        return step(self, model, *args, **kwargs)

    monkeypatch.setattr(training.Trainer, "training_step", poisoned)
    with pytest.raises(KvfoldError, match=r"no number any more at step 8.*last good checkpoint"):
        uptrain(str(folded), str(tmp_path / "out"), options())
    kept = last_checkpoint(tmp_path / ".out.unfinished")
    assert kept is not None
    assert kept.endswith("checkpoint-5")


def test_stops_early_and_keeps_the_best(folded: Path, text_file: Path, tmp_path: Path, options: Any) -> None:
    same: dict[str, Any] = {"tokens": 40 * 128, "evaluate": str(text_file)}  # (a second run holds other sequences out)
    chosen = options(**same, evaluate_every=128, patience=2, learning_rate=0.3, warmup=0.5)
    result = uptrain(str(folded), str(tmp_path / "out"), chosen)
    assert result is not None
    (run,) = result.recipe.uptraining
    losses = [entry["eval_loss"] for entry in result.log if "eval_loss" in entry]
    assert run["tokens_trained"] < 40 * 128
    assert run["tokens"] == run["tokens_trained"] - 2 * 128
    assert losses[-3] == min(losses)
    again = uptrain(str(tmp_path / "out"), str(tmp_path / "again"), options(**same, evaluate_every=40 * 128))
    assert again is not None
    assert again.log[0]["eval_loss"] == pytest.approx(min(losses), rel=1e-4)


def test_no_better_than_before(folded: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(NoGain, match="nothing was better than the start"):
        uptrain(str(folded), str(tmp_path / "out"), options(learning_rate=0.5, warmup=0.0))
    assert not (tmp_path / "out").exists()


def test_minutes_become_tokens(folded: Path, tmp_path: Path, options: Any) -> None:
    result = uptrain(str(folded), str(tmp_path / "out"), options(tokens=None, minutes=0.02, evaluate_every=None))
    assert result is not None
    assert result.recipe.uptraining[0]["tokens_trained"] >= 128


def test_activations_may_be_computed_again(folded: Path, tmp_path: Path, options: Any) -> None:
    for out, again in (("plain", False), ("again", True)):
        uptrain(str(folded), str(tmp_path / out), options(checkpoint_activations=again))
    plain, again = weights(tmp_path / "plain"), weights(tmp_path / "again")
    for name, tensor in plain.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-3, atol=1e-5)


def test_bad_input(folded: Path, source: Path, tmp_path: Path, options: Any, tokenizer: Any) -> None:
    def fails(told: str, model: Path = folded, out: Path = tmp_path / "out", **changes: Any) -> None:
        with pytest.raises(KvfoldError, match=told):
            uptrain(str(model), str(out), options(**changes))
        assert not out.exists()
        assert not (tmp_path / ".out.unfinished").exists()

    fails("is not folded", model=source)
    fails("lies inside the source", out=folded / "out")
    fails("longer than the 512 positions", sequence=513)
    fails("does not exist", texts=(str(tmp_path / "none.txt"),))

    other = tmp_path / "other"
    llama(vocab_size=352).save_pretrained(other)
    tokenizer.save_pretrained(other)
    fails("has a vocabulary of 352", teacher=str(other))
    stranger = tmp_path / "stranger"
    shutil.copytree(source, stranger)
    told = json.loads((stranger / "tokenizer.json").read_text())
    vocabulary = told["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (stranger / "tokenizer.json").write_text(json.dumps(told))
    fails("another tokenizer", teacher=str(stranger))

    moved = tmp_path / "moved"
    shutil.copytree(folded, moved)
    recipe = json.loads((moved / "kvfold.json").read_text())
    recipe["source"]["path"] = str(other)
    (moved / "kvfold.json").write_text(json.dumps(recipe))
    fails("not the model any more", model=moved)
    recipe["source"]["path"] = "/nowhere"
    (moved / "kvfold.json").write_text(json.dumps(recipe))
    fails("--teacher, or use --loss lm", model=moved)

    uptrain(str(folded), str(tmp_path / "adapted"), options(keep_adapter=True))
    narrow = tmp_path / "narrow"
    from kvfold.convert.conversion import convert
    from kvfold.convert.options import ConvertOptions

    convert(str(source), str(narrow), ConvertOptions(method="svd", cache_fraction=0.75))
    fails("of another model", model=narrow, adapter=str(tmp_path / "adapted" / "adapter"))
    fails("no PEFT adapter", adapter=str(source))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": "some"}, "what to train 'some' is unknown"),
        ({"loss": "hope"}, "loss 'hope' is unknown"),
        ({"minutes": 1.0}, "not both"),
        ({"batch": 0}, "batch 0 is too little"),
        ({"learning_rate": float("nan")}, "learning-rate nan must be"),
        ({"train": "full", "keep_adapter": True}, "for --train lora"),
        ({"loss": "lm", "hidden": 1.0}, "needs a teacher"),
        ({"warmup": 1.0}, "shares"),
        ({"report_to": "tensorboard"}, "needs the package of this name"),
    ],
)
def test_options_out_of_range(
    options: Any, changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KvfoldError, match=told):
        options(**changes)


def test_numbers_of_tokens() -> None:
    assert [token_count(written) for written in ("200", "200k", "1.5M", "2b")] == [200, 200_000, 1_500_000, 2 * 10**9]
    for wrong in ("many", "-1", "2 M k"):
        with pytest.raises(KvfoldError, match="no number of tokens"):
            token_count(wrong)


def test_default_is_lora_on_all_maps(folded: Path) -> None:
    assert UptrainOptions().train == "lora"
    assert len(list(folded_layers(AutoModelForCausalLM.from_pretrained(folded)))) == 3


def test_what_tensorboard_was_given_comes_along(tmp_path: Path) -> None:
    (tmp_path / "unfinished" / "runs" / "today").mkdir(parents=True)
    (tmp_path / "unfinished" / "runs" / "today" / "events").write_text("event")
    (tmp_path / "out").mkdir()
    history = [{"loss": 1.0, "tokens": 8}, {"eval_loss": 1.0, "perplexity": 2.0, "tokens": 8}]
    write_course(tmp_path / "out", history, tmp_path / "unfinished")
    assert (tmp_path / "out" / "runs" / "today" / "events").read_text() == "event"
    assert len((tmp_path / "out" / "train_log.jsonl").read_text().splitlines()) == 2
