"""Exports: what they say, what they refuse, and that their analysis is that of the folded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import llama, relative, with_layouts
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.analysis.perplexity import evaluate
from kvfold.cli import main
from kvfold.convert.conversion import convert
from kvfold.convert.export import ExportOptions, export
from kvfold.convert.native import native_model
from kvfold.convert.options import ConvertOptions
from kvfold.model import FoldedLayout, KvfoldError

TARGETS = ["q_proj", "latent_proj", "value_map", "o_proj"]


@pytest.fixture
def adapter(tmp_path: Path, folded: Path) -> tuple[Path, Any]:
    """A LoRA adapter of the folded model, and the model with it."""
    model = AutoModelForCausalLM.from_pretrained(folded)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", adapted


def test_native_export_from_the_command_line(
    folded: Path, source: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, figures = tmp_path / "plain", tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["kvfold", "export", str(folded), str(out), "--json", str(figures)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    told = json.loads(figures.read_text())
    assert told["architecture"] == "LlamaForCausalLM"
    assert told["difference"] < 1e-5
    config = json.loads((out / "config.json").read_text())
    assert "kvfold" not in config
    assert "auto_map" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {"tokenizer.json", "LICENSE"} <= {path.name for path in out.iterdir()}
    assert not list(out.glob("*.py"))
    # The same perplexity, and the source's cache: an engine that knows nothing of folding keeps keys and values.
    plain, twin = evaluate([str(out), str(folded)], str(text_file), 64, 4)
    assert plain.perplexity == pytest.approx(twin.perplexity, rel=1e-5)
    assert plain.cache_fraction == 1.0
    assert twin.cache_fraction == 0.5


@torch.no_grad()
def test_heads_that_are_fewer_are_said(ids: torch.Tensor) -> None:
    """One key and one value head for six query heads: the source's class with one KV head, which saves its cache."""
    model = with_layouts(llama(), [FoldedLayout(12, 1, 1)] * 3)
    plain = native_model(model)
    assert plain.config.num_key_value_heads == 1
    assert relative(plain(ids).logits, model(ids).logits) < 1e-5


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ([FoldedLayout(16, 2, 2, rotary_pairs=((0, 1), (1, 2)))] * 3, "layer 0: some rotary pairs are not rotated"),
        ([FoldedLayout(16, 1, 2)] * 3, "shared in a way of its own"),
        ([FoldedLayout(16, 2, 2, query_to_key=(0, 1, 0, 1, 0, 1))] * 3, "shared in a way of its own"),
        ([FoldedLayout(16, 2, 2), FoldedLayout(16, 1, 1), FoldedLayout(16, 2, 2)], "different numbers of heads"),
        ([FoldedLayout(24, 2, 2, "head")] * 3, "its values have 12 numbers a head"),
    ],
)
def test_what_the_source_s_class_cannot_say(tmp_path: Path, layouts: list[FoldedLayout], says: str) -> None:
    with_layouts(llama(), layouts).save_pretrained(tmp_path / "folded")
    with pytest.raises(KvfoldError, match=says):
        export(str(tmp_path / "folded"), str(tmp_path / "out"), ExportOptions())
    assert not (tmp_path / "out").exists()


def test_wide_values_rounded_to_bfloat16_are_said(source: Path, tmp_path: Path) -> None:
    options = ConvertOptions(method="svd", span="head", cache_fraction=0.625, dtype="bfloat16")
    convert(str(source), str(tmp_path / "folded"), options)
    result = export(str(tmp_path / "folded"), str(tmp_path / "out"), ExportOptions())
    assert result.difference < 0.05


def test_what_is_not_folded_needs_no_export(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KvfoldError, match="not folded"):
        export(str(source), str(tmp_path / "out"), ExportOptions())


@torch.no_grad()
def test_merged_export_is_the_model_with_its_adapter(
    adapter: tuple[Path, Any], folded: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    path, adapted = adapter
    result = export(str(path), str(tmp_path / "out"), ExportOptions("merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(merged).__name__ == "KvfoldLlamaForCausalLM"
    assert result.difference < 1e-5
    assert relative(merged(ids).logits, adapted(ids).logits) < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 320
    # It is a folded checkpoint like any other.
    export(str(tmp_path / "out"), str(tmp_path / "plain"), ExportOptions())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert relative(plain(ids).logits, adapted(ids).logits) < 1e-5


def test_bad_adapters(adapter: tuple[Path, Any], folded: Path, source: Path, tmp_path: Path) -> None:
    path, _ = adapter
    out = tmp_path / "out"

    def fails(says: str, path: Path = path, **options: Any) -> None:
        with pytest.raises(KvfoldError, match=says):
            export(str(path), str(out), ExportOptions("merged", **options))
        assert not out.exists()

    fails("adapter_config.json: --format merged takes", folded)
    fails("does not fit the model", base=str(source))
    with pytest.raises(KvfoldError, match="is the source or holds it"):
        export(str(path), str(folded), ExportOptions("merged", overwrite=True))
    (path / "adapter_model.safetensors").unlink()
    fails("has no adapter_model.safetensors")
    with pytest.raises(KvfoldError, match="format 'onnx' is unknown"):
        export(str(path), str(out), ExportOptions("onnx"))
