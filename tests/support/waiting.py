"""Waiting until something has happened, which takes as long as the machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkflow.runtime.store.discovery import find

PATIENCE_SECONDS = 300.0  # for what comes, however busy the machine is; a test that hangs ends later still


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
