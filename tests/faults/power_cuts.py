"""Power cuts of a real file system: everything that was not synced is lost, at a call of the store after the other.

A child process commits in a loop-mounted image, and notes outside of it what was acknowledged. After one of its calls
the file system is shut down without a flush (FS_IOC_SHUTDOWN) and mounted again: L1, L2, L3 and L5 must hold. With
``--survives`` the process lives on. Needs root (:mod:`mounting`). Free of torch and of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkflow.core.errors import CheckflowError
from checkflow.runtime.store import file_writer
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.faults.kill_writer import check, seed_of
from tests.faults.mounting import Image, scratch
from tests.support.store_tools import fill, recover, small_layout

# Calls that change what is on the disk. After any other one a cut leaves what it leaves after the one before.
CHANGES = (
    "make_folders", "mkdir", "open_new", "open_lock", "truncate", "set_direct", "pwrite", "pwritev", "fsync", "rename",
    "move", "unlink", "rmdir",
)  # fmt: skip
HANG_SECONDS = 300.0  # which no machine needs, however busy
KEEP = 2
RUNS_A_LIFE = 10  # run numbers that one life may use: each attempt at a checkpoint has content of its own
Attempt = tuple[int, int]  # run, step


@dataclass
class Noted:
    """What the children said, all lives together."""

    attempts: set[Attempt] = field(default_factory=set)
    acknowledged: Attempt | None = None
    acknowledgements: int = 0

    def add(self, text: str) -> str | None:
        """The notes of one life; returns what went wrong by its own account."""
        said = None
        for kind, *rest in (line.split(" ", 2) for line in text.splitlines()):
            if kind == "failed":
                said = " ".join(rest)
            elif kind == "attempt":
                self.attempts.add((int(rest[0]), int(rest[1])))
            else:
                self.acknowledged = (int(rest[0]), int(rest[1]))
                self.acknowledgements += 1
        return said


def wrap_calls(at: int, act: Callable[[], None]) -> None:
    """Do this after the at-th call that changes something. In a process that ends afterwards."""
    count = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal count
            try:
                return real(*args, **named)
            finally:
                count += 1
                if count == at:
                    act()

        return call

    for name in CHANGES:
        if hasattr(fs, name):
            setattr(fs, name, wrap(getattr(fs, name)))


def lie(what: str, root: Path) -> None:
    """One kind of fsync does nothing from now on: of a file, of a folder below the root, or of the root."""
    real = fs.fsync

    def fsync(fd: int) -> None:
        status = os.fstat(fd)
        folder = "root" if root.exists() and status.st_ino == root.stat().st_ino else "folder"
        if what != (folder if stat.S_ISDIR(status.st_mode) else "file"):
            real(fd)

    fs.fsync = fsync


def live(directory: Path, life: int, fresh: bool, note: Callable[[str], None]) -> None:
    """Commits until it is over: new steps, the same step again, old ones retired."""
    layout = small_layout()
    run = life * RUNS_A_LIFE
    with Store(directory, run_id=f"life{life}", keep_latest=KEEP, keep_epochs=False) as store:
        step = 0
        if (checkpoint := recover(store)) is not None:
            with checkpoint:
                step = checkpoint.step + 1
            store.went_on_from(checkpoint.step)
        for run, one in enumerate((step,) if fresh else (step, step, step + 1), run):  # noqa: B020
            staging, _ = fill(layout, seed_of(run, one))
            note(f"attempt {run} {one}")
            store.commit(one, layout, staging, str((run, one)).encode(), {"run": run})
            note(f"done {run} {one}")


class Machine:
    """An image, and a store in it that lives through one power cut after the other."""

    def __init__(
        self, kind: str, folder: Path, *, fresh: bool = False, survives: bool = False, direct: bool = False,
        lies: str = "",
    ) -> None:  # fmt: skip
        self._image, self._folder, self._fresh, self._lies = Image(kind, folder), folder, fresh, lies
        self._survives, self._direct = survives, direct
        self._image.mount()
        self.noted, self.lives, self.cuts = Noted(), 0, 0

    def life(self, at: int) -> tuple[bool, list[str]]:
        """One life that ends with a power cut after its at-th call; whether it had so many, and what is wrong then."""
        self.lives += 1
        if self._fresh:  # a directory that this life makes, with its parents
            self.noted = Noted(acknowledgements=self.noted.acknowledgements)
        directory = self._image.target / (f"new-{self.lives}/a/b" if self._fresh else "checkpoints")
        notes = self._folder / f"notes-{self.lives}"
        child = os.fork()
        if child == 0:
            self._in_child(directory, at, notes)
        problem = _wait(child)
        text = notes.read_text()
        self._image.unmount()
        self._image.mount()
        said = self.noted.add(text)
        met = (self._folder / "cut").exists()
        (self._folder / "cut").unlink(missing_ok=True)
        self.cuts += met
        problems = [problem] if problem else []
        if said and not met:
            problems.append(f"L5 failed without a power cut: {said}")
        if met or not self._fresh:
            problems += self._examine(directory)
        return met, [f"cut after call {at}: {problem}" for problem in problems]

    def _in_child(self, directory: Path, at: int, notes: Path) -> None:
        fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def cut() -> None:
            self._image.cut_power()
            (self._folder / "cut").touch()
            if not self._survives:
                os._exit(0)

        def note(text: str) -> None:
            os.write(fd, f"{text}\n".encode())

        try:
            if self._direct:
                fs.LEAST_DIRECT_BYTES = file_writer.THREAD_BYTES = 1
            if self._lies:
                lie(self._lies, directory)
            wrap_calls(at, cut)
            live(directory, self.lives, self._fresh, note)
        except (CheckflowError, OSError) as error:
            note(f"failed {type(error).__name__}: {error}")
            os._exit(0 if isinstance(error, CheckflowError) else 3)
        except BaseException as error:  # noqa: BLE001 - a child must end here, whatever it is
            note(f"failed {type(error).__name__}: {error}")
            os._exit(4)
        os._exit(0)

    def _examine(self, directory: Path) -> list[str]:
        """What a fresh start finds; then the next save, which must work."""
        problems = []
        try:
            # (L1, L2, L3) and that nothing was torn: a power cut is no reason to set a checkpoint aside
            if problem := check(directory, self.noted.attempts, self.noted.acknowledged):
                problems.append(f"L1 to L3 {problem}")
            run = self.lives * RUNS_A_LIFE + RUNS_A_LIFE - 1
            with Store(directory, run_id="next", keep_latest=KEEP, keep_epochs=False) as store:
                newest = recover(store)
                step = 0 if newest is None else newest.step + 1
                if newest is not None:
                    newest.close()
                layout = small_layout()
                self.noted.attempts.add((run, step))
                store.commit(step, layout, fill(layout, seed_of(run, step))[0], str((run, step)).encode(), {"run": run})
                self.noted.acknowledged = (run, step)
            size = max(_size_bytes(path) for path in find(directory))
            if _size_bytes(directory) > (KEEP + 1) * size + (1 << 20):
                problems.append(f"L5 {_size_bytes(directory)} bytes in use, a checkpoint has {size}")
        except CheckflowError as error:
            problems.append(f"L5 the next start fails: {error}")
        return problems

    def close(self) -> None:
        self._image.unmount()


def _size_bytes(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def _wait(child: int) -> str | None:
    """The end of a child; what is wrong with it."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return f"L5 the writer ended with {code}" if code else None
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"L5 the writer hangs for {HANG_SECONDS} s"
        time.sleep(0.001)


def cut_after_calls(
    kind: str,
    *,
    first: int = 1,
    every: int = 1,
    most: int | None = None,
    fresh: bool = False,
    survives: bool = False,
    direct: bool = False,
    lies: str = "",
) -> dict[str, Any]:
    """Cuts after calls ``first``, ``first + every``, … of a life, until one ends before its call, or ``most`` cuts."""
    folder = scratch()
    try:
        machine = Machine(kind, folder, fresh=fresh, survives=survives, direct=direct, lies=lies)
        problems: list[str] = []
        try:
            if not fresh:
                problems += machine.life(0)[1]  # undisturbed: there is something to lose
            at, met = first, True
            while met and (most is None or machine.cuts < most) and not (problems and not lies):
                met, found = machine.life(at)
                problems += found
                at += every
        finally:
            machine.close()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    return {"tried": machine.cuts, "acknowledged": machine.noted.acknowledgements, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["ext4", "xfs"])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--most", type=int, default=None)
    parser.add_argument("--fresh", action="store_true", help="each life makes the directory, with its parents")
    parser.add_argument("--survives", action="store_true", help="the process outlives its disk")
    parser.add_argument("--direct", action="store_true", help="files of every size go around the page cache")
    parser.add_argument("--lie", default="", choices=["", "file", "folder", "root"], help="to see it fail")
    chosen = parser.parse_args()
    logging.getLogger("checkflow").setLevel(logging.CRITICAL)  # what cannot be removed after a cut is no news
    found = cut_after_calls(
        chosen.kind, first=chosen.first, every=chosen.every, most=chosen.most, fresh=chosen.fresh,
        survives=chosen.survives, direct=chosen.direct, lies=chosen.lie,
    )  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
