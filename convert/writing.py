"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..model import KvfoldError


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


@contextmanager
def whole_folder(out: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary sibling of ``out`` to write into; it becomes ``out`` when the block ends without an error.

    Raises KvfoldError where the disk is full or not writable; nothing is left behind then.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if needed_bytes > free:
            raise KvfoldError(
                f"no space for {out}: {needed_bytes / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free"
            )
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise KvfoldError(f"{out} cannot be written: {error.strerror}") from error
    try:
        yield partial
        _readable_by_others(partial)
        _replace(out, partial)
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
        reason = "no space left on the disk" if full else str(error)
        raise KvfoldError(f"{out} cannot be written: {reason}") from error
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
