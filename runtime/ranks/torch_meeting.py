"""Ranks meet in torch's own TCP store, torchrun's or the default process group's, over a connection of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from checkflow.core.errors import StorageError

_PREFIX = "checkflow"


class TorchMeeting:
    """Values under a prefix of a TCP store. The store outlives the ranks where it is torchrun's.

    Args:
        prefix: of all keys, the same on all ranks.
        timeout_seconds: for one answer of the store.

    Raises:
        StorageError: the store cannot be reached.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout_seconds: float) -> None:
        self._host, self._port, self._timeout = host, port, timedelta(seconds=timeout_seconds)
        self._place, self._prefix = f"the store at {host}:{port}", f"{_PREFIX}/{prefix}/"
        self._known: set[str] = set()  # keys that were there: none is removed but receipts, which are read once
        self._store: Any = None
        self._closed = False
        self._ask(lambda store: None)

    def put(self, key: str, value: bytes) -> None:
        self._ask(lambda store: store.set(self._prefix + key, value))

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        new = [key for key in keys if key not in self._known]
        found = self._ask(lambda store: {key for key in new if store.check([self._prefix + key])})
        there = [key for key in keys if key in self._known or key in found]
        if not there:
            return {}
        self._known.update(key for key in there if not key.startswith("receipt/"))
        values = self._ask(lambda store: store.multi_get([self._prefix + key for key in there]))
        return dict(zip(there, (bytes(value) for value in values), strict=True))

    def drop(self, keys: Sequence[str]) -> None:
        self._ask(lambda store: [store.delete_key(self._prefix + key) for key in keys])

    def close(self, *, last: bool = False) -> None:
        self._store, self._closed = None, True  # its destructor closes the connection; the store ends with its process

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        """One answer. After an error the connection is made anew: a late answer would be taken for the next one."""
        if self._closed:
            raise StorageError(f"{self._place} is closed")
        try:
            if self._store is None:
                self._store = TCPStore(
                    self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._timeout
                )
            return ask(self._store)
        except (dist.DistError, RuntimeError) as error:
            self._store = None
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StorageError(f"{self._place} does not answer: {reason}") from error


def store_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Host and port of the TCP store by which this job's ranks have met; None: they met by something else."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("MASTER_PORT", "").isdecimal():
        return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store: Any = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None
