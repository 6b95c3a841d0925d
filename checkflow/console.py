"""Where the command line talks: tables on standard output, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_SECONDS = 1.0  # work that takes less shows no progress
PIPE_WIDTH = 120  # columns where there is no terminal to ask


def output() -> Console:
    """Standard output: colours on a terminal, plain text of a fixed width in a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


def complain(message: str) -> None:
    """One error, on standard error."""
    print(f"checkflow: {message}", file=sys.stderr)  # noqa: T201 - this is the command line's voice


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal what is being done, once it takes a while; silent in a pipe."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(f"{what} …")
    timer = threading.Timer(PATIENCE_SECONDS, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
