"""The bare link between a GPU and its host: plain asynchronous copies, without anything of checkflow's engine; and what
this machine allows of what that engine does.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.figures import LOCKED, Row
from benchmarks.gpu.worker import SHARED_MEMORY
from checkflow.core.errors import CheckflowError
from checkflow.core.machine.host_memory import free_host_memory_bytes
from checkflow.planner.measure.timing import EventClock, clock_of, spread_of
from checkflow.runtime.system import numa
from checkflow.runtime.transfer.cudart import (
    HOST_POINTERS,
    PAGEABLE_ACCESS,
    REGISTRATION,
    Copies,
    CudaRuntime,
    load_runtime,
)
from checkflow.runtime.transfer.engine import Transfer

ATTRIBUTES = {
    "can use host pointer for registered memory": HOST_POINTERS,
    "pageable memory access": PAGEABLE_ACCESS,
    "host register supported": REGISTRATION,
}
CHECKED_BYTES = 64 * 2**20
PIECES = 1000  # of a batch that is checked


def what_it_allows(device: torch.device) -> Row:
    """What the device says of itself, and what is free on both sides."""
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    return {
        "attributes": {name: load_runtime().attribute(number, device.index) for name, number in ATTRIBUTES.items()},
        "runtime": load_runtime().version,
        "free_bytes": {
            "device": free_bytes,
            "device, at most": all_bytes,
            "host": free_host_memory_bytes(),
            "shared memory": shutil.disk_usage(SHARED_MEMORY).free,
        },
        "locked_memory_limit_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],  # -1: none
    }


@contextlib.contextmanager
def host_memory(kind: str, size_bytes: int, runtime: CudaRuntime, index: int) -> Iterator[torch.Tensor]:
    """Memory as staging buffers are, near a GPU: uint8, zeros.

    Args:
        kind: "shared", a file in shared memory, and "anonymous" are locked in place for CUDA; "allocated" is locked
            from the begin, by CUDA; "unlocked" is what is left where all of that is refused.
        index: of the GPU.

    Raises:
        CheckflowError: CUDA does not take it.
        OSError: there is not so much of it.
    """
    pages: mmap.mmap | ctypes.Array[ctypes.c_char]
    with contextlib.ExitStack() as ending:
        if kind == "allocated":
            address = runtime.allocate_host(size_bytes)
            ending.callback(runtime.free_host, address)
            pages = (ctypes.c_char * size_bytes).from_address(address)
        elif kind == "shared":
            file = ending.enter_context(tempfile.TemporaryFile(dir=SHARED_MEMORY))
            os.ftruncate(file.fileno(), size_bytes)
            pages = mmap.mmap(file.fileno(), size_bytes)
        else:
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        if kind != "allocated" and (node := numa.node_of_pci(runtime.pci_address(index))) is not None:
            numa.prefer_node(address, size_bytes, node)
        if kind == "shared":
            os.posix_fallocate(file.fileno(), 0, size_bytes)  # or a page that is not to be had would be SIGBUS
        ctypes.memset(address, 0, size_bytes)
        if kind in ("shared", "anonymous"):
            # Torch's own call leaves the error of a refusal behind, for the next kernel to find.
            runtime.register(address, size_bytes)
            ending.callback(runtime.unregister, address)
        ending.callback(torch.cuda.synchronize)
        yield torch.frombuffer(pages, dtype=torch.uint8)


def try_host_memory(kind: str, device: torch.device) -> Row:
    """Whether CUDA takes this kind of host memory, and whether what is copied there arrives: see
    :func:`benchmarks.gpu.figures.unable`."""
    runtime = copy.copy(load_runtime())  # a batch that is refused here is still to be tried by the jobs that follow
    there = torch.randint(256, (CHECKED_BYTES,), dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    locked = kind in LOCKED
    row: Row = {"kind": kind}
    try:
        with host_memory(kind, CHECKED_BYTES, runtime, device.index) as here:
            row["single"] = arrives(runtime, there, here, stream, 1, locked=locked)
            # Elsewhere a batch is taken, and faults later: every call of CUDA fails from then on.
            if locked and runtime.attribute(HOST_POINTERS, device.index) == 1:
                row["batched"] = arrives(runtime, there, here, stream, PIECES, locked=True)
                row["batches"] = runtime.batches
    except (CheckflowError, OSError) as error:
        row["refused"] = " ".join(str(error).split())
    return row


def arrives(
    runtime: CudaRuntime,
    there: torch.Tensor,
    here: torch.Tensor,
    stream: torch.cuda.Stream,
    pieces: int,
    *,
    locked: bool,
) -> bool:
    """Whether what is copied in so many pieces, from one byte to thousands, is what arrives."""
    here.zero_()
    edges = [there.nbytes * i**2 // pieces**2 for i in range(pieces + 1)]
    transfers = [
        Transfer(there.data_ptr() + begin, here.data_ptr() + begin, end - begin)
        for begin, end in itertools.pairwise(edges)
    ]
    runtime.copy(Copies(transfers, asynchronous=locked, batched=locked), stream.cuda_stream, beside=True)
    stream.synchronize()
    return torch.equal(here, there.cpu())


def bare_link(device: torch.device, size_bytes: int, laps: int = 9) -> Row:
    """Bytes per second of plain asynchronous copies, one at a time: least, median and most.

    By kind of host memory: what torch pins, and what staging buffers may lie in, locked. In the place of the
    figures of one that CUDA does not take stands why.
    """
    found: Row = {"bytes": size_bytes}
    there = torch.randint(255, (size_bytes,), dtype=torch.uint8, device=device)
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found |= _rates("pinned", pinned, there, laps)
    for kind in LOCKED:
        try:
            with host_memory(kind, size_bytes, load_runtime(), device.index) as mapped:
                found |= _rates(kind, mapped, there, laps)
        except (CheckflowError, OSError) as error:  # a limit on locked memory, most often
            found[kind] = f"refused: {' '.join(str(error).split())}"
    return found


def usual_to_host(link: Row, kind: str) -> float:
    """The median copy of :func:`bare_link` to this kind of host memory; to what torch pins, where CUDA took none."""
    usual: float = link.get(f"{kind}, to host", link["pinned, to host"])["median"]
    return usual


def _rates(kind: str, here: torch.Tensor, there: torch.Tensor, laps: int) -> Row:
    found: Row = {}
    clock = clock_of(there.device)
    for way, target, source in (("to host", here, there), ("to device", there, here)):
        seconds = spread_of(clock.laps(functools.partial(target.copy_, source, non_blocking=True), laps + 1)[1:])
        rates = {"least": seconds.most, "median": seconds.median, "most": seconds.least}
        found[f"{kind}, {way}"] = {name: here.nbytes / value for name, value in rates.items()}
    return found


def both_ways(device: torch.device) -> Row:
    """To the host while as much comes from it, as where a data loader feeds training; and beside products."""
    size_bytes = 256 * 2**20
    there, other = (torch.randint(255, (size_bytes,), dtype=torch.uint8, device=device) for _ in range(2))
    here, source = (torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    matrix = torch.randn(4096, 4096, device=device)
    product = torch.empty_like(matrix)
    side = torch.cuda.Stream()

    def beside(work: Callable[[], object]) -> float:
        """Bytes per second to the host while ``work`` runs on a stream of its own."""

        def lap() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()
            here.copy_(there, non_blocking=True)

        seconds = spread_of(EventClock(device).laps(lap, 10)[1:]).median
        torch.cuda.synchronize()
        return size_bytes / seconds

    def products() -> None:
        for _ in range(16):
            torch.mm(matrix, matrix, out=product)

    return {
        "bytes": size_bytes,
        "alone": beside(lambda: None),
        "while as much comes from the host": beside(lambda: other.copy_(source, non_blocking=True)),
        "while matrices are multiplied": beside(products),
    }
