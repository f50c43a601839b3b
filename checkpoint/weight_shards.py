"""Weight files written tensor by tensor: however large they are, one tensor at a time is in memory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DTYPES = {  # by their names in the files
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: its name, shape and dtype, and the function that makes it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def shard_bytes(size: str) -> int:
    """Bytes of a size like 500MB or 5GiB."""
    number, unit = re.fullmatch(r"([\d.]+)\s*(\w+)", size).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS[unit.upper()])


def write_shards(
    folder: Path, tensors: list[Tensor], largest: int, advance: Callable[[int], None] = lambda tensors: None
) -> None:
    """Write ``tensors`` into ``model.safetensors``, or into shards of at most ``largest`` bytes and their index.

    The format is that of https://huggingface.co/docs/safetensors: the length of the header, the header, the numbers.
    """
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(each.bytes for each in shards[-1]) + tensor.bytes > largest:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        _write(folder / "model.safetensors", shards[0], advance)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / name, shard, advance)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.bytes for tensor in tensors)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write(path: Path, tensors: list[Tensor], advance: Callable[[int], None]) -> None:
    # Wide numbers first, so that each tensor begins at a multiple of its numbers' size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.bytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors:
            made = tensor.make()
            if tuple(made.shape) != tensor.shape or made.dtype != tensor.dtype:
                raise ValueError(f"{tensor.name} is {made.dtype} {list(made.shape)}, announced was another tensor")
            file.write(made.contiguous().flatten().view(torch.uint8).numpy().data)
            advance(1)
