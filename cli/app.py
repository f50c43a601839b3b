"""The commands, and what happens to their errors."""

from __future__ import annotations

import os
import sys

import typer

from ..model import KvfoldError
from .analyze import analyze
from .convert import convert
from .demo import demo
from .evaluate import evaluate
from .generate import generate

COMMANDS = (analyze, convert, evaluate, generate, demo)

app = typer.Typer(
    name="kvfold",
    help="Fold the keys and values of a pretrained model into one tensor, and see what it costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Run the command line; a failure is one line on standard error and an exit status other than 0."""
    try:
        app()
    except KvfoldError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; nothing was left half-written", status=130)
    except Exception as error:  # the last resort: nobody but a developer wants the traceback
        if os.environ.get("KVFOLD_DEBUG"):
            raise
        reason = (str(error).strip() or "no message").splitlines()[0]
        _fail(f"unexpected {type(error).__name__}: {reason} (KVFOLD_DEBUG=1 shows where)")


def _fail(message: str, status: int = 1) -> None:
    print(f"kvfold: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
