"""What Python's collector tracks, looked through while other threads stand still."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable
from typing import Any

_LONG_SECONDS = 1.0  # a look takes less


def find_objects(kinds: Iterable[type]) -> list[Any]:
    """All objects of exactly these types.

    Another thread may be building a tuple. CPython cannot resize one that somebody else refers to, and raises
    SystemError there. So no other thread should run while the list of all objects is alive.
    """
    wanted, interval = frozenset(kinds), sys.getswitchinterval()
    sys.setswitchinterval(_LONG_SECONDS)
    try:
        asked_until = time.monotonic() + 20 * interval
        while time.monotonic() < asked_until:  # threads that wait by the old interval ask here, late on a busy machine
            pass
        return [one for one in gc.get_objects() if type(one) in wanted]
    finally:
        sys.setswitchinterval(interval)
