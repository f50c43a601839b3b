"""The folded layers of an unfinished conversion, in a folder beside OUT, so that it can resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..checkpoint.resuming import Unfinished
from ..model import FoldedLayout
from .hidden_states import HiddenStates, OffloadedStates, save_whole
from .methods.base import FoldedWeights

FOLDED, REFINED = "layer", "refined"  # stages of a conversion


class LayerStore(Unfinished):
    """The layers of an unfinished conversion.

    Args, raises: see ``Unfinished``.
    """

    def __init__(self, out: Path, settings: dict[str, Any], resume: bool) -> None:
        super().__init__(out, settings, resume, "conversion")

    def restore(self, states: HiddenStates) -> int:
        """Take up the hidden states that were kept last; returns how many layers were done."""
        with self.whole():
            return states.restore()

    def begun(self) -> bool:
        """Whether there is anything worth going on from."""
        return self.has_layer(0)

    def layer(self, index: int, stage: str = FOLDED) -> Path:
        """File of the folded tensors of a layer, as one of the stages of a conversion leaves them."""
        return self.folder / f"{stage}-{index:05d}.safetensors"

    def has_layer(self, index: int, stage: str = FOLDED) -> bool:
        return self.layer(index, stage).is_file()

    def save_layer(self, index: int, folds: list[FoldedWeights], stage: str = FOLDED) -> None:
        """Keep a layer, folded in one or several ways; a tensor that they have in common is kept once."""
        tensors = {}
        for name in dict.fromkeys(name for fold in folds for name in fold.tensors):  # whole windows need no key map
            each = {way: fold.tensors[name] for way, fold in enumerate(folds) if name in fold.tensors}
            if len(each) == len(folds) and len({tensor.data_ptr() for tensor in each.values()}) == 1:
                tensors[f"all/{name}"] = each[0]
            else:
                # (clones, since a file does not take the same memory twice)
                tensors |= {f"{way}/{name}": tensor.clone() for way, tensor in each.items()}
        told = [
            {"layout": fold.layout.to_dict(), "kept_energy": fold.kept_energy, "refined": fold.refined}
            for fold in folds
        ]
        save_whole(self.layer(index, stage), tensors, {"folds": json.dumps(told)})

    def fold(self, index: int, way: int, stage: str = FOLDED) -> FoldedWeights:
        """A layer with its tensors."""
        layout, kept_energy, refined = self.described(index, way, stage)
        tensors = {name: read() for name, _, read in self.tensors(index, way, stage)}
        return FoldedWeights(layout, tensors, kept_energy, refined)

    def described(
        self, index: int, way: int, stage: str = FOLDED
    ) -> tuple[FoldedLayout, float | None, tuple[float, float] | None]:
        """Layout and kept energy of a layer, and the errors before and after it was refined."""
        with self.whole(), safe_open(self.layer(index, stage), framework="pt") as file:
            told = json.loads(file.metadata()["folds"])[way]
        refined = told["refined"]
        return FoldedLayout.from_dict(told["layout"]), told["kept_energy"], refined and tuple(refined)

    def tensors(
        self, index: int, way: int, stage: str = FOLDED
    ) -> list[tuple[str, list[int], Callable[[], torch.Tensor]]]:
        """Name, shape and reader of a layer's tensors, folded the ``way``-th way."""
        path = self.layer(index, stage)
        found: list[tuple[str, list[int], Callable[[], torch.Tensor]]] = []
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                owner, _, name = key.partition("/")
                if owner in ("all", str(way)):
                    found.append((name, file.get_slice(key).get_shape(), partial(_tensor, path, key)))
        return found

    def states(self, offload: bool, stage: str = FOLDED) -> HiddenStates:
        """Hidden states of a stage that outlive an interruption; with ``offload`` they take no memory."""
        folder = self.folder / f"states-{stage}"
        folder.mkdir(exist_ok=True)
        return OffloadedStates(folder) if offload else HiddenStates(folder)


def _tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
