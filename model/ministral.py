"""Ministral: Mistral with a sliding window in some layers."""

from transformers import MinistralConfig, MinistralForCausalLM, MinistralModel

from .family import Family, register

MINISTRAL = register(Family(__name__, MinistralConfig, MinistralModel, MinistralForCausalLM))
