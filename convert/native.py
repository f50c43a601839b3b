"""Folded layers as the source's own architecture says them: k_proj = W_s, v_proj = B·W_s.

Any engine serves such a checkpoint; it saves the memory of grouped heads, though not of folding.
"""

from __future__ import annotations

from typing import Any

import torch

from ..model import AttentionWeights, Family, FoldedAttention, KvfoldError, family_of
from ..model.rotary import key_columns

TOLERANCE = 1e-4  # relative; what a part of a layer may lose in the source's terms, beside its dtype's rounding


def native_model(folded: Any) -> Any:
    """The source's own model class with the folded weights of ``folded``, in its dtype.

    Raises KvfoldError where the source's architecture has no way to say what a layer does.
    """
    family = family_of(folded.config)
    attentions = family.attentions(folded)
    heads = {attention.layout.value_heads for attention in attentions}
    if len(heads) > 1:
        raise KvfoldError("its layers have different numbers of heads, and the source's architecture has one for all")
    config = _source_config(family, folded.config, heads.pop())
    with torch.device("meta"):
        plain: Any = family.source_model(config)
    state = folded.state_dict()
    for index, (attention, target) in enumerate(zip(attentions, family.attentions(plain), strict=True)):
        prefix = f"{folded.base_model_prefix}.{family.layers}.{index}.{family.attention}."
        state = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
        traits = family.traits(target, config, index)
        try:
            written = family.projections.write(_weights(attention, traits.output_bias), traits)
        except KvfoldError as error:
            raise KvfoldError(f"layer {index}: {error}") from error
        state |= {prefix + name: tensor.to(folded.dtype).contiguous() for name, tensor in written.items()}
    plain.load_state_dict(state, strict=True, assign=True)
    _take_buffers(family, plain, folded)
    plain.tie_weights()
    plain.generation_config = folded.generation_config
    return plain.eval()


def _take_buffers(family: Family, plain: Any, folded: Any) -> None:
    """Rotary tables and other buffers are in no state dict, and a model made on the meta device has none."""
    if family.rotary is not None:
        parent, _, name = family.rotary.rpartition(".")
        setattr(plain.base_model.get_submodule(parent), name, family.rotary_module(folded).rotary)
    buffers = dict(folded.named_buffers())
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, buffers[name])


def _source_config(family: Family, config: Any, heads: int) -> Any:
    entries = config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "auto_map", "kvfold"):
        entries.pop(name, None)
    if "num_key_value_heads" in entries:
        entries["num_key_value_heads"] = heads
    elif heads != config.num_attention_heads:
        raise KvfoldError(f"{family.model_type} has no grouped heads, so {heads} KV heads cannot be said")
    plain = family.source_config(**entries)
    plain._attn_implementation = config._attn_implementation
    return plain


@torch.no_grad()
def _weights(attention: FoldedAttention, output_bias: bool) -> AttentionWeights:
    """The plain projections of a folded layer, in float64. Raises KvfoldError where there are none."""
    traits, layout = attention.traits, attention.layout
    tolerance = max(TOLERANCE, torch.finfo(attention.o_proj.weight.dtype).eps)
    all_pairs = traits.rotary_dim // 2
    if any(len(kept) < all_pairs for kept in layout.pairs(all_pairs)):
        raise KvfoldError("some rotary pairs are not rotated, and the source's architecture rotates all of them")
    assigned = layout.key_assignment(traits.query_heads), layout.value_assignment(traits.query_heads)
    if layout.query_to_key or layout.query_to_value or layout.key_heads != layout.value_heads:
        raise KvfoldError(f"its key and value heads are shared in a way of its own ({assigned[0]}, {assigned[1]})")
    latent, latent_bias = _double(attention.latent_proj.weight), _double(attention.latent_proj.bias)
    if latent_bias is None:
        latent_bias = latent.new_zeros(len(latent))
    ones = torch.cat((latent, latent_bias[:, None]), dim=1)  # S as a map of x̃ = [x, 1]
    keys = ones[: attention.windows]
    if attention.key_map is not None:
        order = key_columns(layout, traits.head_dim, all_pairs)
        keys = torch.cat((keys, _double(attention.key_map.weight) @ ones))[order]
    output, bias = _double(attention.o_proj.weight), _double(attention.o_proj.bias)
    if attention.value_map is not None:
        values = _double(attention.value_map.weight) @ ones
        if attention.value_map.bias is not None:
            values[:, -1] += _double(attention.value_map.bias)
    else:
        columns = torch.arange(layout.latent_width, dtype=torch.float64).expand(1, 1, -1)
        own = attention.values(columns)[0, :, 0].long()  # [heads, value_width]: which columns a head's values are
        values, output = _narrowed(ones[own], output, traits.head_dim, tolerance)
    if bias is not None and not output_bias:
        values[:, -1] += _through(output, bias, layout.value_heads, traits.head_dim, tolerance)
        bias = None
    extras = {
        name: tensor
        for name, tensor in attention.state_dict().items()
        if name.partition(".")[0] in ("q_norm", "k_norm", "sinks")
    }
    return AttentionWeights(
        q=attention.q_proj.weight,
        k=keys[:, :-1],
        v=values[:, :-1],
        o=output,
        q_bias=attention.q_proj.bias,
        k_bias=keys[:, -1] if traits.key_bias else None,
        v_bias=values[:, -1] if traits.value_bias else None,
        o_bias=bias,
        extras=extras,
    )


def _double(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().double().cpu()


def _narrowed(
    values: torch.Tensor, output: torch.Tensor, head_dim: int, tolerance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of ``head_dim`` numbers and an output projection that do what wider values do.

    Args:
        values: maps of x̃ to the values of each head, ``[KV, w, D + 1]``. output: ``[D, H·w]``.

    A conversion makes wide values by multiplying the output projection with a map of rank ``head_dim``, which the
    singular vectors take apart again. Raises KvfoldError where the rank is higher.
    """
    heads, wide, _ = values.shape
    if wide == head_dim:
        return values.flatten(0, 1), output
    blocks = output.view(len(output), heads, -1, wide)  # [D, KV, group, w]
    by_head = blocks.permute(1, 3, 0, 2).flatten(2)  # [KV, w, D·group]
    left, sizes, right = torch.linalg.svd(by_head, full_matrices=False)
    lost = sizes[:, head_dim:].square().sum() / sizes.square().sum()
    if lost.sqrt() > tolerance:
        raise KvfoldError(f"its values have {wide} numbers a head, and the source's architecture has {head_dim}")
    left, right = left[:, :, :head_dim], sizes[:, :head_dim, None] * right[:, :head_dim]
    narrow = (left.transpose(1, 2) @ values).flatten(0, 1)
    blocks = right.unflatten(2, (len(output), -1)).permute(2, 0, 3, 1)  # [D, KV, group, d]
    return narrow, blocks.reshape(len(output), -1)


def _through(output: torch.Tensor, bias: torch.Tensor, heads: int, head_dim: int, tolerance: float) -> torch.Tensor:
    """The constant of the values, ``[KV·d]``, that the output projection ``[D, H·d]`` turns into ``bias`` ``[D]``.

    Raises KvfoldError where there is none.
    """
    summed = output.view(len(output), heads, -1, head_dim).sum(2).flatten(1)  # [D, KV·d]
    constant = torch.linalg.lstsq(summed, bias[:, None], driver="gelsd").solution[:, 0]
    if (summed @ constant - bias).norm() > tolerance * bias.norm():
        raise KvfoldError("its output has a bias, for which the source's architecture has no place")
    return constant
