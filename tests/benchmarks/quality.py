"""Perplexity ratio and conversion time of every method and cache fraction, as a table for the README.

    python tests/benchmarks/quality.py demo/source --calibrate docs --evaluate docs
    python tests/benchmarks/quality.py demo/source --only narrow plan --json figures.json

Conversions go to a temporary folder, one at a time. --long measures the perplexity in 2,048-token windows, too;
--rounded that of the models, source and folded, rounded to bfloat16 with their caches; --also that on other texts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from kvfold.analysis.perplexity import evaluate
from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions

REFINE = 8.0  # minutes

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--calibrate", default="docs")
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
    measures = [(text, *size, "auto") for text in (arguments.evaluate, *arguments.also)]
    if arguments.rounded:
        measures.append((arguments.evaluate, *size, "bfloat16"))
    if arguments.long:
        measures.append((arguments.evaluate, 2048, 6, "auto"))

    def perplexities(path: str) -> list[float]:
        return [evaluate([path], *measure)[0].perplexity for measure in measures]

    source = perplexities(arguments.source)
    names = [f"{Path(text).stem}, {window}" + ", bf16" * (dtype != "auto") for text, window, _, dtype in measures]
    print("source: perplexity " + ", ".join(f"{value:.3f} ({name})" for name, value in zip(names, source, strict=True)))
    print(f"\n| conversion | cache fraction | {' | '.join(names)} | seconds |")
    print("| --- " * (3 + len(names)) + "|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for run in (each for only in arguments.only for each in RUNS[only]):
            options = ConvertOptions(
                calibrate=arguments.calibrate, calibrate_tokens=arguments.calibrate_tokens, overwrite=True, **run
            )
            recipe = convert(arguments.source, f"{folder}/folded", options).recipe
            found = perplexities(f"{folder}/folded")
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
