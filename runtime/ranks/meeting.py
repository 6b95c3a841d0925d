"""Where ranks meet: a place of small values by key. Nothing here waits without a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.005, 0.25
_T = TypeVar("_T")
_monotonic, _sleep = time.monotonic, time.sleep


class MeetingPlace(Protocol):
    """Small values by key, seen by all ranks of one generation. One thread uses it.

    Each method raises StorageError where the place cannot be reached; nothing says then whether ``put`` took effect.
    """

    def put(self, key: str, value: bytes) -> None:
        """Replace a value."""

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values that are there, at once."""

    def drop(self, keys: Sequence[str]) -> None:
        """Remove values that may be there."""

    def close(self, *, last: bool = False) -> None:
        """Leave the place. ``last``: no rank needs it any more, and it may go."""


def wait_until(happened: Callable[[], _T | None], wait_seconds: float) -> _T | None:
    """Poll until ``happened`` returns something, at least once; None when the time is over."""
    end, pause = _monotonic() + wait_seconds, FIRST_POLL_SECONDS
    while (found := happened()) is None:
        left = end - _monotonic()
        if left <= 0:
            return None
        _sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    return found
