"""Encoders are analyzed by their weights, and nothing else is done to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, AutoModel

from kvfold.checkpoint.encoders import ENCODERS, keys_and_values
from kvfold.cli import main

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "embedding_size": 32, "vocab_size": 60}
SIZES |= {"image_size": 8, "patch_size": 4, "conv_dim": [8], "conv_kernel": [3], "conv_stride": [2]}


def small(model_type: str) -> transformers.PreTrainedModel:
    config = AutoConfig.for_model(model_type)
    known = {name: value for name, value in SIZES.items() if hasattr(config, name)}
    return AutoModel.from_config(AutoConfig.for_model(model_type, **known))


@pytest.mark.parametrize("model_type", ENCODERS)
def test_keys_and_values_are_found(model_type: str) -> None:
    for key, value in keys_and_values(small(model_type)):
        assert key.shape == value.shape == (32, 32)
        assert key is not value


def test_analyze_takes_an_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small("vit")
    layer = model.get_submodule("layers.1.attention")
    layer.v_proj.weight.data.copy_(layer.k_proj.weight)
    model.save_pretrained(tmp_path / "vit")

    def run(*arguments: str) -> int | str | None:
        monkeypatch.setattr("sys.argv", ["kvfold", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code

    figures = tmp_path / "figures.json"
    assert run("analyze", str(tmp_path / "vit"), "--json", str(figures)) == 0
    layers = json.loads(figures.read_text())["layers"]
    assert [len(layer["heads"]) for layer in layers] == [4, 4]
    assert abs(layers[0]["cosine"]) < 0.2
    assert layers[1]["cosine"] == pytest.approx(1)
    capsys.readouterr()
    assert run("convert", str(tmp_path / "vit"), str(tmp_path / "out")) == 1
    assert "an encoder, which has no KV cache to fold" in capsys.readouterr().err
    assert run("analyze", str(tmp_path / "vit"), "--calibrate", "docs") == 1
    assert "leave out --calibrate" in capsys.readouterr().err
