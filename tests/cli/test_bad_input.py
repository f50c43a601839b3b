"""Bad input is one line, an exit status other than 0, and no folder left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from kvfold.cli import main


@pytest.fixture
def copy_of(source: Path, tmp_path: Path) -> Path:
    """A copy of the source that may be damaged."""
    return Path(shutil.copytree(source, tmp_path / "damaged"))


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text_file: Path) -> Any:
    """Run ``kvfold convert`` and expect one line that names the cause; returns the line."""

    def check(model: Path | str, *options: str, says: str, out: str = "out") -> None:
        before = sorted(path.name for path in tmp_path.iterdir())
        small = ["--calibrate", str(text_file), "--calibrate-tokens", "512", "--calibrate-window", "64"]
        monkeypatch.setattr("sys.argv", ["kvfold", "convert", str(model), str(tmp_path / out), *small, *options])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        error = capsys.readouterr().err
        assert exit_.value.code not in (0, None)
        assert error.count("\n") == 1
        assert error.startswith("kvfold: ")
        assert says in error
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    return check


def rewrite(folder: Path, change: Any) -> None:
    """Change the weights of a checkpoint folder in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_folder(fails: Any, tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", says="does not exist")


def test_folder_without_config(fails: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", says="config.json")


def test_folder_without_weights(fails: Any, copy_of: Path) -> None:
    (copy_of / "model.safetensors").unlink()
    fails(copy_of, says="no safetensors weights")


def test_missing_shard(fails: Any, copy_of: Path) -> None:
    (copy_of / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (copy_of / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(copy_of, says="shard")


def test_missing_tensor(fails: Any, copy_of: Path) -> None:
    rewrite(copy_of, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.weight"))
    fails(copy_of, says="model.layers.1.self_attn.v_proj.weight")


def test_tensor_of_another_shape(fails: Any, copy_of: Path) -> None:
    rewrite(copy_of, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}))
    fails(copy_of, says="lm_head.weight has shape [3, 3]")


def test_tensor_that_belongs_nowhere(fails: Any, copy_of: Path) -> None:
    rewrite(copy_of, lambda tensors: tensors.update({"model.layers.1.self_attn.k_proj.bias": torch.zeros(16)}))
    fails(copy_of, says="k_proj.bias")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
    ],
)
def test_config_that_does_not_fit(fails: Any, copy_of: Path, changes: dict, says: str) -> None:
    config = json.loads((copy_of / "config.json").read_text()) | changes
    (copy_of / "config.json").write_text(json.dumps(config))
    fails(copy_of, says=says)


def test_json_into_the_source(fails: Any, copy_of: Path) -> None:
    before = (copy_of / "config.json").read_text()
    fails(copy_of, "--json", str(copy_of / "config.json"), says="never touched")
    assert (copy_of / "config.json").read_text() == before


def test_truncated_weights(fails: Any, copy_of: Path) -> None:
    whole = (copy_of / "model.safetensors").read_bytes()
    (copy_of / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    fails(copy_of, says="damaged")


def test_nan_weights(fails: Any, copy_of: Path) -> None:
    rewrite(copy_of, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")))
    fails(copy_of, says="NaN")


def test_damaged_config(fails: Any, copy_of: Path) -> None:
    (copy_of / "config.json").write_text("{")
    fails(copy_of, says="damaged")


def test_unknown_family(fails: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "bloom"
    )
    tokenizer.save_pretrained(tmp_path / "bloom")
    fails(tmp_path / "bloom", says="'bloom' is not supported; supported: ")
    fails(tmp_path / "bloom", says="CONTRIBUTING")


def test_code_of_a_checkpoint_is_not_run(fails: Any, copy_of: Path) -> None:
    config = json.loads((copy_of / "config.json").read_text())
    config |= {"model_type": "mystery", "auto_map": {"AutoConfig": "mystery.Config"}}
    (copy_of / "config.json").write_text(json.dumps(config))
    (copy_of / "mystery.py").write_text("raise SystemExit('ran')")
    fails(copy_of, says="supported: ")


def test_text_file_that_is_no_model(fails: Any, text_file: Path) -> None:
    fails(text_file, says="a folder, a Hub id or a .gguf file")


def test_file_that_is_no_gguf(fails: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model at all")
    fails(tmp_path / "model.gguf", says="not a GGUF file")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cache-fraction", "0"], "out of range"),
        (["--cache-fraction", "0.01"], "cache fraction 0.0625 to 1"),
        (["--cache-fraction", "0.05", "--span", "head"], "cache fraction 0.125 to 1"),
        (["--cache-fraction", "0.2", "--rotary-pairs", "2"], "8 to 32 (cache fraction 0.25 to 1)"),
        (["--cache-fraction", "0.2", "--span", "head", "--key-heads", "1"], "8 to 32"),
        (["--rotary-pairs", "5"], "5 rotary pairs are out of range for this model: 0 to 4"),
        (["--rotary-pairs", "-1"], "out of range"),
        (["--rotary-pairs", "some"], "a number, or auto"),
        (["--key-heads", "0"], "0 key heads are out of range for this model: 1 to 2"),
        (["--key-heads", "3"], "1 to 2"),
        (["--key-heads", "1", "--span", "head", "--rotary-pairs", "2"], "whole windows only"),
        (["--key-heads", "1", "--grouping", "some"], "aligned, mean"),
        (["--method", "mean", "--key-heads", "1"], "leave out --key-heads"),
        (["--refine", "-1"], "minutes"),
        (["--refine", "1", "--method", "svd"], "reads no text"),
        (["--plan", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--plan", "nowhere.yaml", "--cache-fraction", "0.5"], "leave out the other options"),
        (["--plan", "nowhere.yaml", "--auto-plan"], "not both"),
        (["--auto-plan", "--method", "svd"], "automatic plan"),
        (["--auto-plan", "--latent-width", "16"], "automatic plan"),
        (["--evaluate", "nowhere.txt"], "does not exist"),
        (["--cache-fraction", "1.5"], "out of range"),
        (["--cache-fraction", "nan"], "out of range"),
        (["--latent-width", "1"], "2 to 32"),
        (["--latent-width", "33"], "2 to 32"),
        (["--latent-width", "17", "--span", "head"], "divide"),
        (["--latent-width", "16", "--cache-fraction", "0.5"], "not both"),
        (["--span", "some"], "span"),
        (["--method", "magic"], "mean, procrustes, svd, calibrated"),
        (["--method", "mean", "--cache-fraction", "0.75"], "0.5"),
        (["--method", "procrustes", "--latent-width", "20"], "0.5"),
        (["--balance", "-1"], "balance"),
        (["--dtype", "int3"], "dtype"),
        (["--cache-dtype", "int3"], "dtype"),
        (["--device", "abacus"], "abacus"),
        (["--calibrate-window", "1"], "window"),
        (["--max-shard-size", "banana"], "max shard size"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_options_out_of_range(fails: Any, source: Path, options: list[str], says: str) -> None:
    fails(source, *options, says=says)


def test_out_that_exists(fails: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep")
    fails(source, says="--overwrite")
    monkeypatch.chdir(tmp_path / "out")
    fails(source, "--overwrite", says="is not overwritten")
    assert (tmp_path / "out" / "precious").read_text() == "keep"


def test_out_that_is_the_source(fails: Any, copy_of: Path) -> None:
    fails(copy_of, "--overwrite", says="never touched", out="damaged")
    fails(copy_of, "--overwrite", says="never touched", out=".")
    fails(copy_of, says="never touched", out="damaged/inside")


def test_folding_twice(fails: Any, folded: Path) -> None:
    fails(folded, says="folded already")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b"  \n ", "is empty"),
        ("short.txt", b"too short", "too short"),
        ("binary.txt", bytes(range(256)) * 20, "UTF-8"),
        ("zeros.txt", b"some text\0with zeros " * 99, "binary"),
        ("rows.jsonl", b'{"title": 1}\n', "text"),
        ("broken.jsonl", b"{not json", "cannot be read"),
        ("empty.jsonl", b"", "is empty"),
        ("nulls.jsonl", b'{"text": null}\n', "is empty"),
        ("word.docx", b"", "understood"),
    ],
)
def test_text_that_is_none(fails: Any, source: Path, tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    fails(source, "--calibrate", str(tmp_path / name), says=says)


def test_text_that_does_not_exist(fails: Any, source: Path, tmp_path: Path) -> None:
    fails(source, "--calibrate", str(tmp_path / "none.txt"), says="does not exist")


def test_full_disk_is_noticed_before_writing(fails: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    fails(source, says="no space")


def test_disk_that_fills_while_writing(fails: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.convert.layer_store import LayerStore

    def fill(self: Any, index: int, folds: Any) -> None:
        self.layer(index).write_bytes(b"half of it")
        self.layer(index).rename(self.layer(index).with_suffix(".begun"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LayerStore, "save_layer", fill)
    fails(source, says="no space left")


def test_interruption_before_anything_is_done(fails: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.convert.layer_store import LayerStore

    monkeypatch.setattr(LayerStore, "save_layer", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    fails(source, says="nterrupted")


def test_interruption_keeps_what_was_to_be_overwritten(
    fails: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfold.convert.layer_store import LayerStore

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep")
    monkeypatch.setattr(LayerStore, "save_layer", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    fails(source, "--overwrite", says="nterrupted")
    assert (tmp_path / "out" / "precious").read_text() == "keep"
