"""Several TEXTs together, each with its share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..model import KvfoldError
from .generated import Writer
from .sources import CALIBRATE, TextSource


@dataclass(frozen=True)
class WeightedText:
    """A TEXT and the share of the tokens that it gives, relative to the others."""

    source: TextSource
    weight: float = 1.0

    @classmethod
    def parse(cls, spec: str) -> WeightedText:
        """Read ``TEXT`` or ``TEXT:WEIGHT``. Raises KvfoldError for either that is not understood."""
        text, colon, weight = spec.rpartition(":")
        if colon and re.fullmatch(r"\d+(\.\d*)?|\.\d+", weight):
            if float(weight) <= 0:
                raise KvfoldError(f"text {spec!r} has weight {weight}: give a number above 0")
            return cls(TextSource(text, CALIBRATE), float(weight))
        return cls(TextSource(spec, CALIBRATE))


def named_texts(specs: Sequence[str]) -> list[WeightedText]:
    """``TEXT`` or ``TEXT:WEIGHT`` each. Raises KvfoldError for none, or one that is not understood."""
    if not specs:
        raise KvfoldError("no text is given")
    return [WeightedText.parse(each) for each in specs]


def shares(texts: Sequence[WeightedText]) -> list[float]:
    """What part of the tokens each text gives; they sum to 1."""
    whole = sum(text.weight for text in texts)
    return [text.weight / whole for text in texts]


def mixed_tokens(
    texts: Sequence[WeightedText], tokenizer: Any, count: int, window: int, writer: Writer | None = None
) -> torch.Tensor:
    """Token ids ``[n]`` (int64), n ≤ ``count``, of several texts, every window of which has its share of each text.

    Args:
        texts: with their weights. tokenizer: the model's. count: tokens wanted; so many where the texts have them.
        window: tokens. writer: of text ``self`` and ``chat``.

    Raises:
        KvfoldError: for a text that cannot be read, or has not even one window's share.
    """
    if len(texts) == 1:
        return texts[0].source.tokens(tokenizer, count, writer)
    ends = [0, *(round(window * bound) for bound in accumulate(shares(texts)))]
    blocks = []
    for text, begin, end in zip(texts, ends, ends[1:], strict=False):
        share = end - begin
        if not share:
            raise KvfoldError(f"text {text.source.spec!r} has too small a weight: no token of a window is its")
        tokens = text.source.tokens(tokenizer, count // window * share, writer)
        if len(tokens) < share:
            raise KvfoldError(f"text {text.source.spec!r} is too short: {len(tokens)} tokens, use {share} or more")
        blocks.append(tokens[: len(tokens) // share * share].view(-1, share))
    rows = min(map(len, blocks))
    return torch.cat([block[:rows] for block in blocks], 1).flatten()
