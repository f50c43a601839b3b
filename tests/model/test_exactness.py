"""A folded model must be what the mathematics says, however it is run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import llama, mistral, relative, with_layouts

from kvfold.convert.native import native_model
from kvfold.model import AttentionTraits, FoldedAttention, FoldedLayout, KvfoldError, family_of
from kvfold.model.attention import FoldedAttention as Attention
from kvfold.model.rotary import SharedRotary

HALF = FoldedLayout(16, 2, 2, "all")
LAYOUTS = {
    "half": HALF,
    "half, head": FoldedLayout(16, 2, 2, "head"),
    "wider": FoldedLayout(22, 2, 2, "all"),
    "wider, head": FoldedLayout(24, 2, 2, "head"),
    "narrow windows": FoldedLayout(11, 2, 2, "all", rotary_pairs=((0, 2), (1, 3))),
    "unequal windows": FoldedLayout(12, 2, 2, "all", rotary_pairs=((0, 1, 3), (2,))),
    "one head without a window": FoldedLayout(10, 2, 2, "all", rotary_pairs=((), (0, 1, 2))),
    "no windows": FoldedLayout(9, 2, 2, "all", rotary_pairs=((), ())),
    "narrow, head": FoldedLayout(12, 2, 2, "head", rotary_pairs=((0, 3), (1, 2))),
    "one key head": FoldedLayout(12, 1, 2, "all"),
    "one of everything": FoldedLayout(8, 1, 1, "head"),
    "one narrow key head, three value heads": FoldedLayout(10, 1, 3, "all", rotary_pairs=((0, 1, 2),)),
    "a shared window": FoldedLayout(13, 2, 2, "all", rotary_pairs=((0, 2, 3),), key_to_window=(0, 0)),
    "unequal shared windows": FoldedLayout(
        14, 3, 2, "all", rotary_pairs=((1, 2, 3), (0,)), query_to_key=(0, 0, 1, 1, 2, 2), key_to_window=(0, 1, 0)
    ),
    "clustered": FoldedLayout(18, 2, 2, "all", query_to_key=(0, 1, 0, 0, 1, 0), query_to_value=(1, 0, 0, 1, 1, 0)),
    "clustered, narrow, head": FoldedLayout(
        16, 2, 2, "head", rotary_pairs=((0, 1, 2), (1, 2, 3)), query_to_key=(0, 1, 1, 0, 1, 1), query_to_value=(1,) * 6
    ),
}


def by_the_formula(attention: Any, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Attention as the design writes it, one query, head and key at a time, in complex numbers."""
    layout, traits = attention.layout, attention.traits
    d, half = traits.head_dim, traits.rotary_dim // 2
    latent = attention.latent_proj(x).double()
    query = attention.q_proj(x).double().view(len(x), traits.query_heads, d)
    pairs = layout.pairs(half)
    of_window = layout.window_pairs(half)
    starts = [sum(2 * len(kept) for kept in of_window[:window]) for window in layout.window_assignment()]
    mapped = [sum(d - 2 * len(kept) for kept in pairs[:head]) for head in range(layout.key_heads)]
    windows = sum(2 * len(kept) for kept in of_window)
    extra = (layout.latent_width - windows) // layout.key_heads
    outputs = []
    for j in range(traits.query_heads):
        head = layout.key_assignment(traits.query_heads)[j]
        value_head = layout.value_assignment(traits.query_heads)[j]
        kept, p, start = pairs[head], len(pairs[head]), starts[head]
        window = latent[:, start : start + 2 * p]
        key = torch.complex(window[:, :p], window[:, p:])
        asked = torch.complex(query[:, j, :p], query[:, j, p : 2 * p])
        if attention.key_map is not None:
            a = attention.key_map.weight.double()[mapped[head] : mapped[head] + d - 2 * p]
            rest = latent @ a.T
        if attention.value_map is not None:
            value = latent @ attention.value_map.weight.double()[value_head * d : (value_head + 1) * d].T
        else:
            start = starts[value_head]
            value = torch.cat(
                (
                    latent[:, start : start + 2 * len(pairs[value_head])],
                    latent[:, windows + value_head * extra : windows + (value_head + 1) * extra],
                ),
                dim=1,
            )
        rows = []
        for m in range(len(x)):
            scores = []
            for n in range(m + 1):
                turn = torch.exp(1j * (m - n) * frequencies[list(kept)].double())
                score = (asked[m] * turn * key[n].conj()).real.sum()
                if attention.key_map is not None:
                    score = score + query[m, j, 2 * p :] @ rest[n]
                scores.append(score * traits.scaling)
            rows.append(torch.stack(scores).softmax(0) @ value[: m + 1])
        outputs.append(torch.stack(rows))
    return attention.o_proj(torch.cat(outputs, dim=1).float())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@torch.no_grad()
def test_attention_is_the_formula(layout: FoldedLayout) -> None:
    source = llama()
    model = with_layouts(source, [layout] * 3)
    attention = family_of(model.config).attentions(model)[1]
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(5))
    rotary = model.model.rotary_emb
    assert isinstance(rotary, SharedRotary)
    tables = rotary(x[None], position_ids=torch.arange(7)[None])
    found, _ = attention(x[None], position_embeddings=tables)
    assert relative(found[0], by_the_formula(attention, x, rotary.rotary.inv_freq)) < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_expanded_absorbed_and_cached_agree(
    layout: FoldedLayout, implementation: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_layouts(llama(), [layout, HALF, layout])
    model.set_attn_implementation(implementation)
    whole = model(ids).logits
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # a mask that cannot be left out, as the absorbed form needs for several queries
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    seen = mask.bool()
    logits = {}
    for absorbed in (True, False):
        monkeypatch.setattr(Attention, "_absorbs", lambda *args, absorbed=absorbed: absorbed)
        logits[absorbed] = model(ids, attention_mask=mask, position_ids=positions).logits[seen]
    assert relative(logits[True], logits[False]) < 2e-5
    monkeypatch.undo()

    out = model(ids[:, :5], use_cache=True)
    steps = [out.logits]
    for stop in (6, 7, 12, 13, 20):  # single tokens and chunks
        out = model(ids[:, out.cache.get_seq_length() : stop], cache=out.cache, use_cache=True)
        steps.append(out.logits)
    assert relative(torch.cat(steps, dim=1), whole) < 2e-5


def at_full_width(source: Any) -> Any:
    """The source as a folded model that caches keys and values side by side."""
    config = source.config
    heads, width = config.num_key_value_heads, config.num_key_value_heads * config.head_dim
    model = with_layouts(source, [FoldedLayout(2 * width, heads, heads)] * config.num_hidden_layers)
    family = family_of(config)
    state = {name: tensor for name, tensor in source.state_dict().items() if name in model.state_dict()}
    for index, attention in enumerate(family.attentions(source)):
        prefix = f"model.layers.{index}.self_attn."
        state[prefix + "latent_proj.weight"] = torch.cat((attention.k_proj.weight, attention.v_proj.weight))
        state[prefix + "value_map.weight"] = torch.eye(2 * width)[width:]
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("make", [llama, mistral])
@torch.no_grad()
def test_full_width_is_the_source(make: Any, ids: torch.Tensor) -> None:
    source = make()
    model = at_full_width(source)
    assert relative(model(ids).logits, source(ids).logits) < 1e-5


@pytest.mark.parametrize("span", ["all", "head"])
@pytest.mark.parametrize("make", [llama, mistral])
@torch.no_grad()
def test_folded_is_a_plain_model_with_folded_weights(make: Any, span: str, ids: torch.Tensor) -> None:
    model = with_layouts(make(), [FoldedLayout(16, 2, 2, span)] * 3)
    plain = native_model(model)
    assert relative(model(ids).logits, plain(ids).logits) < 1e-5
    for choice in (
        {"max_new_tokens": 30},
        {"max_new_tokens": 30, "num_beams": 4, "num_return_sequences": 2},
        {"max_new_tokens": 30, "cache_implementation": "static"},
        {"max_new_tokens": 30, "num_beams": 3, "cache_implementation": "static"},
        {"max_new_tokens": 10, "prefill_chunk_size": 6},
        {"max_new_tokens": 10, "prefill_chunk_size": 6, "cache_implementation": "static"},
        {"max_new_tokens": 20, "penalty_alpha": None, "prompt_lookup_num_tokens": 3},
    ):
        rows = ids[:1] if "prompt_lookup_num_tokens" in choice else ids
        expected = plain.generate(rows, do_sample=False, **choice)
        assert torch.equal(model.generate(rows, do_sample=False, **choice), expected), choice


@torch.no_grad()
def test_left_padded_batch_equals_its_rows_alone(ids: torch.Tensor) -> None:
    model = with_layouts(llama(), [HALF, LAYOUTS["narrow windows"], LAYOUTS["clustered"]])
    lengths = (20, 9)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, : 20 - lengths[1]] = 1
    mask[1, : 20 - lengths[1]] = 0
    together = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=12,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, length in enumerate(lengths):
        alone = model.generate(
            padded[row : row + 1, 20 - length :],
            do_sample=False,
            max_new_tokens=12,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert torch.equal(together.sequences[row, 20:], alone.sequences[0, length:])
        for a, b in zip(together.logits, alone.logits, strict=True):
            assert relative(a[row], b[0]) < 2e-5


@torch.no_grad()
def test_keys_are_normed_when_read() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm, Qwen3RotaryEmbedding

    config = Qwen3Config(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_hidden_layers=1)
    config._attn_implementation = "eager"
    source = Qwen3Attention(config, 0).eval()
    torch.manual_seed(0)
    for parameter in source.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)

    traits = AttentionTraits(48, 6, 2, 8, 8, 8**-0.5, query_norm=True, key_norm=True)
    norms = (Qwen3RMSNorm(8, eps=config.rms_norm_eps), Qwen3RMSNorm(8, eps=config.rms_norm_eps))
    attention = FoldedAttention(traits, FoldedLayout(32, 2, 2), 0, 0, config, norms).eval()
    attention.load_state_dict(
        {
            "q_proj.weight": source.q_proj.weight,
            "latent_proj.weight": torch.cat((source.k_proj.weight, source.v_proj.weight)),
            "value_map.weight": torch.eye(32)[16:],
            "o_proj.weight": source.o_proj.weight,
            "q_norm.weight": source.q_norm.weight,
            "k_norm.weight": source.k_norm.weight,
        }
    )
    x = torch.randn(1, 9, 48)
    rotary = SharedRotary(Qwen3RotaryEmbedding(config))
    tables = rotary(x, torch.arange(9)[None])
    mask = torch.full((9, 9), -math.inf).triu(1)[None, None]
    expected, _ = source(x, position_embeddings=tuple(tables), attention_mask=mask)
    found, _ = attention(x, position_embeddings=tables, attention_mask=mask)
    assert relative(found, expected) < 1e-5


@torch.no_grad()
def test_attention_weights_are_returned(ids: torch.Tensor) -> None:
    model = with_layouts(llama(), [HALF] * 3)
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 3
    assert out.attentions[0].shape == (2, 6, 20, 20)
    assert torch.allclose(out.attentions[0].sum(-1), torch.ones(2, 6, 20), atol=1e-5)
    assert len(out.hidden_states) == 4


@pytest.mark.parametrize(
    "layout",
    [
        FoldedLayout(15, 2, 2),
        FoldedLayout(17, 2, 2, "head"),
        FoldedLayout(16, 2, 2, "some"),
        FoldedLayout(16, 4, 4),
        FoldedLayout(16, 2, 1, "head"),
        FoldedLayout(16, 2, 2, rotary_pairs=((0, 1), (2, 1))),
        FoldedLayout(16, 2, 2, rotary_pairs=((0, 1), (4,))),
        FoldedLayout(16, 2, 2, query_to_key=(0, 1)),
    ],
)
def test_impossible_layouts_are_refused(layout: FoldedLayout) -> None:
    with pytest.raises(KvfoldError):
        layout.validate(6, 8, 4)
