"""The bare link between a GPU and its host: plain asynchronous copies, without anything of checkflow's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_figures import Row
from checkflow.core.errors import CheckflowError
from checkflow.planner.measure.timing import EventClock, clock_of, spread_of
from checkflow.runtime.transfer.cudart import load_runtime


@contextlib.contextmanager
def registered(size_bytes: int) -> Iterator[torch.Tensor]:
    """Host memory that CUDA was told of, as staging buffers are: uint8.

    Raises:
        CheckflowError: CUDA does not take it.
    """
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ctypes.memset(address, 0, size_bytes)
    runtime = load_runtime()  # torch's own call leaves the error of a refusal behind, for the next kernel to find
    runtime.register(address, size_bytes)
    try:
        yield torch.frombuffer(pages, dtype=torch.uint8)
    finally:
        torch.cuda.synchronize()
        runtime.unregister(address)


def bare_link(device: torch.device, size_bytes: int, laps: int = 9) -> Row:
    """Bytes per second of plain asynchronous copies, one at a time: least, median and most.

    Where CUDA takes no registered memory, ``registered`` says why, and the figures of pinned memory stand alone.
    """
    found: Row = {"bytes": size_bytes}
    there = torch.randint(255, (size_bytes,), dtype=torch.uint8, device=device)
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found |= _rates("pinned", pinned, there, laps)
    try:
        with registered(size_bytes) as mapped:
            found |= _rates("registered", mapped, there, laps)
    except (CheckflowError, OSError) as error:  # a limit on locked memory, most often
        found["registered"] = f"refused: {' '.join(str(error).split())}"
    return found


def most_to_host(link: Row) -> float:
    """The fastest copy of :func:`bare_link` to host memory as staging buffers are; else to what torch pins."""
    best: float = link.get("registered, to host", link["pinned, to host"])["most"]
    return best


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
