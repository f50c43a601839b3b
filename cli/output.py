"""Tables, progress bars and JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..checkpoint.progress import Advance
from ..model import KvfoldError

console = Console()
_progress_console = Console(stderr=True)


@contextmanager
def track(description: str, total: int | None) -> Iterator[Advance]:
    """A progress bar on the terminal; nothing where standard error is not one."""
    if not on_terminal():
        yield lambda steps: None
        return
    with bars() as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)


def on_terminal() -> bool:
    """Whether there is somebody to show bars to."""
    return _progress_console.is_terminal


def bars(more: str | None = None) -> Progress:
    """Progress bars, with another column of this format; for use in a with statement."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    if more is not None:
        columns.append(TextColumn(more))
    return Progress(*columns, console=_progress_console, transient=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        drawn.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def check_output(path: Path, *models: str) -> None:
    """Refuse to write into a model's folder. Raises KvfoldError."""
    for model in models:
        if Path(model).expanduser().resolve() in (path.resolve(), *path.resolve().parents):
            raise KvfoldError(f"{path} lies in the model {model}, which is never touched: give another place")


def check_json(path: Path | None, *models: str) -> None:
    """Fail before the work, not after it, where a file (JSON, a page) cannot or must not be written. KvfoldError."""
    if path is not None:
        check_output(path, *models)
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise KvfoldError(f"{path} cannot be written: it is a folder, or its folder does not exist")


def write_json(path: Path | None, data: Any) -> None:
    """Write ``data`` where a file was asked for. Raises KvfoldError."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise KvfoldError(f"{path} cannot be written: {error.strerror}") from error


def ratio(value: float, reference: float) -> str:
    """``value`` against ``reference``, for a table."""
    return f"{value / reference:.3f}"
