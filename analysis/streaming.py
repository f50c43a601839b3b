"""Text on its way through a model one decoder layer at a time, so that only one layer need be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..model import Family, FoldedAttention
from ..model.rotary import TABLE_LAYOUTS

TOKENS_AT_ONCE = 1024


class States(Protocol):
    """Keeps the hidden states of each batch of rows, ``[batch, window, D]``."""

    def __getitem__(self, index: int) -> torch.Tensor: ...

    def __setitem__(self, index: int, state: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class _Call:
    """What a decoder layer is called with beside the hidden states."""

    args: tuple
    kwargs: dict[str, Any]


class Stream:
    """Rows of token ids, and their hidden states before the next decoder layer.

    Args:
        family, model: a causal-LM model; its decoder layers need not hold weights, all else must for ``enter`` and
            ``logits``. rows: token ids ``[rows, window]``. batch: rows that go through a layer together; None: about
            ``TOKENS_AT_ONCE`` tokens.
        states: where hidden states are kept; None: in memory.
        weights: whether attention modules are to return their weights, for which they must attend eagerly; without,
            they attend as the model does, in a fraction of the time and memory.
    """

    def __init__(
        self, family: Family, model: Any, rows: torch.Tensor, batch: int | None = None, states: States | None = None,
        weights: bool = False,
    ) -> None:  # fmt: skip
        self.family, self.model, self.rows, self.weights = family, model, rows, weights
        self.batches = list(rows.split(batch or max(1, TOKENS_AT_ONCE // rows.shape[1])))
        self.states: Any = {} if states is None else states
        self._calls: dict[int, list[_Call]] = {}

    @torch.inference_mode()
    def enter(self) -> Stream:
        """Embed the rows, and learn what each layer is to be called with (masks, rotary tables, positions)."""
        for index, ids in enumerate(self.batches):
            with self._attending():
                state, calls = _what_layers_get(self.family, self.model, ids)
            self.states[index] = state.cpu()
            # All rows are as long, none is padded: what goes with the hidden states depends on their number only.
            self._calls[len(ids)] = calls
        return self

    def fork(self, states: States | None = None) -> Stream:
        """The same rows at the same place, to go on through other layers."""
        other = Stream(self.family, self.model, self.rows, len(self.batches[0]), states, self.weights)
        other._calls = self._calls
        for index in range(len(self.batches)):
            other.states[index] = self.states[index]
        return other

    @torch.inference_mode()
    def through(self, layer: nn.Module, index: int, advance: Callable[[int], None] = lambda rows: None) -> None:
        """Put the hidden states through ``layer``, number ``index``, the model's own or one with folded attention."""
        folded = isinstance(getattr(layer, self.family.attention), FoldedAttention)
        device = next(layer.parameters()).device
        for number, ids in enumerate(self.batches):
            call = self._calls[len(ids)][index]
            kwargs = dict(call.kwargs)
            if folded and kwargs.get("position_embeddings") is not None:
                arrange = TABLE_LAYOUTS[self.family.rotary_layout]
                kwargs["position_embeddings"] = tuple(arrange(table) for table in kwargs["position_embeddings"])
            with self._attending():
                out = layer(self.states[number].to(device), *_on(call.args, device), **_on(kwargs, device))
            self.states[number] = (out[0] if isinstance(out, tuple) else out).cpu()
            advance(len(ids))

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Let the model attend as this stream needs it for a while; the masks that it makes are of that kind, too."""
        config, own = self.model.config, self.model.config._attn_implementation
        if self.weights:
            config._attn_implementation = "eager"  # weights are visible in no other
        try:
            yield
        finally:
            config._attn_implementation = own

    def logits(self) -> Iterator[torch.Tensor]:
        """The model's logits for the hidden states after the last layer, ``[batch, window, vocabulary]`` a batch."""
        # No name, and no decorator of this generator, may hold on to them: many streams wait here, and they are large.
        for number in range(len(self.batches)):
            yield self._logits(number)

    @torch.inference_mode()
    def _logits(self, number: int) -> torch.Tensor:
        given = _Given(self.states[number])
        with _replaced_layers(self.family, self.model, lambda index: given):
            return self.model(input_ids=self.batches[number].to(self.model.device), use_cache=False).logits


class _Recorder(nn.Module):
    """Stands in for a decoder layer: notes what it is called with and passes the hidden states on."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None
        self.call: _Call | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.state, self.call = hidden_states, _Call(args, kwargs)
        return hidden_states


class _Given(nn.Module):
    """Stands in for a decoder layer: returns given hidden states."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self.state = state

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.state.to(hidden_states.device)


def _what_layers_get(family: Family, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[_Call]]:
    recorders: list[_Recorder] = []

    def recorder(index: int) -> nn.Module:
        recorders.append(_Recorder())
        return recorders[-1]

    with _replaced_layers(family, model, recorder):
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
    calls = [each.call for each in recorders if each.call is not None]
    state = recorders[0].state
    assert state is not None
    return state, calls


@contextmanager
def _replaced_layers(family: Family, model: Any, make: Callable[[int], nn.Module]) -> Iterator[None]:
    """Put ``make(index)`` in the place of every decoder layer for a while."""
    layers = model.base_model.get_submodule(family.layers)
    own = list(layers)
    for index in range(len(own)):
        layers[index] = make(index)
    try:
        yield
    finally:
        for index, layer in enumerate(own):
            layers[index] = layer


def _on(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dictionaries moved to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_on(each, device) for each in value)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    return value
