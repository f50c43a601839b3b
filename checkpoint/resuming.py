"""What unfinished work has done so far, in a folder beside OUT, so that it can go on after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..model import KvfoldError
from .atomic_output import DiskError, disk_errors


def unfinished_folder(out: Path) -> Path:
    """Where unfinished work on ``out`` is kept."""
    return out.parent / f".{out.name}.unfinished"


class Unfinished:
    """The folder ``.OUT.unfinished``.

    Args:
        out: the folder that the work is to make. settings: what decides its result, as plain values.
        resume: go on from what lies there; else it is thrown away. what: the work's name, for messages.

    Raises KvfoldError where the work that lies there had other settings.
    """

    def __init__(self, out: Path, settings: dict[str, Any], resume: bool, what: str) -> None:
        self.folder = unfinished_folder(out)
        self._out, self._what = out, what
        told = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        with disk_errors(out):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / "lock", timeout=0)
            try:
                self._lock.acquire()
            except Timeout as error:
                raise KvfoldError(f"another {what} to {out} is under way") from error
        if resume and told.is_file():
            with self.whole():
                earlier = json.loads(told.read_text(encoding="utf-8"))
            changed = [
                f"{name} {earlier.get(name)!r} → {settings.get(name)!r}"
                for name in sorted({*earlier, *settings})
                if earlier.get(name) != settings.get(name)
            ]
            if changed:
                raise KvfoldError(
                    f"the unfinished {what} to {out} was begun with other settings ({', '.join(changed)}): use "
                    "those, or leave out --resume to begin anew"
                )
            return
        with disk_errors(out):
            self._empty()
            begun = told.with_suffix(".begun")
            begun.write_text(json.dumps(settings, indent=1), encoding="utf-8")
            begun.rename(told)

    def discard(self) -> None:
        """Remove the folder, and what killed ones to the same place have left half-written."""
        self._lock.release()
        for left in (self.folder, *self.folder.parent.glob(f".{self._out.name}.partial-*")):
            shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def kept_where_worthwhile(self, begun: Callable[[], bool], kept: str = "", inputs: bool = True) -> Iterator[None]:
        """Discard the folder when the block ends well; after an error keep it where there is something to go on from.

        Args:
            begun: whether there is. kept: what that is, to be named in the message of a full disk.
            inputs: bad input, a ``KvfoldError`` other than of the disk, means that the work was asked for in vain.

        Raises:
            DiskError: for a full disk, with what is kept.
        """
        try:
            yield
        except BaseException as error:
            in_vain = inputs and isinstance(error, KvfoldError) and not isinstance(error, DiskError)
            if in_vain or not begun():
                self.discard()
                raise
            self.close()
            if kept and isinstance(error, DiskError):
                raise DiskError(f"{error}; {kept} is kept, and --resume goes on from it") from error
            raise
        self.discard()

    def close(self) -> None:
        """Leave the folder for later work to go on from."""
        self._lock.release()

    def remember(self, name: str, value: Any) -> None:
        """Keep something that is found out on the way, of plain values."""
        begun = self.folder / f"{name}.begun"
        begun.write_text(json.dumps(value), encoding="utf-8")
        begun.rename(self.folder / f"{name}.json")

    def recall(self, name: str) -> Any:
        """What was kept under this name, or None."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        with self.whole():
            return json.loads(path.read_text(encoding="utf-8"))

    def _empty(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Raises KvfoldError where what is read is damaged."""
        try:
            yield
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise KvfoldError(
                f"what is left of the {self._what} to {self._out} is damaged: leave out --resume to begin anew"
            ) from error
