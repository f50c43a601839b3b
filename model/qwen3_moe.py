"""Qwen 3 with a mixture of experts."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeModel

from .family import Family, register

QWEN3_MOE = register(Family(__name__, Qwen3MoeConfig, Qwen3MoeModel, Qwen3MoeForCausalLM))
