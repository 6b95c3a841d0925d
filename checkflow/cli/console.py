"""The command line's output: tables on standard output, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from checkflow.core.errors import StoppedError
from checkflow.core.small_files import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Exit codes; for signals, STOPPED plus their number.
FOUND, FAILED, USAGE, INFEASIBLE, STOPPED = 0, 1, 2, 3, 128
PIPE_WIDTH = 120  # columns without a terminal


def output() -> Console:
    """Return standard output: colours on a terminal, plain text of a fixed width in a pipe."""
    return console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


def console(**options: Any) -> Console:
    """Return a console that shows control characters, which may come from files' names, and obeys none."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Visible(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return Visible(**options)


def print_line(line: str, end: str = "\n") -> None:
    sys.stdout.write(visible(line) + end)


def print_parts(parts: Iterable[RenderableType]) -> None:
    shown = output()
    for part in parts:
        shown.print(part)


def print_json(data: object) -> None:
    sys.stdout.write(json.dumps(data, allow_nan=False, indent=2) + "\n")


def expect_page(path: Path | None) -> None:
    """Before any work for a page: ViewError if none can be made here."""
    if path is not None:
        from checkflow.views.page import need_plotly

        need_plotly()


def write_page(page: str, path: Path, *, said: bool) -> None:
    """Write a page's file, and say so; ViewError if it cannot be written."""
    from checkflow.views.page import write

    write(page, path)
    _say_written("page", path, said)


def write_trace(events: Iterable[Mapping[str, Any]], path: Path, *, said: bool) -> None:
    """Write a trace's file, and say so; CheckflowError if it cannot be written."""
    from checkflow.views.perfetto import write_trace as write

    write(events, path)
    _say_written("trace", path, said)


def _say_written(what: str, path: Path, said: bool) -> None:
    if said:
        print_line(f"{what} written to {path}")


def complain(message: str) -> None:
    print(f"checkflow: {visible(message)}", file=sys.stderr)  # noqa: T201 - this is the command line's voice


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise StoppedError, to clean up; ignored signals (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        asked.append(number)
        raise StoppedError(number)

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, StoppedError):  # raised again below
            hook(lost)

    hook = sys.unraisablehook
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        sys.unraisablehook = unraisable
        for number in ours:
            signal.signal(number, stop)
        yield
        if asked:  # it was raised where Python drops errors, such as in a destructor
            raise StoppedError(asked[0])
    except Exception as error:
        if asked:  # something on its way, such as an import of C++ code, replaced it by another error
            raise StoppedError(asked[0]) from error
        raise
    finally:
        for number in ours:
            signal.signal(number, before[number])
        sys.unraisablehook = hook


class _Voice(logging.Handler):
    """The package's warnings, each line once: a plan may call its solver several times."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.said:
            self.said.add(text)
            complain(text)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    logger, voice = logging.getLogger("checkflow"), _Voice()
    logger.addHandler(voice)
    try:
        yield
    finally:
        logger.removeHandler(voice)
