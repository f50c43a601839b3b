"""Mistral: the Llama layout with a sliding window."""

from __future__ import annotations

from transformers import MistralConfig, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

from .attention import FoldedAttention
from .family import Family, FoldedConfigMixin, FoldedModelMixin, register
from .llama import traits, weights


class KvfoldMistralConfig(FoldedConfigMixin, MistralConfig):
    """Config of a Mistral whose keys and values are folded."""

    model_type = "kvfold_mistral"
    kvfold: dict | None = None


class KvfoldMistralForCausalLM(FoldedModelMixin, MistralForCausalLM):
    """A Mistral whose keys and values are folded."""

    config_class = KvfoldMistralConfig
    _can_record_outputs = {"hidden_states": MistralDecoderLayer, "attentions": FoldedAttention}


MISTRAL = register(Family("mistral", KvfoldMistralConfig, KvfoldMistralForCausalLM, traits, weights))
