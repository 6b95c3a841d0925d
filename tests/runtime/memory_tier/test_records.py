"""The staging buffers of a job in shared memory, without the job: what is written down, by whom, and what is left."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from checkflow.core.errors import StorageError
from checkflow.runtime.format.digest import Digest
from checkflow.runtime.format.layout import Layout, make_layout
from checkflow.runtime.memory_tier import orphans, records
from checkflow.runtime.memory_tier import tier as tier_module
from checkflow.runtime.memory_tier.records import LIFE, MARK, MARKS, NOTHING, RECORDS, Owner, RunLife
from checkflow.runtime.memory_tier.staging import StagingBuffer, StagingBuffers
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.system import fs, mounts
from checkflow.runtime.system.aligned_memory import map_address
from checkflow.runtime.system.large_pages import LARGE_BYTES
from tests.support.dead_jobs import folder_of, folders_below, give_back, kept_in, needs_memory
from tests.support.store_tools import record

pytestmark = needs_memory

SIZE_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    give_back(tmp_path)


class Tier:
    """Three buffers, and captures of one small layout in them."""

    def __init__(self, directory: Path) -> None:
        self.tier = MemoryTier(directory, RunLife("run"))
        memories = self.tier.allocate(3, SIZE_BYTES, None)
        assert memories is not None
        self.memories = memories
        self.folder = folder_of(directory)
        self.layout: Layout = make_layout([record("model/w", (4, 4)), record("optimizer/w.exp_avg", (4, 4))])

    def capture(self, index: int, step: int, *, plan: str = "plan", by_plan: bool = True, **more: Any) -> Capture:
        memory = self.memories[index]
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        arguments: dict[str, Any] = {"ties": (), "absent": (), "digests": None, "settled": {}, **more}
        return Capture(
            step, StagingBuffer(index, memory, address), self.layout, b"", {},
            plan_digest=plan, by_plan=by_plan, **arguments,
        )  # fmt: skip

    def keep(self, index: int, step: int, **more: Any) -> None:
        self.tier.keep(self.capture(index, step, **more), b"extra", {"epoch": 1})

    def steps(self) -> dict[int, int]:
        """By buffer, as another process finds them."""
        with fs.folder(str(self.folder)) as folder:
            return {index: one.step for index, one in orphans.read_records(folder).items()}


@pytest.fixture
def three(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


class Audited:
    def __init__(self, digests: dict[str, Digest]) -> None:
        self._digests = digests

    def take(self) -> dict[str, Digest]:
        return self._digests


def test_a_record_says_all_of_its_capture(three: Tier) -> None:
    audited, settled = Digest("xxh3", 0xA), Digest("sums", 0xB)
    three.keep(
        1, 7, ties=(("model/v", "model/w"),), absent=("optimizer/w.exp_avg_sq",),
        digests=Audited({"model/w": audited}), settled={"optimizer/w.exp_avg": settled},
    )  # fmt: skip
    found = RECORDS.validate_json((three.folder / "buffer-1.json").read_bytes())
    assert (found.step, found.plan_digest, found.by_plan, found.audited) == (7, "plan", True, True)
    assert found.ties == (("model/v", "model/w"),)
    assert found.absent == ("optimizer/w.exp_avg_sq",)
    assert {name: (one.rule, one.value) for name, one in found.digests.items()} == {
        "model/w": ("xxh3", "a"), "optimizer/w.exp_avg": ("sums", "b"),
    }  # fmt: skip
    assert found.info == {"epoch": 1}
    assert (three.folder / "buffer-1.extra").read_bytes() == b"extra"
    assert found.extra == xxhash.xxh3_128_hexdigest(b"extra")
    assert (three.folder / f"layout-{found.layout}.json").is_file()
    assert three.tier.newest() == three.tier.step_of(1) == 7
    assert three.tier.step_of(0) == NOTHING


def test_what_is_not_audited_says_so(three: Tier) -> None:
    settled = Digest("sums", 0xB)
    three.keep(0, 7, settled={"model/w": settled})
    found = RECORDS.validate_json((three.folder / "buffer-0.json").read_bytes())
    assert not found.audited
    assert list(found.digests) == ["model/w"]


def test_a_refuted_plan_takes_its_own_captures_along_and_no_others(three: Tier) -> None:
    three.keep(0, 5, plan="torn")
    three.keep(1, 6, plan="torn", by_plan=False)  # copied at the boundary, all of it
    three.keep(2, 7, plan="another")
    three.tier.distrust("torn")
    assert three.steps() == {1: 6, 2: 7}
    assert three.tier.step_of(0) == NOTHING


@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_record_that_cannot_be_written_is_not_there(three: Tier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Neither in part nor of the capture before, nor for this process."""
    three.keep(0, 6)
    three.tier.forget(0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr(fs, "open_new", full)
        else:
            patch.setattr(fs, "rename", full)
        three.keep(0, 7)
    assert three.steps() == {}
    assert three.tier.step_of(0) == NOTHING
    assert three.tier.newest() is None
    three.keep(0, 8)
    assert three.steps() == {0: 8}


def test_a_record_that_cannot_be_removed_keeps_its_buffer_from_being_filled(
    three: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.keep(0, 6)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "unlink", fail)
        with pytest.raises(StorageError, match=r"cannot remove a record .* Input/output error"):
            three.tier.forget(0)
    assert three.steps() == {0: 6}


def test_the_newest_capture_is_written_over_last(tmp_path: Path) -> None:
    buffers = StagingBuffers(3, tier=MemoryTier(tmp_path, RunLife("run")))
    buffers.grow(SIZE_BYTES)
    tier = buffers._tier
    assert tier is not None
    layout = make_layout([record("model/w", (4, 4))])
    taken = [buffers.take() for _ in range(3)]
    for buffer, step in zip(taken, (7, 5, 6), strict=True):
        capture = Capture(step, buffer, layout, b"", {}, (), (), None, {}, "plan", by_plan=True)
        tier.keep(capture, b"", {})
        buffers.give_back(buffer)
    assert sorted(kept_in(tmp_path)) == [5, 6, 7]
    for left in ([6, 7], [7], []):
        buffers.take()
        assert sorted(kept_in(tmp_path)) == left
    buffers.close()


def test_a_buffer_whose_record_cannot_be_removed_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(tmp_path, RunLife("run"))
    buffers = StagingBuffers(2, tier=tier)
    buffers.grow(SIZE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "forget", failing_always(StorageError("cannot remove a record")))
        with pytest.raises(StorageError):
            buffers.take()
    assert buffers.free == 2
    taken = [buffers.take(), buffers.take()]
    assert {one.index for one in taken} == {0, 1}
    for one in taken:
        buffers.give_back(one)
    buffers.close()


def failing_always(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def pages(path: Path) -> int:
    return os.stat(path).st_blocks


def test_what_stays_is_the_newest_alone(three: Tier) -> None:
    for index, step in enumerate((6, 7, 5)):
        three.keep(index, step)
    assert all(pages(three.folder / f"buffer-{index}") for index in range(3))
    three.tier.close(leave=True)
    assert three.steps() == {1: 7}
    assert [bool(pages(three.folder / f"buffer-{index}")) for index in range(3)] == [False, True, False]


@pytest.mark.parametrize("leave", [False, True])
def test_a_directory_that_was_exchanged_keeps_its_mark_and_nothing_stays(
    tmp_path: Path, three: Tier, leave: bool
) -> None:
    three.keep(0, 6)
    other = records.MARKS.dump_json(records.Mark("0" * 32, "boot"))
    (tmp_path / MARK).write_bytes(other)
    three.tier.close(leave=leave)
    assert (tmp_path / MARK).read_bytes() == other
    assert not three.folder.exists()


def test_a_forked_child_changes_nothing(tmp_path: Path, three: Tier) -> None:
    three.keep(0, 6)
    before = {path.name: path.read_bytes() for path in three.folder.iterdir()}
    child = os.fork()
    if not child:
        code = 1
        try:
            three.keep(1, 7)
            three.tier.forget(0)
            three.tier.stored(7)
            code = 0 if three.tier.allocate(1, 4096, None) is None else 1
            three.tier.close()
            three.tier.close(leave=True)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert {path.name: path.read_bytes() for path in three.folder.iterdir()} == before
    assert folders_below(tmp_path) == [three.folder]
    assert (tmp_path / MARK).exists()
    assert three.tier.step_of(0) == 6


def test_what_storage_has_is_noted(three: Tier) -> None:
    assert json.loads((three.folder / LIFE).read_text())["durable"] == NOTHING
    three.tier.stored(3)
    assert json.loads((three.folder / LIFE).read_text())["durable"] == 3


def test_memory_on_a_disk_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if mounts.file_system(tmp_path)[0] in (None, "tmpfs"):
        pytest.skip("the temporary directory is in memory")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    tier = MemoryTier(tmp_path, RunLife("run"))
    with caplog.at_level(logging.WARNING, "checkflow"):
        assert tier.allocate(1, 4096, None) is None
    assert "is no shared memory, but" in caplog.text
    assert not folders_below(tmp_path)


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(self: MemoryTier, index: int, *_: Any) -> Any:
        if index:
            raise error
        return map_(self, index, *_)

    map_ = MemoryTier._map
    return fail


def test_memory_that_runs_short_is_told_once_and_all_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = MemoryTier(tmp_path, RunLife("run"))
    monkeypatch.setattr(MemoryTier, "_map", failing(OSError(errno.ENOSPC, "No space left on device")))
    with caplog.at_level(logging.WARNING, "checkflow"):
        for _ in range(2):
            assert tier.allocate(2, 4096, None) is None
    assert [one.getMessage() for one in caplog.records] == [
        "captures in host memory end with the process, and only storage outlives it: "
        f"{records.ROOT}: No space left on device"
    ]
    assert not folders_below(tmp_path)
    assert not (tmp_path / MARK).exists()
    assert not tier.survives


def test_where_the_mark_cannot_be_written_it_is_tried_again_with_each_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk of the checkpoints is full at the start; shared memory is not."""
    tier, publish, full = MemoryTier(tmp_path, RunLife("run")), tier_module._publish, [True]

    def publish_unless_full(folder: int, name: str, data: bytes, **more: bool) -> None:
        if full and name == MARK:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(folder, name, data, **more)

    monkeypatch.setattr(tier_module, "_publish", publish_unless_full)
    with caplog.at_level(logging.INFO, "checkflow"):
        assert tier.allocate(2, 4096, None) is not None
        assert not tier.mark()
        assert not tier.survives
        assert [one.getMessage() for one in caplog.records] == [
            "captures in host memory end with the process, and only storage outlives it: "
            f"{tmp_path / MARK} cannot be written: No space left on device"
        ]
        full.clear()
        assert tier.mark()
        assert tier.survives
        assert caplog.records[1:][0].getMessage() == "captures in host memory outlive the process from now on"
        tier.mark()
        assert len(caplog.records) == 2
        full.append(True)
        tier.allocate(2, 8192, None)  # the state has grown
        assert not tier.survives
        assert "cannot be written" in caplog.records[2].getMessage()
        full.clear()
        assert tier.mark()
    (folder,) = folders_below(tmp_path)
    assert MARKS.validate_json((tmp_path / MARK).read_bytes()).token in folder.name
    tier.close()
    assert not folders_below(tmp_path)
    assert not (tmp_path / MARK).exists()


def test_a_file_that_comes_half_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(tier_module.fs, "write_all", failing_always(full))
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="No space left"):
        tier_module._publish(fd, MARK, b"{}")
    os.close(fd)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_memory_is_taken_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(tmp_path, RunLife("run"))
    monkeypatch.setattr(MemoryTier, "_map", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tier.allocate(2, 4096, None)
    assert not folders_below(tmp_path)
    assert not (tmp_path / MARK).exists()


def test_whose_directory_it_is(tmp_path: Path) -> None:
    status, path = os.stat(tmp_path), os.path.realpath(tmp_path)
    assert Owner(path, status.st_dev, status.st_ino).is_of(tmp_path)
    assert Owner("/elsewhere", status.st_dev, status.st_ino).is_of(tmp_path)  # it was moved
    assert Owner(path, status.st_dev + 1, status.st_ino).is_of(tmp_path)  # a network's disk, mounted anew
    assert not Owner("/elsewhere", status.st_dev + 1, status.st_ino).is_of(tmp_path)
    assert not Owner(path, status.st_dev, status.st_ino + 1).is_of(tmp_path)  # begun anew


def test_memory_goes_back_though_a_child_lives(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, RunLife("run"))
    memories = tier.allocate(2, 32 << 20, None)
    assert memories is not None
    folder = folder_of(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    with open(folder / "buffer-0", "rb") as first, open(folder / "buffer-1", "rb") as second:
        assert all(os.fstat(one.fileno()).st_blocks * 512 >= 32 << 20 for one in (first, second))
        tier.close()
        assert not any(os.fstat(one.fileno()).st_blocks for one in (first, second))
    os.close(write)
    os.waitpid(child, 0)


def test_larger_state_gets_larger_buffers_and_leaves_no_old_ones(tmp_path: Path) -> None:
    tier = MemoryTier(tmp_path, RunLife("run"))
    first = tier.allocate(2, 4096, None)
    one = folder_of(tmp_path)
    second = tier.allocate(3, 8193, None)
    two = folder_of(tmp_path)
    assert first is not None
    assert second is not None
    assert [len(memory) for memory in second] == [8193] * 3
    assert not any(map_address(memory) % LARGE_BYTES for memory in second)
    assert not one.exists()
    assert sorted(path.stat().st_size for path in two.glob("buffer-*")) == [8193] * 3
    tier.close()
    tier.close()
    assert not two.exists()


def test_what_a_dead_job_had_goes_back_though_its_child_lives(three: Tier) -> None:
    with open(three.folder / "buffer-0", "rb") as held:  # as a child that it has forked
        assert os.fstat(held.fileno()).st_blocks
        (three.folder / "buffer-1").unlink()
        (three.folder / "buffer-1").symlink_to("/dev/zero")  # nothing of ours
        records.remove(three.folder)
        assert not os.fstat(held.fileno()).st_blocks
