"""A small Llama with full multi-head attention, trained here for some minutes, then folded.

    python tests/benchmarks/full_heads.py mine.txt WORK --minutes 6

With as many KV heads as the width has room for (kv_heads · d = width) values are a linear map of the keys, and half of
the cache should cost nothing (V = K W_k⁻¹ W_v). The first four fifths of the text are trained and calibrated on, the
last fifth is what perplexities are of.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from kvfold.analysis.perplexity import evaluate
from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions
from kvfold.text.mixture import WeightedText
from kvfold.text.packing import Packing, collate, packed_texts

WIDTH, HEADS, LAYERS, VOCABULARY, SEQUENCE, BATCH = 256, 8, 4, 4096, 256, 16

RUNS: list[dict[str, Any]] = [
    {"cache_fraction": 0.5},
    {"cache_fraction": 0.5, "span": "head"},
    {"cache_fraction": 0.25},
    {"cache_fraction": 0.25, "refine": 3.0},
    {"cache_fraction": 0.25, "key_heads": 4, "span": "head"},
    {"cache_fraction": 0.25, "key_heads": 4, "span": "head", "cluster": True},
    {"cache_fraction": 0.125},
]


class Minutes(TrainerCallback):
    """Ends training when the time is up."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end = time.monotonic() + self.seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = time.monotonic() > self.end


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def train(text: Path, tokenizer: Any, minutes: float, work: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    steps = round(minutes * 60 / 1.3)  # about what two cores do; the clock ends it, if they do not
    data = packed_texts([WeightedText.parse(str(text))], None, tokenizer, Packing(SEQUENCE, steps * BATCH), None)
    arguments = TrainingArguments(
        output_dir=str(work / "training"), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=2e-3,
        lr_scheduler_type="cosine", warmup_steps=steps // 20, weight_decay=0.1, adam_beta2=0.95, report_to=[],
        save_strategy="no", remove_unused_columns=False, use_cpu=not torch.cuda.is_available(), logging_steps=25,
    )  # fmt: skip
    Trainer(
        model=model, args=arguments, train_dataset=data.train, data_collator=collate, callbacks=[Minutes(minutes)]
    ).train()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    arguments = parser.parse_args()
    source, work = arguments.work / "source", arguments.work
    work.mkdir(parents=True, exist_ok=True)
    whole = arguments.text.read_text(encoding="utf-8")
    cut = whole.rindex("\n", 0, len(whole) * 4 // 5)
    known, unseen = work / "known.txt", work / "unseen.txt"
    known.write_text(whole[:cut], encoding="utf-8")
    unseen.write_text(whole[cut:], encoding="utf-8")
    if not source.is_dir():
        tokenizer = make_tokenizer(whole[:cut])
        train(known, tokenizer, arguments.minutes, work).save_pretrained(source)
        tokenizer.save_pretrained(source)

    def perplexities(path: Path) -> list[float]:
        return [evaluate([str(path)], str(unseen), SEQUENCE, 24, dtype)[0].perplexity for dtype in ("auto", "bfloat16")]

    before = perplexities(source)
    print(f"source: perplexity {before[0]:.3f}, in bfloat16 {before[1]:.3f}")
    print("\n| conversion | cache fraction | ratio | ratio in bfloat16 |\n| --- | --- | --- | --- |")
    for run in RUNS:
        options = ConvertOptions(calibrate=(str(known),), calibrate_tokens=12288, overwrite=True, **run)
        recipe = convert(str(source), str(work / "folded"), options).recipe
        after = perplexities(work / "folded")
        told = " ".join(f"{name}={value}" for name, value in run.items() if name != "cache_fraction") or "(default)"
        ratios = " | ".join(f"{found / original:.4f}" for found, original in zip(after, before, strict=True))
        print(f"| {told} | {recipe.cache_fraction:.3f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
