"""Perplexity ratio and conversion time of every method and cache fraction, as a table for the README.

    python tests/benchmarks/quality.py demo/source --calibrate docs --evaluate docs

Conversions go to a temporary folder, one at a time. With --dtype bfloat16 the models and their caches are rounded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from kvfold.analysis.perplexity import evaluate
from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions

RUNS = (
    ("mean", "head", 0.5),
    ("procrustes", "head", 0.5),
    ("svd", "head", 0.5),
    ("svd", "all", 0.5),
    ("svd", "all", 0.75),
    ("calibrated", "head", 0.5),
    ("calibrated", "all", 0.5),
    ("calibrated", "all", 0.625),
    ("calibrated", "all", 0.75),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--calibrate", default="docs")
    parser.add_argument("--calibrate-tokens", type=int, default=12288)
    parser.add_argument("--evaluate", default="docs")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    (source,) = evaluate([arguments.source], arguments.evaluate, arguments.window, arguments.windows, arguments.dtype)
    print(f"source: perplexity {source.perplexity:.3f}\n")
    print("| method | span | cache fraction | perplexity ratio | conversion, seconds |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method, span, fraction in RUNS:
            options = ConvertOptions(
                method=method,
                span=span,
                cache_fraction=fraction,
                calibrate=arguments.calibrate,
                calibrate_tokens=arguments.calibrate_tokens,
                overwrite=True,
            )
            recipe = convert(arguments.source, f"{folder}/folded", options).recipe
            (found,) = evaluate(
                [f"{folder}/folded"], arguments.evaluate, arguments.window, arguments.windows, arguments.dtype
            )
            ratio = found.perplexity / source.perplexity
            print(f"| `{method}` | {span} | {fraction} | {ratio:,.3f} | {recipe.seconds:.0f} |", flush=True)
            rows.append({"method": method, "span": span, "ratio": ratio, **found.to_dict(), "seconds": recipe.seconds})
    if arguments.json:
        arguments.json.write_text(json.dumps({"source": source.to_dict(), "folded": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
