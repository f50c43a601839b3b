"""How a source is named in records, so that it can be told from every other one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from .loading import is_hub_id, weight_files


def identity(described: dict[str, Any]) -> str:
    """What tells a described source from all others: of the commit on the Hub, or the hash of its weights."""
    return (described.get("sha256") or described["revision"])[:32]


def describe_source(path: str, folder: Path, config: Any) -> dict[str, Any]:
    """Name a source so that it can be told from another: Hub id and commit, or the hash of its weight files.

    Args:
        path: what the user gave. folder: where its files lie (see ``Checkpoint``). config: of the source.
    """
    entry: dict[str, Any] = {"path": path, "model_type": config.model_type}
    if is_hub_id(path):
        entry["revision"] = folder.name
        return entry
    gguf = path.endswith(".gguf")
    named = getattr(config, "transformers_weights", None)
    weights = [Path(path).expanduser()] if gguf else weight_files(folder, named)
    digest = hashlib.sha256()
    for file in weights:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    entry["sha256"] = digest.hexdigest()
    return entry
