"""OLMo 1: the Llama layout; some sizes clip queries, keys and values, which is not linear."""

from __future__ import annotations

from typing import Any

from transformers import OlmoConfig, OlmoForCausalLM, OlmoModel

from .family import Family, register


def refusal(config: Any) -> str | None:
    return "it clips queries, keys and values (clip_qkv)" if config.clip_qkv is not None else None


OLMO = register(Family(__name__, OlmoConfig, OlmoModel, OlmoForCausalLM, refusal=refusal))
