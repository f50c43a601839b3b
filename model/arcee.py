"""Arcee's AFM: the Llama layout with another MLP."""

from transformers import ArceeConfig, ArceeForCausalLM, ArceeModel

from .family import Family, register

ARCEE = register(Family(__name__, ArceeConfig, ArceeModel, ArceeForCausalLM))
