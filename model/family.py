"""Model families: where a family keeps its attention, and the folded classes built on transformers' own.

A family is one file of this folder with a ``Family`` in it; see ``llama`` for the common layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .attention import AttentionTraits, FoldedAttention
from .cache import latent_layer_type
from .errors import KvfoldError
from .layout import FoldedLayout
from .rotary import SharedRotary

FORMAT = 1  # of the "kvfold" entry in config.json


@dataclass(frozen=True)
class AttentionWeights:
    """One attention layer's projections in the common form: ``y = x @ weight.T + bias``, heads one after another.

    Rotary pairs lie half a rotary width apart (``rotate_half``). Shapes: q ``[H·d, D]``, k and v ``[KV·d, D]``, o
    ``[D, H·d]``; biases or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Family:
    """Where a model family keeps what kvfold needs.

    Attributes:
        model_type: the source's ``model_type`` in config.json.
        folded_model_type: that of its converted checkpoints.
        config_class, base_class, model_class: the folded classes; model_class is the causal-LM one.
        layers: path from the base model to its list of decoder layers.
        attention: name of the attention module in a decoder layer.
        rotary: path from the base model to the rotary embedding module, or None.
        traits: the attention layer's properties from a config and a layer number.
        weights: reads an attention module of the source into the common form.
    """

    model_type: str
    config_class: type[PreTrainedConfig]
    base_class: type[PreTrainedModel]
    model_class: type[PreTrainedModel]
    traits: Callable[[Any, int], AttentionTraits]
    weights: Callable[[nn.Module], AttentionWeights]
    layers: str = "layers"
    attention: str = "self_attn"
    rotary: str | None = "rotary_emb"

    @property
    def folded_model_type(self) -> str:
        return self.config_class.model_type

    def attentions(self, model: Any) -> list[nn.Module]:
        """The attention module of every layer of ``model`` (causal-LM or base), in order."""
        return [getattr(layer, self.attention) for layer in model.base_model.get_submodule(self.layers).children()]

    def rotary_module(self, model: Any) -> Any:
        """The rotary embedding module of ``model``, or None."""
        return None if self.rotary is None else model.base_model.get_submodule(self.rotary)

    def auto_map(self) -> dict[str, str]:
        """Where transformers finds the classes in a checkpoint's own files (``trust_remote_code``)."""
        classes = {
            "AutoConfig": self.config_class,
            "AutoModel": self.base_class,
            "AutoModelForCausalLM": self.model_class,
        }
        return {auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in classes.items()}


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make a family known to kvfold, and its folded classes to transformers' Auto classes."""
    _FAMILIES[family.model_type] = family
    family.config_class.register_for_auto_class()
    family.base_class.register_for_auto_class("AutoModel")
    family.model_class.register_for_auto_class("AutoModelForCausalLM")
    AutoConfig.register(family.folded_model_type, family.config_class, exist_ok=True)
    AutoModel.register(family.config_class, family.base_class, exist_ok=True)
    AutoModelForCausalLM.register(family.config_class, family.model_class, exist_ok=True)
    return family


def families() -> list[str]:
    """The ``model_type`` of every family that can be converted."""
    return sorted(_FAMILIES)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a source model's config, or of a folded model's. Raises KvfoldError for an unknown one."""
    return require_known(config.model_type)


def require_known(model_type: str) -> Family:
    """The family of this ``model_type``, a source's or a folded one's. Raises KvfoldError for an unknown one."""
    for family in _FAMILIES.values():
        if model_type in (family.model_type, family.folded_model_type):
            return family
    raise KvfoldError(
        f"model family {model_type!r} is not supported; supported: {', '.join(families())} (CONTRIBUTING.md tells how "
        "to add one)"
    )


def is_folded(config: PreTrainedConfig) -> bool:
    """Whether ``config`` is that of a converted checkpoint."""
    return isinstance(getattr(config, "kvfold", None), dict)


class FoldedConfigMixin:
    """What a folded model's config has beside its family's: the entry ``kvfold``, with one layout per layer.

    ``{"format": 1, "layers": [{"latent_width": …, "key_heads": …, …}, …]}``, see ``FoldedLayout``.
    """

    kvfold: dict | None

    def layouts(self) -> list[FoldedLayout]:
        """The layout of every layer. Raises KvfoldError where the entry is missing or of another format."""
        entry = getattr(self, "kvfold", None)
        if not isinstance(entry, dict) or entry.get("format") != FORMAT:
            raise KvfoldError(f"config has no 'kvfold' entry of format {FORMAT}: was it written by another version?")
        layers = [FoldedLayout.from_dict(layer) for layer in entry["layers"]]
        if len(layers) != self.num_hidden_layers:  # type: ignore[attr-defined]
            raise KvfoldError(f"config has {len(layers)} folded layouts for {self.num_hidden_layers} layers")  # type: ignore[attr-defined]
        return layers

    @property
    def layer_types(self) -> list[str] | None:
        """The cache layer type of each layer, which is where transformers' caches find ours."""
        if not isinstance(getattr(self, "kvfold", None), dict):
            return None
        family = family_of(self)  # type: ignore[arg-type]
        return [
            latent_layer_type(family.traits(self, layer).sliding_window)
            for layer in range(self.num_hidden_layers)  # type: ignore[attr-defined]
        ]

    def validate_layer_type(self) -> None:
        """transformers knows its own layer types only; ours come from ``layer_types`` above."""


class FoldedBaseMixin:
    """Puts folded attention in the place of a base model's own; everything else is the family's transformers class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        family = family_of(config)
        keepers: dict[int | None, int] = {}  # sliding window → first layer that has it
        layers = self.get_submodule(family.layers).children()  # type: ignore[attr-defined]
        for index, (layer, layout) in enumerate(zip(layers, config.layouts(), strict=True)):
            traits = family.traits(config, index)
            keeper = keepers.setdefault(traits.sliding_window, index)
            setattr(layer, family.attention, FoldedAttention(traits, layout, index, keeper, config))
        if family.rotary is not None:
            parent, _, name = family.rotary.rpartition(".")
            module = self.get_submodule(parent)  # type: ignore[attr-defined]
            setattr(module, name, SharedRotary(getattr(module, name)))
        self.post_init()  # type: ignore[attr-defined]


class FoldedCausalMixin:
    """Puts the folded base model into a family's causal-LM class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        setattr(self, self.base_model_prefix, family_of(config).base_class(config))  # type: ignore[attr-defined]
        self.post_init()  # type: ignore[attr-defined]
