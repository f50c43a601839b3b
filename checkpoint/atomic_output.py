"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..model import KvfoldError
from .hub import LICENCES, TOKENIZER_FILES


def require_free(out: Path, overwrite: bool, source: Path) -> None:
    """OUT may be written.

    Raises KvfoldError where it exists (unless it is to be overwritten), and where writing it would touch the source, a
    folder or a file, or delete the user's home or working folder.
    """
    place, home = out.resolve(), source.resolve()
    if source.exists() and (place == home or place in home.parents):
        raise KvfoldError(f"{out} is the source or holds it, and a source is never touched: give another OUT")
    if source.is_dir() and home in place.parents:
        raise KvfoldError(f"{out} lies inside the source {source}, which is never touched: give another OUT")
    if not out.exists():
        return
    if not overwrite:
        raise KvfoldError(f"{out} exists: give another OUT, or --overwrite")
    if not out.is_dir():
        raise KvfoldError(f"{out} exists and is not a folder: give another OUT")
    for precious in (Path.home(), Path.cwd()):
        if place == precious.resolve() or place in precious.resolve().parents:
            raise KvfoldError(f"{out} holds {precious}, so it is not overwritten: give another OUT")


def require_shard_size(size: str) -> None:
    """Raises KvfoldError for a size of weight files that is not written like 500MB or 5GB."""
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?([KMG]i?B)", size, re.IGNORECASE):
        raise KvfoldError(f"max shard size {size!r} is not understood: give a size like 500MB or 5GB")


def copy_beside(source: Path, out: Path, tokenizer: bool = True) -> None:
    """Copy what lies beside the weights of a checkpoint: licences, generation config, tokenizer and chat template."""
    for pattern in (*LICENCES, "generation_config.json", *(TOKENIZER_FILES if tokenizer else ())):
        for path in source.glob(pattern):
            if path.is_file():
                copied = out / path.relative_to(source)
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copied)


def require_room(out: Path, needed: int) -> None:
    """Raises KvfoldError where the disk of ``out`` has fewer than ``needed`` bytes left."""
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise KvfoldError(f"no space for {out}: {needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free")


class DiskError(KvfoldError):
    """The disk is full or cannot be written; what was asked for may be all right."""


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn what is raised for a full disk, or one that cannot be written, into one line. Raises DiskError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
        reason = "no space left on the disk" if full else str(error)
        raise DiskError(f"{out} cannot be written: {reason}") from error


@contextmanager
def whole_folder(out: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary sibling of ``out`` to write into; it becomes ``out`` when the block ends without an error.

    Raises KvfoldError where the disk is full or not writable; nothing is left behind then.
    """
    with disk_errors(out):
        require_room(out, needed_bytes)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        try:
            yield partial
            _readable_by_others(partial)
            _replace(out, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _replace(out: Path, partial: Path) -> None:
    """Rename ``partial`` to ``out``; what stood there is deleted only once the new folder is in its place."""
    if not out.exists():
        partial.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent)) / out.name
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old.parent, ignore_errors=True)


def _readable_by_others(folder: Path) -> None:
    """Temporary folders are private; give the result the permissions that an ordinary ``mkdir`` gives."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
