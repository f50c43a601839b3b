"""Narrowed windows, shared windows, refinement: lossless where they can be, better than without where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import llama, relative
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from kvfold.analysis.divergence import divergences
from kvfold.analysis.rotation import QueryMoments
from kvfold.convert.conversion import convert
from kvfold.convert.methods.key_windows import even_groups
from kvfold.convert.native import native_model
from kvfold.convert.options import ConvertOptions
from kvfold.convert.refine import OutputRegression
from kvfold.model import KvfoldError
from kvfold.text.generated import write_text

HALF = 4  # frequency pairs of the small model's heads


@pytest.fixture
def run(tmp_path: Path, text_file: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Convert a model with some options; returns the folded model and its recipe."""

    def convert_it(model: Any, **changes: Any) -> tuple[Any, Any]:
        source = model
        if not isinstance(model, Path):
            source = tmp_path / "source"
            model.save_pretrained(source)
            tokenizer.save_pretrained(source)
        options = {"calibrate": (str(text_file),), "calibrate_tokens": 2048, "calibrate_window": 64, "overwrite": True}
        result = convert(str(source), str(tmp_path / "out"), ConvertOptions(**(options | changes)))
        return AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), result.recipe

    return convert_it


def change_attention(model: Any, change: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    """Change the queries ``[KV, group, d, D]`` and keys ``[KV, d, D]`` of every layer in place."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            change(attention.q_proj.weight.view(2, 3, 8, -1), attention.k_proj.weight.view(2, 8, -1))
    return model


def turn(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply the pairs of ``[8, D]`` with complex factors ``[4]``."""
    numbers = torch.complex(rows[:HALF], rows[HALF:]) * factors[:, None]
    return torch.cat((numbers.real, numbers.imag))


@torch.no_grad()
def test_pairs_without_keys_are_dropped_for_nothing(run: Any, ids: torch.Tensor) -> None:
    unused = {0: [1, 3], 1: [0, 2]}

    def silence(queries: torch.Tensor, keys: torch.Tensor) -> None:
        for head, pairs in unused.items():
            for pair in pairs:
                keys[head, [pair, pair + HALF]] = 0

    source = change_attention(llama(), silence)
    model, recipe = run(source, latent_width=24, rotary_pairs=2, balance=0.1)
    assert [layer["rotary_pairs"] for layer in recipe.layers] == [((0, 2), (1, 3))] * 3
    assert relative(model(ids).logits, source(ids).logits) < 1e-3


@torch.no_grad()
def test_slow_pairs_are_dropped_before_fast_ones_and_turned(ids: torch.Tensor) -> None:
    """What a pair costs unrotated is what a dense computation over the distances says."""
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    queries = torch.randn(2, 50, 8, dtype=torch.float64, generator=generator)
    weights = torch.rand(2, 30, dtype=torch.float64, generator=generator)
    weights = weights / weights.sum(1, keepdim=True)
    moments = QueryMoments(
        queries.transpose(1, 2) @ queries / 50, torch.ones(2, 8, dtype=torch.float64), weights, frequencies
    )
    kept = torch.tensor([[True, True, False, False], [True, False, True, False]])
    for head in range(2):
        numbers = torch.complex(queries[head, :, :HALF], queries[head, :, HALF:])
        moved = numbers[None] * torch.exp(1j * torch.arange(30.0)[:, None] * frequencies)[:, None]
        mean = (weights[head][:, None, None] * moved).sum(0)
        moved = torch.where(kept[head], moved, mean[None])
        seen = torch.cat((moved.real, moved.imag), dim=-1)
        expected = torch.einsum("t,tnd,tne->de", weights[head] + 0, seen, seen) / 50
        assert torch.allclose(moments.as_keys_meet_them(kept)[head], expected)
    costs = moments.pair_costs(torch.ones(2, 8, dtype=torch.float64))
    assert (costs[:, :-1] > costs[:, 1:]).all()
    assert (costs[:, 3] < 1e-3 * costs[:, 0]).all()


@torch.no_grad()
def test_heads_that_differ_by_a_factor_share_a_window_for_nothing(run: Any, ids: torch.Tensor) -> None:
    factors = torch.polar(torch.tensor([0.5, 1.0, 2.0, 1.5]), torch.tensor([0.3, 2.0, -1.0, 3.0]))

    def align(queries: torch.Tensor, keys: torch.Tensor) -> None:
        keys[1] = turn(keys[0], factors)

    source = change_attention(llama(), align)
    model, recipe = run(source, latent_width=24, key_heads=1, balance=0.1)
    assert all(layer["key_heads"] == 1 and layer["value_heads"] == 2 for layer in recipe.layers)
    assert relative(model(ids).logits, source(ids).logits) < 1e-3
    mean, _ = run(source, latent_width=24, key_heads=1, balance=0.1, grouping="mean")
    assert relative(mean(ids).logits, source(ids).logits) > 0.1


@torch.no_grad()
def test_equal_heads_have_their_mean_for_nothing(run: Any, ids: torch.Tensor) -> None:
    def same(queries: torch.Tensor, keys: torch.Tensor) -> None:
        keys[1] = keys[0]

    source = change_attention(llama(), same)
    model, _ = run(source, latent_width=24, key_heads=1, grouping="mean", balance=0.1)
    assert relative(model(ids).logits, source(ids).logits) < 1e-3


@torch.no_grad()
def test_shared_and_narrow(run: Any, ids: torch.Tensor) -> None:
    """A window for both heads with the pairs that are used, and key maps of each head's own for the rest."""
    factors = torch.polar(torch.tensor([0.5, 1.0, 2.0, 1.5]), torch.tensor([0.3, 2.0, -1.0, 3.0]))

    def align(queries: torch.Tensor, keys: torch.Tensor) -> None:
        keys[1] = turn(keys[0], factors)
        keys[:, [3, 3 + HALF]] = 0

    source = change_attention(llama(), align)
    model, recipe = run(source, latent_width=24, key_heads=1, rotary_pairs=3, balance=0.1)
    assert all(layer["rotary_pairs"] == ((0, 1, 2),) and layer["key_to_window"] == (0, 0) for layer in recipe.layers)
    assert relative(model(ids).logits, source(ids).logits) < 1e-3


@torch.no_grad()
def test_clustering_finds_who_shares(run: Any, ids: torch.Tensor) -> None:
    source = llama(num_key_value_heads=6, num_attention_heads=6)
    partners = {3: 0, 5: 1, 4: 2}
    with torch.no_grad():
        for layer in source.model.layers:
            keys = layer.self_attn.k_proj.weight.view(6, 8, -1)
            for head, like in partners.items():
                keys[head] = turn(keys[like], torch.polar(torch.ones(4), torch.arange(4.0)))
    # 24 columns of windows and all 48 dimensions of the values' input
    model, recipe = run(source, latent_width=72, key_heads=3, cluster=True, balance=0.1)
    assert all(layer["query_to_key"] == (0, 1, 2, 0, 2, 1) for layer in recipe.layers)
    assert relative(model(ids).logits, source(ids).logits) < 1e-3
    neighbours, _ = run(source, latent_width=72, key_heads=3, balance=0.1)
    assert relative(neighbours(ids).logits, source(ids).logits) > 0.1


@torch.no_grad()
def test_the_studys_q_mqa(run: Any, ids: torch.Tensor) -> None:
    """One key window, nothing else, values read from it: a multi-query model whose keys are its values."""
    model, recipe = run(llama(), key_heads=1, span="head")
    assert recipe.cache_fraction == 0.25
    assert all(layer["key_heads"] == layer["value_heads"] == 1 for layer in recipe.layers)
    plain = native_model(model)
    assert plain.config.num_key_value_heads == 1
    assert relative(model(ids).logits, plain(ids).logits) < 1e-5


@torch.no_grad()
def test_cost_falls_with_width_and_alignment_beats_the_mean(stories: Path, run: Any, tokenizer: Any) -> None:
    """On a real model that the text was written by."""
    from transformers import AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(stories)
    rows = write_text(source, AutoTokenizer.from_pretrained(stories), seed=1, length=128, documents=8)

    def divergence(**changes: Any) -> float:
        model, _ = run(stories, calibrate=("self",), calibrate_tokens=4096, calibrate_window=128, **changes)
        expected, found = (torch.stack([each(row[None]).logits for row in rows]) for each in (source, model))
        return divergences(expected, [found])[0]

    costs = {fraction: divergence(cache_fraction=fraction) for fraction in (0.5, 0.375, 0.25, 0.125)}
    assert sorted(costs.values()) == list(costs.values())
    # Heads of four pairs are better shared than narrowed, and that is found out.
    assert costs[0.25] < 0.7 * divergence(cache_fraction=0.25, rotary_pairs=2)
    two = {"key_heads": 2, "cache_fraction": 0.25}
    assert divergence(**two) < divergence(**two, grouping="mean")
    assert divergence(cache_fraction=0.25, refine=5.0) < costs[0.25]


@torch.no_grad()
def test_a_model_without_rope_goes_below_half(run: Any, ids: torch.Tensor) -> None:
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 320, "n_positions": 512}
    torch.manual_seed(0)
    source = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()
    model, recipe = run(source, cache_fraction=0.25)
    assert recipe.cache_fraction == 0.25
    assert relative(model(ids).logits, source(ids).logits) < 0.5
    with pytest.raises(KvfoldError, match="rotates no keys"):
        run(source, key_heads=2)


def test_regression_keeps_what_is_better() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(200, 6, generator=generator), torch.randn(5, 6, generator=generator)
    weight = torch.zeros(5, 6)
    fits, does_not = OutputRegression(weight), OutputRegression(weight)
    noise = torch.randn(200, 5, generator=generator)
    for held_out, part in ((False, slice(0, 100)), (True, slice(100, 200))):
        given, nothing = inputs[part], torch.zeros(100, 5)
        fits.add(given, nothing, given @ wanted.T, held_out)
        does_not.add(given[:7] if not held_out else given, nothing[:7] if not held_out else nothing,
                     noise[part][:7] * 100 if not held_out else noise[part] * 0, held_out)  # fmt: skip
    found = fits.solve()
    assert found.weight is not None
    assert found.after < 0.01 * found.before
    assert does_not.solve().weight is None


def test_even_groups() -> None:
    assert even_groups(6, 3) == ((0, 1), (2, 3), (4, 5))
    assert even_groups(3, 2) == ((0, 1), (2,))
