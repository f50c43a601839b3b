"""A source checkpoint whose weights are read a piece at a time."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig

from ..model import KvfoldError, family_to_fold
from ..model.errors import one_line
from .hub import quiet
from .loading import Location, one_line_errors, require_unfolded
from .weight_shards import DTYPES

LARGE = 1 << 26  # bytes


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its name there, its name in the model, and what it is."""

    name: str
    target: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor. The file is opened anew, so that memory mapped for it is given back with the tensor."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)


class LazySource:
    """A model without weights, and the files that have them.

    Attributes:
        location: where the checkpoint lies. config, family: its own.
        model: transformers' model; its parameters are on the meta device but for those that ``loaded`` lends it, its
            buffers are real. It computes in float32.
        tensors: everything that is stored, in the order of the files.

    Raises KvfoldError for tensors that are missing, of another shape, or not the model's.
    """

    def __init__(self, location: Location, device: str = "cpu") -> None:
        self.location = location
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise KvfoldError(f"device {device!r} cannot be used: {one_line(error)}") from error
        with one_line_errors(location.path), quiet():
            self.config: Any = AutoConfig.from_pretrained(str(location.folder), trust_remote_code=False)
        require_unfolded(location.path, location.folder, self.config)
        with one_line_errors(location.path), quiet():
            self.family = family_to_fold(self.config)
            self.config._attn_implementation = None  # transformers' choice, whatever the checkpoint was trained with
            with init_empty_weights(include_buffers=False), no_init_weights():
                self.model: Any = self.family.source_model(self.config).eval()
            self._mapping: Any = get_model_conversion_mapping(self.model)
            self.tensors = self._stored()
            self._check()
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    @property
    def layers(self) -> int:
        return len(self.family.attentions(self.model))

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored keys, which the folded weights are to have, too."""
        prefix = self.attention_prefix(0)
        return next(each.dtype for each in self.tensors if each.target.startswith(prefix))

    def attention_prefix(self, layer: int) -> str:
        """What the model's names of a layer's attention tensors begin with."""
        return f"{self._layer_prefix(layer)}{self.family.attention}."

    def stored_prefix(self, layer: int) -> str:
        """The same in the files, which may leave out the name of the base model."""
        prefix = self.attention_prefix(layer)
        base = f"{self.model.base_model_prefix}."
        bare = all(not each.name.startswith(prefix) for each in self.tensors if each.target.startswith(prefix))
        return prefix.removeprefix(base) if bare else prefix

    def outside_attention(self) -> list[Stored]:
        """Everything that folding leaves as it is."""
        prefixes = tuple(self.attention_prefix(layer) for layer in range(self.layers))
        return [each for each in self.tensors if not each.target.startswith(prefixes)]

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.nn.Module]:
        """Decoder layer ``index`` with its weights."""
        prefix = self._layer_prefix(index)
        with self.loaded(lambda target: target.startswith(prefix)):
            yield self.model.base_model.get_submodule(self.family.layers)[index]

    @contextmanager
    def attention(self, index: int) -> Iterator[torch.nn.Module]:
        """The attention module of layer ``index`` with its weights."""
        prefix = self.attention_prefix(index)
        with self.loaded(lambda target: target.startswith(prefix)):
            yield self.family.attentions(self.model)[index]

    @contextmanager
    def ends(self) -> Iterator[Any]:
        """The model with the weights of all that is not a decoder layer: embeddings, last norm, head."""
        prefixes = tuple(self._layer_prefix(layer) for layer in range(self.layers))
        with self.loaded(lambda target: not target.startswith(prefixes)):
            self.model.tie_weights()
            yield self.model

    @contextmanager
    def loaded(self, belongs: Callable[[str], bool]) -> Iterator[None]:
        """Lend the model the parameters whose names ``belongs`` accepts. Raises KvfoldError for damaged ones."""
        wanted = [each for each in self.tensors if belongs(each.target)]
        with one_line_errors(self.location.path), quiet():
            state = {each.name: finite(each, each.read()) for each in wanted}
            settings = LoadStateDictConfig(
                dtype=torch.float32, device_map={"": self.device}, weight_mapping=self._mapping
            )  # fmt: skip
            convert_and_load_state_dict_in_model(self.model, state, settings)
        del state
        try:
            yield
        finally:
            for module in self.model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and not parameter.is_meta:
                        module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            if sum(each.bytes for each in wanted) > LARGE:
                gc.collect()  # what read them refers to itself, and heaps grow while it waits

    def _layer_prefix(self, layer: int) -> str:
        return f"{self.model.base_model_prefix}.{self.family.layers}.{layer}."

    def _stored(self) -> list[Stored]:
        renamings = [each for each in self._mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        own = self.model.state_dict()
        found = []
        for path in self.location.files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    target, _ = rename_source_key(name, renamings, converters, self.model.base_model_prefix, own)
                    part = file.get_slice(name)
                    dtype = DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise KvfoldError(f"weight {name} is stored as {part.get_dtype()}, which is not supported")
                    found.append(Stored(name, target, path, tuple(part.get_shape()), dtype))
        return found

    def _check(self) -> None:
        own = self.model.state_dict()
        ignored = self.model._keys_to_ignore_on_load_unexpected or ()
        unknown = [each.name for each in self.tensors if each.target not in own]
        strangers = [name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)]
        if strangers:
            raise KvfoldError(
                f"{len(strangers)} tensors are not in the model that the config describes, first {min(strangers)}"
            )
        self.tensors = [each for each in self.tensors if each.target in own]
        tied = self.model.all_tied_weights_keys
        present = {each.target for each in self.tensors}
        missing = sorted(name for name in own if name not in present and tied.get(name) not in present)
        if missing:
            raise KvfoldError(f"{len(missing)} tensors are missing from the weights, first {missing[0]}")
        counts = Counter(each.target for each in self.tensors)
        for each in self.tensors:  # several tensors that make one (experts) have no shape to be held against
            expected = tuple(own[each.target].shape)
            if counts[each.target] == 1 and each.name.endswith(each.target) and each.shape != expected:
                raise KvfoldError(
                    f"weight {each.name} has shape {list(each.shape)}, the config says {list(expected)}: damaged?"
                )
        self._untie(tied)

    def _untie(self, tied: dict[str, str]) -> None:
        """Of tied weights that are stored twice keep one, unless they differ; then transformers does not tie them."""
        by_target = {each.target: each for each in self.tensors}
        for name, other in tied.items():
            if name in by_target and other in by_target:
                if torch.equal(by_target[name].read(), by_target[other].read()):
                    self.tensors.remove(by_target[name])
                else:
                    self.config.tie_word_embeddings = False


def finite(stored: Stored, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself. Raises KvfoldError where an entry is NaN or infinite."""
    # The sum is quicker, and finite only where every entry is; a sum that overflows needs a closer look.
    suspect = tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32))
    if suspect and not torch.isfinite(tensor).all():
        raise KvfoldError(f"weight {stored.name} has NaN or infinite entries")
    return tensor
