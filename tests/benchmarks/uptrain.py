"""Speed and memory of uptraining against the obvious loop, on the same batches.

    python tests/benchmarks/uptrain.py demo/folded-0.5
    python tests/benchmarks/uptrain.py demo/folded-0.5 --train attention --compile

The obvious loop has the logits of both models whole: teacher forward, student forward, KL over the vocabulary,
backward. Steps of both are timed alternately in one process; peak memory is that of a process of its own for each.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvfold.checkpoint.record import Recipe
from kvfold.finetune.distillation import teach
from kvfold.finetune.loss import LossWeights
from kvfold.finetune.trainable import WAYS, LoraSettings, choose, share_frozen
from kvfold.finetune.uptrain_options import LEARNING_RATES
from kvfold.model import family_of


def models(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Teacher, student, and the student as it is trained."""
    recipe = Recipe.read(Path(arguments.model))
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(arguments.device)
        for path in (recipe.source["path"], arguments.model)
    )
    teacher.requires_grad_(False).eval()
    return teacher, student, choose(student, arguments.train, LoraSettings()).train()


def ours(arguments: argparse.Namespace) -> Callable[[torch.Tensor], float]:
    teacher, student, model = models(arguments)
    share_frozen(model, teacher)
    if arguments.compile:
        for each in (teacher, student):
            for layer in family_of(each.config).decoder_layers(each):
                layer.compile()
    teach(student, teacher, arguments.weights)
    positions = torch.arange(arguments.sequence, device=arguments.device).expand(arguments.batch, -1)
    return stepper(model, lambda ids: model(input_ids=ids, position_ids=positions, labels=ids)["loss"], arguments.train)


def obvious(arguments: argparse.Namespace) -> Callable[[torch.Tensor], float]:
    teacher, _, model = models(arguments)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            expected = teacher(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        found = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        divergence = torch.nn.functional.kl_div(found, expected, log_target=True, reduction="sum")
        return divergence / ids.numel()

    return stepper(model, loss, arguments.train)


def stepper(model: Any, loss_of: Callable[[torch.Tensor], torch.Tensor], way: str) -> Callable[[torch.Tensor], float]:
    trained = [each for each in model.parameters() if each.requires_grad]
    # Without a warm-up the full rate makes the first steps so wild that rounding alone drives the two losses apart.
    optimiser = torch.optim.AdamW(trained, lr=LEARNING_RATES[way] / 10, weight_decay=0.0, fused=True)

    def step(ids: torch.Tensor) -> float:
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--train", choices=WAYS, default="lora")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak", choices=["ours", "obvious"], help="only this one's memory, for the parent process")
    arguments = parser.parse_args()
    arguments.weights = LossWeights()
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.steps + 2, arguments.batch, arguments.sequence)
    batches = torch.randint(1000, 20000, shape, generator=generator).to(arguments.device)
    if arguments.peak:
        step = {"ours": ours, "obvious": obvious}[arguments.peak](arguments)
        for ids in batches[:3]:
            step(ids)
        cuda = torch.device(arguments.device).type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() / 1e9
            if cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        )
        print(json.dumps(peak))
        return
    peaks = {}
    for name in ("ours", "obvious"):
        command = [sys.executable, *sys.argv, "--peak", name]
        peaks[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    steps = {"ours": ours(arguments), "obvious": obvious(arguments)}
    seconds: dict[str, list[float]] = {"ours": [], "obvious": []}
    losses = {}
    for number, ids in enumerate(batches):
        for name, step in steps.items():
            began = time.perf_counter()
            losses[name] = step(ids)
            if number >= 2:  # compilation and first touches
                seconds[name].append(time.perf_counter() - began)
    tokens = arguments.batch * arguments.sequence
    for name in steps:
        pace = tokens / statistics.median(seconds[name])
        print(f"{name}: {pace:.1f} tokens/s, peak {peaks[name]:.2f} GB, last loss {losses[name]:.6f}")
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["obvious"], strict=True))
    print(f"speed {ratio:.3f} times the obvious loop's, memory {peaks['ours'] / peaks['obvious']:.3f} times")


if __name__ == "__main__":
    main()
