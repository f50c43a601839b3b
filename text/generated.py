"""Text that a model writes itself, kept on disk, so that no data is needed and a second run needs no second writing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..checkpoint.progress import Track, silent
from ..checkpoint.sample_model import cache_folder
from ..model import KvfoldError
from ..model.errors import one_line

DOCUMENT, DOCUMENTS = 512, 16  # tokens of a document, and how many are written at a time
CHATS = 32  # written at a time
MESSAGE, REPLY = 96, 384  # tokens at most
MARK = "user message here"

Documents = list[list[int]]


@torch.inference_mode()
def write_text(
    model: Any, tokenizer: Any, seed: int, length: int = DOCUMENT, documents: int = DOCUMENTS
) -> torch.Tensor:  # fmt: skip
    """What the model writes after the token that texts begin with: token ids ``[documents, length]``, temperature 1."""
    start = getattr(tokenizer, "bos_token_id", None)
    start = start if start is not None else getattr(tokenizer, "eos_token_id", None)
    first = torch.full((documents, 1), start if start is not None else 0)
    more = min(length, _positions(model)) - 1
    return _sample(model, first, torch.ones_like(first), more, seed, at_least=more)


@torch.inference_mode()
def write_chats(
    model: Any, tokenizer: Any, seed: int, message: int = MESSAGE, reply: int = REPLY, chats: int = CHATS
) -> Documents:
    """Chats in which the model plays both sides: token ids of each, a user's message and a reply, temperature 1.

    An instruct model that is given its template up to where the user's message begins writes that message itself
    (Xu et al. 2024, "Magpie"). That way its own kinds of question are met without data.

    Args:
        message, reply: tokens at most. chats: how many.

    Raises:
        KvfoldError: for a model without a chat template, or one whose template cannot be used so.
    """
    before = _chat(tokenizer, MARK, whole=True).split(MARK)[0]
    opened = torch.tensor(_ids(tokenizer, before)).expand(chats, -1)
    positions = _positions(model)
    message = min(message, (positions - opened.shape[1]) // 4)
    if message < 1:
        raise KvfoldError(f"text 'chat': no chat fits into the model's {positions} positions")
    written = _sample(model, opened, torch.ones_like(opened), message, 2 * seed)[:, opened.shape[1] :]
    messages = [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
    asked = [
        ids for ids in (_ids(tokenizer, _chat(tokenizer, text)) for text in messages if text) if len(ids) < positions
    ]
    if not asked:
        raise KvfoldError("text 'chat': the model writes no messages that could be answered: use other text")
    longest = max(map(len, asked))
    reply = min(reply, positions - longest)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in asked])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in asked])
    replies = _sample(model, padded, mask, reply, 2 * seed + 1)[:, longest:].tolist()
    return [ids + _ended(answer, _ends(model)) for ids, answer in zip(asked, replies, strict=True)]


# What can be written, each by a function of model, tokenizer and seed.
WRITTEN: dict[str, Callable[[Any, Any, int], Documents]] = {
    "self": lambda model, tokenizer, seed: write_text(model, tokenizer, seed).tolist(),
    "chat": write_chats,
}


@dataclass(frozen=True)
class Writer:
    """A model that writes text.

    Attributes:
        load: gives the model; called only where text is not on disk yet. tokenizer: the model's. seed: of the sampling.
        identity: tells the model from all others; None: what it writes is not kept.
    """

    load: Callable[[], Any]
    tokenizer: Any
    seed: int = 0
    identity: str | None = None
    track: Track = silent

    def documents(self, kind: str, tokens: int) -> Documents:
        """At least ``tokens`` tokens of text ``self`` or ``chat``, in documents of token ids. Raises KvfoldError."""
        if kind == "chat":
            _require_template(self.tokenizer)
        documents: Documents = []
        found = number = 0
        model = None
        with self.track(f"writing text ({kind})", tokens) as advance:
            while found < tokens:
                piece = self._kept(kind, number)
                if piece is None:
                    model = model or self.load()
                    piece = WRITTEN[kind](model, self.tokenizer, self.seed * 1_000_003 + number)
                    self._keep(kind, number, piece)
                documents += piece
                size = sum(map(len, piece))
                advance(min(size, tokens - found))
                found, number = found + size, number + 1
        return documents

    def _file(self, kind: str, number: int) -> Path:
        return cache_folder() / "written" / f"{self.identity}-{kind}-{self.seed}" / f"{number:06d}.safetensors"

    def _kept(self, kind: str, number: int) -> Documents | None:
        if self.identity is None or not (file := self._file(kind, number)).is_file():
            return None
        held = load_file(file)
        return [ids.tolist() for ids in held["ids"].split(held["lengths"].tolist())]

    def _keep(self, kind: str, number: int, documents: Documents) -> None:
        if self.identity is None:
            return
        file = self._file(kind, number)
        begun = file.with_suffix(f".begun-{os.getpid()}")
        flat = torch.tensor([each for ids in documents for each in ids], dtype=torch.int32)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({"ids": flat, "lengths": torch.tensor([len(ids) for ids in documents])}, begun)
            begun.rename(file)
        except (OSError, SafetensorError):  # what cannot be kept is written again where it is wanted again
            begun.unlink(missing_ok=True)


def _sample(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int, seed: int, at_least: int = 0
) -> torch.Tensor:  # fmt: skip
    """Prompts ``[batch, n]`` and up to ``tokens`` more of each, sampled from the model's own distribution."""
    # transformers samples from torch's global generator; fork it, so that the caller's stays as it was.
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            written = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, max_new_tokens=tokens, min_new_tokens=at_least or None,
            )  # fmt: skip
        except RuntimeError as error:  # probabilities that are no numbers, above all
            raise KvfoldError(f"the model cannot write text: {one_line(error)}; give it other text") from error
    return written.cpu()


def _positions(model: Any) -> int:
    """How many tokens the model can read in one go."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 20


def can_chat(tokenizer: Any) -> bool:
    """Whether there is a chat template that takes a user's message alone."""
    try:
        _chat(tokenizer, MARK, whole=True)
    except KvfoldError:
        return False
    return True


def usual_texts(tokenizer: Any) -> tuple[str, ...]:
    """The TEXTs that stand in where none is named, for a model that can be asked to write.

    ``docs``, Python's manual, and, as that alone is too narrow, what the model writes itself: ``chat`` where it has a
    chat template, else ``self``.
    """
    return ("docs", "chat" if can_chat(tokenizer) else "self")


def _require_template(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise KvfoldError("text 'chat': the model has no chat template; use text 'self'")


def _chat(tokenizer: Any, message: str, whole: bool = False) -> str:
    """A user's message in the chat template; with the place for a reply opened unless ``whole``."""
    _require_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=not whole
        )
    except TemplateError as error:
        raise KvfoldError(f"text 'chat': the chat template fails: {one_line(error)}") from error
    if whole and MARK not in text:
        raise KvfoldError("text 'chat': the chat template leaves the user's message out")
    return text


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _ends(model: Any) -> set[int]:
    """The tokens that end a reply."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])


def _ended(ids: list[int], ends: set[int]) -> list[int]:
    """A reply up to its end, without the padding after it."""
    return next((ids[: place + 1] for place, each in enumerate(ids) if each in ends), ids)
