"""How folded instruct models chat: against the source on chats that it writes itself, and on their own.

    python tests/benchmarks/chats.py demo/source folded/ uptrained/ --text wikitext2-tail.txt

KL divergence from the source on its chats and on TEXT, and how often the most probable token is the source's; then
greedy replies to a dozen messages: how much of them repeats itself (share of the 4-grams that were there before).
The chats come from another seed than those that kvfold convert --calibrate chat is given by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch

from kvfold.analysis.generation import continue_text
from kvfold.analysis.moments import windows
from kvfold.checkpoint.loading import load
from kvfold.cli.output import console, table
from kvfold.text.generated import Writer
from kvfold.text.sources import TextSource

SEED = 77
WINDOW = 512
MESSAGES = [
    "Give me three tips for sleeping better.",
    "What is photosynthesis?",
    "Write a Python function that adds two numbers.",
    "Write a short story about a dog who finds a key.",
    "List five countries in Africa.",
    "How do I boil an egg?",
    "Explain why the sky is blue.",
    "Give me a recipe for pancakes.",
    "Translate to French: The cat sleeps on the sofa.",
    "What is the capital of France?",
    "Summarize the plot of Romeo and Juliet.",
    "Why do leaves change color in autumn?",
]


@torch.inference_mode()
def fidelity(source: Any, folded: Any, rows: Iterable[torch.Tensor]) -> tuple[float, float]:
    """KL(source ‖ folded) in nats a token, and the share of tokens where both find the same one most probable."""
    divergence, same, tokens = 0.0, 0, 0
    for row in rows:
        log, found = (model(row[None]).logits[0].float().log_softmax(-1) for model in (source, folded))
        divergence += float(torch.nn.functional.kl_div(found, log, reduction="sum", log_target=True))
        same += int((log.argmax(-1) == found.argmax(-1)).sum())
        tokens += len(row)
    return divergence / tokens, same / tokens


def repeated(ids: list[int], size: int = 4) -> float:
    """Share of the ``size``-grams that are there for at least the second time."""
    grams = list(zip(*(ids[start:] for start in range(size)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("folded", nargs="*")
    parser.add_argument("--text", default="docs")
    parser.add_argument("--tokens", type=int, default=6144, help="of chats, and of TEXT")
    parser.add_argument("--new", type=int, default=80, help="tokens of a reply")
    parser.add_argument("--show", type=int, default=0, help="replies to print")
    arguments = parser.parse_args()
    source = load(arguments.source)
    writer = Writer(lambda: source.model, source.tokenizer, SEED, None)
    chats = [torch.tensor(ids) for ids in writer.documents("chat", arguments.tokens)]
    prose = windows(TextSource(arguments.text).tokens(source.tokenizer, arguments.tokens), WINDOW)
    rows = []
    for path in (arguments.source, *arguments.folded):
        folded = load(path)
        on_chats, on_prose = fidelity(source.model, folded.model, chats), fidelity(source.model, folded.model, prose)
        shares = []
        for number, message in enumerate(MESSAGES):
            said = continue_text(folded.model, folded.tokenizer, message, arguments.new, chat=True).text
            shares.append(repeated(source.tokenizer(said).input_ids))
            if number < arguments.show:
                console.print(f"{path}: {message} → {' '.join(said.split())}", markup=False, highlight=False)
        figures = [
            f"{value:.4f}" if place % 2 == 0 else f"{value:.1%}" for place, value in enumerate(on_chats + on_prose)
        ]
        rows.append([path, *figures, f"{sum(shares) / len(shares):.1%}"])
    table("", ["model", "KL, chats", "same token", "KL, text", "same token", "repeated"], rows)


if __name__ == "__main__":
    main()
