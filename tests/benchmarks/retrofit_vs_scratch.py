"""Convert and uptrain, or train that way from the start? The central comparison, at small scale.

    python tests/benchmarks/retrofit_vs_scratch.py WORK --text docs --tokens 1M --seeds 2

For each seed: qkv and Q-K=V are trained from scratch with all of the tokens, on the same data in the same order; qkv is
converted to Q-K=V (calibrated on the same text) and uptrained with 5 % and with 10 % of the tokens. All are measured on
the shards' validation part. What is in WORK already is not done again; it may be the folder of a kvfold study.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvfold.analysis.comparison import compare, write_comparison
from kvfold.analysis.perplexity import negative_log_likelihood
from kvfold.analysis.serving import Machine
from kvfold.checkpoint.loading import load
from kvfold.checkpoint.option_checks import token_count
from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions
from kvfold.finetune.pretrain import VALIDATION, PretrainOptions, pretrain
from kvfold.finetune.sizes import size_named
from kvfold.finetune.uptrain import uptrain
from kvfold.finetune.uptrain_options import UptrainOptions
from kvfold.text.prepare import PrepareOptions, prepare
from kvfold.text.token_shards import Index, Sequences

SHARES = (0.05, 0.1)


def perplexity(path: Path, shards: Path, sequence: int) -> float:
    """That of all of the validation part."""
    index, model = Index.read(shards), load(str(path)).model
    held_out = Sequences(shards, index.validation, sequence, index.tokenizer)
    total = scored = 0.0
    for number in range(len(held_out)):
        loss, tokens = negative_log_likelihood(model, torch.from_numpy(held_out[number]["input_ids"])[None])
        total, scored = total + loss, scored + tokens
    return math.exp(total / scored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", default="docs")
    parser.add_argument("--size", default="3m")
    parser.add_argument("--tokens", type=token_count)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--train", default="full")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    work, size = arguments.work, size_named(arguments.size)
    tokens = arguments.tokens or size.tokens
    work.mkdir(parents=True, exist_ok=True)
    shards = work / "shards"
    if not shards.is_dir():
        prepare(arguments.text, str(shards), PrepareOptions(size.tokenizer, validation=VALIDATION, resume=True))
    rows: dict[str, list[float]] = {}
    paths: list[str] = []
    for seed in range(arguments.seeds):
        options = PretrainOptions(size, text=str(shards), tokens=tokens, seed=seed, resume=True)
        qkv, scratch, folded = (work / f"{name}-{seed}" for name in ("qkv", "q-k=v", "folded"))
        for path, variant in ((qkv, "qkv"), (scratch, "q-k=v")):
            if not path.is_dir():
                pretrain(str(path), replace(options, variant=variant))
        made: list[tuple[str, Path]] = [("qkv, from scratch", qkv), ("q-k=v, from scratch", scratch)]
        if not folded.is_dir():
            calibration: dict[str, Any] = {"calibrate": (arguments.text,), "calibrate_window": size.sequence}
            convert(str(qkv), str(folded), ConvertOptions(span="head", **calibration))
        made.append(("converted", folded))
        for share in SHARES:
            out = work / f"uptrained-{share:g}-{seed}"
            if not out.is_dir():
                told = UptrainOptions(
                    texts=(arguments.text,), tokens=int(share * tokens), sequence=size.sequence, batch=4,
                    train=arguments.train, loss="mixed", seed=seed, resume=True,
                )  # fmt: skip
                uptrain(str(folded), str(out), told)
            made.append((f"converted, {100 * share:g} % of the tokens", out))
        for name, path in made:
            rows.setdefault(name, []).append(perplexity(path, shards, size.sequence))
            paths += [str(path)] if seed == 0 else []
    print("| model | " + " | ".join(f"seed {seed}" for seed in range(arguments.seeds)) + " | against qkv |")
    print("| --- " * (arguments.seeds + 2) + "|")
    base = rows["qkv, from scratch"]
    for name, found in rows.items():
        lost = sum(100 * (value / of - 1) for value, of in zip(found, base, strict=True)) / len(found)
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in found) + f" | {lost:+.1f} % |")
    machine = Machine()
    found = compare(paths, arguments.text, size.sequence, 24, 32768, machine)
    write_comparison(work / "comparison.html", found, arguments.text, size.sequence, 24, 32768, machine)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
