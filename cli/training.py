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


@contextmanager
def watching_each() -> Iterator[Callable[[str], Callable[[Moment], None]]]:
    """The same for several trainings, one after another, each with a name."""
    with ExitStack() as opened:

        def named(name: str) -> Callable[[Moment], None]:
            return _Bar(opened.enter_context(ExitStack()), name) if on_terminal() else _Lines(f"{name}, ")

        yield named


class _Bar:
    """A bar from the first step to the last: a terminal has one at a time, and other work has its own."""

    def __init__(self, opened: ExitStack, name: str = "training") -> None:
        self._opened, self._name, self._done = opened, name, False
        self._progress: Progress | None = None

    def __call__(self, moment: Moment) -> None:
        if self._done:
            return
        if self._progress is None:
            self._progress = self._opened.enter_context(bars("{task.fields[figures]}"))
            self._task = self._progress.add_task(self._name, total=moment.steps, figures="")
        self._progress.update(self._task, completed=moment.step, figures=_figures(moment))
        if moment.step == moment.steps:
            self._done = True
            self._opened.close()


class _Lines:
    """Prints where an evaluation is new."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._told: float | None = None

    def __call__(self, moment: Moment) -> None:
        if moment.perplexity is not None and moment.perplexity != self._told:
            self._told = moment.perplexity
            left = f", {moment.seconds_left:.0f} s left" if moment.tokens_per_second else ""
            console.print(
                f"{self._name}{moment.tokens:,} tokens: {_figures(moment)}{left}", highlight=False, soft_wrap=True
            )


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
    if moment.utilisation:
        parts.append(f"{100 * moment.utilisation:.0f} % of the matmul rate")
    return ", ".join(parts)
