"""Mistral: the Llama layout with a sliding window."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import MistralConfig, MistralForCausalLM, MistralModel
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

from .attention import FoldedAttention
from .family import Family, FoldedBaseMixin, FoldedCausalMixin, FoldedConfigMixin, register
from .llama import traits, weights


@strict
class KvfoldMistralConfig(FoldedConfigMixin, MistralConfig):
    """Config of a Mistral whose keys and values are folded."""

    model_type = "kvfold_mistral"
    kvfold: dict | None = None


class KvfoldMistralModel(FoldedBaseMixin, MistralModel):
    """A Mistral without a language-model head whose keys and values are folded."""

    config_class = KvfoldMistralConfig
    _can_record_outputs: ClassVar[dict] = {"hidden_states": MistralDecoderLayer, "attentions": FoldedAttention}  # type: ignore[misc]


class KvfoldMistralForCausalLM(FoldedCausalMixin, MistralForCausalLM):
    """A Mistral whose keys and values are folded."""

    config_class = KvfoldMistralConfig


MISTRAL = register(
    Family("mistral", KvfoldMistralConfig, KvfoldMistralModel, KvfoldMistralForCausalLM, traits, weights)
)
