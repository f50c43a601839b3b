"""Hidden states between two layers of a conversion, in memory or on disk, kept so that it can resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


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
        save_whole(
            self._path(layers), {f"{stream}/{batch}": state for (stream, batch), state in self._held.items()}, {}
        )
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


def save_whole(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a file that is there whole or not at all."""
    begun = path.with_suffix(".begun")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, begun, metadata | {"format": "pt"})
    begun.rename(path)
