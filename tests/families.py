"""A small random model of every family, made with transformers' own classes and anything but trivial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from helpers import SIZES, randomize, study_model

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
LEARNED = {"head_dim", "num_key_value_heads"}  # entries that models with full multi-head attention do not have


def _make(
    name: str, model: str = "ForCausalLM", without: set[str] = frozenset(), **changes: object
) -> Callable[..., Any]:  # type: ignore[assignment]
    def make(**more: object) -> Any:
        config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
        sizes = {key: value for key, value in (SIZES | changes | more).items() if key not in without}
        config = getattr(transformers, config_name)(**sizes)
        return randomize(getattr(transformers, f"{name}{model}")(config))

    return make


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _make("Llama", attention_bias=True, mlp_bias=True),
    "arcee": _make("Arcee", attention_bias=True),
    "gemma": _make("Gemma", head_dim=10),
    "granitemoe": _make("GraniteMoe", attention_multiplier=0.2, num_local_experts=4, num_experts_per_tok=2),
    "ministral": _make("Ministral", sliding_window=12, layer_types=WINDOWS),
    "olmo": _make("Olmo", without={"head_dim"}, attention_bias=True),
    "olmo3": _make("Olmo3", without={"head_dim"}, sliding_window=12, layer_types=WINDOWS),
    "phi": _make("Phi", without={"head_dim"}, qk_layernorm=True),
    "seed_oss": _make("SeedOss", attention_bias=True, attention_out_bias=True),
    "mistral": _make("Mistral", sliding_window=12),
    "mixtral": _make("Mixtral", sliding_window=12, **MOE),
    "qwen2": _make("Qwen2", without={"head_dim"}, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": _make("Qwen3", head_dim=10, layer_types=WINDOWS, use_sliding_window=True, sliding_window=12),
    "qwen3_moe": _make("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=10),
    "gemma2": _make("Gemma2", head_dim=10, query_pre_attn_scalar=7, sliding_window=12, attn_logit_softcapping=3.0),
    "gemma3_text": _make("Gemma3", head_dim=10, query_pre_attn_scalar=7, sliding_window=12, layer_types=WINDOWS),
    "phi3": _make(
        "Phi3",
        without={"head_dim"},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "olmo2": _make("Olmo2", without={"head_dim"}, attention_bias=True),
    "stablelm": _make("StableLm", without={"head_dim"}, qk_layernorm=True, use_qkv_bias=True),
    "gpt_neox": _make("GPTNeoX", without=LEARNED, use_parallel_residual=True),
    "smollm3": _make("SmolLM3", no_rope_layers=[1, 0, 1]),
    "gpt2": _make("GPT2", "LMHeadModel", without=LEARNED | {"intermediate_size"}),
    "qkv_gpt2": study_model,
    "opt": _make("OPT", without=LEARNED | {"intermediate_size"}, ffn_dim=80, word_embed_proj_dim=48),
    "cohere": _make("Cohere", use_qk_norm=True, logit_scale=0.5),
    "cohere2": _make("Cohere2", sliding_window=12, layer_types=WINDOWS, logit_scale=0.5),
    "granite": _make(
        "Granite", attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.5, attention_bias=True
    ),
    "starcoder2": _make("Starcoder2", without={"head_dim"}, sliding_window=12, use_bias=True),
    "gpt_oss": _make("GptOss", sliding_window=12, layer_types=WINDOWS, attention_bias=True, **MOE),
}
