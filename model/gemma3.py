"""Gemma 3 (text): normed heads, sliding windows in most layers, which rotate by frequencies of their own."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma3TextModel

from .family import Family, register


def refusal(config: Any) -> str | None:
    return "it sees tokens both ways, so it has no KV cache" if config.use_bidirectional_attention else None


GEMMA3 = register(Family(__name__, Gemma3TextConfig, Gemma3TextModel, Gemma3ForCausalLM, refusal=refusal))
