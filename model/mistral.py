"""Mistral: the Llama layout with a sliding window."""

from transformers import MistralConfig, MistralForCausalLM, MistralModel

from .family import Family, register

MISTRAL = register(Family(__name__, MistralConfig, MistralModel, MistralForCausalLM))
