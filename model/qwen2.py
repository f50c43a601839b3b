"""Qwen 2 and 2.5: biases on queries, keys and values; sliding windows in some layers."""

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from .family import Family, register

QWEN2 = register(Family(__name__, Qwen2Config, Qwen2Model, Qwen2ForCausalLM))
