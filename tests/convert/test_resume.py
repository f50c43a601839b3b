"""A conversion takes one layer at a time, and goes on where it was interrupted, to the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from helpers import relative
from transformers import AutoModelForCausalLM

from kvfold.analysis.energy import weigh
from kvfold.analysis.moments import collect_moments, moments_of_layer
from kvfold.analysis.streaming import Stream
from kvfold.checkpoint.lazy_source import LazySource
from kvfold.checkpoint.loading import load, locate
from kvfold.convert.conversion import convert
from kvfold.convert.layer_store import LayerStore
from kvfold.convert.methods.base import LayerProblem
from kvfold.convert.methods.closed_form import fold
from kvfold.convert.methods.key_windows import full_windows
from kvfold.convert.options import ConvertOptions, rounding_noise
from kvfold.model import KvfoldError, family_of
from kvfold.text.sources import TextSource


@pytest.fixture
def options(text_file: Path) -> ConvertOptions:
    return ConvertOptions(calibrate=(str(text_file),), calibrate_tokens=1024, calibrate_window=64)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("changes", [{}, {"offload": True}, {"method": "svd"}], ids=str)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_goes_on_after_an_interruption(
    source: Path,
    tmp_path: Path,
    options: ConvertOptions,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    layer: int,
) -> None:
    options = replace(options, **changes)
    convert(str(source), str(tmp_path / "whole"), options)

    folded: list[int] = []
    save = LayerStore.save_layer

    def interrupt_after(self: LayerStore, index: int, folds: Any) -> None:
        save(self, index, folds)
        folded.append(index)
        if index == layer:
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerStore, "save_layer", interrupt_after)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), str(tmp_path / "out"), options)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.unfinished").is_dir()

    layer = -1
    before, folded = folded, []
    convert(str(source), str(tmp_path / "out"), replace(options, resume=True))
    # A layer counts as done once the text is through it, too.
    again = before[-1:] if changes.get("method") != "svd" else []
    assert folded == again + [index for index in range(3) if index not in before]
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    recipes = [json.loads((tmp_path / name / "kvfold.json").read_text()) for name in ("out", "whole")]
    for recipe in recipes:
        del recipe["seconds"]
    assert recipes[0] == recipes[1]
    assert not (tmp_path / ".out.unfinished").exists()


def test_other_settings_do_not_go_on(
    source: Path, tmp_path: Path, options: ConvertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvfold.convert.conversion.write_shards", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), str(tmp_path / "out"), options)
    monkeypatch.undo()
    other = replace(options, cache_fraction=0.75, resume=True)
    with pytest.raises(KvfoldError, match=r"cache_fraction None → 0\.75"):
        convert(str(source), str(tmp_path / "out"), other)
    assert (tmp_path / ".out.unfinished").is_dir()
    convert(str(source), str(tmp_path / "out"), replace(other, resume=False))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_keeps_what_is_done(
    source: Path, tmp_path: Path, options: ConvertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvfold.convert.conversion.write_shards", full)
    with pytest.raises(KvfoldError, match="no space left on the disk; what is done so far is kept, and --resume"):
        convert(str(source), str(tmp_path / "out"), options)
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    monkeypatch.undo()
    convert(str(source), str(tmp_path / "out"), replace(options, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_conversion_at_a_time(
    source: Path, tmp_path: Path, options: ConvertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, refused = LayerStore.save_layer, []

    def begin_another(self: LayerStore, index: int, folds: Any, stage: str = "layer") -> None:
        for resume in (False, True):
            with pytest.raises(KvfoldError, match=r"another conversion to .* is under way"):
                convert(str(source), str(tmp_path / "out"), replace(options, resume=resume))
            refused.append(index)
        save(self, index, folds)

    monkeypatch.setattr(LayerStore, "save_layer", begin_another)
    convert(str(source), str(tmp_path / "out"), options)
    assert len(refused) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "damaged", ["settings.json", "layer-00001.safetensors", "states-layer/state-00002.safetensors"]
)
def test_damaged_remains_are_said_and_left_behind(
    source: Path, tmp_path: Path, options: ConvertOptions, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    save = LayerStore.save_layer

    def interrupt(self: LayerStore, index: int, folds: Any) -> None:
        save(self, index, folds)
        if index == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerStore, "save_layer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), str(tmp_path / "out"), options)
    monkeypatch.undo()
    path = tmp_path / ".out.unfinished" / damaged
    path.write_bytes(path.read_bytes()[:7])
    (tmp_path / ".out.partial-killed").mkdir()
    with pytest.raises(KvfoldError, match="is damaged: leave out --resume to begin anew"):
        convert(str(source), str(tmp_path / "out"), replace(options, resume=True))
    convert(str(source), str(tmp_path / "out"), options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "gpt2", "gpt_oss", "opt"])
@torch.no_grad()
def test_statistics_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """A layer at a time, its weights read from the disk: what the layers get and give is what the whole model does."""
    whole = FAMILIES[name]()
    whole.save_pretrained(tmp_path / "source")
    rows = torch.randint(2, 320, (5, 32), generator=torch.Generator().manual_seed(3))
    expected = collect_moments(whole, rows)
    source = LazySource(locate(str(tmp_path / "source")))
    with source.ends() as model:
        stream, plain = (Stream(source.family, model, rows, weights=weights).enter() for weights in (True, False))
    assert all(parameter.is_meta for parameter in source.model.parameters())
    for index, moments in enumerate(expected):
        with source.layer(index) as layer:
            found = moments_of_layer(stream, layer, index)
            plain.through(layer, index)
        for part in ("inputs", "keys", "values", "distances", "queries"):
            assert relative(getattr(found, part), getattr(moments, part)) < 5e-5
    with source.ends():
        for each in (stream, plain):
            assert relative(torch.cat(list(each.logits())), whole(rows).logits) < 1e-5
    assert source.config._attn_implementation == whole.config._attn_implementation


@torch.no_grad()
def test_result_is_that_of_the_whole_model(
    source: Path, tmp_path: Path, options: ConvertOptions, ids: torch.Tensor, text_file: Path
) -> None:
    convert(str(source), str(tmp_path / "out"), replace(options, balance=0.1))
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    found = folded(ids).logits

    whole = load(str(source))
    tokens = TextSource(str(text_file)).tokens(whole.tokenizer, 1024)
    family, noise = family_of(whole.config), rounding_noise(torch.bfloat16)
    for index, moments in enumerate(collect_moments(whole.model, tokens.view(-1, 64))):
        parts = family.parts_of(whole.model, index)
        problem = LayerProblem(
            parts.weights, parts.traits, weigh(parts, moments), 16, "all", full_windows(parts.traits), 0.1,
                noise, torch.float32
        )  # fmt: skip
        family.attentions(folded)[index].load_state_dict(fold(problem).tensors)
    assert relative(found, folded(ids).logits) < 1e-5


def test_shards_and_prefixes(tmp_path: Path, source: Path, options: ConvertOptions, ids: torch.Tensor) -> None:
    """Files that leave out the base model's name (as GPT-2's on the Hub) are read, and written so."""
    from safetensors.torch import load_file, save_file

    model = FAMILIES["gpt2"]()
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a mask that old files have
    save_file(state, path, {"format": "pt"})
    convert(str(tmp_path / "source"), str(tmp_path / "out"), ConvertOptions(method="svd", max_shard_size="20KB"))
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3
    names = {name for shard in shards for name in load_file(shard)}
    assert "h.0.attn.latent_proj.weight" in names
    assert not {name for name in names if "c_attn" in name or name.startswith("transformer.")}
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():  # full multi-head attention loses nothing at half
        assert relative(folded(ids).logits, model(ids).logits) < 1e-5
