"""``kvfold generate``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from .options import AllowPickle, Device, Dtype, Json, Model, Revision, Seed, Token
from .output import check_json, console, write_json


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue, or with --chat a message to answer.")],
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to write.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: greedy; above: sample.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Continue a prompt, folded model or not, and tell what the cache held at the end.

    Example: kvfold generate folded/ --prompt "The capital of France is"
    """
    from transformers import TextStreamer

    from ..analysis.generation import continue_text
    from ..checkpoint.loading import Access, load

    check_json(json, model)
    checkpoint = load(model, dtype, device, Access(revision, token, allow_pickle))
    streamer = None
    if checkpoint.tokenizer is not None:
        streamer = TextStreamer(checkpoint.tokenizer, skip_prompt=chat, skip_special_tokens=True)
    result = continue_text(
        checkpoint.model, checkpoint.tokenizer, prompt, max_new_tokens, temperature, chat, seed, streamer
    )
    console.print(
        f"[{result.new_tokens} tokens; cache {result.cache_bytes:,} bytes for {result.cached_tokens} tokens]",
        markup=False,
        highlight=False,
    )
    write_json(json, asdict(result))
