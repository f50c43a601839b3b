"""Two processes train as one with twice the accumulation does: DDP, and FSDP with the teacher sharded, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvfold.finetune import ACCELERATE

COMMAND = ["-m", "kvfold.cli", "uptrain"]


def run(starter: list[str], folded: Path, out: Path, text: Path, *more: str) -> list[tuple[int, float]]:
    """Uptrain in processes of their own; returns step and loss of every entry of the log."""
    options = [
        "--sequence",
        "32",
        "--batch",
        "4",
        "--tokens",
        "1536",
        "--evaluate-every",
        "768",
        "--text",
        str(text),
        *more,
    ]
    environment = os.environ | {"HF_HOME": str(out.parent / "home"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *starter, *COMMAND, str(folded), str(out), *options],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    log = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry.get("loss", entry.get("eval_loss"))) for entry in log]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize(("way", "train"), [("ddp", "attention"), ("fsdp", "lora"), ("fsdp", "full")])
def test_two_processes_are_one(folded: Path, text_file: Path, tmp_path: Path, way: str, train: str) -> None:
    same = ("--train", train, "--learning-rate", "2e-3")
    one = run([], folded, tmp_path / "one", text_file, *same, "--accumulation", "2")
    two = run(TORCHRUN, folded, tmp_path / "two", text_file, *same, *(["--fsdp"] if way == "fsdp" else []))
    assert [step for step, _ in one] == [step for step, _ in two]
    assert max(abs(a - b) for (_, a), (_, b) in zip(one, two, strict=True)) < 1e-4
    weights = [load_file(tmp_path / out / "model.safetensors") for out in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-4)
    start = load_file(folded / "model.safetensors")
    assert any((weights[1][name] - start[name]).abs().max() > 1e-3 for name in start)


def test_accelerate_launch_with_our_config(folded: Path, text_file: Path, tmp_path: Path) -> None:
    starter = [
        "-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE / "fsdp2.yaml"), "--num_processes", "2",
        "--cpu", "--main_process_port", "0",
    ]  # fmt: skip
    losses = run(starter, folded, tmp_path / "out", text_file)
    assert losses[-1][1] < losses[0][1]
