"""Granite with a mixture of experts."""

from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, GraniteMoeModel

from .family import Family, register

GRANITEMOE = register(Family(__name__, GraniteMoeConfig, GraniteMoeModel, GraniteMoeForCausalLM))
