"""One CUDA GPU as the copy engine sees it, and the host memory that it copies to.

Streams, events and memory are torch's; copies go by address, through the CUDA runtime.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from checkflow.core.errors import CheckflowError
from checkflow.core.units import format_size
from checkflow.runtime.system import numa
from checkflow.runtime.transfer.cuda_capture import merged
from checkflow.runtime.transfer.cudart import HOST_POINTERS, Copies, InvalidCopyError, load_runtime
from checkflow.runtime.transfer.device import Stream
from checkflow.runtime.transfer.engine import Transfer

logger = logging.getLogger("checkflow")


@dataclass(slots=True)
class _Prepared:
    """The result of :meth:`CudaDevice.prepare`."""

    transfers: Sequence[Transfer]
    inside: bool
    copies: Copies
    merged: bool  # neighbours are one copy


class CudaDevice:
    """Streams, events, memory and copies of one GPU; see :class:`.device.StreamDevice`."""

    def __init__(self, device: torch.device) -> None:
        self.memory, self._index = device, device.index
        self._runtime = load_runtime()
        self.side: Stream = _side_stream(device)
        self._free_events: tuple[list[_Event], list[_Event]] = ([], [])  # plain, timed
        self._locked: dict[int, int] = {}  # host memory, by address: its bytes
        # A device that cannot use the host's address of registered memory accepts a batch of copies there, and faults
        # later: every call of CUDA fails from then on, training's too (sgl-project/sglang#40232).
        self._batched = self._runtime.attribute(HOST_POINTERS, self._index) == 1
        self._merges = True

    def current(self) -> Stream:
        try:
            stream: Stream = torch.cuda.current_stream(self._index)
        except RuntimeError as error:
            raise _checkflow_error(error) from error
        if self.capturing(stream):
            raise CheckflowError(
                "training is being captured into a CUDA graph, which passes no anchor when it is replayed: "
                "nothing can be copied meanwhile"
            )
        return stream

    def allocate(self, size_bytes: int) -> tuple[int, object]:
        try:
            # Not a tensor: under deterministic algorithms torch would fill it first.
            memory = torch.UntypedStorage(size_bytes, device=self.memory)  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError as error:
            raise CheckflowError(
                f"no GPU memory for a snapshot of {format_size(size_bytes)}: make a plan with --extra-memory 0, or "
                "with a lower --memory-limit"
            ) from error
        except RuntimeError as error:
            raise _checkflow_error(error) from error
        return memory.data_ptr(), memory

    def capturing(self, stream: Stream) -> bool:
        if handle := cast(torch.cuda.Stream, stream).cuda_stream:
            return self._runtime.is_capturing(handle)
        with self._current():
            return self._runtime.is_capturing(handle)

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Make this device the current one: the legacy stream and a batch of copies are of the current device."""
        here = torch.cuda.current_device() == self._index
        return contextlib.nullcontext() if here else torch.cuda.device(self._index)

    @property
    def batches(self) -> bool:
        """Whether one call makes many copies to locked memory."""
        return self._batched and self._runtime.batches

    def prepare(self, transfers: Sequence[Transfer], *, inside: bool = False) -> _Prepared:
        return _Prepared(transfers, inside, self._copies(transfers, inside, self._merges), self._merges)

    def _copies(self, transfers: Sequence[Transfer], inside: bool, merge: bool) -> Copies:
        fewest = merged(transfers) if merge else [transfer for transfer in transfers if transfer.length_bytes]
        asynchronous = inside or all(map(self._is_locked, fewest))
        return Copies(fewest, asynchronous=asynchronous, batched=self._batched)

    def _is_locked(self, transfer: Transfer) -> bool:
        begin, end = transfer.target, transfer.target + transfer.length_bytes
        return any(address <= begin and end <= address + size for address, size in self._locked.items())

    def copy(self, prepared: _Prepared, stream: Stream) -> None:
        if prepared.merged and not self._merges:
            prepared.copies, prepared.merged = self._copies(prepared.transfers, prepared.inside, merge=False), False
        batches = self._runtime.batches
        try:
            self._copy(prepared.copies, stream)
        except InvalidCopyError as error:
            if not prepared.merged:
                raise
            # Another allocator than torch's: neighbours may be two allocations.
            logger.info("adjacent tensors in GPU memory are copied one by one from now on: %s", error)
            self._merges, self._runtime.batches = False, batches
            self.copy(prepared, stream)

    def _copy(self, copies: Copies, stream: Stream) -> None:
        with self._current():
            self._runtime.copy(copies, cast(torch.cuda.Stream, stream).cuda_stream, beside=stream is self.side)

    def record(self, stream: Stream, *, timed: bool = False) -> _Event:
        try:
            event = self._free_events[timed].pop()
        except IndexError:
            event = _Event(timed)
        try:
            event.event.record(cast(torch.cuda.Stream, stream))
        except RuntimeError as error:
            raise _checkflow_error(error) from error
        return event

    def wait(self, stream: Stream, event: _Event) -> None:
        try:
            event.event.wait(cast(torch.cuda.Stream, stream))
        except RuntimeError as error:
            raise _checkflow_error(error) from error

    def done(self, event: _Event) -> bool:
        with self._asking():
            return bool(event.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: _Event) -> None:
        with self._asking():
            event.event.synchronize()

    def seconds_between(self, before: _Event, after: _Event) -> float:
        with self._asking():
            if not after.event.query():  # type: ignore[no-untyped-call]
                return 0.0
            milliseconds: float = before.event.elapsed_time(after.event)
        return milliseconds / 1e3

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask an event without invalidating the CUDA graph that another thread may be capturing."""
        mode = self._runtime.exempt_thread()
        try:
            yield
        except RuntimeError as error:
            raise _checkflow_error(error) from error
        finally:
            self._runtime.restore_thread(mode)

    def recycle(self, events: Iterable[_Event]) -> None:
        for event in events:
            self._free_events[event.timed].append(event)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index)

    # Host memory

    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the GPU's PCI slot, if the system says."""
        return numa.node_of_pci(self._runtime.pci_address(self._index))

    def register(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._index):
            self._runtime.register(address, size_bytes)
        self._locked[address] = size_bytes

    def unregister(self, address: int) -> None:
        self._locked.pop(address, None)
        self._runtime.unregister(address)

    def allocate_host(self, size_bytes: int) -> int:
        with torch.cuda.device(self._index):
            address = self._runtime.allocate_host(size_bytes)
        self._locked[address] = size_bytes
        return address

    def free_host(self, address: int) -> None:
        self._locked.pop(address, None)
        self._runtime.free_host(address)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The engine's stream: one for each GPU in the process."""
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(load_runtime().make_stream(), device)  # type: ignore[no-untyped-call]


class _Event:
    """A torch event that knows whether it is timed. A host thread that waits for it sleeps."""

    __slots__ = ("event", "timed")

    def __init__(self, timed: bool) -> None:
        self.timed = timed
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]


def _checkflow_error(error: RuntimeError) -> CheckflowError:
    """An error of torch's CUDA calls as a CheckflowError."""
    return CheckflowError(f"CUDA: {str(error).partition(chr(10))[0]}")
