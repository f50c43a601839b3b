"""Mixtral: Mistral's attention before a mixture of experts."""

from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel

from .family import Family, register

MIXTRAL = register(Family(__name__, MixtralConfig, MixtralModel, MixtralForCausalLM))
