"""Perplexity ratio and conversion time of every method and cache fraction, as a table for the README.

    python tests/benchmarks/quality.py demo/source --calibrate docs --evaluate docs
    python tests/benchmarks/quality.py demo/source --only narrow plan --json figures.json

Conversions go to a temporary folder, one at a time. --long measures the perplexity in 2,048-token windows, too;
--rounded that with the latents rounded to bfloat16, as a cache of that dtype has them, and that of the models, source
and folded, in bfloat16 altogether; --also that on other texts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from kvfold.analysis.moments import windows
from kvfold.analysis.perplexity import evaluate_checkpoint
from kvfold.checkpoint.loading import load
from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions
from kvfold.model import FoldedAttention
from kvfold.text.sources import TextSource

REFINE = 8.0  # minutes
CACHE, MODEL = "bf16 cache", "bf16"  # what is rounded

RUNS: dict[str, list[dict[str, Any]]] = {
    "baselines": [
        {"method": "mean"},
        {"method": "procrustes"},
        {"method": "svd", "span": "head"},
        {"method": "svd"},
        {"method": "svd", "cache_fraction": 0.75},
    ],
    "half": [
        {"cache_fraction": 0.75},
        {"cache_fraction": 0.625},
        {"cache_fraction": 0.5},
        {"cache_fraction": 0.5, "span": "head"},
    ],
    "narrow": [{"cache_fraction": 0.333}, {"cache_fraction": 0.25}, {"cache_fraction": 0.167}],
    "shared": [{"key_heads": 1, "span": "head"}, {"key_heads": 1, "span": "head", "grouping": "mean"}],
    "refined": [
        {"cache_fraction": 0.5, "refine": REFINE},
        {"cache_fraction": 0.5, "span": "head", "refine": REFINE},
        {"cache_fraction": 0.333, "refine": REFINE},
        {"cache_fraction": 0.25, "refine": REFINE},
        {"cache_fraction": 0.167, "refine": REFINE},
        {"key_heads": 1, "span": "head", "refine": REFINE},
    ],
    "plan": [
        {"cache_fraction": 0.6},
        {"cache_fraction": 0.6, "auto_plan": True},
        {"cache_fraction": 0.5, "auto_plan": True},
        {"cache_fraction": 0.25, "auto_plan": True, "refine": REFINE},
    ],
}


def perplexity(path: str, text: str, window: int, count: int, rounded: str) -> float:
    """That of one model on one text, with nothing, its latents or all of it rounded."""
    checkpoint = load(path, "bfloat16" if rounded == MODEL else "auto")
    if rounded == CACHE:
        for module in checkpoint.model.modules():
            if isinstance(module, FoldedAttention):
                module.latent_proj.register_forward_hook(
                    lambda _module, _inputs, latent: latent.bfloat16().to(latent.dtype)
                )
    rows = windows(TextSource(text).tokens(checkpoint.tokenizer, window * count), window)
    return evaluate_checkpoint(checkpoint, rows).perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--calibrate", nargs="+", default=["docs"])
    parser.add_argument("--calibrate-tokens", type=int, default=12288)
    parser.add_argument("--evaluate", default="docs")
    parser.add_argument("--also", nargs="*", default=[])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--rounded", action="store_true")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size = (arguments.window, arguments.windows)
    measures = [(text, *size, "") for text in (arguments.evaluate, *arguments.also)]
    if arguments.rounded:
        measures += [(arguments.evaluate, *size, rounded) for rounded in (CACHE, MODEL)]
    if arguments.long:
        measures.append((arguments.evaluate, 2048, 6, ""))
    source = [perplexity(arguments.source, *measure) for measure in measures]
    names = [", ".join(filter(None, (Path(text).stem, str(window), rounded))) for text, window, _, rounded in measures]
    print("source: perplexity " + ", ".join(f"{value:.3f} ({name})" for name, value in zip(names, source, strict=True)))
    print(f"\n| conversion | cache fraction | {' | '.join(names)} | seconds |")
    print("| --- " * (3 + len(names)) + "|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for run in (each for only in arguments.only for each in RUNS[only]):
            options = ConvertOptions(
                calibrate=tuple(arguments.calibrate), calibrate_tokens=arguments.calibrate_tokens, overwrite=True, **run
            )
            recipe = convert(arguments.source, f"{folder}/folded", options).recipe
            found = [perplexity(f"{folder}/folded", *measure) for measure in measures]
            ratios = [value / before for value, before in zip(found, source, strict=True)]
            told = " ".join(f"{name}={value}" for name, value in run.items() if name != "cache_fraction") or "(default)"
            shown = " | ".join(f"{value:,.3f}" for value in ratios)
            print(f"| {told} | {recipe.cache_fraction:.3f} | {shown} | {recipe.seconds:.0f} |", flush=True)
            rows.append({"options": run, "cache_fraction": recipe.cache_fraction, "ratios": ratios,
                         "seconds": recipe.seconds, "refinement": recipe.refinement})  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps({"measures": measures, "source": source, "folded": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
