"""What Python's collector tracks, looked through while other threads stand still."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

_LONG_SECONDS = 0.2  # a look takes less


def find_objects(wanted: Callable[[Any], bool]) -> list[Any]:
    """All objects that are wanted; ``wanted`` must not wait for another thread.

    Another thread may be building a tuple. CPython cannot resize one that somebody else refers to, and raises
    SystemError there. So that thread should not run while the list of all objects is alive.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG_SECONDS)
    try:
        asked_until = time.monotonic() + 2 * interval
        while time.monotonic() < asked_until:  # threads that wait by the old interval ask for their turn here
            pass
        return [value for value in gc.get_objects() if wanted(value)]
    finally:
        sys.setswitchinterval(interval)
