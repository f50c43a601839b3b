"""What a cache costs when a model is served: an estimate from sizes alone, with its assumptions said."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import KvfoldError

BYTES = 2  # of a weight and of a cached number: 16 bits
MILLION = 1e6


@dataclass(frozen=True)
class Machine:
    """What serves, by default one GPU of 80 GB as rented in 2026.

    Attributes:
        memory: bytes. bandwidth: bytes per second that memory is read at. price: per hour, in any currency.
        reserve: share of the memory that activations and all else need.
    """

    memory: float = 80e9
    bandwidth: float = 3.35e12
    price: float = 2.5
    reserve: float = 0.1

    def __post_init__(self) -> None:
        if min(self.memory, self.bandwidth) <= 0 or self.price < 0 or not 0 <= self.reserve < 1:
            raise KvfoldError("memory and bandwidth must be above 0, the price no less than 0, the reserve a share")


@dataclass(frozen=True)
class Serving:
    """The estimate; None where not even the weights, or one sequence, fit.

    Attributes:
        sequences: of the context's length that fit at a time. longest: tokens of one sequence alone.
        tokens_per_second: of all sequences together, while decoding at that length. cost: of a million tokens.
    """

    sequences: int
    longest: int
    tokens_per_second: float | None
    cost: float | None


def serving(parameters: int, cached_numbers: float, context: int, machine: Machine) -> Serving:
    """Estimate how a model is served at a context length.

    Decoding is bound by memory: a step gives one token to every sequence, and reads all weights once and every
    sequence's cache. Weights and caches have 16 bits; all sequences are as long as the context.

    Args:
        parameters: of the model. cached_numbers: per token, all layers. context: tokens. machine: see there.
    """
    room = machine.memory * (1 - machine.reserve) - parameters * BYTES
    token = cached_numbers * BYTES
    if room <= 0:
        return Serving(0, 0, None, None)
    sequences = int(room // (token * context))
    if sequences == 0:
        return Serving(0, int(room // token), None, None)
    step = (parameters * BYTES + sequences * context * token) / machine.bandwidth
    speed = sequences / step
    return Serving(sequences, int(room // token), speed, machine.price / 3600 / speed * MILLION)
