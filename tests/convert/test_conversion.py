"""Conversions end to end on small models: exact where they can be, close where they should be, and recorded."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import llama, mistral, randomize, relative
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from kvfold.analysis.divergence import divergences
from kvfold.convert import calibration
from kvfold.convert.conversion import convert
from kvfold.convert.methods.registry import METHODS
from kvfold.convert.options import ConvertOptions, cache_dtype, rounding_noise
from kvfold.model import family_of
from kvfold.text.generated import WRITTEN, write_text


@pytest.fixture
def run(tmp_path: Path, source: Path, text_file: Path) -> Any:
    """Convert the source with changed options; returns the folded model and its recipe."""

    def convert_it(path: Path = source, **changes: Any) -> tuple[Any, Any]:
        options = {"calibrate": (str(text_file),), "calibrate_tokens": 2048, "calibrate_window": 64, "overwrite": True}
        result = convert(str(path), str(tmp_path / "out"), ConvertOptions(**(options | changes)))
        return AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), result.recipe

    return convert_it


@pytest.fixture
def rows(source: Path, text_file: Path) -> torch.Tensor:
    """Text that no conversion here was calibrated on: the end of the file."""
    tokens = AutoTokenizer.from_pretrained(source)(text_file.read_text()).input_ids
    assert len(tokens) > 2048 + 4 * 64
    return torch.tensor(tokens[-4 * 64 :]).view(4, 64)


@torch.no_grad()
def divergence(source: Path, model: Any, rows: torch.Tensor) -> float:
    models = (AutoModelForCausalLM.from_pretrained(source).eval(), model)
    expected, found = (torch.stack([each(row[None]).logits for row in rows]) for each in models)
    return divergences(expected, [found])[0]


def test_several_texts(run: Any, text_file: Path) -> None:
    _, mixed = run(calibrate=(f"{text_file}:3", "self"))
    assert mixed.calibration["texts"] == [f"{text_file}:3", "self"]
    assert mixed.calibration["tokens"] + mixed.calibration["held_out_tokens"] == 2048
    _, again = run(calibrate=(f"{text_file}:3", "self"))
    _, alone = run()
    assert mixed.balance_search == again.balance_search != alone.balance_search


def test_text_by_default(run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def few(kind: str) -> Any:
        return lambda model, tokenizer, seed: asked.append(kind) or [[seed % 300, *range(2, 300)]]

    for kind in ("self", "chat"):
        monkeypatch.setitem(WRITTEN, kind, few(kind))
    assert run(calibrate=())[1].calibration["texts"] == ["docs", "self"]
    chatty = tmp_path / "chatty"
    shutil.copytree(source, chatty)
    (chatty / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert run(chatty, calibrate=())[1].calibration["texts"] == ["docs", "chat"]
    (chatty / "chat_template.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    assert run(chatty, calibrate=())[1].calibration["texts"] == ["docs", "self"]
    assert "chat" in asked
    monkeypatch.setattr(calibration, "_free_memory", lambda device: 1000)
    assert run(chatty, calibrate=())[1].calibration["texts"] == ["docs"]


@pytest.mark.parametrize("name", ["svd", "calibrated"])
@pytest.mark.parametrize("span", ["all", "head"])
@torch.no_grad()
def test_full_width_reproduces_the_source(run: Any, source: Path, ids: torch.Tensor, name: str, span: str) -> None:
    model, recipe = run(method=name, span=span, cache_fraction=1.0)
    expected = AutoModelForCausalLM.from_pretrained(source).eval()(ids).logits
    assert relative(model(ids).logits, expected) < 1e-5
    assert recipe.cache_fraction == 1.0


@torch.no_grad()
def test_full_width_reproduces_stories(stories: Path, tmp_path: Path) -> None:
    convert(str(stories), str(tmp_path / "out"), ConvertOptions(method="svd", latent_width=64))
    tokenizer = AutoTokenizer.from_pretrained(stories)
    rows = tokenizer("Once upon a time there was a little girl named Lily.", return_tensors="pt").input_ids
    expected = AutoModelForCausalLM.from_pretrained(stories)(rows).logits
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(rows).logits
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("method", ["calibrated", "svd"])
@torch.no_grad()
def test_full_multi_head_loses_nothing_at_half(tmp_path: Path, run: Any, ids: torch.Tensor, method: str) -> None:
    """KV·d = D: the values are a linear map of the keys, so half of the cache suffices."""
    source = llama(num_key_value_heads=6)
    source.save_pretrained(tmp_path / "mha")
    # The text file's tokenizer has the same vocabulary; the random model does not mind what the ids mean.
    AutoTokenizer.from_pretrained(run()[0].name_or_path).save_pretrained(tmp_path / "mha")
    model, recipe = run(tmp_path / "mha", method=method, cache_dtype="float32")
    assert recipe.cache_fraction == 0.5
    expected = source(ids).logits
    assert float((model(ids).logits - expected).abs().max()) < 1e-3


def test_every_latent_but_the_whole_one_stands_a_coarse_cache() -> None:
    (traits, *_) = family_of(llama(num_key_value_heads=6).config).traits_of(llama(num_key_value_heads=6))
    chosen = [cache_dtype(ConvertOptions(), traits, width, torch.float32) for width in (24, 48, 95, 96)]
    assert chosen == [torch.bfloat16] * 3 + [torch.float32]
    assert cache_dtype(ConvertOptions(cache_dtype="float16"), traits, 96, torch.float32) == torch.float16


@torch.no_grad()
def test_more_cache_is_closer_and_data_helps(run: Any, source: Path, rows: torch.Tensor) -> None:
    losses = [divergence(source, run(cache_fraction=fraction)[0], rows) for fraction in (0.5, 0.625, 0.75, 0.875, 1.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-6
    every = {name: divergence(source, run(method=name)[0], rows) for name in METHODS}
    head = divergence(source, run(span="head")[0], rows)
    assert every["calibrated"] < min(every["svd"], every["procrustes"]) < every["mean"]
    assert every["calibrated"] < head < every["mean"]


def test_methods_on_a_pretrained_model(stories: Path, run: Any) -> None:
    """On real weights and the model's own text, data helps and the baselines destroy the model."""
    source = AutoModelForCausalLM.from_pretrained(stories)
    rows = write_text(source, AutoTokenizer.from_pretrained(stories), seed=1, length=128, documents=8)
    every = {
        name: divergence(stories, run(stories, method=name, calibrate=("self",), calibrate_tokens=4096)[0], rows)
        for name in METHODS
    }
    assert every["calibrated"] < 0.1
    assert every["calibrated"] < every["svd"] < every["procrustes"] < every["mean"]


@torch.no_grad()
def test_sliding_window_family(tmp_path: Path, run: Any, folded: Path, ids: torch.Tensor) -> None:
    source = mistral()
    source.save_pretrained(tmp_path / "mistral")
    AutoTokenizer.from_pretrained(folded).save_pretrained(tmp_path / "mistral")
    model, _ = run(tmp_path / "mistral", cache_fraction=1.0)
    assert relative(model(ids).logits, source(ids).logits) < 1e-5
    assert torch.equal(
        model.generate(ids, do_sample=False, max_new_tokens=30),
        source.generate(ids, do_sample=False, max_new_tokens=30),
    )
    half, _ = run(tmp_path / "mistral")
    assert half.generate(ids, do_sample=False, max_new_tokens=30, return_dict_in_generate=True).cache.layers[
        0
    ].keys.shape == (2, 1, 11, 16)


@torch.no_grad()
def test_biases_are_carried(tmp_path: Path, run: Any, folded: Path, ids: torch.Tensor, rows: torch.Tensor) -> None:
    source = llama(attention_bias=True)
    source.save_pretrained(tmp_path / "biased")
    AutoTokenizer.from_pretrained(folded).save_pretrained(tmp_path / "biased")
    for span in ("all", "head"):
        model, _ = run(tmp_path / "biased", cache_fraction=1.0, span=span)
        assert relative(model(ids).logits, source(ids).logits) < 1e-5
    without, _ = run(tmp_path / "biased", cache_fraction=0.75)
    assert divergence(tmp_path / "biased", without, rows) < 0.2


@torch.no_grad()
def test_the_fold_stands_a_rounded_cache(run: Any, source: Path, rows: torch.Tensor) -> None:
    """In bfloat16 the fold made for a bfloat16 cache does no worse than the one made for a float32 cache."""
    losses = {}
    for dtype in ("bfloat16", "float32"):
        model, _ = run(cache_dtype=dtype, balance=0.1)
        losses[dtype] = divergence(source, model.bfloat16(), rows)
    assert losses["bfloat16"] <= losses["float32"] * 1.02
    assert math.isclose(rounding_noise(torch.bfloat16), 2.18e-6, rel_tol=0.01)


def test_the_folder_is_an_ordinary_checkpoint_with_its_recipe(folded: Path, source: Path) -> None:
    names = {path.name for path in folded.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "kvfold.json", "LICENSE"} <= names
    assert {"llama.py", "attention.py", "cache.py", "family.py", "layout.py", "rotary.py", "absorbed.py"} <= names
    recipe = json.loads((folded / "kvfold.json").read_text())
    assert recipe["method"] == "calibrated"
    assert recipe["calibration"]["tokens"] + recipe["calibration"]["held_out_tokens"] == 2048
    assert len(recipe["layers"]) == 3
    assert len(recipe["source"]["sha256"]) == 64
    assert all(0.5 < layer["kept_energy"] <= 1 for layer in recipe["layers"])
    card = (folded / "README.md").read_text()
    assert "0.5" in card
    assert recipe["source"]["sha256"] in card
    assert not [path for path in folded.parent.iterdir() if path.name.startswith(".")]


def test_the_same_conversion_gives_the_same_bytes(folded: Path, run: Any, tmp_path: Path) -> None:
    run()
    for name in ("model.safetensors", "config.json"):
        assert (folded / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_shards_and_dtype(run: Any, tmp_path: Path) -> None:
    model, recipe = run(max_shard_size="40KB", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert recipe.dtype == "bfloat16"
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


@torch.no_grad()
def test_the_base_model_loads_too(folded: Path, ids: torch.Tensor) -> None:
    base = AutoModel.from_pretrained(folded).eval()
    model = AutoModelForCausalLM.from_pretrained(folded).eval()
    expected = model(ids, output_hidden_states=True).hidden_states[-1]
    assert relative(base(ids).last_hidden_state, expected) < 1e-6


@torch.no_grad()
def test_saving_again_keeps_everything(folded: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(folded).eval()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert (tmp_path / "again" / "llama.py").is_file()


@pytest.fixture
def absolute(tmp_path: Path, tokenizer: Any) -> Path:
    """A random GPT-2, which has no RoPE, with heads whose values are linear maps of their keys, and a tokenizer."""
    config = GPT2Config(vocab_size=320, n_positions=512, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = randomize(GPT2LMHeadModel(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.transformer.h:
            weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
            for head in range(4):
                keys, values = (slice(start + 12 * head, start + 12 * head + 12) for start in (48, 96))
                turn = torch.linalg.qr(torch.randn(12, 12, generator=generator))[0]
                weight[:, values], bias[values] = weight[:, keys] @ turn, torch.randn(12, generator=generator)
    model.save_pretrained(tmp_path / "absolute")
    tokenizer.save_pretrained(tmp_path / "absolute")
    return tmp_path / "absolute"


@pytest.mark.parametrize("name", ["calibrated", "svd"])
@torch.no_grad()
def test_without_rope_span_head_binds_keys_too(run: Any, absolute: Path, ids: torch.Tensor, name: str) -> None:
    model, recipe = run(absolute, method=name, span="head")
    assert recipe.layers[0]["key_span"] == "head"
    assert all("key_map" not in entry for entry in model.state_dict())
    expected = AutoModelForCausalLM.from_pretrained(absolute).eval()(ids).logits
    assert relative(model(ids).logits, expected) < 1e-4
    wider, recipe = run(absolute, method=name, span="head", cache_fraction=0.75)
    assert "key_span" not in recipe.layers[0]
    assert relative(wider(ids).logits, expected) < 1e-4


@torch.no_grad()
def test_heads_without_rope_are_folded_best_jointly(
    run: Any, tmp_path: Path, ids: torch.Tensor, tokenizer: Any
) -> None:
    plain = tmp_path / "plain"
    config = GPT2Config(vocab_size=320, n_positions=512, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    randomize(GPT2LMHeadModel(config)).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    source = AutoModelForCausalLM.from_pretrained(plain).eval()
    found = {}
    for name in ("calibrated", "procrustes", "mean"):
        model, recipe = run(plain, method=name, span="head")
        assert recipe.layers[0]["key_span"] == "head"
        found[name] = divergences([source(ids).logits], [[model(ids).logits]])[0]
        grown = model.generate(ids[:1, :8], max_new_tokens=6, do_sample=False)
        assert torch.equal(grown, model.generate(ids[:1, :8], max_new_tokens=6, do_sample=False, use_cache=False))
    assert found["calibrated"] < 0.7 * found["procrustes"]
    assert found["calibrated"] < 0.7 * found["mean"]
