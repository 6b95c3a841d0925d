"""Where ranks meet: a place of small values by key. Nothing here waits without a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from checkflow.core.errors import MissingShardsError
from checkflow.runtime.ranks.records import name_ranks

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

    def close(self) -> None:
        """Leave the place."""


def wait(place: MeetingPlace, keys: Mapping[int, str], wait_seconds: float, what: str) -> dict[int, bytes]:
    """The value of each rank's key, by rank. Raises MissingShardsError that names the ranks whose value did not come.

    Args:
        what: is awaited, for the message.
    """
    found: dict[int, bytes] = {}

    def complete() -> bool | None:
        missing = {key: rank for rank, key in keys.items() if rank not in found}
        found.update((missing[key], value) for key, value in place.get(list(missing)).items())
        return True if len(found) == len(keys) else None

    if wait_until(complete, wait_seconds) is None:
        late = tuple(sorted(rank for rank in keys if rank not in found))
        raise MissingShardsError(f"no {what} from {name_ranks(late)} within {wait_seconds:g} s", late)
    return found


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
