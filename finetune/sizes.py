"""Sizes of models that are trained from scratch, with the settings they are trained with."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from ..checkpoint.option_checks import token_count
from ..model import KvfoldError, Variant, VariantAttention, is_folded
from ..model.attention import FoldedAttention
from ..model.errors import one_line
from ..model.layout import FoldedLayout
from ..model.qkv_gpt2 import QKV_GPT2, QkvGPT2Config

PRESETS = ("3m", "30m", "300m", "1.2b")
CACHE_BYTES = 2  # of a cached number: 16 bits


@dataclass(frozen=True)
class Size:
    """A size: one YAML file, a preset or one's own.

    Attributes:
        layers, width, heads, mlp, positions: of the model; ``mlp`` is the inner width, ``positions`` are learned.
        vocabulary: tokens, where no tokenizer is at hand to tell. dropout: of what is added to the residual stream.
        tokenizer: a folder, a Hub id, or ``train:N``. sequence: tokens. batch, accumulation, devices: their product
            is the sequences of a step, whatever the number of devices. tokens: to train on.
        learning_rate, final_rate, warmup_steps, weight_decay, clip: see ``TrainingSettings``.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int
    positions: int
    tokenizer: str
    sequence: int
    batch: int
    learning_rate: float
    final_rate: float
    tokens: int
    dropout: float = 0.1
    accumulation: int = 1
    devices: int = 1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if kind in ("int", "float") and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise KvfoldError(f"{field.name} {value!r} is no number")
            if kind == "int" and (value != int(value) or value < (0 if field.name == "warmup_steps" else 1)):
                raise KvfoldError(f"{field.name} {value!r} is no whole number above 0")
            if kind == "float" and not 0 <= value < float("inf"):
                raise KvfoldError(f"{field.name} {value!r} is below 0")
        if self.width % self.heads:
            raise KvfoldError(f"width {self.width} does not divide over {self.heads} heads")
        if self.sequence > self.positions:
            raise KvfoldError(f"sequences of {self.sequence} tokens are longer than the {self.positions} positions")

    @property
    def sequences_a_step(self) -> int:
        """Sequences of a step, all devices together."""
        return self.batch * self.accumulation * self.devices

    def for_devices(self, devices: int, batch: int | None = None) -> Size:
        """The same step on another number of devices, or with another batch a device: its accumulation is adapted.

        Raises KvfoldError where the sequences of a step do not divide.
        """
        batch = self.batch if batch is None else batch
        accumulation, rest = divmod(self.sequences_a_step, batch * devices)
        if rest or not accumulation:
            raise KvfoldError(
                f"{self.sequences_a_step} sequences a step do not divide over {devices} devices with {batch} each: "
                "give another --batch"
            )
        return replace(self, batch=batch, accumulation=accumulation, devices=devices)


def size_named(name: str) -> Size:
    """The preset of this name, or the size in this YAML file. Raises KvfoldError."""
    if name in PRESETS:
        text = files("kvfold.finetune").joinpath(f"presets/{name}.yaml").read_text(encoding="utf-8")
    else:
        path = Path(name).expanduser()
        if path.suffix not in (".yaml", ".yml") or not path.is_file():
            raise KvfoldError(f"size {name!r} is unknown: use {', '.join(PRESETS)}, or a YAML file")
        text = path.read_text(encoding="utf-8")
    try:
        entries: Any = yaml.safe_load(text)
        if isinstance(entries, dict):
            entries = {name: _read(name, value) for name, value in entries.items()}
        return Size(**entries)
    except KvfoldError as error:
        raise KvfoldError(f"size {name}: {error}") from error
    except (yaml.YAMLError, TypeError) as error:
        known = ", ".join(field.name for field in fields(Size))
        raise KvfoldError(f"size {name} cannot be read: {one_line(error)} (its entries: {known})") from error


def _read(name: str, value: Any) -> Any:
    """An entry of a YAML file, in which 2M and 1e-3 are strings."""
    if name == "tokens" and isinstance(value, str):
        return token_count(value)
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def model_config(size: Size, variant: Variant, key_value_heads: int, vocabulary: int | None = None) -> Any:
    """The config of a model of this size and variant. Raises KvfoldError for heads that do not fit.

    Args:
        size, variant: see there. key_value_heads: heads of keys and values. vocabulary: None: as the size has it.
    """
    variant.require_heads(size.heads, key_value_heads)
    common: dict[str, Any] = {
        "vocab_size": vocabulary or size.vocabulary, "n_positions": size.positions, "n_embd": size.width,
        "n_layer": size.layers, "n_head": size.heads, "n_inner": size.mlp, "activation_function": "gelu",
        "resid_pdrop": size.dropout, "embd_pdrop": size.dropout, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "num_key_value_heads": key_value_heads, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if not variant.folded:
        return QkvGPT2Config(variant=variant.name, **common)
    width = key_value_heads * (size.width // size.heads)
    layout = FoldedLayout(width, key_value_heads, key_value_heads, span="head", key_span="head")
    return QKV_GPT2.config_with([layout] * size.layers, **common)


def new_model(config: Any) -> Any:
    """A model with first weights, drawn from torch's generator."""
    return (QKV_GPT2.model_class if is_folded(config) else QKV_GPT2.source_model)(config)


@dataclass(frozen=True)
class Figures:
    """What a model would be: ``cache_bytes_per_token`` in 16 bits, ``flops_per_token`` of a training step.

    The latter as PaLM counts them (arXiv 2204.02311, appendix B): 6 for each parameter that multiplies, and
    12 · layers · width · tokens of the sequence for attention.
    """

    parameters: int
    attention_parameters: int
    cache_bytes_per_token: int
    tokens_per_step: int
    flops_per_token: int


def figures(size: Size, variant: Variant, key_value_heads: int, vocabulary: int | None = None) -> Figures:
    """The figures of a model that is not made: its parameters are on the meta device."""
    with torch.device("meta"):
        model = new_model(model_config(size, variant, key_value_heads, vocabulary))
    attention = [each for each in model.modules() if isinstance(each, VariantAttention | FoldedAttention)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cached = variant.cached_tensors * key_value_heads * (size.width // size.heads)
    multiplied = parameters - size.positions * size.width
    return Figures(
        parameters=parameters,
        attention_parameters=sum(parameter.numel() for each in attention for parameter in each.parameters()),
        cache_bytes_per_token=size.layers * cached * CACHE_BYTES,
        tokens_per_step=size.sequences_a_step * size.sequence,
        flops_per_token=6 * multiplied + 12 * size.layers * size.width * size.sequence,
    )
