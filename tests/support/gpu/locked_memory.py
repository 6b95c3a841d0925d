"""Host memory as staging buffers are: page-aligned, and locked in place where an engine copies to it from a GPU."""

from __future__ import annotations

import ctypes
import json
import mmap
import os

import pytest

from benchmarks.gpu.figures import SHARED_LOCKED, UNABLE
from checkflow.runtime.transfer.cuda import CudaCopyEngine
from checkflow.runtime.transfer.cuda_device import CudaDevice
from checkflow.runtime.transfer.engine import CopyEngine


def device_of(engine: CopyEngine) -> CudaDevice | None:
    """The GPU that it copies from, if it is a real one."""
    device = engine._device if isinstance(engine, CudaCopyEngine) else None
    return device if isinstance(device, CudaDevice) else None


def skip_where_unable(what: str) -> None:
    """Skip a test that needs what ``make test-gpu`` has found this machine unable to."""
    reasons: dict[str, str] = json.loads(os.environ.get(UNABLE, "{}"))
    if what in reasons:
        pytest.skip(reasons[what])


class LockedMemory:
    """Zeroed bytes at ``address``; a GPU's engine must be done with them before :meth:`unlock`."""

    def __init__(self, engine: CopyEngine, size_bytes: int) -> None:
        self._bytes = (ctypes.c_char * size_bytes).from_buffer(mmap.mmap(-1, size_bytes))
        self.address = ctypes.addressof(self._bytes)
        self._device = device_of(engine)
        if self._device is not None:
            skip_where_unable(SHARED_LOCKED)
            self._device.register(self.address, size_bytes)

    @property
    def raw(self) -> bytes:
        return self._bytes.raw

    def unlock(self) -> None:
        if self._device is not None:
            self._device.unregister(self.address)
