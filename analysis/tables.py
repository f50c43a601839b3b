"""An analysis as a CSV file and as plain data."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .redundancy import HeadRedundancy, LayerRedundancy


def write_csv(layers: list[LayerRedundancy], folder: Path) -> list[Path]:
    """``heads.csv``, a row per KV head, and with calibration text ``energy.csv``, a row per layer and width."""
    heads = folder / "heads.csv"
    with heads.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(HeadRedundancy)])
        writer.writeheader()
        writer.writerows(asdict(head) for layer in layers for head in layer.heads)
    if not layers[0].fractions:
        return [heads]
    energy = folder / "energy.csv"
    with energy.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["layer", "cache_fraction", "kept_all", "kept_head"])
        for layer in layers:
            for row in zip(layer.fractions, layer.kept_all, layer.kept_head, strict=True):
                rows.writerow([layer.layer, *row])
    return [heads, energy]


def summary(layers: list[LayerRedundancy]) -> dict[str, Any]:
    """Means over the model: of each head measure, and of the energy kept at half the cache."""
    heads = [head for layer in layers for head in layer.heads]
    result: dict[str, Any] = {"cosine_whole": sum(layer.cosine for layer in layers) / len(layers)}
    for name in ("cosine", "aligned_cosine", "principal_cosine", "key_rank", "value_rank", "cka"):
        values = [getattr(head, name) for head in heads]
        result[name] = None if values[0] is None else sum(values) / len(values)
    if layers[0].fractions:
        result["kept_all_at_half"] = sum(layer.kept_all[0] for layer in layers) / len(layers)
        result["kept_head_at_half"] = sum(layer.kept_head[0] for layer in layers) / len(layers)
    return result
