"""Measuring the machine: the statistics on a clock of the tests' own, the disk's edges, and one real quick probe."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkflow.cli.main import FAILED, FOUND, USAGE, main
from checkflow.core.errors import CheckflowError, StorageError
from checkflow.core.machine import device as devices
from checkflow.core.machine.device import find_device, read_device, write_device
from checkflow.planner.live import bandwidth
from checkflow.planner.measure import disk
from checkflow.planner.measure import probe as probes
from checkflow.planner.measure.disk import BLOCK_BYTES, LEAST_FILE_BYTES, disk_figures
from checkflow.planner.measure.machine import Machine, free_memory_bytes, this_machine
from checkflow.planner.measure.probe import (
    Probed,
    array_size_bytes,
    host_link_figures,
    link_piece_figure,
    make_device,
    product_figure,
    staging_memory,
)
from checkflow.planner.measure.timing import (
    Effort,
    EventClock,
    Figure,
    HostClock,
    Spread,
    Work,
    rate,
    repeat,
    spread_of,
)

CPU = torch.device("cpu")
TINY = Effort(repetitions=3, seconds=0.01, array_bytes=8 * 2**20, product_seconds=1e-4, disk_bytes=LEAST_FILE_BYTES)
MACHINE = Machine(CPU, "cuda", "NVIDIA H200", "torch 2.13, CUDA 13.0, driver 580.1", 141 * 10**9, (9, 0))


class FakeClock:
    """Says what it was told to say, in order and then over again; the work is done all the same."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = seconds
        self.laps_run = 0

    def laps(self, work: Work, count: int) -> list[float]:
        said = []
        for _ in range(count):
            work()
            said.append(self._seconds[self.laps_run % len(self._seconds)])
            self.laps_run += 1
        return said


# --- a job's own moment


@pytest.mark.parametrize(("free_bytes", "size_bytes"), [(2**40, 256 * 2**20), (2**30, 64 * 2**20), (2**28, 2**24)])
def test_a_gpus_memory_is_measured_beyond_its_caches_and_given_back(
    free_bytes: int, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Any]] = []

    class Pool:
        def __init__(self) -> None:
            events.append(("pool is made", None))
            weakref.finalize(self, events.append, ("pool is gone", None))

    @contextlib.contextmanager
    def inside(what: str, value: Any) -> Iterator[torch.Tensor]:
        events.append((what, value))
        yield torch.empty(0)
        events.append((f"end of {what}", value))

    def ones(count: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        events.append((device.type, count))
        array = torch.empty(0, dtype=dtype)
        weakref.finalize(array, events.append, ("array is gone", None))
        return array

    def piece(here: torch.Tensor, there: torch.Tensor, clock: Any, effort: Effort) -> Figure:
        return Figure("", "seconds", spread_of([2e-6]), "")

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "device", lambda device: inside("device", device.index))
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: inside("pool", None))
    monkeypatch.setattr(bandwidth, "staging_memory", lambda size, device: inside("staging", size))
    monkeypatch.setattr(bandwidth, "link_piece_figure", piece)
    monkeypatch.setattr(bandwidth, "clock_of", lambda device: FakeClock(1e-3))
    for name in ("free_memory_bytes", "free_host_memory_bytes"):
        monkeypatch.setattr(probes, name, lambda *_: free_bytes)
    found = bandwidth.measure_bandwidths(torch.device("cuda", 1))
    link_bytes = min(size_bytes, 32 * 2**20)
    # A pool is the current device's. Arrays that outlived it would stay in the allocator's cache.
    assert events == [
        ("device", 1), ("pool is made", None), ("pool", None), ("cuda", size_bytes), ("cuda", size_bytes),
        ("staging", link_bytes), ("end of staging", link_bytes), ("array is gone", None), ("array is gone", None),
        ("end of pool", None), ("end of device", 1), ("pool is gone", None),
    ]  # fmt: skip
    assert found.link_bytes_per_second == pytest.approx(link_bytes * 1e3)
    assert found.memory_bytes_per_second == pytest.approx(2 * size_bytes * 1e3)
    assert found.copy_seconds == 2e-6


class FakeRuntime:
    """CUDA's, as torch offers it: what is registered, and an error that stays behind for the next kernel."""

    def __init__(self, *refused: str) -> None:
        self._refused = refused
        self.registered: list[tuple[int, int, int]] = []
        self.left_behind = False

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.left_behind = "register" in self._refused
        if not self.left_behind:
            self.registered.append((address, size_bytes, flags))
        return 712 * self.left_behind

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.left_behind = "unregister" in self._refused
        self.registered = [one for one in self.registered if one[0] != address]
        return 713 * self.left_behind

    def kernel(self, *_: Any, **__: Any) -> None:
        left_behind, self.left_behind = self.left_behind, False
        if left_behind:
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")


@pytest.mark.parametrize("refused", ["", "register", "unregister"])
def test_staging_memory_is_locked_for_a_while_and_a_refusal_leaves_no_error_behind(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(refused)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", runtime.kernel)
    with staging_memory(8192, torch.device("cuda", 0)) as here:
        assert runtime.registered == ([] if refused == "register" else [(here.data_ptr(), 8192, 1)])
        assert not runtime.left_behind
        assert (here.nbytes, here.dtype) == (8192, torch.uint8)
        here.fill_(7)
    assert runtime.registered == []
    assert not runtime.left_behind


class CopyClock:
    """A clock on which nothing takes time but copies: so much each, and so much a byte."""

    def __init__(self, copy_seconds: float, byte_seconds: float) -> None:
        self._price = copy_seconds, byte_seconds
        self._now = 0.0
        self.places: set[int] = set()

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._now += self._price[0] + self._price[1] * size_bytes
        self.places.add(target)

    def laps(self, work: Work, count: int) -> list[float]:
        said = []
        for _ in range(count):
            begun = self._now
            work()
            said.append(self._now - begun)
        return said


class FakeArray:
    """An array that only tells a clock what is copied into it."""

    def __init__(self, clock: CopyClock, begin: int, end: int) -> None:
        self._clock, self._begin, self.nbytes = clock, begin, end - begin

    def __getitem__(self, part: slice) -> FakeArray:
        return FakeArray(self._clock, self._begin + part.start, self._begin + part.stop)

    def copy_(self, source: FakeArray, *, non_blocking: bool) -> None:
        assert non_blocking
        assert source.nbytes == self.nbytes
        self._clock.copy(self._begin, source._begin, self.nbytes)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("copy_seconds", [0.0, 3e-6])
def test_a_piece_costs_what_a_copy_costs_besides_its_bytes(
    kind: str, copy_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, size = CopyClock(copy_seconds, 1e-9), 8 * 2**20
    if kind == "cuda":
        array: Any = FakeArray(clock, 0, size)
        figure = link_piece_figure(array, array, clock, TINY)
    else:
        monkeypatch.setattr(probes.ctypes, "memmove", clock.copy)
        link, figure = host_link_figures(clock, TINY, size)
        assert link.spread.median == pytest.approx(size / (copy_seconds + 1e-9 * size))
    assert (figure.unit, figure.spread.count) == ("seconds", 3)
    assert figure.spread.median == pytest.approx(copy_seconds, abs=1e-12)
    assert len(clock.places) == probes.PIECES  # each to another one


def test_pieces_that_are_faster_than_one_copy_cost_nothing() -> None:
    clock = FakeClock(*[1e-3] * 5, *[1e-4] * 5)
    figure = probes.piece_figure(lambda places, size: lambda: None, clock, TINY, 2**20)
    assert figure.spread == Spread(0.0, 0.0, 0.0, 0.0, 0.0, 3)


# --- statistics


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([3.0], Spread(3.0, 3.0, 3.0, 3.0, 3.0, 1)),
        ([4.0, 2.0], Spread(2.0, 2.5, 3.0, 3.5, 4.0, 2)),
        ([5.0, 1.0, 2.0, 4.0, 3.0], Spread(1.0, 2.0, 3.0, 4.0, 5.0, 5)),
        ([9.0, 1.0, 1.0, 1.0], Spread(1.0, 1.0, 1.0, 3.0, 9.0, 4)),
    ],
)
def test_spreads(samples: Sequence[float], expected: Spread) -> None:
    assert spread_of(samples) == expected


def test_nothing_has_no_spread() -> None:
    with pytest.raises(ValueError, match="no measurement"):
        spread_of([])


@given(samples=st.lists(st.floats(1e-9, 1e9), min_size=1), data=st.data())
def test_a_spread_is_ordered_and_knows_no_order(samples: list[float], data: st.DataObject) -> None:
    spread = spread_of(samples)
    ordered = (spread.least, spread.lower, spread.median, spread.upper, spread.most)
    assert list(ordered) == sorted(ordered)
    assert (spread.least, spread.most, spread.count) == (min(samples), max(samples), len(samples))
    assert spread_of(data.draw(st.permutations(samples))) == spread


def test_the_host_clock_runs_the_work_once_a_lap() -> None:
    ran: list[int] = []
    laps = HostClock().laps(lambda: ran.append(len(ran)), 5)
    assert ran == [0, 1, 2, 3, 4]
    assert len(laps) == 5
    assert all(seconds >= 0 for seconds in laps)


@pytest.mark.parametrize(
    ("lap_seconds", "repetitions"),
    [(0.0, 20), (1e-9, 20), (0.05, 20), (0.1, 10), (0.26, 3), (50.0, 3)],
)
def test_slow_work_is_repeated_less(lap_seconds: float, repetitions: int) -> None:
    clock = FakeClock(lap_seconds)
    effort = dataclasses.replace(TINY, repetitions=20, seconds=1.0)
    assert repeat(lambda: None, clock, effort).count == repetitions
    assert clock.laps_run == repetitions + 2


def test_what_warms_up_does_not_count() -> None:
    clock = FakeClock(9.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    spread = repeat(lambda: None, clock, dataclasses.replace(TINY, repetitions=5))
    assert spread == Spread(1.0, 2.0, 3.0, 4.0, 5.0, 5)


def test_the_slowest_run_is_the_least_rate() -> None:
    figure = rate("copy", "bytes_per_second", 60.0, Spread(1.0, 2.0, 3.0, 4.0, 5.0, 5), "all of it")
    assert figure.spread == Spread(12.0, 15.0, 20.0, 30.0, 60.0, 5)


def test_work_of_no_time_has_no_rate() -> None:
    with pytest.raises(CheckflowError, match=r"^cannot probe: copy on so little \(1 B\)[^\n]*$"):
        rate("copy", "bytes_per_second", 1.0, Spread(0.0, 1.0, 1.0, 1.0, 1.0, 3), "1 B")


# --- the measuring functions


@pytest.mark.parametrize(
    ("free_bytes", "size"),
    [
        (10**15, 256 * 2**20),  # no more than asked
        (16 * 100 * 2**20, 64 * 2**20),  # a power of two
        (16 * 8 * 2**20, 8 * 2**20),
    ],
)
def test_arrays_are_bounded_by_free_memory(free_bytes: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "free_memory_bytes", lambda device: free_bytes)
    monkeypatch.setattr(probes, "free_host_memory_bytes", lambda: 10**15)
    assert array_size_bytes(dataclasses.replace(TINY, array_bytes=256 * 2**20), CPU) == size


@pytest.mark.parametrize("free_bytes", [0, 1, 16 * 8 * 2**20 - 1])
@pytest.mark.parametrize("short", ["free_memory_bytes", "free_host_memory_bytes"])
def test_too_little_memory_is_one_line(short: str, free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "free_memory_bytes", lambda device: 10**15)
    monkeypatch.setattr(probes, "free_host_memory_bytes", lambda: 10**15)
    monkeypatch.setattr(probes, short, lambda *_: free_bytes)
    with pytest.raises(CheckflowError, match=r"^cannot probe with [^\n]* of free memory[^\n]*; free 134 MB$"):
        array_size_bytes(TINY, CPU)


def test_products_grow_until_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_FIRST_PRODUCT", 8)
    clock = FakeClock(*[1e-6] * 8, *[1e-3] * 100)  # four runs of two sizes are too short
    figure, note = product_figure(CPU, "float32", clock, TINY)
    assert note == ""
    assert figure is not None
    assert figure.how == "32 x 32, plain units"
    assert figure.spread.median == 2 * 32**3 / 1e-3


def test_products_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_FIRST_PRODUCT", 8)
    monkeypatch.setattr(probes, "free_memory_bytes", lambda device: 8 * 5 * 64**2 * 4)
    figure, _ = product_figure(CPU, "float32", FakeClock(1e-6), TINY)
    assert figure is not None
    assert figure.how == "64 x 64, plain units"


def test_a_dtype_that_cannot_be_multiplied_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(a: torch.Tensor, b: torch.Tensor) -> Work:
        raise RuntimeError('"addmm" not implemented\nfor this')

    monkeypatch.setattr(probes, "_multiply", refuse)
    assert product_figure(CPU, "bfloat16", FakeClock(1.0), TINY) == (
        None,
        'no products in bfloat16: "addmm" not implemented',
    )


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(a: torch.Tensor, b: torch.Tensor) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(probes, "_multiply", exhaust)
    with pytest.raises(CheckflowError, match=r"^cannot probe: not enough free memory for products in float16$"):
        product_figure(CPU, "float16", FakeClock(1.0), TINY)


def test_torch_keeps_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_FIRST_PRODUCT", 8)
    before = torch.backends.cuda.matmul.fp32_precision
    seen: list[str] = []

    class Looking(FakeClock):
        def laps(self, work: Work, count: int) -> list[float]:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().laps(work, count)

    product_figure(CPU, "float32", Looking(1.0), TINY)
    assert set(seen) == {"ieee"}  # whatever the process was set to
    assert torch.backends.cuda.matmul.fp32_precision == before


# --- from figures to a device


def figures_of(**medians: float) -> list[Figure]:
    """Figures of a GPU, whose spread is 1 % on both sides; products in float16 and TF32 on matrix units."""
    names = {
        "copy": "device copy", "streaming": "element-wise", "out": "device to host, pinned",
        "back": "host to device, pinned", "slow_out": "device to host, pageable", "launch": "launch",
        "float32": "product, float32", "float16": "product, float16", "tf32": "product, tf32",
        "write": "disk write", "read": "disk read", "piece": "each piece",
    }  # fmt: skip
    return [
        Figure(
            names[key], "seconds" if key in ("launch", "piece") else "bytes_per_second",
            Spread(0.99 * value, 0.995 * value, value, 1.005 * value, 1.01 * value, 5), "",
            matrix_units=key in ("float16", "tf32"),
        )
        for key, value in medians.items()
    ]  # fmt: skip


GPU = {
    "copy": 4e12,
    "streaming": 3e12,
    "out": 5.5e10,
    "float32": 5e13,
    "float16": 7e14,
    "launch": 4e-6,
    "piece": 1.23456e-6,
}


def test_a_device_is_made_of_medians_and_says_when_and_on_what() -> None:
    moment = datetime.datetime(2026, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
    figures = figures_of(**GPU, tf32=4e14, back=5.123456e10, slow_out=1e10, write=2e9, read=3e9)
    device = make_device(MACHINE, figures, now=moment)
    assert (device.name, device.kind, device.memory_bytes) == ("NVIDIA H200", "cuda", 141 * 10**9)
    assert device.compute_capability == (9, 0)
    assert device.memory_bandwidth_bytes_per_second * device.memory_efficiency == pytest.approx(3e12)
    assert device.memory_bandwidth_bytes_per_second == 4e12
    assert device.link_bandwidth_bytes_per_second == 5.5e10
    assert device.link_to_device_bytes_per_second == 5.123e10  # no more digits than a measurement has
    assert (device.pageable_to_host_bytes_per_second, device.pageable_to_device_bytes_per_second) == (1e10, None)
    assert (device.disk_write_bytes_per_second, device.disk_read_bytes_per_second) == (2e9, 3e9)
    assert device.copy_seconds == 1.235e-6
    assert device.plain_flops_per_second == {"float32": 5e13}
    assert device.matrix_flops_per_second == {"float16": 7e14, "tf32": 4e14}
    assert (device.compute_efficiency, device.matrix_efficiency, device.launch_seconds) == (1.0, None, 4e-6)
    for fact in ("2026-03-04 05:06 UTC", "NVIDIA H200", "torch 2.13", "driver 580.1"):
        assert fact in device.source


@pytest.mark.parametrize(("tf32", "kept"), [(5e13, False), (5.05e13, False), (5.1e13, True)])
def test_tf32_counts_only_where_it_beats_float32(tf32: float, kept: bool) -> None:
    assert ("tf32" in make_device(MACHINE, figures_of(**GPU, tf32=tf32)).matrix_flops_per_second) == kept


def test_streaming_faster_than_copies_is_no_efficiency_above_one() -> None:
    device = make_device(MACHINE, figures_of(**{**GPU, "streaming": 5e12}))
    assert device.memory_efficiency == 1.0


# --- the disk


def no_room(free_bytes: int) -> Callable[[Any], os.statvfs_result]:
    blocks = free_bytes // 512
    return lambda path: os.statvfs_result((512, 512, 10**9, blocks, blocks, 10**6, 10**6, 10**6, 0, 255))


def test_the_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    figures, notes = disk_figures(tmp_path, TINY, FakeClock(2.0, 1.0))
    write, read = figures
    assert (write.name, read.name) == ("disk write", "disk read")
    assert write.spread.median == LEAST_FILE_BYTES / 2.0
    assert read.spread.median == LEAST_FILE_BYTES / 1.0
    assert write.spread.count == read.spread.count == 3
    assert list(tmp_path.iterdir()) == []
    assert len(notes) <= 1


@pytest.mark.parametrize(("free_bytes", "blocks"), [(10**12, 3), (4 * 2 * BLOCK_BYTES, 2), (12 * BLOCK_BYTES - 1, 2)])
def test_a_file_is_bounded_by_the_free_disk(
    free_bytes: int, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", no_room(free_bytes))
    effort = dataclasses.replace(TINY, disk_bytes=3 * BLOCK_BYTES + 1)
    (write, _), _ = disk_figures(tmp_path, effort, FakeClock(1.0))
    assert write.spread.median == blocks * BLOCK_BYTES


@pytest.mark.parametrize("free_bytes", [0, 4 * LEAST_FILE_BYTES - 1])
def test_a_full_disk_is_one_line(free_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", no_room(free_bytes))
    with pytest.raises(StorageError, match=r"^cannot measure the disk in [^\n]* free, and 67\.1 MB are needed;[^\n]*$"):
        disk_figures(tmp_path, TINY, FakeClock(1.0))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "preadv"])
def test_a_disk_that_fails_is_one_line_and_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=r"^cannot measure the disk in [^\n]*: No space left on device; [^\n]*$"):
        disk_figures(tmp_path, TINY, FakeClock(1.0))
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("none", "file"):
        with pytest.raises(StorageError, match=rf"^cannot measure the disk in [^\n]*{name}: [^\n]*$"):
            disk_figures(tmp_path / name, TINY, FakeClock(1.0))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        disk_figures(tmp_path, TINY, FakeClock(1.0))


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    written: list[tuple[int, int]] = []

    def short_write(fd: int, data: memoryview, offset: int) -> int:
        count = write(fd, data[: BLOCK_BYTES // 3 + 1], offset)
        written.append((offset, count))
        return count

    def short_read(fd: int, buffers: list[Any], offset: int, *flags: int) -> int:
        return read(fd, [memoryview(buffers[0])[: BLOCK_BYTES // 2 + 4096]], offset, *flags)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    disk_figures(tmp_path, TINY, FakeClock(1.0))
    covered = sum(count for _, count in written)
    assert covered == 3 * LEAST_FILE_BYTES  # three repetitions, no byte twice
    assert max(offset + count for offset, count in written) == LEAST_FILE_BYTES


def test_what_was_just_written_has_not_gone(tmp_path: Path) -> None:
    """The kernel is asked, not believed to have done what it was advised to."""
    with open(tmp_path / "file", "w+b") as file:
        file.write(bytes(2**20))
        file.flush()
        assert not disk._gone(file.fileno(), 2**20)


def test_a_read_from_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_gone", lambda fd, size: False)
    monkeypatch.setattr(disk, "_around_memory", lambda fd: False)
    (_, read), notes = disk_figures(tmp_path, TINY, FakeClock(1.0))
    assert "cold" not in read.how
    assert notes == [f"what was read may have come from memory, not from a disk under {tmp_path}"]


# --- this machine


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Probed:
    return probes.probe(tmp_path_factory.mktemp("disk"), TINY)


def test_this_machine_is_measured(probed: Probed) -> None:
    names = [figure.name for figure in probed.figures]
    assert len(set(names)) == len(names)
    assert {"device copy", "element-wise", "product, float32", "launch", "disk write", "disk read"} < set(names)
    for figure in probed.figures:
        assert 0 <= figure.spread.least <= figure.spread.median <= figure.spread.most, figure.name
        assert figure.spread.least > 0 or figure.name == "each piece"  # a difference, and of very little
        assert figure.spread.count >= 3, figure.name
    device = probed.device
    assert device.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.memory_bytes > free_memory_bytes(this_machine().device) / 2
    launch = next(figure.spread.median for figure in probed.figures if figure.name == "launch")
    assert device.launch_seconds == pytest.approx(launch, rel=0.01)  # rounded
    if device.kind == "cpu":
        assert device.matrix_flops_per_second == {}
        assert device.link_to_device_bytes_per_second is None
        assert any("one thread's copy" in note for note in probed.notes)


def test_a_measured_device_survives_its_file(probed: Probed, tmp_path: Path) -> None:
    write_device(probed.device, tmp_path / "device.json")
    assert read_device(tmp_path / "device.json") == probed.device
    assert [path.name for path in tmp_path.iterdir()] == ["device.json"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("none/device.json", "."):
        with pytest.raises(CheckflowError, match=r"^cannot write the device to [^\n]*$"):
            write_device(find_device("cpu"), tmp_path / name)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(devices.os, "replace", full)
    with pytest.raises(CheckflowError, match="No space left on device"):
        write_device(find_device("cpu"), tmp_path / "device.json")
    assert list(tmp_path.iterdir()) == []


def test_device_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """What a probe measures besides is optional, and strict where it is given."""
    data = dataclasses.asdict(find_device("V100"))
    new = ["link_to_device_bytes_per_second", "pageable_to_host_bytes_per_second"]
    new += ["pageable_to_device_bytes_per_second", "disk_write_bytes_per_second", "disk_read_bytes_per_second"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if key not in (*new, "copy_seconds")}))
    assert read_device(path) == find_device("V100")
    for key in new:
        path.write_text(json.dumps(data | {key: 0.0}))
        with pytest.raises(CheckflowError, match=rf"^[^\n]*{key} must be a number above zero$"):
            read_device(path)


@pytest.mark.parametrize("seconds", [0.0, 2.5e-6])
def test_what_a_piece_costs_survives_the_file(seconds: float, tmp_path: Path) -> None:
    device = dataclasses.replace(find_device("V100"), copy_seconds=seconds)
    write_device(device, tmp_path / "d.json")
    assert read_device(tmp_path / "d.json") == device


def test_the_catalogue_knows_no_price_of_a_piece() -> None:
    assert {device.copy_seconds for device in devices.CATALOGUE.values()} == {0.0}


def test_a_device_without_a_float32_peak_says_what_is_missing(tmp_path: Path) -> None:
    data = dataclasses.asdict(find_device("V100")) | {"plain_flops_per_second": {"float16": 1e12}}
    (tmp_path / "d.json").write_text(json.dumps(data))
    with pytest.raises(CheckflowError, match=r'^[^\n]*plain_flops_per_second has no "float32"[^\n]*: add [^\n]*$'):
        read_device(tmp_path / "d.json")


# --- the command


@pytest.mark.slow
def test_the_command_measures_and_writes_what_device_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", "--quick", "--json", "-o", "device.json"]) == FOUND
    said = capsys.readouterr()
    assert said.err == ""
    data = json.loads(said.out)
    assert list(data) == ["device", "figures", "notes"]
    keys = ["name", "unit", "least", "lower", "median", "upper", "most", "count", "matrix_units", "how"]
    assert all(list(figure) == keys for figure in data["figures"])
    assert dataclasses.asdict(read_device("device.json")) == data["device"]
    assert main(["plan", "digits", "--device", "device.json", "--json"]) == FOUND
    assert (
        json.loads(capsys.readouterr().out)["bandwidth_bytes_per_second"]
        == (data["device"]["link_bandwidth_bytes_per_second"])
    )


def test_the_command_s_table_has_every_figure(
    probed: Probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def measure(*given: Any, progress: Callable[[str], None]) -> Probed:
        asked.append(given)
        progress("a part")
        return probed

    monkeypatch.setattr(probes, "probe", measure)
    assert main(["probe", "--directory", str(tmp_path)]) == FOUND
    assert main(["probe", "--quick"]) == FOUND
    assert asked == [(tmp_path, probes.FULL), (Path("."), probes.QUICK)]
    said = capsys.readouterr()
    assert said.err == ""  # no progress in a pipe
    for figure in probed.figures:
        assert figure.name in said.out
    for note in probed.notes:
        assert note.partition(",")[0] in said.out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--directory", "none"], FAILED, "cannot measure the disk in none: No such file or directory"),
        (["-o", "none/device.json"], FAILED, "there is no folder none"),
        (["-o", "device.txt"], USAGE, "must end in .json"),
        (["--fast"], USAGE, "--fast"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert text in said.err


# --- with a GPU


@pytest.mark.cuda
def test_events_time_the_device_and_not_the_call() -> None:
    device = this_machine().device
    x = torch.ones(2**26, device=device)
    laps = EventClock(device).laps(lambda: x.mul_(1.0), 20)
    assert len(laps) == 20
    assert all(seconds > 0 for seconds in laps)
    moved = 2 * x.numel() * 4
    assert moved / spread_of(laps).median < 2e13  # a call that was not waited for would be faster than any memory


@pytest.mark.cuda
def test_a_gpu_has_four_links_and_matrix_units() -> None:
    here = this_machine()
    figures, _ = probes.device_figures(here, EventClock(here.device), TINY, lambda part: None)
    device = make_device(here, figures)
    assert device.kind == "cuda"
    for value in (
        device.link_to_device_bytes_per_second,
        device.pageable_to_host_bytes_per_second,
        device.pageable_to_device_bytes_per_second,
    ):
        assert value is not None
        assert 0 < value < device.memory_bandwidth_bytes_per_second
    if torch.cuda.get_device_capability() >= (7, 0):
        assert device.matrix_flops_per_second["float16"] > device.plain_flops_per_second["float32"]
