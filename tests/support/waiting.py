"""Waiting until something has happened, which takes as long as the machine needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkflow.runtime.store.discovery import find

PATIENCE_SECONDS = 300.0  # for what comes, however busy the machine is; a test that hangs ends later still
_STANDING = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")  # lines of /proc


def wait_for(happened: Callable[[], Any]) -> Any:
    """Its first true answer."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := happened()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)
    return found


def wait_until_saved(directory: Path, step: int) -> None:
    """A capture reaches the writer on the engine's thread: an idle writer does not mean that it is saved."""
    wait_for(lambda: any(path.name == f"step-{step:08d}" for path in find(directory)))


def blocked(waiter: threading.Thread | int) -> Callable[[], bool]:
    """Whether a thread of this process, or the main one of another, lives and stood still from one look to the next.

    It waits for what does not come then: not for a processor, and not for the GIL, which it would look for meanwhile.
    """
    path = Path(f"/proc/{waiter}" if isinstance(waiter, int) else f"/proc/self/task/{waiter.native_id}", "status")
    before = ""

    def stands_still() -> bool:
        nonlocal before
        now, last = "".join(line for line in path.read_text().splitlines() if line.startswith(_STANDING)), before
        before = now
        return now == last and "S (sleeping)" in now

    return stands_still
