"""The Llama family (Llama 1 to 3, SmolLM 1 and 2, TinyLlama), whose attention layout many other families share."""

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .family import Family, register

LLAMA = register(Family(__name__, LlamaConfig, LlamaModel, LlamaForCausalLM))
