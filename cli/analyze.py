"""``kvfold analyze``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import TEXT_HELP, WRITTEN_HELP, AllowPickle, Device, Dtype, Json, Model, Revision, Seed, Token
from .output import check_json, check_output, console, table, track, write_json


def analyze(
    model: Model,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help=f"{TEXT_HELP}, {WRITTEN_HELP}. Adds CKA and the energy that latents keep."),
    ] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="Tokens of it.")] = 8192,
    calibrate_window: Annotated[int, typer.Option(help="Tokens the model reads in one go.")] = 512,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write plots (PNG) and CSV files there.")] = None,
    json: Json = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """How redundant keys and values are, layer by layer and head by head.

    Example: kvfold analyze HuggingFaceTB/SmolLM2-135M-Instruct --calibrate docs --out analysis/
    """
    from ..analysis.moments import collect_moments, windows
    from ..analysis.plots import write_figures
    from ..analysis.redundancy import analyze as run
    from ..analysis.redundancy import analyze_encoder
    from ..analysis.tables import summary, write_csv
    from ..checkpoint.encoders import is_encoder
    from ..checkpoint.loading import Access, load, require_unfolded
    from ..model import KvfoldError
    from ..text.generated import Writer
    from ..text.sources import CALIBRATE, TextSource

    check_json(json, model)
    source = TextSource(calibrate, CALIBRATE) if calibrate else None
    if out is not None:
        check_output(out, model)
        _make_folder(out)
    checkpoint = load(model, dtype, device, Access(revision, token, allow_pickle), encoders=True)
    require_unfolded(model, checkpoint.folder, checkpoint.config)
    encoder, moments = is_encoder(checkpoint.config.model_type), None
    if encoder and source is not None:
        raise KvfoldError(f"{model} is an encoder, which is compared by its weights alone: leave out --calibrate")
    if source is not None:
        writer = Writer(lambda: checkpoint.model, checkpoint.tokenizer, seed, track=track)
        tokens = source.tokens(checkpoint.tokenizer, calibrate_tokens, writer)
        moments = collect_moments(checkpoint.model, windows(tokens, calibrate_window), track=track)
    layers = analyze_encoder(checkpoint.model, track) if encoder else run(checkpoint.model, moments, track)
    _print(model, layers)
    means = summary(layers)
    console.print(
        "means: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items() if value is not None),
        highlight=False,
    )
    if out is not None:
        for path in [*write_csv(layers, out), *write_figures(layers, out)]:
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    write_json(json, {"model": model, "means": means, "layers": [asdict(layer) for layer in layers]})


def _print(model: str, layers: list[Any]) -> None:
    columns = ["layer", "cosine", "per head", "aligned", "principal", "rank K", "rank V"]
    if layers[0].fractions:
        columns += ["CKA", "lost at 0.5, all", "head"]
    rows = []
    for layer in layers:
        row = [str(layer.layer), f"{layer.cosine:.3f}"]
        for name, form in (
            ("cosine", ".3f"),
            ("aligned_cosine", ".3f"),
            ("principal_cosine", ".3f"),
            ("key_rank", ".1f"),
            ("value_rank", ".1f"),
        ):
            row.append(f"{_mean(layer.heads, name):{form}}")
        if layer.fractions:
            row += [f"{_mean(layer.heads, 'cka'):.3f}", f"{1 - layer.kept_all[0]:.2%}", f"{1 - layer.kept_head[0]:.2%}"]
        rows.append(row)
    table(f"{model}: keys against values (means over heads)", columns, rows)


def _mean(heads: list[Any], name: str) -> float:
    return sum(getattr(head, name) for head in heads) / len(heads)


def _make_folder(path: Path) -> None:
    from ..model import KvfoldError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvfoldError(f"{path} cannot be made: {error.strerror}") from error
