"""Training steps of the study's models: speed against transformers' own GPT-2, and whether one fits here.

    python tests/benchmarks/pretrain.py speed --size 300m --tokens 256
    python tests/benchmarks/pretrain.py step --size 1.2b --variant q-k=v --tokens 64

``speed`` gives ``GPT2LMHeadModel`` the weights of our qkv, compares logits, and times training steps of both in turn.
``step`` takes one AdamW step, batch 1, and tells the process's peak memory.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvfold.finetune.distillation import teach
from kvfold.finetune.loss import LossWeights
from kvfold.finetune.sizes import model_config, new_model, size_named
from kvfold.model import variant_named


def ours(arguments: argparse.Namespace) -> Any:
    size = size_named(arguments.size)
    torch.manual_seed(0)
    return new_model(model_config(size, variant_named(arguments.variant), arguments.kv_heads or size.heads))


def theirs(model: Any) -> Any:
    """transformers' GPT-2 of the same configuration with the same weights."""
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function")
    names += ("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon")
    plain = GPT2LMHeadModel(GPT2Config(**{name: getattr(model.config, name) for name in names}))
    state = {name: tensor for name, tensor in model.state_dict().items() if ".attn." not in name}
    for index, block in enumerate(model.transformer.h):
        prefix, parts = f"transformer.h.{index}.attn.", (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj)
        state[prefix + "c_attn.weight"] = torch.cat([part.weight for part in parts]).T
        state[prefix + "c_attn.bias"] = torch.cat([part.bias for part in parts])
        state[prefix + "c_proj.weight"] = block.attn.o_proj.weight.T
        state[prefix + "c_proj.bias"] = block.attn.o_proj.bias
    plain.load_state_dict(state)
    return plain


def step_of(model: Any, batch: dict[str, torch.Tensor], rate: float = 1e-4) -> Callable[[], float]:
    """A training step; ``model(**batch)`` gives its loss. Returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step() -> float:
        loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def speed(arguments: argparse.Namespace) -> None:
    model = ours(arguments)
    plain = theirs(model)
    ids = torch.randint(model.config.vocab_size, (arguments.batch, arguments.tokens))
    with torch.no_grad():
        difference = (model.eval()(ids).logits - plain.eval()(ids).logits).abs().max().item()
    print(f"largest difference of logits: {difference:.2e}")
    teach(model.train(), None, LossWeights(distill=0.0, lm=1.0))
    positions = torch.arange(arguments.tokens).expand_as(ids)
    steps = {
        "ours": step_of(model, {"input_ids": ids, "position_ids": positions, "labels": ids}),
        "GPT2LMHeadModel": step_of(plain.train(), {"input_ids": ids, "labels": ids}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {ids.numel() / median:.1f} tokens/s")
    print(f"ratio: {medians['GPT2LMHeadModel'] / medians['ours']:.3f}")


def one_step(arguments: argparse.Namespace) -> None:
    model = ours(arguments).train()
    teach(model, None, LossWeights(distill=0.0, lm=1.0))
    ids = torch.randint(model.config.vocab_size, (arguments.batch, arguments.tokens))
    positions = torch.arange(arguments.tokens).expand_as(ids)
    step = step_of(model, {"input_ids": ids, "position_ids": positions, "labels": ids})
    began = time.perf_counter()
    losses = [step() for _ in range(arguments.rounds)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{arguments.size} {arguments.variant}: losses {', '.join(f'{loss:.3f}' for loss in losses)}, "
        f"{(time.perf_counter() - began) / arguments.rounds:.1f} s a step, peak memory {peak:.1f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "step"])
    parser.add_argument("--size", default="300m")
    parser.add_argument("--variant", default="qkv")
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    {"speed": speed, "step": one_step}[arguments.what](arguments)


if __name__ == "__main__":
    main()
