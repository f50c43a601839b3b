"""Model families: where a family keeps its attention, and the folded classes built on transformers' own.

A family is one file of this folder with a ``Family`` in it; see ``llama`` for the common layout.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from .attention import FoldedAttention, split_heads
from .cache import LAYER_TYPE, latent_layer_type
from .errors import KvfoldError
from .layout import FoldedLayout
from .projections import OUR_NORMS, AttentionWeights, Projections, Separate
from .rotary import SharedRotary
from .traits import AttentionTraits, separate, sliding_window

FORMAT = 1  # of the "kvfold" entry in config.json


@dataclass(frozen=True)
class Family:
    """Where a model family keeps what kvfold needs.

    Attributes:
        module: name of the Python module that the folded classes are to be found in, the family's ``__name__``.
        source_config, source_base, source_model: transformers' classes; source_model is the causal-LM one.
        traits: an attention layer's properties, from its module, the model's config and the layer's number.
        projections: reads an attention module into the common form.
        layers: path from the base model to its list of decoder layers.
        attention: name of the attention module in a decoder layer.
        rotary: path from the base model to the rotary embedding module, or None.
        rotary_layout: how its tables lie, see ``rotary.TABLE_LAYOUTS``.
        refusal: says why a config of this family cannot be folded, or None.
        config_class, base_class, model_class: the folded classes, made from transformers' ones.
    """

    module: str
    source_config: type[PreTrainedConfig]
    source_base: type[PreTrainedModel]
    source_model: type[PreTrainedModel]
    traits: Callable[[Any, Any, int], AttentionTraits] = separate
    projections: Projections = field(default_factory=Separate)
    layers: str = "layers"
    attention: str = "self_attn"
    rotary: str | None = "rotary_emb"
    rotary_layout: str = "halves"
    refusal: Callable[[Any], str | None] = lambda config: None
    config_class: type[PreTrainedConfig] = field(init=False)
    base_class: type[PreTrainedModel] = field(init=False)
    model_class: type[PreTrainedModel] = field(init=False)

    def __post_init__(self) -> None:
        for name, cls in zip(("config_class", "base_class", "model_class"), _folded_classes(self), strict=True):
            object.__setattr__(self, name, cls)

    @property
    def model_type(self) -> str:
        """The source's ``model_type`` in config.json."""
        return self.source_config.model_type

    @property
    def folded_model_type(self) -> str:
        """That of its converted checkpoints."""
        return f"kvfold_{self.model_type}"

    def config_with(self, layouts: Sequence[FoldedLayout], **entries: Any) -> Any:
        """A folded config with these layouts, one for each layer, and the entries of the family's own config."""
        make: Any = self.config_class  # its classes are made at run time
        return make(**entries, kvfold={"format": FORMAT, "layers": [layout.to_dict() for layout in layouts]})

    def folded_config(self, config: PreTrainedConfig, layouts: Sequence[FoldedLayout], **changes: Any) -> Any:
        """A source's config with these layouts, one for each layer, in it."""
        entries = config.to_dict()
        for name in ("model_type", "architectures", "transformers_version", "auto_map"):
            entries.pop(name, None)
        folded = self.config_with(layouts, **(entries | changes))
        folded._name_or_path = ""
        return folded

    def attentions(self, model: Any) -> list[Any]:
        """The attention module of every layer of ``model`` (causal-LM or base), in order."""
        return [getattr(layer, self.attention) for layer in self.decoder_layers(model)]

    def decoder_layers(self, model: Any) -> list[Any]:
        """The decoder layers of a model, in order."""
        return list(model.base_model.get_submodule(self.layers).children())

    def rotary_module(self, model: Any) -> Any:
        """The rotary embedding module of ``model``, or None."""
        return None if self.rotary is None else model.base_model.get_submodule(self.rotary)

    def traits_of(self, model: Any) -> list[AttentionTraits]:
        """The traits of every attention layer of ``model``, a source or a folded one."""
        return [
            attention.traits if isinstance(attention, FoldedAttention) else self.traits(attention, model.config, layer)
            for layer, attention in enumerate(self.attentions(model))
        ]

    def parts_of(self, model: Any, layer: int) -> AttentionParts:
        """A source model's attention layer in the common form."""
        attention = self.attentions(model)[layer]
        traits = self.traits(attention, model.config, layer)
        weights = self.projections.read(attention, traits)
        query_norm, key_norm = (
            norm and _norm_in_common_form(norm, ours, weights)
            for ours, norm in zip(OUR_NORMS, self.norms(attention, traits), strict=True)
        )
        frequencies, scale = self._rotation(model, traits, layer)
        return AttentionParts(traits, weights, query_norm, key_norm, frequencies, scale)

    def norms(self, attention: Any, traits: AttentionTraits) -> tuple[nn.Module | None, nn.Module | None]:
        """The modules of a source's attention layer that norm its queries and its keys."""
        query, key = self.projections.norms
        return (
            getattr(attention, query) if traits.query_norm else None,
            getattr(attention, key) if traits.key_norm else None,
        )

    def _rotation(self, model: Any, traits: AttentionTraits, layer: int) -> tuple[torch.Tensor | None, float]:
        """RoPE's angles per token, and its factor on what it rotates, in one layer."""
        if traits.rotary_dim == 0:
            return None, 1.0
        rotary = self.rotary_module(model)
        kind = "" if hasattr(rotary, "inv_freq") else f"{model.config.layer_types[layer]}_"
        scale = getattr(rotary, f"{kind}attention_scaling", getattr(rotary, "attention_scaling", 1.0))
        return getattr(rotary, f"{kind}inv_freq"), float(scale)

    def auto_map(self) -> dict[str, str]:
        """Where transformers finds the classes in a checkpoint's own files (``trust_remote_code``)."""
        file = self.module.rpartition(".")[2]
        return {
            "AutoConfig": f"{file}.{self.config_class.__name__}",
            "AutoModel": f"{file}.{self.base_class.__name__}",
            "AutoModelForCausalLM": f"{file}.{self.model_class.__name__}",
        }


@dataclass(frozen=True)
class AttentionParts:
    """An attention layer in the common form.

    Attributes:
        traits, weights: see there. query_norm, key_norm: modules for heads in the common form, or None.
        frequencies: RoPE's angle per token of each rotary pair, ``[rotary_dim / 2]``; None: no RoPE.
        rotary_scale: the factor that RoPE puts on whatever it rotates (yarn and longrope have one).
    """

    traits: AttentionTraits
    weights: AttentionWeights
    query_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    frequencies: torch.Tensor | None = None
    rotary_scale: float = 1.0

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Queries ``[batch, H, tokens, d]`` of hidden states ``[batch, tokens, D]``, normed, not rotated."""
        return self._heads(x, self.weights.q, self.weights.q_bias, self.query_norm)

    def keys(self, x: torch.Tensor, normed: bool = True) -> torch.Tensor:
        """Keys ``[batch, KV, tokens, d]``, normed or not, not rotated."""
        return self._heads(x, self.weights.k, self.weights.k_bias, self.key_norm if normed else None)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Values ``[batch, KV, tokens, d]``."""
        return self._heads(x, self.weights.v, self.weights.v_bias, None)

    def _heads(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: nn.Module | None
    ) -> torch.Tensor:
        flat = nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return split_heads(flat, self.traits.head_dim, norm, self.traits.norm_over)


def _norm_in_common_form(norm: nn.Module, name: str, weights: AttentionWeights) -> nn.Module:
    """A copy of a family's norm whose weights are in the order of the common form."""
    norm = copy.deepcopy(norm)
    extras = weights.extras.items()
    norm.load_state_dict({key.partition(".")[2]: tensor for key, tensor in extras if key.partition(".")[0] == name})
    return norm


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
    # Files keep the source's names for everything that is not attention (experts one by one, for example).
    names = [
        (family.model_type, family.folded_model_type),
        (family.source_base.__name__, family.base_class.__name__),
        (family.source_model.__name__, family.model_class.__name__),
    ]
    for theirs, ours in names:
        mapping = get_checkpoint_conversion_mapping(theirs)
        if mapping is not None:
            register_checkpoint_conversion_mapping(ours, mapping, overwrite=True)
    return family


def families() -> list[str]:
    """The ``model_type`` of every family that can be converted."""
    return sorted(_FAMILIES)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a source model's config, or of a folded model's. Raises KvfoldError for an unknown family."""
    return require_known(config.model_type)


def family_to_fold(config: PreTrainedConfig) -> Family:
    """The family of a source model that is to be folded.

    Raises KvfoldError for an unknown family, and for a config that its family cannot fold.
    """
    family = family_of(config)
    reason = family.refusal(config)
    if reason:
        raise KvfoldError(f"this {config.model_type} model cannot be folded: {reason}")
    return family


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

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """The config as transformers reads it; its caches ask for the decoder's.

        They get a copy whose ``layer_types`` are our cache layers; all else (masks, RoPE, the layers themselves) goes
        by the source's own.
        """
        config = super().get_text_config(decoder=decoder, encoder=encoder)  # type: ignore[misc]
        return latent_view(config) if decoder and is_folded(config) else config


def latent_view(config: Any) -> Any:
    """A copy of a config whose ``layer_types`` are our cache layers, or the config where it is such a copy."""
    types = getattr(config, "layer_types", None)
    if types and types[0].startswith(LAYER_TYPE):
        return config
    view = copy.copy(config)
    view.__dict__["layer_types"] = [
        latent_layer_type(sliding_window(config, layer)) for layer in range(config.num_hidden_layers)
    ]
    return view


class FoldedBaseMixin:
    """Puts folded attention in the place of a base model's own; everything else is the family's transformers class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        family = family_of(config)
        keepers: dict[int | None, int] = {}  # sliding window → first layer that has it and rotates
        layers = self.get_submodule(family.layers).children()  # type: ignore[attr-defined]
        for index, (layer, layout) in enumerate(zip(layers, config.layouts(), strict=True)):
            attention = getattr(layer, family.attention)
            traits = family.traits(attention, config, index)
            keeper = keepers.setdefault(traits.sliding_window, index) if traits.rotary_dim else index
            folded = FoldedAttention(traits, layout, index, keeper, config, family.norms(attention, traits))
            setattr(layer, family.attention, folded)
        if family.rotary is not None:
            parent, _, name = family.rotary.rpartition(".")
            module = self.get_submodule(parent)  # type: ignore[attr-defined]
            setattr(module, name, SharedRotary(getattr(module, name), family.rotary_layout))
        self.post_init()  # type: ignore[attr-defined]


class FoldedCausalMixin:
    """Puts the folded base model into a family's causal-LM class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        setattr(self, self.base_model_prefix, family_of(config).base_class(config))  # type: ignore[attr-defined]
        self.post_init()  # type: ignore[attr-defined]


def _recorded(base: Any) -> dict[str, Any]:
    """What ``output_hidden_states`` and ``output_attentions`` record: the model's own, with folded attention."""
    recorded = dict(base._can_record_outputs or {})
    if "attentions" in recorded:
        recorded["attentions"] = FoldedAttention
    return recorded


def _folded_classes(family: Family) -> tuple[type, type, type]:
    """Config, base model and causal-LM class of a family, as attributes of its module (where pickle looks)."""
    source = family.source_config

    @strict
    class Config(FoldedConfigMixin, source):  # type: ignore[misc, valid-type]
        model_type = f"kvfold_{source.model_type}"
        kvfold: dict | None = None

    class Base(FoldedBaseMixin, family.source_base):  # type: ignore[misc, name-defined]
        config_class = Config
        _can_record_outputs = _recorded(family.source_base)

    class Causal(FoldedCausalMixin, family.source_model):  # type: ignore[misc, name-defined]
        config_class = Config

    made = ((Config, source), (Base, family.source_base), (Causal, family.source_model))
    for cls, original in made:
        cls.__name__ = cls.__qualname__ = f"Kvfold{original.__name__}"
        cls.__module__ = family.module
        cls.__doc__ = f"{original.__name__} whose keys and values are folded."
        setattr(sys.modules[family.module], cls.__name__, cls)
    return Config, Base, Causal
