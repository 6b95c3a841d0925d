"""A checkpoint is deleted while others still use its files: whoever can see, or has sent, the old bytes keeps them."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.store import Store
from tests.faults.mounting import need_mount
from tests.support.store_tools import fill, record

LAYOUT = make_layout([record("model/weight", (10_000,))])
(FILE,) = LAYOUT.files
Look = Callable[[], bytes]


@pytest.fixture(params=["/dev/shm", "/var/tmp"])
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=request.param, prefix="checkflow-test-") as folder:
        yield Path(folder) / "checkpoints"


def commit(store: Store, step: int) -> Path:
    return store.commit(step, LAYOUT, fill(LAYOUT, step)[0], b"extra", {})


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Look]:
    with open(path, "rb") as file:
        yield file.read


@contextlib.contextmanager
def named(path: Path) -> Iterator[Look]:
    """A descriptor that only names the file (O_PATH), as of a path that systemd or a sandbox hands on."""
    fd = os.open(path, os.O_PATH)
    try:
        yield lambda: Path(f"/proc/self/fd/{fd}").read_bytes()
    finally:
        os.close(fd)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[Look]:
    """As safetensors opens a file: the descriptor is closed, and the memory stays."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with memory:
        yield lambda: memory[:]


@contextlib.contextmanager
def linked(path: Path) -> Iterator[Look]:
    """A backup, as ``cp --link`` makes it."""
    os.link(path, other := path.parents[1] / "backup")
    yield other.read_bytes


@contextlib.contextmanager
def sent(path: Path) -> Iterator[Look]:
    """By a web server, which has closed the file before the client reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with open(path, "rb") as file:
            assert os.sendfile(ours.fileno(), file.fileno(), 0, 1 << 20) == path.stat().st_size
        ours.shutdown(socket.SHUT_WR)
        yield lambda: b"".join(iter(lambda: theirs.recv(1 << 20), b""))


@contextlib.contextmanager
def spliced(path: Path) -> Iterator[Look]:
    """Into a pipe."""
    out, into = os.pipe()
    try:
        with open(path, "rb") as file:
            assert os.splice(file.fileno(), into, 1 << 20) == path.stat().st_size
        yield lambda: os.read(out, 1 << 20)
    finally:
        os.close(out)
        os.close(into)


@contextlib.contextmanager
def overlaid(path: Path) -> Iterator[Look]:
    """By a container whose image has the version's folder as its lower layer."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        upper, work, target = (Path(other) / name for name in ("upper", "work", "target"))
        for one in (upper, work, target):
            one.mkdir()
        options = f"lowerdir={path.parent},upperdir={upper},workdir={work}"
        done = subprocess.run(
            ["mount", "-t", "overlay", "-o", options, "overlay", str(target)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        need_mount(f"mounting an overlay is not allowed here: {done.stderr.strip()}" if done.returncode else None)
        try:
            fd = os.open(target / path.name, os.O_PATH)  # as by a path's lookup in the container
            try:
                yield lambda: Path(f"/proc/self/fd/{fd}").read_bytes()
            finally:
                os.close(fd)
        finally:
            subprocess.run(["umount", str(target)], check=True)


WAYS: list[Any] = [opened, named, mapped, linked, sent, spliced, overlaid]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whoever_can_see_the_old_bytes_keeps_them(directory: Path, way: Any) -> None:
    with Store(directory, run_id="run", keep_epochs=0) as store:
        old = commit(store, 0) / FILE.name
        before = old.read_bytes()
        with way(old) as look:
            for step in range(1, 7):
                commit(store, step)
            assert not old.exists()
            assert look() == before


def test_each_checkpoint_has_files_of_its_own_and_the_deleted_leave_nothing(directory: Path) -> None:
    with Store(directory, run_id="run", keep_epochs=0) as store, contextlib.ExitStack() as held:
        seen = set()
        for step in range(8):
            fd = os.open(commit(store, step) / FILE.name, os.O_PATH)  # or its number would be given away again
            held.callback(os.close, fd)
            seen.add(os.fstat(fd).st_ino)
            kept = [step_name(one) for one in range(max(0, step - 1), step + 1)]
            assert sorted(os.listdir(directory)) == [".lock", *kept]
    assert len(seen) == 8
