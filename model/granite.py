"""Granite: the Llama layout with a scale of its own on the scores."""

from transformers import GraniteConfig, GraniteForCausalLM, GraniteModel

from .family import Family, register

GRANITE = register(Family(__name__, GraniteConfig, GraniteModel, GraniteForCausalLM))
