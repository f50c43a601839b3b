"""What of a folded model is trained: adapters on its attention, the attention in full, or everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..model import KvfoldError, VariantAttention
from ..model.attention import FoldedAttention
from ..model.errors import one_line

WAYS = ("lora", "attention", "full")
ADAPTED = ("q_proj", "latent_proj", "key_map", "value_map", "o_proj")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): rank, scale ``alpha / rank``, whether on MLPs, too."""

    rank: int = 32
    alpha: float = 64.0
    mlp: bool = False


def choose(model: Any, train: str, lora: LoraSettings, seed: int = 0, adapter: str | None = None) -> Any:
    """Freeze all of ``model`` but what ``train`` names; returns the model to train, which for ``lora`` wraps it.

    Its dropout is turned off.

    Args:
        model: a folded model. train: of ``WAYS``. lora: for ``lora``. seed: of the adapters' first values.
        adapter: a PEFT folder to go on from, instead of new adapters.

    Raises:
        KvfoldError: for an adapter that is of another model, or a model without MLPs that adapters can be put on.
    """
    without_dropout(model)
    model.requires_grad_(train == "full")
    if train == "attention":
        for parameter in _attention_and_norms(model):
            parameter.requires_grad_(True)
    if train != "lora":
        return model
    # peft takes a second to import, and few commands need it.
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        _require_adapter(model, adapter)
        try:
            return PeftModel.from_pretrained(model, adapter, is_trainable=True)
        except (RuntimeError, ValueError, OSError, KeyError, TypeError) as error:
            raise KvfoldError(f"adapter {adapter} does not fit the model: {one_line(error)}") from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # (any number)
        target_modules=_targets(model, lora.mlp),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def without_dropout(model: Any) -> None:
    """Turn all dropout of ``model`` off (its config stays): a student is to give what its teacher gives, no noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, FoldedAttention | VariantAttention):
            module.traits = replace(module.traits, dropout=0.0, output_dropout=0.0)
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def core(model: Any) -> Any:
    """The transformers model itself, without adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def trained_parameters(model: Any) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def share_frozen(student: Any, teacher: Any) -> int:
    """Let the teacher's tensors stand for those of the student that are frozen and equal; returns the bytes saved."""
    theirs = dict(core(teacher).named_parameters())
    saved = 0
    for name, parameter in core(student).named_parameters():
        other = theirs.get(name)
        if (
            other is not None and not parameter.requires_grad and other.dtype == parameter.dtype
            and other.shape == parameter.shape and torch.equal(other, parameter)
        ):  # fmt: skip
            parameter.data = other.data
            saved += parameter.numel() * parameter.element_size()
    return saved


def folded_layers(model: Any) -> Iterator[tuple[str, FoldedAttention]]:
    """The folded attention modules of a model and their names."""
    for name, module in model.named_modules():
        if isinstance(module, FoldedAttention):
            yield name, module


def _attention_and_norms(model: Any) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, FoldedAttention) or "norm" in type(module).__name__.lower():
            yield from module.parameters()


def _targets(model: Any, mlp: bool) -> list[str]:
    """Full names of the linear layers that get adapters."""
    attention = dict(folded_layers(model))
    targets = [
        f"{name}.{part}" for name, module in attention.items() for part in ADAPTED if getattr(module, part) is not None
    ]
    if not mlp:
        return targets
    layers = {name.rpartition(".")[0] for name in attention}
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and any(name.startswith(f"{layer}.") for layer in layers)
        and not any(name.startswith(f"{each}.") for each in attention)
    ]
    if not others:
        raise KvfoldError("the model's MLPs are no linear layers (experts?): leave out --lora-mlp, or --train full")
    return targets + others


def _require_adapter(model: Any, adapter: str) -> None:
    """Raises KvfoldError where the folder holds no adapter, or one whose modules or sizes the model does not have."""
    from safetensors import SafetensorError, safe_open

    file = Path(adapter).expanduser() / "adapter_model.safetensors"
    if not file.is_file() or not file.with_name("adapter_config.json").is_file():
        raise KvfoldError(f"{adapter} is no PEFT adapter: it has no {file.name} or no adapter_config.json")
    modules = dict(model.named_modules())
    try:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (no mapping)
                name, _, kind = key.removeprefix("base_model.model.").partition(".lora_")
                shape, module = stored.get_slice(key).get_shape(), modules.get(name)
                size = None if module is None else _sizes(module)[0 if kind.startswith("A") else 1]
                if size is None or size != shape[1 if kind.startswith("A") else 0]:
                    raise KvfoldError(f"adapter {adapter} is of another model: {key} {shape} has no place in this one")
    except SafetensorError as error:
        raise KvfoldError(f"adapter {adapter} is damaged: {one_line(error)}") from error


def _sizes(module: nn.Module) -> tuple[int, int] | tuple[None, None]:
    """Inputs and outputs of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.weight.shape[0], module.weight.shape[1]) if isinstance(module, Conv1D) else (None, None)
