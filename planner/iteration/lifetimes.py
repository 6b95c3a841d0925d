"""When each storage of one iteration lives, counted in operators. Views and ties share a storage; a resize parts lives.

Frees are observed, not derived: each storage reports when its last reference goes (as in
torch.distributed._tools.mem_tracker).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from checkflow.core.graph import GraphStorage, StateKind, StorageKind

_STATE = frozenset(get_args(StateKind))


@dataclass(slots=True)
class _Record:
    name: str
    kind: StorageKind
    size_bytes: int
    created: int
    last_use: int
    freed: int | None = None  # last operator of its life; None while it lives
    first_write: int | None = None
    empty: bool = False  # between two lives of one storage


class StorageLedger:
    """Every device storage seen. Indices are stable until :meth:`storages` drops what never lived.

    ``operators`` gives the number of operators so far.
    """

    def __init__(self, operators: Callable[[], int]) -> None:
        self._operators = operators
        self._records: list[_Record] = []
        self._by_address: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._closed = False

    def enter(self, tensor: torch.Tensor, name: str, kind: StorageKind, created: int) -> int:
        """Return the index of a tensor's storage, new or not; ``created``: by which operator, -1 at the boundary."""
        return self.enter_storage(tensor.untyped_storage(), name, kind, created)

    def enter_storage(self, storage: torch.UntypedStorage, name: str, kind: StorageKind, created: int) -> int:
        """As :meth:`enter`, for a storage without a tensor at hand."""
        address = storage._cdata
        known = self._by_address.get(address)
        if known is not None:
            return known
        index = len(self._records)
        self._records.append(_Record(name, kind, int(storage.nbytes()), created, created))
        self._by_address[address] = index
        self._watches[address] = weakref.ref(storage, lambda _: self._free(address))
        return index

    def resize(self, storage: torch.UntypedStorage) -> None:
        """End the life of a known storage that was resized, and begin another: FSDP2 frees whole parameters so."""
        address = storage._cdata
        known = self._by_address.get(address)
        if self._closed or known is None or storage.nbytes() == self._records[known].size_bytes:
            return
        old = self._records[known]
        self._free(address)
        index = self.enter_storage(storage, old.name, old.kind, self._operators())
        self._records[index].empty = not storage.nbytes()

    @contextlib.contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Notice every ``storage.resize_``."""
        original = torch.UntypedStorage.resize_

        @functools.wraps(original)
        def resized(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self.resize(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def enter_unseen(self, name: str, size_bytes: int) -> None:
        """Enter memory that lasts all iteration and belongs to no known tensor; none unless positive."""
        if size_bytes > 0:
            self._records.append(_Record(name, "activation", size_bytes, -1, -1))

    def find(self, tensor: torch.Tensor) -> int | None:
        return self._by_address.get(tensor.untyped_storage()._cdata)

    def rename(self, tensor: torch.Tensor, name: str, kind: StorageKind) -> None:
        """Name a storage once its role is known (a gradient, when it is accumulated)."""
        index = self.find(tensor)
        if index is not None and self._records[index].kind == "activation":
            self._records[index].name, self._records[index].kind = name, kind

    def use(self, index: int, operator: int, *, writes: bool) -> None:
        record = self._records[index]
        record.last_use = operator
        if writes and record.first_write is None:
            record.first_write = operator

    def first_write(self, index: int) -> int | None:
        """Return the first operator that writes a storage; the one that creates it counts."""
        return self._records[index].first_write

    def created(self, index: int) -> int:
        return self._records[index].created

    def close(self) -> None:
        """End the iteration: what lives now also lives at the next boundary."""
        self._closed = True
        self._watches.clear()

    def storages(self) -> tuple[tuple[GraphStorage, ...], dict[int, int]]:
        """Return all storages that live at some time, and their place in that tuple by index."""
        end = self._operators()
        storages: list[GraphStorage] = []
        places: dict[int, int] = {}
        for index, record in enumerate(self._records):
            eager_end = end if record.freed is None else record.freed
            # What outlives the iteration in place holds a value (state, gradients kept by set_to_none=False); the batch
            # is needed only until its last use.
            kept = record.created == -1 and record.kind != "input"
            lasting = record.freed is None and (kept or record.kind in _STATE)
            graph_end = end if lasting else record.last_use
            if eager_end >= record.created and not record.empty:
                places[index] = len(storages)
                size, created = record.size_bytes, record.created
                storages.append(GraphStorage(record.name, record.kind, size, created, graph_end, eager_end))
        return tuple(storages), places

    def _free(self, address: int) -> None:
        if self._closed:
            return
        self._records[self._by_address.pop(address)].freed = self._operators() - 1
        del self._watches[address]
