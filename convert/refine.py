"""Layer by layer the output projection is fitted anew to what the source's layer gives, on the folded model's inputs.

With attention weights and values as the folded layer has them, its output is linear in the output projection; the best
one is a ridge regression towards the one that it has. How strong the ridge must be, and whether the layer is better
off at all, is judged by the error on rows that the regression has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..analysis.streaming import Stream

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # relative to the energy of each of the projection's inputs


@dataclass(frozen=True)
class Refinement:
    """A new output projection ``[D, n]`` in float64 (None: the old one is better), and the held-out errors.

    Errors are squared, relative to the source's output: ``before`` with the projection as it was, ``after`` with the
    better one.
    """

    weight: torch.Tensor | None
    before: float
    after: float


class OutputRegression:
    """Accumulates, in float64, what the regression of one layer needs, of fitted and of held-out rows.

    Args:
        weight: the projection's weight ``[D, n]``.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach().cpu().double()
        outputs, inputs = weight.shape
        self._grams = [self.weight.new_zeros(inputs, inputs) for _ in range(2)]
        self._cross = [self.weight.new_zeros(inputs, outputs) for _ in range(2)]
        self._left = [0.0, 0.0]
        self._wanted = [0.0, 0.0]

    def add(self, inputs: torch.Tensor, output: torch.Tensor, target: torch.Tensor, held_out: bool) -> None:
        """Add rows: the projection's ``inputs`` ``[…, n]``, its ``output`` ``[…, D]`` and what that should be."""
        z, left = inputs.flatten(0, -2).double(), (target - output).flatten(0, -2).double()
        kind = int(held_out)
        self._grams[kind] += z.T @ z
        self._cross[kind] += z.T @ left
        self._left[kind] += float(left.square().sum())
        self._wanted[kind] += float(target.double().square().sum())

    def solve(self) -> Refinement:
        """The best projection as far as the held-out rows tell."""
        before = self._left[1]
        best, change = before, None
        for ridge in RIDGES:
            gram = self._grams[0] + torch.diag(ridge * self._grams[0].diagonal().clamp(min=1e-300))
            tried = torch.linalg.solve(gram, self._cross[0])
            error = self._error(tried)
            if error < best:
                best, change = error, tried
        wanted = max(self._wanted[1], 1e-300)
        return Refinement(None if change is None else self.weight + change.T, before / wanted, best / wanted)

    def _error(self, change: torch.Tensor) -> float:
        """Squared error on the held-out rows after the projection has changed by ``change`` ``[n, D]``."""
        explained = (change * self._cross[1]).sum()
        return self._left[1] - 2 * float(explained) + float((change * (self._grams[1] @ change)).sum())


@contextmanager
def recorded_outputs(attention: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what an attention module returns, a tensor ``[batch, window, D]`` for every batch that goes through."""
    outputs: list[torch.Tensor] = []
    handle = attention.register_forward_hook(lambda module, args, output: outputs.append(output[0].cpu()))
    try:
        yield outputs
    finally:
        handle.remove()


@contextmanager
def recorded_inputs(projection: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what a linear layer is given."""
    inputs: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0].cpu()))
    try:
        yield inputs
    finally:
        handle.remove()


def refine_output(
    layer: Any, index: int, attention: Any, streams: Sequence[Stream], targets: Sequence[list[torch.Tensor]]
) -> Refinement:
    """Fit the output projection of a layer's folded attention, and put the better one into it.

    Args:
        layer: a decoder layer, number ``index``, with ``attention`` in it.
        streams: of the folded model, before that layer: rows to fit on, and held-out rows.
        targets: what the source's attention returned for the batches of each.
    """
    regression = OutputRegression(attention.o_proj.weight)
    for held_out, (stream, wanted) in enumerate(zip(streams, targets, strict=True)):
        with recorded_inputs(attention.o_proj) as inputs, recorded_outputs(attention) as outputs:
            stream.fork().through(layer, index)
        for each in zip(inputs, outputs, wanted, strict=True):
            regression.add(*each, bool(held_out))
    found = regression.solve()
    if found.weight is not None:
        with torch.no_grad():
            attention.o_proj.weight.copy_(found.weight)
    return found
