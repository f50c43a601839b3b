"""Qwen 3: every head of the queries and keys is normed."""

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from .family import Family, register

QWEN3 = register(Family(__name__, Qwen3Config, Qwen3Model, Qwen3ForCausalLM))
