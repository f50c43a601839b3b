"""The cache holds one tensor a layer and survives what generation does to caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import llama, mistral, relative, with_layouts
from transformers import DynamicCache, StaticCache

from kvfold.analysis.perplexity import cached_bytes
from kvfold.model import FoldedLayout, LatentLayer, LatentWindowLayer, StaticLatentLayer, StaticLatentWindowLayer
from kvfold.model.cache import BLOCK, GrowingTensor

HALF = FoldedLayout(16, 2, 2)


@pytest.fixture
def model() -> Any:
    return with_layouts(llama(), [HALF] * 3)


def test_generate_fills_one_tensor_a_layer_with_half_the_bytes(model: Any, ids: torch.Tensor) -> None:
    choice = {"do_sample": False, "max_new_tokens": 400, "return_dict_in_generate": True}
    cache = model.generate(ids, **choice).cache
    source = llama().generate(ids, **choice).cache
    for layer in cache.layers:
        assert type(layer) is LatentLayer
        assert layer.keys.shape == (2, 1, 419, 16)
        assert layer.values.numel() == 0
        held = {name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        assert held <= {"positions"}
    assert 2 * cached_bytes(cache) == cached_bytes(source)
    assert [layer.positions is not None for layer in cache.layers] == [True, False, False]


def test_growth_copies_once_in_a_block() -> None:
    held = GrowingTensor()
    buffers = set()
    for token in range(4 * BLOCK):
        view = held.append(torch.full((1, 1, 1, 3), float(token)))
        buffers.add(view.untyped_storage().data_ptr())
    assert torch.equal(view[0, 0, :, 0], torch.arange(4.0 * BLOCK))
    assert len(buffers) <= 5


@torch.no_grad()
def test_positions_with_gaps_are_remembered(model: Any, ids: torch.Tensor) -> None:
    """A batch padded on the right, then continued: earlier tokens are nearer than their place in the cache says."""
    lengths = (9, 5)
    prompt, more = ids[:, :9].clone(), ids[:, 9:14]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    out = model(prompt, attention_mask=mask, use_cache=True)
    mask = torch.cat((mask, torch.ones(2, 5, dtype=torch.long)), dim=1)
    positions = (mask.cumsum(-1) - 1)[:, 9:]
    found = model(more, attention_mask=mask, position_ids=positions, cache=out.cache).logits
    for row, length in enumerate(lengths):
        alone = model(torch.cat((ids[row, :length], more[row]))[None]).logits[0, length:]
        assert relative(found[row], alone) < 2e-5


@torch.no_grad()
def test_crop_reorder_repeat_select_reset_and_copy(model: Any, ids: torch.Tensor) -> None:
    whole = model(ids).logits
    cache = model(ids[:, :15], use_cache=True).cache
    kept = copy.deepcopy(cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 10
    assert relative(model(ids[:, 10:], cache=cache).logits, whole[:, 10:]) < 2e-5
    assert relative(model(ids[:, 15:], cache=copy.deepcopy(kept)).logits, whole[:, 15:]) < 2e-5

    swapped = copy.deepcopy(kept)
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert relative(model(ids[[1, 0], 15:], cache=swapped).logits, whole[[1, 0], 15:]) < 2e-5

    repeated = copy.deepcopy(kept)
    repeated.batch_repeat_interleave(2)
    repeated.batch_select_indices(torch.tensor([0, 2, 3]))
    rows = torch.tensor([0, 1, 1])
    assert relative(model(ids[rows, 15:], cache=repeated).logits, whole[rows, 15:]) < 2e-5

    kept.reset()
    assert kept.get_seq_length() == 0
    assert relative(model(ids, cache=kept).logits, whole) < 2e-5


@torch.no_grad()
def test_a_cache_of_transformers_own_layers_works_too(model: Any, ids: torch.Tensor) -> None:
    whole = model(ids).logits
    cache = DynamicCache()
    model(ids[:, :12], cache=cache)
    assert relative(model(ids[:, 12:], cache=cache).logits, whole[:, 12:]) < 2e-5


def test_training_through_a_cache(model: Any, ids: torch.Tensor) -> None:
    out = model(ids[:, :10], use_cache=True)
    model(ids[:, 10:], cache=out.cache).logits.sum().backward()
    assert all(
        layer.self_attn.latent_proj.weight.grad is not None and layer.self_attn.latent_proj.weight.grad.abs().sum() > 0
        for layer in model.model.layers
    )


def test_a_layer_moves_to_the_host_and_back(model: Any, ids: torch.Tensor) -> None:
    cache = model(ids, use_cache=True).cache
    before = cache.layers[1].keys.clone()
    cache.layers[1].offload()
    cache.layers[1].prefetch()
    assert torch.equal(cache.layers[1].keys, before)


@torch.no_grad()
def test_sliding_window_keeps_the_window_only(ids: torch.Tensor) -> None:
    model = with_layouts(mistral(), [HALF] * 3)
    whole = model(ids).logits
    out = model(ids[:, :7], use_cache=True)
    steps = [out.logits]
    for stop in (8, 9, 14, 15, 20):
        out = model(ids[:, out.cache.get_seq_length() : stop], cache=out.cache)
        steps.append(out.logits)
        assert out.cache.layers[0].keys.shape[2] <= 11
    assert relative(torch.cat(steps, dim=1), whole) < 2e-5
    assert type(out.cache.layers[0]) is LatentWindowLayer

    recorded = DynamicCache(config=model.config)
    recorded.activate_past_recording()
    model(ids[:, :18], cache=recorded)
    recorded.crop(-4)
    assert relative(model(ids[:, 14:], cache=recorded).logits, whole[:, 14:]) < 2e-5
    with pytest.raises(RuntimeError, match="records the past"):
        out.cache.crop(-1)


@pytest.mark.parametrize(("make", "kind"), [(llama, StaticLatentLayer), (mistral, StaticLatentWindowLayer)])
@torch.no_grad()
def test_static_cache(make: Any, kind: type, ids: torch.Tensor) -> None:
    model = with_layouts(make(), [HALF] * 3)
    whole = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    steps = [model(ids[:, :9], cache=cache).logits]
    steps += [model(ids[:, place : place + 1], cache=cache).logits for place in range(9, 20)]
    assert relative(torch.cat(steps, dim=1), whole) < 2e-5
    assert type(cache.layers[0]) is kind
    assert cache.layers[0].keys.shape == (2, 1, 32 if kind is StaticLatentLayer else 12, 16)


@torch.no_grad()
def test_assisted_generation(ids: torch.Tensor) -> None:
    model = with_layouts(llama(), [HALF] * 3)
    assistant = with_layouts(llama(), [FoldedLayout(20, 2, 2)] * 3, seed=2)
    plain = model.generate(ids[:1], do_sample=False, max_new_tokens=25)
    assert torch.equal(model.generate(ids[:1], do_sample=False, max_new_tokens=25, assistant_model=assistant), plain)


@torch.no_grad()
def test_generation_continues_from_a_cache_handed_in(model: Any, ids: torch.Tensor) -> None:
    expected = model.generate(ids, do_sample=False, max_new_tokens=10)
    cache = model(ids[:, :11], use_cache=True).cache
    assert torch.equal(model.generate(ids, cache=cache, do_sample=False, max_new_tokens=10), expected)


@pytest.mark.parametrize("make", [llama, mistral])
@torch.no_grad()
def test_a_compiled_step_is_one_graph(make: Any, ids: torch.Tensor) -> None:
    """With a static cache a decoding step compiles without a graph break, as ``generate`` does on a GPU."""
    model = with_layouts(make(), [HALF, FoldedLayout(11, 2, 2, rotary_pairs=((0, 2), (1, 3))), HALF])
    whole = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :5], cache=cache)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="eager")
    found = [
        step(ids[:, place : place + 1], cache=cache, position_ids=torch.full((2, 1), place)).logits
        for place in range(5, 20)
    ]
    assert relative(torch.cat(found, dim=1), whole[:, 5:]) < 2e-5
