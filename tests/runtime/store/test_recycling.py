"""A checkpoint that retention has deleted gives its files to the next one: whoever can see the old bytes keeps them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.runtime.format.layout import Layout, make_layout
from checkflow.runtime.store.cleanup import RECYCLING
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.system import fs, mounts
from tests.runtime.store.test_store import LAYOUT, commit, new_store, newest, steps
from tests.support.faults import all_direct
from tests.support.store_tools import fill, record, tree

NAMES = [file.name for file in LAYOUT.files]
FIRST = NAMES[0]


@pytest.fixture(params=["tmpfs", "a disk"])
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    where = "/dev/shm" if request.param == "tmpfs" else "/var/tmp"
    if mounts.file_system(where)[0] not in RECYCLING:
        pytest.skip(f"{where} is on {mounts.file_system(where)[0]}")
    with tempfile.TemporaryDirectory(dir=where, prefix="checkflow-test-") as folder:
        yield Path(folder) / "checkpoints"


def inodes(path: Path) -> dict[str, int]:
    return {name: (path / name).stat().st_ino for name in NAMES}


def rights(path: Path) -> list[tuple[int | str, ...]]:
    files = [(one, one.stat()) for one in sorted(path.iterdir())]
    return [(found.st_mode, found.st_uid, found.st_gid, *os.listxattr(one)) for one, found in files]


def used_bytes(directory: Path) -> int:
    """Of all files, each counted once."""
    return sum({one.stat().st_ino: one.stat().st_size for one in directory.rglob("*") if one.is_file()}.values())


def model(*sizes: int) -> Layout:
    return make_layout([record(f"model/{number}", (size,)) for number, size in enumerate(sizes)])


def test_each_checkpoint_is_written_over_the_one_deleted_last(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk use stays what one more checkpoint takes; at the end there are only those that stay."""
    most, real = [0], fs.fsync

    def fsync(fd: int) -> None:
        real(fd)
        most[0] = max(most[0], used_bytes(directory))

    monkeypatch.setattr(fs, "fsync", fsync)
    with new_store(directory) as store:
        seen = [inodes(commit(store, step, step)) for step in range(8)]
        size_bytes = used_bytes(directory / step_name(7))
    assert seen[3:] == seen[:5]
    assert len({number for one in seen for number in one.values()}) == 3 * len(NAMES)
    assert most[0] <= 3 * size_bytes + 100  # of the lock file
    assert sorted(os.listdir(directory)) == [".lock", step_name(6), step_name(7)]
    assert newest(directory) == (7, 7)


@pytest.mark.parametrize("way", ["buffered", "direct"])
@pytest.mark.parametrize(
    "after", [model(3000), model(5), model(), model(2000, 1), LAYOUT], ids=lambda one: len(one.files)
)
def test_nothing_of_the_old_file_is_left_in_the_new_one(directory: Path, after: Layout, way: str) -> None:
    """Whether it is longer, shorter, as long or not there at all."""
    before = model(2001)
    with all_direct() if way == "direct" else contextlib.nullcontext():
        for folder, layouts in (directory, (before, before, before, after)), (directory / "new", (after,)):
            with new_store(folder, keep_epochs=0) as store:
                for step, layout in enumerate(layouts, 4 - len(layouts)):
                    store.commit(step, layout, fill(layout, step)[0], b"extra", {})
    assert tree(directory / step_name(3)) == tree(directory / "new" / step_name(3))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Callable[[], bytes]]:
    with open(path, "rb") as file:
        yield file.read


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[Callable[[], bytes]]:
    """As safetensors opens a file: the descriptor is closed, and the memory stays."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with memory:
        yield lambda: memory[:]


@contextlib.contextmanager
def mapped_elsewhere(path: Path) -> Iterator[Callable[[], bytes]]:
    program = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file: memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(flush=True); sys.stdin.readline(); sys.stdout.buffer.write(memory[:])"
    )
    reader = subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"\n"
    with reader:
        yield lambda: reader.communicate(b"\n")[0]


@contextlib.contextmanager
def linked(path: Path) -> Iterator[Callable[[], bytes]]:
    """A backup, as ``cp --link`` makes it."""
    os.link(path, other := path.parents[1] / "backup")
    yield other.read_bytes


@contextlib.contextmanager
def read(path: Path) -> Iterator[Callable[[], bytes]]:
    """By a reader of this package that has held the checkpoint for longer than anyone waits."""
    with pytest.MonkeyPatch.context() as patch, open_checkpoint(path.parent) as checkpoint:
        patch.setattr("checkflow.runtime.store.store.READER_SECONDS", 0.0)

        def look() -> bytes:
            checkpoint.verify()
            return image(0)

        yield look


def image(seed: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder, new_store(Path(folder)) as store:
        return (commit(store, 0, seed) / FIRST).read_bytes()


@pytest.mark.parametrize("holding", [opened, mapped, mapped_elsewhere, linked, read], ids=lambda way: way.__name__)
def test_whoever_can_see_the_old_bytes_keeps_them(directory: Path, holding: Any) -> None:
    with new_store(directory) as store:
        old = commit(store, 0, 0)
        numbers, bytes_of = inodes(old), (old / FIRST).read_bytes()
        with holding(old / FIRST) as look:
            for step in (1, 2, 3, 4, 5):
                path = commit(store, step, step)
                if step == 3:
                    left = inodes(path)
            assert look() == bytes_of == image(0)
    assert left[FIRST] != numbers[FIRST]
    assert newest(directory) == (5, 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o666),
        lambda path: path.chmod(0o400),
        pytest.param(
            lambda path: os.chown(path, -1, 12345), marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
        ),
        pytest.param(
            lambda path: os.chown(path, 12345, -1), marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
        ),
        lambda path: os.setxattr(path, "user.checksum", b"of the old bytes"),
    ],
    ids=["writable for all", "read-only", "another group", "another user", "a note"],
)  # fmt: skip
def test_a_new_checkpoint_has_a_new_file_s_rights(directory: Path, change: Callable[[Path], None]) -> None:
    """A job would not go on from a file that anyone may write to, or that is another user's."""
    with new_store(directory) as store:
        first = commit(store, 0, 0)
        expected = rights(first)
        change(first / FIRST)
        for step in (1, 2, 3):
            path = commit(store, step, step)
        assert rights(path) == expected
    assert newest(directory) == (3, 3)


@pytest.mark.parametrize("instead", ["link", "fifo", "nothing", "no folder"])
def test_what_others_put_among_the_old_files_is_not_written_to(directory: Path, tmp_path: Path, instead: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    with new_store(directory) as store:
        for step in (0, 1, 2):
            commit(store, step, step)
        (trash,) = directory.glob(".trash-*")
        (trash / FIRST).unlink()
        if instead == "link":
            (trash / FIRST).symlink_to(precious)
        elif instead == "fifo":
            os.mkfifo(trash / FIRST)
        elif instead == "no folder":
            shutil.rmtree(trash)
        commit(store, 3, 3)
    assert precious.read_bytes() == b"x"
    assert newest(directory) == (3, 3)


def test_whoever_opens_a_file_while_it_is_taken_over_ends_no_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells the holder of a lease by a signal, whose usual number would end this process."""
    real, met = fcntl.fcntl, []

    def call(fd: int, command: int, *rest: Any) -> Any:
        result = real(fd, command, *rest)
        if (command, *rest) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            with pytest.raises(BlockingIOError):
                os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
            met.append(fd)
        return result

    with new_store(directory) as store:
        for step in (0, 1, 2):
            commit(store, step, step)
        monkeypatch.setattr(fcntl, "fcntl", call)
        commit(store, 3, 3)
    assert len(met) == len(NAMES)
    assert newest(directory) == (3, 3)


@pytest.mark.parametrize("kind", ["overlay", "nfs4", "btrfs", None])
def test_where_readers_are_not_known_nothing_is_overwritten(
    directory: Path, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if kind is None else mounts.Mount(kind, "x", frozenset())
    monkeypatch.setattr(mounts, "mount_of", lambda path: found)
    with new_store(directory) as store:
        for step in range(4):
            commit(store, step, step)
            assert not list(directory.glob(".trash-*"))
    assert newest(directory) == (3, 3)


def test_a_system_without_leases_makes_new_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def call(fd: int, command: int, *rest: Any) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", call)
    with new_store(directory) as store:
        for step in range(4):
            commit(store, step, step)
    assert newest(directory) == (3, 3)


def test_of_several_that_go_at_once_one_stays(directory: Path) -> None:
    with new_store(directory, keep_latest=5) as store:
        for step in range(5):
            commit(store, step, step)
    with new_store(directory) as store:
        commit(store, 5, 5)
        assert steps(directory) == [5, 4]
        assert len(list(directory.glob(".trash-*"))) == 1
        store.annotate(5, {"loss": 0.5})  # which takes nothing of it
        assert len(list(directory.glob(".trash-*"))) == 1
        commit(store, 6, 6)
    assert newest(directory) == (6, 6)


def test_a_forked_child_deletes_nothing(directory: Path) -> None:
    with new_store(directory) as store:
        for step in (0, 1, 2):
            commit(store, step, step)
        child = os.fork()
        if not child:
            code = 1
            try:
                store.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(directory.glob(".trash-*"))) == 1
        commit(store, 3, 3)
    assert newest(directory) == (3, 3)
