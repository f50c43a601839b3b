"""Gemma 1: the Llama layout with heads wider than their share of the width."""

from transformers import GemmaConfig, GemmaForCausalLM, GemmaModel

from .family import Family, register

GEMMA = register(Family(__name__, GemmaConfig, GemmaModel, GemmaForCausalLM))
