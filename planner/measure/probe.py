"""Measures this machine as a :class:`.core.machine.device.Device`: copies, products, streaming, launches, its disk.

docs/how-to/probe.md says what each figure means. Every one is the median of several repetitions
(:mod:`.measure.timing`), with its spread. Arrays are far larger than caches, within an eighth of the free memory;
products grow until one takes long enough to be timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkflow.core.errors import CheckflowError
from checkflow.core.machine.device import Device
from checkflow.core.machine.host_memory import free_host_memory_bytes
from checkflow.core.units import format_size
from checkflow.planner.measure.disk import disk_figures
from checkflow.planner.measure.machine import Machine, free_memory_bytes, this_machine
from checkflow.planner.measure.timing import (
    Clock,
    Effort,
    Figure,
    HostClock,
    Work,
    clock_of,
    rate,
    repeat,
)
from checkflow.planner.measure.torch_settings import torch_settings_kept

Progress = Callable[[str], None]

_MIB = 2**20
LEAST_ARRAY_BYTES = 8 * _MIB  # smaller ones fit caches
LAUNCHES = 1000  # in one lap
PIECES, PIECE_BYTES = 128, 4096  # of small copies in one lap
LEAD_BYTES = 32 * _MIB  # of the copy before them: the host issues the pieces while it crosses a 50 GB/s link
_FIRST_PRODUCT, _LARGEST_PRODUCT = 512, 16384  # rows and columns
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
# First compute capability whose matrix units take a dtype (NVIDIA, CUDA C++ programming guide, table of features by
# compute capability). Only data-centre chips have float64 ones.
_MATRIX_SINCE = {"float16": (7, 0), "tf32": (8, 0), "bfloat16": (8, 0)}
_MATRIX_FLOAT64 = frozenset({(8, 0), (9, 0), (10, 0)})
_DIGITS = 4  # of a median in a device: more than a measurement has


FULL = Effort(repetitions=25, seconds=3.0, array_bytes=1024 * _MIB, product_seconds=0.02, disk_bytes=1024 * _MIB)
QUICK = Effort(repetitions=7, seconds=0.25, array_bytes=128 * _MIB, product_seconds=0.005, disk_bytes=64 * _MIB)
PRODUCT = "product, "  # then the dtype
PIECE = "each piece"
_PORTABLE = 1  # cudaHostRegisterPortable, of driver_types.h


@dataclass(frozen=True, slots=True)
class Probed:
    """A machine's figures, and the device made of them."""

    device: Device
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]  # what was not measured, or otherwise than its name says


def probe(
    directory: Path | None,
    effort: Effort = FULL,
    *,
    machine: Machine | None = None,
    clock: Clock | None = None,
    progress: Progress = lambda part: None,
) -> Probed:
    """Measure this machine: its CUDA device if there is one, else its CPU.

    Args:
        directory: where to measure the disk; None: nowhere.
        progress: called with the name of what is measured next.

    Raises:
        CheckflowError: there is not enough memory; one line.
        StorageError: the disk cannot be measured in this directory; one line with the reason.
    """
    here = this_machine() if machine is None else machine
    disk: list[Figure] = []
    disk_notes: list[str] = []
    if directory is not None:  # first, so that an unwritable folder fails at once
        progress("the disk")
        disk, disk_notes = disk_figures(directory, effort, HostClock() if clock is None else clock)
    figures, notes = device_figures(here, clock_of(here.device) if clock is None else clock, effort, progress)
    figures += disk
    return Probed(make_device(here, figures), tuple(figures), (*notes, *disk_notes))


def device_figures(
    machine: Machine, clock: Clock, effort: Effort, progress: Progress
) -> tuple[list[Figure], list[str]]:
    """Return all figures but the disk's, and notes about them."""
    device, notes = machine.device, []
    array_bytes = array_size_bytes(effort, device)
    progress("copies in memory")
    figures = memory_figures(device, clock, effort, array_bytes)
    progress("copies between device and host")
    if machine.kind == "cuda":
        figures += link_figures(device, clock, effort, array_bytes)
    else:
        figures += host_link_figures(clock, effort, array_bytes)
        notes.append("without a GPU the link is one thread's copy from memory to memory, as the runtime makes it")
    for dtype in (*_DTYPES, "tf32"):
        progress(f"products in {dtype}")
        found, note = product_figure(device, dtype, clock, effort)
        figures += [] if found is None else [found]
        notes += [note] if note else []
    progress("launches")
    figures.append(launch_figure(device, clock, effort))
    if machine.kind == "cuda":
        torch.cuda.empty_cache()  # torch's cache is not free to others
    return figures, notes


def array_size_bytes(effort: Effort, device: torch.device) -> int:
    """Return the size of an array to copy, a power of two as torch's pinned memory comes in those.

    Raises CheckflowError if a sixteenth of what is free, on device or host, is too small to measure with.
    """
    free = min(free_memory_bytes(device), free_host_memory_bytes())
    size = min(effort.array_bytes, free // 16)
    if size < LEAST_ARRAY_BYTES:
        raise CheckflowError(
            f"cannot probe with {format_size(free)} of free memory: arrays below {LEAST_ARRAY_BYTES // _MIB} MiB lie in"
            f" caches; free {format_size(16 * LEAST_ARRAY_BYTES)}"
        )
    return 1 << (size.bit_length() - 1)


def memory_figures(device: torch.device, clock: Clock, effort: Effort, array_bytes: int) -> list[Figure]:
    """Time copies within the device, and ``x + y``; bytes read and bytes written both count."""
    x, y, z = (torch.ones(array_bytes // 4, device=device) for _ in range(3))
    copied = repeat(lambda: y.copy_(x), clock, effort)
    added = repeat(lambda: torch.add(x, y, out=z), clock, effort)
    size = format_size(array_bytes)
    return [
        rate("device copy", "bytes_per_second", 2 * array_bytes, copied, f"{size} read, as much written"),
        rate("element-wise", "bytes_per_second", 3 * array_bytes, added, f"z = x + y, {size} each"),
    ]


def host_link_figures(clock: Clock, effort: Effort, array_bytes: int) -> list[Figure]:
    """Time one thread's copy from memory to memory (each byte counts once), and what each piece costs besides.

    A piece costs what the runtime's copy engine pays: one turn of its loop and one memmove.
    """
    source, target = (torch.ones(array_bytes, dtype=torch.uint8, device="cpu") for _ in range(2))

    def copies(places: range, length_bytes: int) -> Work:
        pieces = [(target.data_ptr() + at, source.data_ptr() + at, length_bytes) for at in places]

        def work() -> None:
            for piece in pieces:
                ctypes.memmove(*piece)

        return work

    seconds = repeat(copies(range(1), array_bytes), clock, effort)
    how = f"{format_size(array_bytes)}, memory to memory, one thread"
    return [
        rate("device to host", "bytes_per_second", array_bytes, seconds, how),
        piece_figure(copies, clock, effort, array_bytes),
    ]


def piece_figure(copies: Callable[[range, int], Work], clock: Clock, effort: Effort, array_bytes: int) -> Figure:
    """Time what each piece costs besides its bytes: many small copies, less one copy of as many bytes.

    ``copies`` makes the work of copies at these places of an array, of this many bytes each.
    """
    alone = repeat(copies(range(1), PIECES * PIECE_BYTES), clock, effort).median
    laps = repeat(copies(range(0, array_bytes, array_bytes // PIECES), PIECE_BYTES), clock, effort)
    how = f"{PIECES} copies of {format_size(PIECE_BYTES)}, less one of as many bytes"
    return Figure(PIECE, "seconds", laps.above(alone).scaled(1 / (PIECES - 1)), how)


def link_piece_figure(here: torch.Tensor, there: torch.Tensor, clock: Clock, effort: Effort) -> Figure:
    """Time what each piece costs the link from a CUDA device (``there``) to staging memory (``here``).

    The host issues the pieces while a large copy crosses, so this is the link's time, not Python's. It is an upper
    bound: the runtime (:mod:`checkflow.runtime.transfer.cudart`) hands CUDA many copies at once.
    """

    def copies(places: range, length_bytes: int) -> Work:
        pieces = [(here[at : at + length_bytes], there[at : at + length_bytes]) for at in places]

        def work() -> None:
            here.copy_(there, non_blocking=True)
            for target, source in pieces:
                target.copy_(source, non_blocking=True)

        return work

    return piece_figure(copies, clock, effort, here.nbytes)


@contextlib.contextmanager
def staging_memory(size_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield host memory as the runtime stages checkpoints in for a CUDA device: shared, locked in place, uint8.

    It is returned to the system at the end, while pinned tensors would stay in torch's cache. If the system refuses to
    lock it, it is used unlocked, as the runtime does.
    """
    here = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).fill_(1)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    locked = _succeeded(cudart.cudaHostRegister(here.data_ptr(), size_bytes, _PORTABLE), device)
    try:
        yield here
    finally:
        if locked:
            torch.cuda.synchronize(device)
            _succeeded(cudart.cudaHostUnregister(here.data_ptr()), device)


def _succeeded(code: int, device: torch.device) -> bool:
    """Whether a call of CUDA's runtime succeeded.

    A failed call leaves an error for torch's next kernel, which would blame training: run that kernel here.
    """
    if int(code) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def link_figures(device: torch.device, clock: Clock, effort: Effort, array_bytes: int) -> list[Figure]:
    """Time copies between a CUDA device and the host, both ways, with pinned and pageable host memory; and pieces."""
    there = torch.ones(array_bytes, dtype=torch.uint8, device=device)
    figures = []
    for pinned in (True, False):
        here = torch.ones(array_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        for name, target, source in (("device to host", here, there), ("host to device", there, here)):
            seconds = repeat(_copy(target, source), clock, effort)
            how = f"{format_size(array_bytes)}, {kind} host memory"
            figures.append(rate(f"{name}, {kind}", "bytes_per_second", array_bytes, seconds, how))
    lead_bytes = min(array_bytes, LEAD_BYTES)
    with staging_memory(lead_bytes, device) as here:
        figures.append(link_piece_figure(here, there[:lead_bytes], clock, effort))
    return figures


def _copy(target: torch.Tensor, source: torch.Tensor) -> Work:
    return lambda: target.copy_(source, non_blocking=True)


def product_figure(device: torch.device, dtype: str, clock: Clock, effort: Effort) -> tuple[Figure | None, str]:
    """Time the product of two square matrices in a dtype, or "tf32"; else None and why. May run out of memory."""
    if dtype == "tf32" and not _on_matrix_units(device, dtype):
        return None, ""  # torch would compute in float32
    with torch_settings_kept():
        torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        try:
            size, work = _product(device, _DTYPES.get(dtype, torch.float32), clock, effort)
            seconds = repeat(work, clock, effort)
        except torch.OutOfMemoryError:
            raise CheckflowError(f"cannot probe: not enough free memory for products in {dtype}") from None
        except RuntimeError as error:  # torch cannot multiply this dtype here
            return None, f"no products in {dtype}: {str(error).strip().partition(chr(10))[0]}"
    on_matrix = _on_matrix_units(device, dtype)
    how = f"{size} x {size}, {'matrix' if on_matrix else 'plain'} units"
    figure = rate(f"{PRODUCT}{dtype}", "flops_per_second", 2.0 * size**3, seconds, how)
    return replace(figure, matrix_units=on_matrix), ""


def _product(device: torch.device, dtype: torch.dtype, clock: Clock, effort: Effort) -> tuple[int, Work]:
    """Return the size of matrices whose product lasts long enough, and the product."""
    free, size = free_memory_bytes(device), _FIRST_PRODUCT
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        work = _multiply(a, b)
        larger_bytes = 5 * (2 * size) ** 2 * max(4, dtype.itemsize)  # includes making the random numbers
        if (
            min(clock.laps(work, 4)[1:]) >= effort.product_seconds  # the least, since others may use the machine
            or size == _LARGEST_PRODUCT
            or larger_bytes > free // 8
        ):
            return size, work
        size *= 2


def _multiply(a: torch.Tensor, b: torch.Tensor) -> Work:
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _on_matrix_units(device: torch.device, dtype: str) -> bool:
    """Whether products in this dtype run on matrix units; on CPUs, where torch cannot say, all count as plain."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if dtype == "float64":
        return capability in _MATRIX_FLOAT64
    return dtype in _MATRIX_SINCE and capability >= _MATRIX_SINCE[dtype]


def launch_figure(device: torch.device, clock: Clock, effort: Effort) -> Figure:
    """Time tiny operators back to back: on a GPU the host or the device, whichever is slower."""
    x, y = (torch.ones(1, device=device) for _ in range(2))

    def launches() -> None:
        for _ in range(LAUNCHES):
            torch.add(x, y)

    laps = repeat(launches, clock, effort)
    return Figure("launch", "seconds", laps.scaled(1 / LAUNCHES), f"x + y of one number, {LAUNCHES} in a row")


def make_device(machine: Machine, figures: Sequence[Figure], *, now: datetime.datetime | None = None) -> Device:
    """Make a device of a machine's figures. Its source names the time ``now``, by default this one."""
    medians = {figure.name: _rounded(figure.spread.median) for figure in figures}
    copy, streaming = medians["device copy"], medians["element-wise"]
    plain, matrix = _peaks(figures)
    moment = (datetime.datetime.now(datetime.UTC) if now is None else now).strftime("%Y-%m-%d %H:%M UTC")
    pinned = "device to host, pinned" if machine.kind == "cuda" else "device to host"
    return Device(
        name=machine.name,
        memory_bytes=machine.memory_bytes,
        memory_bandwidth_bytes_per_second=copy,
        link_bandwidth_bytes_per_second=medians[pinned],
        plain_flops_per_second=plain,
        matrix_flops_per_second=matrix,
        compute_efficiency=1.0,
        memory_efficiency=min(1.0, _rounded(streaming / copy)),
        launch_seconds=medians["launch"],
        source=(
            f"measured by checkflow probe on {moment}: {machine.name}, {machine.software};"
            " peaks are those of large products, efficiencies included"
        ),
        kind=machine.kind,
        link_to_device_bytes_per_second=medians.get("host to device, pinned"),
        pageable_to_host_bytes_per_second=medians.get("device to host, pageable"),
        pageable_to_device_bytes_per_second=medians.get("host to device, pageable"),
        disk_write_bytes_per_second=medians.get("disk write"),
        disk_read_bytes_per_second=medians.get("disk read"),
        copy_seconds=medians[PIECE],
        compute_capability=machine.compute_capability,
    )


def _peaks(figures: Sequence[Figure]) -> tuple[dict[str, float], dict[str, float]]:
    """Return operations per second by dtype, of plain and of matrix units; TF32 only if it beats float32."""
    products = {figure.name.removeprefix(PRODUCT): figure for figure in figures if figure.name.startswith(PRODUCT)}
    tf32 = products.get("tf32")
    if tf32 is not None and tf32.spread.median <= products["float32"].spread.most:
        del products["tf32"]
    peaks: tuple[dict[str, float], dict[str, float]] = {}, {}
    for dtype, figure in products.items():
        peaks[figure.matrix_units][dtype] = _rounded(figure.spread.median)
    return peaks


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
