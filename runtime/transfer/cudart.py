"""The CUDA runtime, for the few calls that torch does not offer: copies by address, singly or batched.

It is the library that torch has loaded: errors are kept per library, and signatures differ between versions.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.engine import Transfer

logger = logging.getLogger("checkflow")

# Constants of driver_types.h.
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses say where both ends lie
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
_NON_BLOCKING = 1  # cudaStreamNonBlocking: the legacy stream neither waits for it nor holds it up
_LEGACY = (0, 1)  # handles of the legacy stream
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_OVERLAP = 1  # cudaMemcpyFlagPreferOverlapWithCompute: by copy engines, not by kernels
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_NOT_CAPTURING = 0  # cudaStreamCaptureStatusNone; 2: a capture that was invalidated, and must still be ended
_INVALID_VALUE = 1  # cudaErrorInvalidValue
_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: asked of the legacy stream while another one is captured
_BATCHES_SINCE = 12_080  # versions count as 1000 * major + 10 * minor
_NO_FAIL_INDEX_SINCE = 13_000
# cudaDeviceAttr: whether the device uses pageable memory, takes the host's address of registered memory,
# and lets memory be registered.
PAGEABLE_ACCESS, HOST_POINTERS, REGISTRATION = 88, 91, 99
# Drivers have crashed at 51,828 copies a call, and hung on repeated batches of thousands (vllm-project/vllm#49276).
MOST_TOGETHER = 512
SWITCH = "CHECKFLOW_BATCH_COPIES"  # environment variable: "0" turns batches off


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes, without the location hints, which only managed memory uses."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class InvalidCopyError(CheckflowError):
    """The runtime calls a copy invalid: usually an end of it spans two allocations."""


class _Batch:
    """Arguments of one batched call: at most ``MOST_TOGETHER`` copies."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.count = len(transfers)
        self.targets = (ctypes.c_void_p * self.count)(*(transfer.target for transfer in transfers))
        self.sources = (ctypes.c_void_p * self.count)(*(transfer.source for transfer in transfers))
        self.sizes = (ctypes.c_size_t * self.count)(*(transfer.length_bytes for transfer in transfers))


class Copies:
    """Copies that are enqueued together: prepared once, used at every capture.

    Args:
        asynchronous: whether calls return before the bytes have moved, because the host memory is locked.
        batched: whether one call may take many copies; only with ``asynchronous``.
    """

    def __init__(self, transfers: Sequence[Transfer], *, asynchronous: bool, batched: bool) -> None:
        self.asynchronous = asynchronous
        self.singly = tuple((transfer.target, transfer.source, transfer.length_bytes) for transfer in transfers)
        self.batches: tuple[_Batch, ...] = ()
        if asynchronous and batched and len(transfers) > 1:
            begins = range(0, len(transfers), MOST_TOGETHER)
            self.batches = tuple(_Batch(transfers[begin : begin + MOST_TOGETHER]) for begin in begins)


class CudaRuntime:
    """Calls of the CUDA runtime. Each returns at once and raises its error.

    Args:
        library: loaded by ctypes.CDLL: it releases the GIL during a call.
        holding: loaded by ctypes.PyDLL: it keeps the GIL. A busy thread may hold a released GIL for 5 ms, which would
            add up over hundreds of copies.
    """

    def __init__(self, library: Any, holding: Any = None) -> None:
        self._library, self._holding = library, library if holding is None else holding
        library.cudaGetErrorString.restype = ctypes.c_char_p
        for one in (self._library, self._holding):
            one.cudaMemcpyAsync.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
            ]  # fmt: skip
        library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        library.cudaHostAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaFreeHost.argtypes = [ctypes.c_void_p]
        self._holding.cudaStreamIsCapturing.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        version = ctypes.c_int()
        self._check(library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self.version = version.value
        # Whether to batch copies; False for good once the runtime has refused.
        has_batches = self.version >= _BATCHES_SINCE and hasattr(library, "cudaMemcpyBatchAsync")
        self.batches = has_batches and os.environ.get(SWITCH) != "0"
        self._attributes = tuple(_Attributes(source_order=_STREAM_ORDER, flags=flags) for flags in (0, _OVERLAP))
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    def copy(self, copies: Copies, stream: int, *, beside: bool = False) -> None:
        """Enqueue copies, in no order among themselves; batched if the runtime can.

        Args:
            stream: its handle; the legacy stream takes copies one by one only.
            beside: ask the runtime to leave the multiprocessors to computation.

        Raises:
            InvalidCopyError: a copy is invalid; others may have been enqueued.
            CheckflowError: the runtime refuses, or reports an earlier fault of the device.
        """
        if (
            self.batches
            and copies.batches
            and stream not in _LEGACY
            and all(self._copy_batch(batch, stream, beside) for batch in copies.batches)
        ):
            return
        copy = (self._holding if copies.asynchronous else self._library).cudaMemcpyAsync
        for target, source, length_bytes in copies.singly:
            if code := copy(target, source, length_bytes, _DEFAULT_KIND, stream):
                raise (InvalidCopyError if code == _INVALID_VALUE else CheckflowError)(self._explained(code))

    def _copy_batch(self, batch: _Batch, stream: int, beside: bool) -> bool:
        """Try one batched call; False if it was refused, and then it is never tried again: a driver may lack it."""
        failed = () if self.version >= _NO_FAIL_INDEX_SINCE else (ctypes.byref(self._failed),)
        code = self._holding.cudaMemcpyBatchAsync(
            batch.targets, batch.sources, batch.sizes, ctypes.c_size_t(batch.count),
            ctypes.byref(self._attributes[beside]), ctypes.byref(self._first), ctypes.c_size_t(1),
            *failed, ctypes.c_void_p(stream),
        )  # fmt: skip
        if code:
            self.batches = False
            logger.info("copies to host memory are made one by one: %s", self._explained(code))
        return not code

    def register(self, address: int, size_bytes: int) -> None:
        """Lock host memory in place, so that copies to it run without the host; may exceed the limit on locked
        memory.
        """
        self._check(self._library.cudaHostRegister(address, size_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""
        self._check(self._library.cudaHostUnregister(address))

    def allocate_host(self, size_bytes: int) -> int:
        """Allocate locked host memory; returns its address."""
        place = ctypes.c_void_p()
        self._check(self._library.cudaHostAlloc(ctypes.byref(place), size_bytes, _PORTABLE))
        return place.value or 0

    def free_host(self, address: int) -> None:
        """Undo :meth:`allocate_host`."""
        self._check(self._library.cudaFreeHost(address))

    def attribute(self, number: int, index: int) -> int:
        """A property of a device, by its ``cudaDeviceAttr`` number."""
        value = ctypes.c_int()
        self._check(self._library.cudaDeviceGetAttribute(ctypes.byref(value), number, index))
        return value.value

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        status = ctypes.c_int()
        code = self._holding.cudaStreamIsCapturing(stream, ctypes.byref(status))
        if code == _IMPLICIT:
            self._library.cudaGetLastError()
            return True
        self._check(code)
        return status.value != _NOT_CAPTURING

    def make_stream(self) -> int:
        """Make a stream of the current device and return its handle; torch's come from a pool and are shared."""
        handle = ctypes.c_void_p()
        self._check(self._library.cudaStreamCreateWithFlags(ctypes.byref(handle), _NON_BLOCKING))
        return handle.value or 0

    def pci_address(self, index: int) -> str:
        """A device's domain, bus, device and function, as "0000:3B:00.0"."""
        text = ctypes.create_string_buffer(64)
        self._check(self._library.cudaDeviceGetPCIBusId(text, len(text), index))
        return text.value.decode()

    def exempt_thread(self) -> int:
        """Let this thread wait for events while another one captures a CUDA graph; returns the mode before."""
        return self.restore_thread(_RELAXED)

    def restore_thread(self, mode: int) -> int:
        """Set this thread's mode; returns the one before."""
        both = ctypes.c_int(mode)
        self._check(self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(both)))
        return both.value

    def _check(self, code: int) -> None:
        if code:
            raise CheckflowError(self._explained(code))

    def _explained(self, code: int) -> str:
        """An error's message. Reading it clears the error, which torch would otherwise report at its next kernel."""
        self._library.cudaGetLastError()
        said = self._library.cudaGetErrorString(code) or b"unknown error"
        return f"CUDA: {said.decode(errors='replace')} (error {code})"


@functools.cache
def load_runtime() -> CudaRuntime:
    """The CUDA runtime of this process. Raises CheckflowError if it is missing, or torch is built for another GPU."""
    if torch.version.cuda is None:
        raise CheckflowError("this torch is not built for CUDA: install a build for NVIDIA GPUs, or train on the CPU")
    major = torch.version.cuda.partition(".")[0]
    tried = []
    for name in _candidates(major):
        try:
            return CudaRuntime(ctypes.CDLL(name), ctypes.PyDLL(name))
        except (OSError, AttributeError) as error:  # not there, or not the runtime
            tried.append(f"{name}: {error}")
    raise CheckflowError(
        f"cannot find CUDA's runtime library, libcudart.so.{major}, which torch {torch.__version__} uses: put its "
        f"folder into LD_LIBRARY_PATH (tried {'; '.join(tried)})"
    )


def _candidates(major: str) -> Iterator[str]:
    """Where the library may be, the loaded one first."""
    yield from loaded_runtimes(_maps())
    yield f"libcudart.so.{major}"
    for folder in (Path(torch.__file__).parent / "lib", *(Path(entry) / "nvidia" for entry in sys.path if entry)):
        for pattern in (f"libcudart*.so.{major}*", f"*/lib/libcudart*.so.{major}*"):
            yield from sorted(glob.glob(str(folder / pattern)))


def loaded_runtimes(maps: str) -> list[str]:
    """The paths of CUDA runtimes that a process has mapped, from the text of ``/proc/self/maps``, each once."""
    paths = re.findall(r"^\S+\s+\S+\s+\S+\s+\S+\s+\d+\s+(/.*)$", maps, re.MULTILINE)
    return list(dict.fromkeys(path for path in paths if os.path.basename(path).startswith("libcudart")))


def _maps() -> str:
    try:
        return Path("/proc/self/maps").read_text(errors="replace")
    except OSError:  # no Linux
        return ""
