"""Models made of another model's weights, without initialising any."""

from __future__ import annotations

from typing import Any

import torch

from ..model import Family, FoldedAttention
from ..model.rotary import SharedRotary


def assemble_model(family: Family, model_class: Any, config: Any, state: dict[str, torch.Tensor], like: Any) -> Any:
    """A model of ``model_class`` with the tensors of ``state``; what no state has, it takes from the model ``like``.

    ``like`` is of the same sizes but for its attention (a source and its folded model, either way round). Tensors are
    shared, not copied.
    """
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict(state, strict=True, assign=True)
    if family.rotary is not None:
        _share_rotary(family, model, like)
    buffers = dict(like.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, buffers[name])
    model.tie_weights()
    model.generation_config = like.generation_config
    return model.eval()


def without_attention(family: Family, model: Any) -> dict[str, torch.Tensor]:
    """The state of ``model`` without its attention layers."""
    prefixes = tuple(attention_prefix(family, model, layer) for layer in range(len(family.attentions(model))))
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefixes)}


def attention_prefix(family: Family, model: Any, layer: int) -> str:
    """What the names of a layer's attention tensors begin with in the state of ``model``."""
    return f"{model.base_model_prefix}.{family.layers}.{layer}.{family.attention}."


def _share_rotary(family: Family, model: Any, like: Any) -> None:
    """Rotary tables are not in the state, and a model on the meta device has none."""
    theirs = family.rotary_module(like)
    theirs = theirs.rotary if isinstance(theirs, SharedRotary) else theirs
    parent, _, last = str(family.rotary).rpartition(".")
    if isinstance(family.attentions(model)[0], FoldedAttention):
        family.rotary_module(model).rotary = theirs
    else:
        setattr(model.base_model.get_submodule(parent), last, theirs)
