"""Errors that a signal's handler raises while checkpointing has the word: they are training's, and go on to it.

Python runs handlers in the main thread, between any two steps of whatever is running there, and what a handler raises
appears to come from that place. The one of PyTorch's loader raises when a worker was killed; a user's may end the job.

So a handler's error may come between the taking of a lock and the block that would give it back. ``with`` on a lock of
``threading`` itself is proof against that: the interpreter runs no handler between the two. On a ``Condition`` it is
not, since that enters its lock in Python code. Classes here enter their lock, and use the condition inside only. While
it waits the lock is given up, and an error between the two makes another one of that: it is found by its context.
"""

from __future__ import annotations

import inspect
import signal
import traceback
from types import CodeType


def raised_by_handler(error: BaseException) -> bool:
    """Whether the handler of a signal, as it is set now, was at work when this was raised, or what led to it.

    A handler that is not written in Python leaves no frame, and is not recognised.
    """
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    one: BaseException | None = error
    while one is not None:
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(one.__traceback__)):
            return True
        one = one.__context__
    return False


def _code_of(handler: object) -> CodeType | None:
    if not (inspect.isfunction(handler) or inspect.ismethod(handler)):
        handler = type(handler).__dict__.get("__call__")  # an object that can be called
    return getattr(handler, "__code__", None)
