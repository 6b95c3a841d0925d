"""The reading process, from outside: what it answers, how it ends, and what its memory does."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack

HANG_SECONDS = 60.0  # for one input: then the process says where it is, and is ended
_START_SECONDS = 300.0


class ReaderDied(Exception):  # noqa: N818 - what it was doing at its end is in ``details``
    """The process ended, or had to be ended."""

    def __init__(self, how: str, details: str) -> None:
        super().__init__(how)
        self.how = how
        self.details = details


@dataclass(frozen=True)
class Answer:
    """What came of an input. ``found``: what must not be, in words; "" where there is nothing."""

    outcome: str
    found: str
    details: str
    seconds: float  # of processor time


@dataclass
class Reader:
    """A process that reads. After a ReaderDied there is none until :meth:`start`."""

    directory: Path
    fault: str | None = None  # a name of ``breaks``
    hang_seconds: float = HANG_SECONDS
    _process: subprocess.Popen[bytes] | None = None
    _connection: Connection[Any, Any] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Begin a new one, and wait until it is ready.

        Raises:
            ReaderDied: it does not come so far.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = Pipe()
        command = [
            sys.executable,
            "-m",
            "tests.faults.fuzz.reader",
            str(theirs.fileno()),
            str(self.directory / "inputs"),
        ]
        with self._messages.open("wb") as messages:
            self._process = subprocess.Popen(
                [*command, *([self.fault] if self.fault else [])],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=messages, stderr=messages,
            )  # fmt: skip
        theirs.close()
        self._receive(_START_SECONDS)

    def give(self, name: str, item: Any) -> Answer:
        """Give one input to a target's reader.

        Raises:
            ReaderDied: there is no answer, and no process any more.
        """
        assert self._connection is not None
        with contextlib.suppress(BrokenPipeError):  # what became of it is asked for next
            self._connection.send_bytes(msgpack.packb([name, item]))
        return Answer(*msgpack.unpackb(self._receive(self.hang_seconds)))

    def end(self) -> None:
        """End the process, if there is one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    @property
    def _messages(self) -> Path:
        return self.directory / "messages"

    def _receive(self, patience_seconds: float) -> bytes:
        assert self._connection is not None
        assert self._process is not None
        how = ""
        try:
            if self._connection.poll(patience_seconds):
                return self._connection.recv_bytes()
            how = "hangs"
            self._process.send_signal(signal.SIGABRT)  # its last words are where it is
        except (EOFError, ConnectionResetError):
            pass  # it ended: its exit code, below, says how
        try:
            status = self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if not how:
            how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.end()
        raise ReaderDied(how, self._messages.read_text(errors="backslashreplace"))

    # Memory

    def resident_bytes(self) -> int:
        return self._status_bytes("VmRSS")

    def highest_bytes(self) -> int:
        """The most memory that was resident since the last :meth:`forget_highest`."""
        return self._status_bytes("VmHWM")

    def forget_highest(self) -> None:
        assert self._process is not None
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def _status_bytes(self, key: str) -> int:
        assert self._process is not None
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"the system does not tell {key}")


@contextlib.contextmanager
def reading(fault: str | None = None, *, hang_seconds: float = HANG_SECONDS) -> Iterator[Reader]:
    """A process that reads, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        reader = Reader(Path(directory), fault, hang_seconds)
        reader.start()
        try:
            yield reader
        finally:
            reader.end()
