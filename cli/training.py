"""How far training is, on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.progress import Progress

from .output import bars, console, on_terminal

if TYPE_CHECKING:
    from ..finetune.training import Moment


@contextmanager
def watching() -> Iterator[Callable[[Moment], None]]:
    """A bar with the figures on the terminal; where there is none, a line for each evaluation."""
    with ExitStack() as opened:
        yield _Bar(opened) if on_terminal() else _Lines()


class _Bar:
    """A bar from the first step to the last: a terminal has one at a time, and other work has its own."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened, self._done = opened, False
        self._progress: Progress | None = None

    def __call__(self, moment: Moment) -> None:
        if self._done:
            return
        if self._progress is None:
            self._progress = self._opened.enter_context(bars("{task.fields[figures]}"))
            self._task = self._progress.add_task("training", total=moment.steps, figures="")
        self._progress.update(self._task, completed=moment.step, figures=_figures(moment))
        if moment.step == moment.steps:
            self._done = True
            self._opened.close()


class _Lines:
    """Prints where an evaluation is new."""

    def __init__(self) -> None:
        self._told: float | None = None

    def __call__(self, moment: Moment) -> None:
        if moment.perplexity is not None and moment.perplexity != self._told:
            self._told = moment.perplexity
            left = f", {moment.seconds_left:.0f} s left" if moment.tokens_per_second else ""
            console.print(f"{moment.tokens:,} tokens: {_figures(moment)}{left}", highlight=False, soft_wrap=True)


def _figures(moment: Moment) -> str:
    parts = []
    if moment.loss is not None:
        parts.append(f"loss {moment.loss:.4f}")
    if moment.ratio is not None:
        parts.append(f"perplexity ratio {moment.ratio:.4f}")
    elif moment.perplexity is not None:
        parts.append(f"perplexity {moment.perplexity:.2f}")
    if moment.tokens_per_second:
        parts.append(f"{moment.tokens_per_second:,.0f} tokens/s")
    return ", ".join(parts)
