"""Peak memory and time of converting a large checkpoint, against plainly copying its folder on the same disk.

Makes a checkpoint with the shapes of Llama-2-7B (bfloat16, random weights, 13.5 GB) in WORK, converts it in a process
of its own for each method, and deletes everything again.

    python tests/benchmarks/size.py WORK
    python tests/benchmarks/size.py WORK --layers 4 --methods calibrated
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvfold.checkpoint.weight_shards import Tensor, write_shards

WORDS = 1000  # in the text to calibrate on


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Weights like those of a new model: norms 1, matrices that keep the size of what they are given."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).bfloat16()


def make_source(folder: Path, layers: int) -> None:
    """Write the checkpoint, a tensor at a time."""
    folder.mkdir(parents=True)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32, vocab_size=32000,
        max_position_embeddings=4096, tie_word_embeddings=False, dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    tensors = [
        Tensor(name, shape, torch.bfloat16, partial(random_tensor, name, shape)) for name, shape in shapes.items()
    ]
    write_shards(folder, tensors, 5 * 10**9)
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def measure(command: list[str], log: Path) -> tuple[float, float, int]:
    """Seconds and processor seconds of a command, and the peak of its resident memory in bytes."""
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()}")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder to work in; needs three times the checkpoint's size")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=["mean", "svd", "calibrated"])
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=4096, help="to calibrate on")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    source, out, text = (arguments.work / name for name in ("source", "out", "text.txt"))
    make_source(source, arguments.layers)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (2 * arguments.tokens,), generator=generator).tolist()
    text.write_text(" ".join(f"w{word}" for word in words))
    size = sum(file.stat().st_size for file in source.iterdir())
    rows = []
    try:
        for method in arguments.methods:
            copied, _, _ = measure(["cp", "-r", str(source), str(out)], arguments.work / "log")
            shutil.rmtree(out)
            options = ["--method", method] + ([] if method == "mean" else ["--cache-fraction", str(arguments.fraction)])
            options += ["--calibrate", str(text), "--calibrate-tokens", str(arguments.tokens)]
            seconds, busy, peak = measure(
                [sys.executable, "-m", "kvfold.cli", "convert", str(source), str(out), *options], arguments.work / "log"
            )
            shutil.rmtree(out)
            row = {"method": method, "layers": arguments.layers, "bytes": size, "seconds": seconds, "busy": busy,
                   "copy_seconds": copied, "peak_bytes": peak}  # fmt: skip
            rows.append(row)
            print(
                f"{method}: {size / 1e9:.1f} GB, {arguments.layers} layers; peak {peak / 1e9:.2f} GB; {seconds:.0f} s "
                f"({busy / seconds:.2f} processors), {seconds / copied:.1f} x a copy's {copied:.0f} s",
                flush=True,
            )
    finally:
        for path in (source, out):
            shutil.rmtree(path, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
