"""What long work shows on a terminal: its part, its time, and how much is left if that is known. Nothing in a pipe."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from checkflow.cli.console import console
from checkflow.core.units import format_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PATIENCE_SECONDS = 1.0  # shorter work shows no progress
REFRESHES = 8  # a second


class Say(Protocol):
    """Sets what is being done now, and how much of how much is done; any thread may call it."""

    def __call__(self, part: str = "", done: float = 0.0, total: float | None = None, /) -> None: ...


@contextlib.contextmanager
def working(what: str) -> Iterator[Say]:
    """Show what is being done on a terminal, once it takes a while.

    The time that is left is an estimate from the last half minute, and shown only where ``total`` is known.
    """
    shown = console(stderr=True) if sys.stderr.isatty() else None
    if shown is None or not shown.is_interactive:  # TERM=dumb: no line can vanish there
        yield lambda part="", done=0.0, total=None, /: None
        return
    progress = _progress(shown)
    progress.add_task(what, total=None)
    lock = threading.Lock()

    def say(part: str = "", done: float = 0.0, total: float | None = None, /) -> None:
        words = f"{what}: {part}" if part else what
        with lock:
            (task,) = progress.tasks
            number = task.id
            if total != task.total or done < task.completed:  # the speed of one part says nothing of another
                progress.remove_task(number)
                number = progress.add_task(words, total=total)
            progress.update(number, description=words, completed=done)

    timer = threading.Timer(PATIENCE_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield say
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


def _whole(seconds: float) -> str:
    """A time in whole seconds, if it is short."""
    return f"{seconds:.0f} s" if seconds < 59.5 else format_time(seconds)


def _progress(shown: Console) -> Progress:
    """Return a line that vanishes at the end: a spinner, what is done, a bar if it is known how much, the times."""
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    begun = time.monotonic()

    class Bar(BarColumn):
        def render(self, task: Task) -> Text:  # type: ignore[override]
            return super().render(task) if task.total else Text()  # type: ignore[return-value]

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            words, left = _whole(time.monotonic() - begun), task.time_remaining
            return Text(words if left is None or task.finished else f"{words}, about {_whole(left)} left")

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        Bar(bar_width=24),
        Times(),
        console=shown,
        refresh_per_second=REFRESHES,
        transient=True,
        redirect_stdout=False,
    )
