"""What every stage's command line shares: one line for bad input, exit code 2, and progress a person can follow."""

import errno
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.errors import BadInput

T = TypeVar("T")
PLAIN_LINE_EVERY = 10.0  # seconds between two lines of progress where there is no terminal


def app(help_text: str) -> typer.Typer:
    """A stage's command line: typed options, plain help, no tracebacks dressed up."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=False,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


# What a file system may say of a place to write to: it is no fault of the program's.
REFUSED = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EROFS,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)


def run(application: typer.Typer, name: str) -> None:
    """Run a stage and exit: 0, or 2 with one line on bad use, bad input, a full disk; 130 when interrupted."""
    try:
        code = application(prog_name=f"python -m {name}", standalone_mode=False)
    except BadInput as error:
        _fail(name, str(error))
    except typer.Abort:
        sys.exit(130)
    except typer.TyperException as error:
        _fail(name, error.format_message())
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        _fail(name, f"{error.filename or 'output'}: {error.strerror}; what was already written is intact")
    else:
        sys.exit(code if isinstance(code, int) else 0)


def track(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """The items, with a progress bar on a terminal and a plain line now and then elsewhere (both on stderr)."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            yield from progress.track(items, total=total, description=label)
        return
    said = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - said > PLAIN_LINE_EVERY:
            said = time.monotonic()
            print(f"{label}: {done} of {total}", file=sys.stderr, flush=True)
        yield item


def _fail(name: str, message: str) -> None:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
