"""Text out of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..model import KvfoldError
from .perplexity import cached_bytes


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt, and what its cache held at the end (all layers, in bytes)."""

    prompt: str
    text: str
    new_tokens: int
    cache_bytes: int
    cached_tokens: int


@torch.inference_mode()
def continue_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    chat: bool = False,
    seed: int = 0,
    streamer: Any = None,
) -> Continuation:
    """Continue ``prompt``; greedily at temperature 0, else sampling.

    Args:
        model, tokenizer: of one checkpoint. prompt: text, or with ``chat`` a user's message for the chat template.
        max_new_tokens: the most to write. temperature: 0 or more. seed: of the sampling.
        streamer: a transformers streamer that is given the tokens as they come.

    Raises:
        KvfoldError: for an empty prompt, a missing tokenizer or chat template, or numbers out of range.
    """
    if tokenizer is None:
        raise KvfoldError("the model has no tokenizer")
    if max_new_tokens < 1 or not 0 <= temperature < math.inf:
        raise KvfoldError("max-new-tokens must be 1 or more, temperature 0 or more")
    inputs = _encode(tokenizer, prompt, chat)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise KvfoldError("the prompt is empty")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and length + max_new_tokens > limit:
        raise KvfoldError(f"prompt and new tokens ({length} + {max_new_tokens}) exceed the model's {limit} positions")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        output = model.generate(
            **inputs.to(model.device),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            streamer=streamer,
            **sampling,
        )
    new = output.sequences[0, length:]
    cache = output.cache
    return Continuation(
        prompt=prompt,
        text=tokenizer.decode(new, skip_special_tokens=True),
        new_tokens=len(new),
        cache_bytes=cached_bytes(cache),
        cached_tokens=int(cache.get_seq_length()),
    )


def _encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        inputs = tokenizer(prompt, return_tensors="pt")
        inputs.pop("token_type_ids", None)  # some tokenizers add them, and decoders know nothing of them
        return inputs
    if not tokenizer.chat_template:
        raise KvfoldError("the model has no chat template: leave --chat away")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
