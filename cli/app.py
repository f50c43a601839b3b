"""The commands, and what happens to their errors."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from ..model import KvfoldError
from ..model.errors import one_line
from .analyze import analyze
from .compare import compare
from .convert import convert
from .demo import demo
from .evaluate import evaluate
from .export import export
from .generate import generate
from .plan import plan
from .prepare import prepare
from .pretrain import pretrain
from .study import study
from .uptrain import uptrain

INTERRUPTED = 130  # the shell's status for Ctrl-C, which typer returns
COMMANDS = (analyze, plan, convert, uptrain, prepare, pretrain, study, compare, export, evaluate, generate, demo)

app = typer.Typer(
    name="kvfold",
    help="Fold the keys and values of a pretrained model into one tensor, and see what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Run the command line; a failure is one line on standard error and an exit status other than 0."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        status = app(standalone_mode=False)
    except KvfoldError as error:
        _fail(str(error))
    except Exception as error:
        if message := getattr(error, "format_message", None):  # the parser's: an unknown option, say
            _fail(f"{message()} (see --help)", status=2)
        if os.environ.get("KVFOLD_DEBUG"):
            raise
        # The last resort: nobody but a developer wants the traceback.
        _fail(f"unexpected {type(error).__name__}: {one_line(error)} (KVFOLD_DEBUG=1 shows where)")
    if status == INTERRUPTED:
        _fail(
            "interrupted; nothing was left half-written (convert, uptrain, prepare and pretrain go on with --resume)",
            status=INTERRUPTED,
        )
    _leave_process_group()
    sys.exit(status if isinstance(status, int) else 0)


def _leave_process_group() -> None:
    """A process of several that ends with its group still open may be aborted by the threads of the backend."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"kvfold: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
