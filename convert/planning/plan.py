"""A plan: how wide each layer's latent is to be, and its number of key windows, so that a cache budget costs least."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ...model import KvfoldError

FORMAT = 1
HEADER = """\
# Width of every layer's latent (numbers cached per token) under a cache budget. cost: KL divergence from the source, in
# nats per token, when only that layer is folded so. Change what you like; `kvfold convert MODEL OUT --plan THIS` obeys.
"""


@dataclass(frozen=True)
class LayerPlan:
    """One layer: R, its key windows (None: one for each KV head), and the predicted cost in nats per token."""

    latent_width: int
    key_heads: int | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Plan:
    """The plan for a model.

    Attributes:
        source: what the model is, as in ``kvfold.json``. cache_fraction: F over all layers. span: of all layers.
        full_width: 2·KV·d. uniform_cost: predicted if all layers were equally wide, nats per token.
        layers: one entry each. curves: for each layer the measured points ``[width, key heads, cost]``.
    """

    source: dict[str, Any]
    cache_fraction: float
    span: str
    full_width: int
    uniform_cost: float
    layers: list[LayerPlan]
    curves: list[list[list[Any]]] | None = None

    @property
    def cost(self) -> float:
        """Sum of the layers' costs, nats per token."""
        return sum(layer.cost or 0.0 for layer in self.layers)

    def write(self, path: Path) -> None:
        """Write it as YAML, a line for each layer."""
        entries = asdict(self) | {"format": FORMAT}
        lines = [HEADER]
        for name in ("format", "source", "cache_fraction", "span", "full_width", "uniform_cost"):
            lines.append(yaml.safe_dump({name: entries[name]}, sort_keys=False))
        for name, rows in (("layers", entries["layers"]), ("curves", self.curves or [])):
            lines.append(f"{name}:\n" if rows else f"{name}: []\n")
            for number, row in enumerate(rows):
                told = yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=10_000).strip()
                lines.append(f"- {told}  # layer {number}\n")
        path.write_text("".join(lines), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Plan:
        """Read a plan. Raises KvfoldError for a file that is none."""
        try:
            entries = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise KvfoldError(f"plan {path} cannot be read: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise KvfoldError(f"plan {path} is not YAML") from error
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            raise KvfoldError(f"{path} is not a plan of format {FORMAT}: make one with kvfold plan")
        try:
            layers = [LayerPlan(**layer) for layer in entries["layers"]]
            told = {name: entries[name] for name in ("source", "cache_fraction", "span", "full_width", "uniform_cost")}
            plan = cls(**told, layers=layers, curves=entries.get("curves"))
        except (KeyError, TypeError) as error:
            raise KvfoldError(f"plan {path} is damaged: {error}") from error
        for number, layer in enumerate(layers):
            heads = layer.key_heads
            if type(layer.latent_width) is not int or not (heads is None or type(heads) is int):
                raise KvfoldError(f"plan {path}: layer {number} needs whole numbers for latent_width and key_heads")
        return plan

    def require_for(self, path: str, source: dict[str, Any], layers: int) -> None:
        """Raises KvfoldError unless it was made for the model at ``path``, which is described by ``source``."""
        mine = {name: self.source.get(name) for name in ("model_type", "sha256", "revision")}
        other = {name: source.get(name) for name in mine}
        if mine != other or len(self.layers) != layers:
            raise KvfoldError(
                f"the plan is for another model ({self.source.get('path')}, {len(self.layers)} layers): make one for "
                f"{path} with kvfold plan"
            )
