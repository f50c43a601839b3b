"""The whole job on a real model: fetch, analyse, fold, uptrain, evaluate, generate, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ..analysis.generation import Continuation, continue_text
from ..analysis.moments import collect_moments, windows
from ..analysis.perplexity import Evaluation, evaluate_checkpoint
from ..analysis.plots import figures
from ..analysis.redundancy import LayerRedundancy, analyze
from ..analysis.report import Section, Table, write_report
from ..analysis.tables import summary, write_csv
from ..checkpoint.atomic_output import whole_folder
from ..checkpoint.loading import load, quiet
from ..checkpoint.progress import Track, silent
from ..checkpoint.sample_model import fetch
from ..convert.conversion import convert
from ..convert.options import ConvertOptions
from ..finetune.training import Watch
from ..finetune.uptrain import NoGain, uptrain
from ..finetune.uptrain_options import UptrainOptions
from ..text.sources import CALIBRATE, EVALUATE, TextSource

FRACTIONS = (0.75, 0.5)
LEARNING_RATE = 5e-5  # half of what longer runs take: few steps have no time to come back from the noise of a high one
PROMPT = "The best way to learn a new programming language is"
CAPTIONS = {
    "cosine": "Entry by entry the weights are unrelated (0) or the same (1); the study reports 0.73 for its models.",
    "aligned_cosine": "The same when the values may first be turned onto the keys, which costs nothing.",
    "principal_cosine": "How far the rows of W_k and W_v span the same subspace of the input (1: the same subspace).",
    "cka": "How alike keys and values are on text, whatever rotation lies between them (1: alike).",
    "lost_energy": "Share of the query- and output-weighted energy that a latent loses, a line per layer.",
}


@dataclass(frozen=True)
class DemoOptions:
    """Sizes of the demo: tokens to calibrate on, windows to evaluate on, tokens to generate, tokens to uptrain on."""

    calibrate_tokens: int = 8192
    window: int = 512
    windows: int = 12
    new_tokens: int = 48
    uptrain_tokens: int = 12_800
    seed: int = 0


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured, the source first, and where it wrote its page."""

    evaluations: list[Evaluation]
    continuations: list[Continuation]
    report: Path


def run_demo(out: Path, options: DemoOptions, track: Track = silent, watch: Watch = lambda moment: None) -> DemoResult:
    """Run the demo into the folder ``out``, replacing what an earlier run left there.

    Raises KvfoldError where the model cannot be downloaded or ``out`` cannot be written.
    """
    how = UptrainOptions(
        texts=("docs",),
        tokens=options.uptrain_tokens,
        learning_rate=LEARNING_RATE,
        evaluate_every=-(-options.uptrain_tokens // 2),
        overwrite=True,
        seed=options.seed,
    )
    with track("fetching SmolLM2-135M-Instruct", 1) as advance:
        gguf = fetch()
        advance(1)
    source = out / "source"
    with quiet(), whole_folder(source) as partial:
        checkpoint = load(str(gguf))
        checkpoint.model.save_pretrained(partial)
        checkpoint.tokenizer.save_pretrained(partial)
    tokens = TextSource("docs", CALIBRATE).tokens(checkpoint.tokenizer, options.calibrate_tokens)
    moments = collect_moments(checkpoint.model, windows(tokens, options.window), track=track)
    layers = analyze(checkpoint.model, moments, track)
    write_csv(layers, out)
    del checkpoint, moments

    paths = [source]
    for fraction in FRACTIONS:
        folded = out / f"folded-{fraction}"
        settings = ConvertOptions(
            cache_fraction=fraction,
            calibrate=("docs",),
            calibrate_tokens=options.calibrate_tokens,
            calibrate_window=options.window,
            overwrite=True,
            seed=options.seed,
        )
        convert(str(source), str(folded), settings, track)
        paths.append(folded)
    try:
        trained = uptrain(str(paths[-1]), str(out / f"uptrained-{FRACTIONS[-1]}"), how, track, watch)
        assert trained is not None  # one process
        run = trained.recipe.uptraining[-1]
        told = f"was uptrained by LoRA on {run['tokens_trained']:,} tokens more, in {run['seconds']:.0f} s"
        paths.append(trained.out)
    except NoGain as error:
        told = f"could not be uptrained: {error}"

    evaluations, continuations = [], []
    for path in paths:
        checkpoint = load(str(path))
        held_out = TextSource("docs", EVALUATE).tokens(checkpoint.tokenizer, options.window * options.windows)
        evaluations.append(evaluate_checkpoint(checkpoint, windows(held_out, options.window), track))
        continuations.append(continue_text(checkpoint.model, checkpoint.tokenizer, PROMPT, options.new_tokens))
    report = out / "report.html"
    sections = _sections(layers, evaluations, continuations, told, options)
    write_report(report, "SmolLM2-135M-Instruct, folded", sections)
    return DemoResult(evaluations, continuations, report)


def _sections(
    layers: list[LayerRedundancy],
    evaluations: list[Evaluation],
    continuations: list[Continuation],
    uptrained: str,
    options: DemoOptions,
) -> list[Section]:
    first = evaluations[0]
    rows = [
        [
            Path(result.path).name,
            f"{result.cache_fraction:.2f}",
            f"{result.cache_bytes_per_token:,.0f}",
            f"{result.perplexity:.2f}",
            f"{result.perplexity / first.perplexity:.3f}",
            f"{result.parameters:,}",
        ]
        for result in evaluations
    ]
    means = summary(layers)
    columns = ["model", "cache fraction", "cache bytes/token", "perplexity", "ratio", "parameters"]
    result = Section(
        "What folding costs",
        [
            "Keys and values of every layer folded into one cached tensor, without any training; the last model then "
            f"{uptrained}. Perplexity on the second half of Python's manual, {options.windows} windows of "
            f"{options.window} tokens; calibrated on "
            f"{options.calibrate_tokens:,} tokens of its first half. Cache bytes are read off a filled cache (float32)."
        ],
        Table(columns, rows),
        [("Perplexity against what is cached", _trade(evaluations))],
    )
    redundancy = Section(
        "How redundant keys and values are",
        [
            f"Mean cosine similarity of W_k and W_v per head: {means['cosine']:.3f}; after the best orthogonal "
            f"alignment {means['aligned_cosine']:.3f}; linear CKA of keys and values {means['cka']:.3f}. At half the "
            f"cache a latent keeps {means['kept_all_at_half']:.2%} of the weighted energy when values may read all of "
            f"it, {means['kept_head_at_half']:.2%} when each head's values read their own key only."
        ],
        plots=[(CAPTIONS[name], figure) for name, figure in figures(layers)],
    )
    texts = Section(
        "The same prompt, continued greedily",
        quotes=[
            (f"{Path(result.path).name}: cache {text.cache_bytes:,} bytes for {text.cached_tokens} tokens",
             text.prompt + text.text)
            for result, text in zip(evaluations, continuations, strict=True)
        ],
    )  # fmt: skip
    return [result, redundancy, texts]


def _trade(evaluations: list[Evaluation]) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    fractions = [result.cache_fraction for result in evaluations]
    ratios = [result.perplexity / evaluations[0].perplexity for result in evaluations]
    folded = len(FRACTIONS) + 1
    axes.plot(fractions[:folded], ratios[:folded], "o-", label="folded")
    axes.plot(fractions[folded:], ratios[folded:], "s", label="uptrained")
    axes.legend(loc="upper right")
    for fraction, value in zip(fractions, ratios, strict=True):
        axes.annotate(f"{value:.3f}", (fraction, value), textcoords="offset points", xytext=(6, 6))
    axes.set(xlabel="cache fraction F", ylabel="perplexity ratio", xlim=(0.45, 1.08))
    axes.margins(y=0.2)
    axes.grid(alpha=0.3)
    return figure
