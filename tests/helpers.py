"""Small random models for the tests, folded ones with any layout, and plain ones that must equal them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvfold.model import FoldedLayout, family_of, variant_named
from kvfold.model.qkv_gpt2 import QkvGPT2Config, QkvGPT2LMHeadModel


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 2.0) -> torch.nn.Module:
    """Give a freshly made model weights that make attention matter: larger, and norms that are not all ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() or "ln_" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5 / (3 if "embed" in name else 2))
    return model.eval()


SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}


def llama(**changes: object) -> Any:
    """A random Llama: 3 layers, 6 heads over 2 KV heads, head_dim 8, width 48."""
    return randomize(LlamaForCausalLM(LlamaConfig(**(SIZES | changes))))


def mistral(**changes: object) -> Any:
    """A random Mistral of the same sizes with a sliding window of 12 tokens."""
    return randomize(MistralForCausalLM(MistralConfig(**(SIZES | {"sliding_window": 12} | changes))))


def study_model(variant: str = "qkv", **changes: object) -> Any:
    """A random model of the study's architecture, of the same sizes; variants with Q=K get a KV head for each head."""
    sizes = {name: value for name, value in SIZES.items() if name not in ("head_dim", "intermediate_size")}
    if not variant_named(variant).separate_queries:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = QkvGPT2Config(**(sizes | {"n_inner": 80, "variant": variant} | changes))
    return randomize(QkvGPT2LMHeadModel(config))


def with_layouts(source: Any, layouts: list[FoldedLayout], seed: int = 1) -> Any:
    """A folded model with random weights and these layouts, in the source's family and sizes."""
    family = family_of(source.config)
    config = family.folded_config(source.config, layouts)
    config._attn_implementation = source.config._attn_implementation
    return randomize(family.model_class(config), seed)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest entry."""
    return float((a - b).abs().max() / b.abs().max())
