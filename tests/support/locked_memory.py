"""Host memory as staging buffers are: page-aligned, and locked in place where an engine copies to it from a GPU."""

from __future__ import annotations

import ctypes
import mmap

from checkflow.runtime.transfer.cuda import CudaCopyEngine
from checkflow.runtime.transfer.cuda_device import CudaDevice
from checkflow.runtime.transfer.engine import CopyEngine


def device_of(engine: CopyEngine) -> CudaDevice | None:
    """The GPU that it copies from, if it is a real one."""
    device = engine._device if isinstance(engine, CudaCopyEngine) else None
    return device if isinstance(device, CudaDevice) else None


class LockedMemory:
    """Zeroed bytes at ``address``; a GPU's engine must be done with them before :meth:`unlock`.

    The runtime takes no batch of copies into memory that is not locked, and tries none again in this process.
    """

    def __init__(self, engine: CopyEngine, size_bytes: int) -> None:
        self._bytes = (ctypes.c_char * size_bytes).from_buffer(mmap.mmap(-1, size_bytes))
        self.address = ctypes.addressof(self._bytes)
        self._device = device_of(engine)
        if self._device is not None:
            self._device.register(self.address, size_bytes)

    @property
    def raw(self) -> bytes:
        return self._bytes.raw

    def unlock(self) -> None:
        if self._device is not None:
            self._device.unregister(self.address)
