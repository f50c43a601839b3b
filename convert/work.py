"""What an unfinished conversion has done so far, in a folder beside OUT, so that it can go on after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..model import FoldedLayout
from .problem import FoldedWeights
from .unfinished import Unfinished

FOLDED, REFINED = "layer", "refined"  # stages of a conversion


class Work(Unfinished):
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
        _save(self.layer(index, stage), tensors, {"folds": json.dumps(told)})

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


class HiddenStates:
    """Hidden states of several streams of text between two layers, in memory, with a copy on disk.

    Args:
        folder: where the copy is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[tuple[str, int], torch.Tensor] = {}

    def of(self, stream: str) -> StreamStates:
        """Those of one stream, by the number of the batch."""
        return StreamStates(self, stream)

    def get(self, stream: str, batch: int) -> torch.Tensor:
        return self._held[stream, batch]

    def put(self, stream: str, batch: int, state: torch.Tensor) -> None:
        self._held[stream, batch] = state

    def keep(self, layers: int) -> None:
        """All streams are through the first ``layers`` layers: this is where an interrupted conversion goes on."""
        _save(self._path(layers), {f"{stream}/{batch}": state for (stream, batch), state in self._held.items()}, {})
        for earlier in self.folder.glob("state-*.safetensors"):
            if earlier != self._path(layers):
                earlier.unlink()

    def restore(self) -> int:
        """Take up what was kept last; returns how many layers were done (0 where nothing was kept)."""
        kept = sorted(self.folder.glob("state-*.safetensors"))
        if not kept:
            return 0
        for name, state in load_file(kept[-1]).items():
            stream, _, batch = name.rpartition("/")
            self._held[stream, int(batch)] = state
        return int(kept[-1].stem.partition("-")[2])

    def _path(self, layers: int) -> Path:
        return self.folder / f"state-{layers:05d}.safetensors"


class OffloadedStates(HiddenStates):
    """The same on disk only: a folder for what goes into a layer, and one for what comes out of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._from = self._to = self._begun()

    def get(self, stream: str, batch: int) -> torch.Tensor:
        new = self._to / f"{stream}-{batch}.safetensors"
        return load_file(new if new.is_file() else self._from / new.name)["state"]

    def put(self, stream: str, batch: int, state: torch.Tensor) -> None:
        save_file({"state": state.contiguous()}, self._to / f"{stream}-{batch}.safetensors")

    def keep(self, layers: int) -> None:
        self._from = self._to.rename(self.folder / f"state-{layers:05d}")
        self._to = self._begun()
        for earlier in self.folder.glob("state-*"):
            if earlier not in (self._from, self._to):
                shutil.rmtree(earlier)

    def restore(self) -> int:
        kept = sorted(path for path in self.folder.glob("state-*") if path != self._to)
        if not kept:
            return 0
        self._from, self._to = kept[-1], self._begun()
        return int(self._from.name.partition("-")[2])

    def _begun(self) -> Path:
        begun = self.folder / "state-begun"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        return begun


class StreamStates:
    """The hidden states of one stream, ``states[batch]``."""

    def __init__(self, states: HiddenStates, stream: str) -> None:
        self._states, self._stream = states, stream

    def __getitem__(self, batch: int) -> torch.Tensor:
        return self._states.get(self._stream, batch)

    def __setitem__(self, batch: int, state: torch.Tensor) -> None:
        self._states.put(self._stream, batch, state)


def _tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a file that is there whole or not at all."""
    begun = path.with_suffix(".begun")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, begun, metadata | {"format": "pt"})
    begun.rename(path)
