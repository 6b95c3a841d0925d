"""Errors that a signal handler raises inside checkflow's code: they belong to training and are passed on.

Handlers run in the main thread between any two steps of Python code, so an error may come right after a lock is taken.
``with`` on a plain ``threading`` lock is safe: no handler runs between taking it and entering the block. ``Condition``
enters its lock in Python code and is not safe. So classes enter their own lock and use the condition inside it.
"""

from __future__ import annotations

import inspect
import signal
import traceback
from types import CodeType


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal handler, written in Python and set now, raised this error or one in its context."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    one: BaseException | None = error
    while one is not None:
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(one.__traceback__)):
            return True
        one = one.__context__
    return False


def _code_of(handler: object) -> CodeType | None:
    if not (inspect.isfunction(handler) or inspect.ismethod(handler)):
        handler = type(handler).__dict__.get("__call__")  # a callable object
    return getattr(handler, "__code__", None)
