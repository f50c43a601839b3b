"""The study's variants: what the formula says, cached or not, in both directions, and as transformers' own GPT-2."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import randomize, relative, study_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from kvfold.analysis.perplexity import cache_bytes_per_token
from kvfold.finetune.sizes import figures, model_config, new_model, size_named
from kvfold.model import VARIANTS, FoldedAttention, FoldedLayout, KvfoldError, VariantAttention, variant_named
from kvfold.model.qkv_gpt2 import QKV_GPT2, QkvGPT2Config

NAMES = list(VARIANTS)
SHARED = ["qkv", "q-k=v"]  # that may have fewer KV heads


def by_the_formula(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention of ``x`` ``[tokens, D]`` as the paper writes it, with the encoding of every pair written out."""
    variant, traits = attention.variant, attention.traits
    d, heads, groups = traits.head_dim, traits.query_heads, traits.query_heads // traits.key_value_heads
    key = attention.k_proj(x)
    query = attention.q_proj(x) if variant.separate_queries else key
    value = attention.v_proj(x) if variant.separate_values else key
    added = torch.zeros(len(x), len(x))
    if variant.pair_positions:
        channels = attention.pair_positions.channels
        for i in range(len(x)):
            for j in range(len(x)):
                pair = [
                    function(place * 10000.0 ** (-4 * c / channels))
                    for place in (i, j)
                    for function in (math.sin, math.cos)
                    for c in range(channels // 4)
                ]
                added[i, j] = attention.pair_positions.proj(torch.tensor(pair))[0]
    if traits.causal:
        added = added.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    outputs = []
    for head in range(heads):
        q, own = query[:, head * d : (head + 1) * d], slice(head // groups * d, (head // groups + 1) * d)
        outputs.append((q @ key[:, own].T / d**0.5 + added).softmax(-1) @ value[:, own])
    return attention.o_proj(torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_attention_is_the_formula(name: str, implementation: str, causal: bool) -> None:
    model = study_model(name, is_causal=causal)
    model.set_attn_implementation(implementation)
    inputs, outputs = [], []
    attention = model.transformer.h[1].attn

    def keep(module: Any, given: Any, kept: Any, found: Any) -> None:
        inputs.append(given[0])
        outputs.append(found[0])

    attention.register_forward_hook(keep, with_kwargs=True)
    model(torch.arange(2, 13)[None])
    assert relative(outputs[0][0], by_the_formula(attention, inputs[0][0])) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_with_and_without_a_cache_padded_or_not(name: str, ids: torch.Tensor) -> None:
    model = study_model(name)
    whole = model(ids).logits
    out = model(ids[:, :9], use_cache=True)
    steps = [out.logits] + [model(ids[:, i : i + 1], cache=out.cache, use_cache=True).logits for i in range(9, 20)]
    assert relative(torch.cat(steps, dim=1), whole) < 2e-5
    rest = model(ids[:, 9:], cache=model(ids[:, :9], use_cache=True).cache, use_cache=True).logits
    assert relative(rest, whole[:, 9:]) < 2e-5
    padded = torch.cat((torch.ones(2, 3, dtype=torch.int64), ids), dim=1)
    mask = (torch.arange(23) >= 3).long().expand(2, -1)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], alone)
    beams = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, **options)
    assert beams.shape == alone.shape


@pytest.mark.parametrize(("name", "heads"), [*((name, 6) for name in NAMES), *((name, 1) for name in SHARED)])
@torch.no_grad()
def test_what_is_cached_is_what_the_variant_says(name: str, heads: int, ids: torch.Tensor) -> None:
    config = _config(name, heads)
    model = randomize(new_model(config))
    cache = model(ids, use_cache=True).cache
    tensors = [each for layer in cache.layers for each in (layer.keys, layer.values) if each.numel()]
    assert len(tensors) == 3 * VARIANTS[name].cached_tensors
    assert cache_bytes_per_token(model, ids[0]) == 3 * VARIANTS[name].cached_tensors * heads * 8 * 4


@pytest.mark.parametrize("heads", [6, 2, 1])
@torch.no_grad()
def test_q_kv_is_the_folded_model(heads: int, ids: torch.Tensor) -> None:
    """Q-K=V trained from scratch is of the converted format; it must be the variant all the same."""
    plain = study_model("q-k=v", num_key_value_heads=heads)
    folded = new_model(_config("q-k=v", heads)).eval()
    assert all(isinstance(block.attn, FoldedAttention) for block in folded.transformer.h)
    state = {name.replace("k_proj", "latent_proj"): tensor for name, tensor in plain.state_dict().items()}
    folded.load_state_dict(state)
    assert relative(folded(ids).logits, plain(ids).logits) < 1e-6
    out = folded(ids[:, :9], use_cache=True)
    assert relative(folded(ids[:, 9:], cache=out.cache, use_cache=True).logits, plain(ids).logits[:, 9:]) < 2e-5


@torch.no_grad()
def test_qkv_is_transformers_gpt2(ids: torch.Tensor) -> None:
    ours = study_model("qkv", num_key_value_heads=6)
    config = GPT2Config(**{name: getattr(ours.config, name) for name in _GPT2}, activation_function="gelu_new")
    theirs = GPT2LMHeadModel(config).eval()
    state = {}
    for name, tensor in ours.state_dict().items():
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")):
            state[name] = tensor
    for index, block in enumerate(ours.transformer.h):
        prefix = f"transformer.h.{index}.attn."
        parts = [block.attn.q_proj, block.attn.k_proj, block.attn.v_proj]
        state[prefix + "c_attn.weight"] = torch.cat([part.weight for part in parts]).T
        state[prefix + "c_attn.bias"] = torch.cat([part.bias for part in parts])
        state[prefix + "c_proj.weight"] = block.attn.o_proj.weight.T
        state[prefix + "c_proj.bias"] = block.attn.o_proj.bias
    theirs.load_state_dict(state)
    assert relative(ours(ids).logits, theirs(ids).logits) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_both_directions(name: str, ids: torch.Tensor) -> None:
    later = ids.clone()
    later[:, -1] += 1
    for causal in (True, False):
        model = study_model(name, is_causal=causal)
        same = torch.equal(model(ids).logits[:, :-1], model(later).logits[:, :-1])
        assert same == causal


@pytest.mark.parametrize("name", ["q=k-v+", "q=k=v+"])
@torch.no_grad()
def test_the_plus_makes_scores_asymmetric(name: str) -> None:
    positions = torch.arange(9)[None]
    added = study_model(name).transformer.h[0].attn.pair_positions(positions, positions)[0]
    assert relative(added, added.T) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_saved_loaded_and_run_without_kvfold(name: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model = randomize(new_model(_config(name, 6)))
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(ids).logits, expected)
    if name not in ("q=k=v+", "q-k=v"):  # the forms that need most of the files
        return
    script = f"""
import sys
sys.modules["kvfold"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules")
with torch.no_grad():
    torch.save(model(torch.tensor({ids.tolist()})).logits, {str(tmp_path / "logits")!r})
"""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert relative(torch.load(tmp_path / "logits"), expected) < 1e-6


def test_first_weights_are_gpt2s() -> None:
    torch.manual_seed(0)
    for name in ("qkv", "q-k=v"):
        model = new_model(_config(name, 6))
        attention: Any = model.transformer.h[0].attn
        assert isinstance(attention, VariantAttention | FoldedAttention)
        assert abs(attention.q_proj.weight.std().item() - 0.02) < 0.002
        assert abs(attention.o_proj.weight.std().item() - 0.02 / math.sqrt(6)) < 0.001
        assert not attention.q_proj.bias.any()


@pytest.mark.parametrize(
    ("size", "variant", "heads", "parameters", "attention", "cache"),
    [
        ("300m", "qkv", 16, 305_534_976, 83_968_000, 81_920),
        ("300m", "q=k-v", 16, 284_542_976, 62_976_000, 81_920),
        ("300m", "q-k=v", 16, 284_542_976, 62_976_000, 40_960),
        ("300m", "q=k=v", 16, 263_550_976, 41_984_000, 40_960),
        ("300m", "q-k=v", 4, None, None, 10_240),  # 87.5 % less
        ("300m", "q-k=v", 1, None, None, 2_560),  # 96.9 % less
        ("1.2b", "qkv", 32, 1_215_102_976, None, 180_224),  # 5.9 GB at 32,768 tokens
        ("1.2b", "q-k=v", 1, None, None, 2_816),  # 88 MiB at 32,768 tokens
    ],
)
def test_the_study_s_figures(
    size: str, variant: str, heads: int, parameters: int | None, attention: int | None, cache: int
) -> None:
    found = figures(size_named(size), variant_named(variant), heads)
    assert parameters in (None, found.parameters)
    assert attention in (None, found.attention_parameters)
    assert found.cache_bytes_per_token == cache
    assert found.tokens_per_step == {"300m": 6 * 24 * 8 * 2048, "1.2b": 2 * 36 * 8 * 2048}[size]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(KvfoldError, match=r"variant 'kqv' is unknown: use qkv, q=k-v, "):
        variant_named("kqv")
    with pytest.raises(KvfoldError, match="in q=k-v the queries are the keys, so it needs as many key heads"):
        study_model("q=k-v", num_key_value_heads=2)
    with pytest.raises(KvfoldError, match="6 query heads do not divide over 4 key heads"):
        study_model("qkv", num_key_value_heads=4)
    with pytest.raises(KvfoldError, match="no multiple of 4"):
        study_model("q=k-v+", pair_channels=6)
    own = FoldedLayout(16, 2, 2, span="head", key_span="head")
    own.validate(6, 8, 0)
    for changes in ({"span": "all"}, {"latent_width": 18}, {"key_span": "own"}):
        with pytest.raises(KvfoldError, match="key_span"):
            FoldedLayout(**(own.to_dict() | changes)).validate(6, 8, 0)
    with pytest.raises(KvfoldError, match="key_span 'head' is for models without RoPE"):
        own.validate(6, 8, 4)


_GPT2 = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "tie_word_embeddings")


def _config(name: str, heads: int) -> Any:
    """The config of the small model of a variant, in the format that a training writes."""
    if not VARIANTS[name].folded:
        return study_model(name, num_key_value_heads=heads).config
    layout = FoldedLayout(8 * heads, heads, heads, span="head", key_span="head")
    return QKV_GPT2.folded_config(study_model("qkv").config, [layout] * 3, num_key_value_heads=heads)


def test_configs_of_sizes_make_models() -> None:
    size = size_named("3m")
    for name in NAMES:
        config = model_config(size, VARIANTS[name], size.heads, 512)
        assert config.vocab_size == 512
        assert isinstance(config, QkvGPT2Config)
