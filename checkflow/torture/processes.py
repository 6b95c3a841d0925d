"""The processes of a job that is killed: start it, find who trains, signal, and leave none of it behind.

The job runs in a session of its own. Its orphans come to this process, so that whoever loses its parent is still found.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from checkflow.core.errors import CheckflowError
from checkflow.core.small_files import read_regular
from checkflow.runtime.store.lock import LOCK, MAX_HOLDER_BYTES

DEATH_SECONDS = 60.0  # that a killed process may take: what waits for a disk ends late
POLL_SECONDS = 0.002  # between two looks at a running process
_EMPTY_LOOKS = 2  # one alone may miss a process whose parent dies in the middle of it
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_TAIL_BYTES = 16384
_BANNER = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (\d+)")  # where torchrun's own words begin

Process = Any  # psutil's, which has no types


class Child(Protocol):
    """A process that this one has started: ``subprocess.Popen``, or one that was forked."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> Any: ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""


@dataclass(frozen=True, slots=True)
class JobProcess:
    """The process that a job was started as.

    Attributes:
        log: what it says goes there, from ``log_begin`` on.
        strangers: processes below this one that were there before.
    """

    process: Child
    log: Path
    log_begin: int
    strangers: frozenset[Process]


@contextlib.contextmanager
def nothing_left(strangers: frozenset[Process]) -> Iterator[None]:
    """Nothing that was started within this runs afterwards, however it is left: by a Ctrl-C while a job was just being
    started, too. Orphans become children of this process meanwhile, where the system can do that (Linux).

    Raises:
        CheckflowError: a process does not end.
    """
    control = getattr(ctypes.CDLL(None), "prctl", lambda *nothing: None)
    before = ctypes.c_int(0)
    control(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            end_all(strangers)
        finally:
            control(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def below() -> frozenset[Process]:
    """All processes below this one. One that gets the number of another later is not the same."""
    return frozenset(psutil.Process().children(recursive=True))


def start(
    command: Sequence[str], log: Path, strangers: frozenset[Process], *, env: Mapping[str, str] | None = None
) -> JobProcess:
    """Start the command, in this process's environment or another.

    Raises:
        CheckflowError: it cannot be started, or what it says cannot be written.
    """
    try:
        output = open(log, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise CheckflowError(f"cannot write what the job says to {log}: {error.strerror or error}") from error
    with output:
        begin = output.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env=env,
            )  # fmt: skip
        except OSError as error:
            raise CheckflowError(f"cannot start {command[0]}: {error.strerror or error}") from error
    return JobProcess(process, log, begin, strangers)


def members(strangers: frozenset[Process]) -> list[Process]:
    """All processes of the job that live."""
    return [one for one in _remains(strangers) if lives(one)]


def _remains(strangers: frozenset[Process]) -> list[Process]:
    """All processes below this one, zombies too, but for strangers and what those have started since."""
    outside: set[int] = set()
    found = []
    for one in psutil.Process().children(recursive=True):  # parents come before their children
        if one in strangers or _parent_of(one) in outside:
            outside.add(one.pid)
        else:
            found.append(one)
    return found


def process_of(job: JobProcess) -> Process:
    """The one that was started; whoever calls this has not waited for its end yet."""
    return psutil.Process(job.process.pid)


def _parent_of(process: Process) -> int | None:
    """Its parent's number; None: it is gone."""
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def lives(process: Process) -> bool:
    """Whether it runs, and waits for nobody to take its remains away."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def name_of(process: Process) -> str:
    """In a few words, for people."""
    try:
        return f"{process.name()} {process.pid}"
    except psutil.NoSuchProcess:
        return str(process.pid)


def writers(processes: Iterable[Process]) -> dict[Path, Process]:
    """The checkpoint directories whose lock one of these processes holds, and which."""
    found = {}
    for process in processes:
        for directory in _locks_of(process.pid):
            found[directory] = process
    return found


def _locks_of(pid: int) -> Iterator[Path]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it has ended, or has changed its user
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = Path(os.readlink(f"{folder}/{name}"))
                if target.name == LOCK and _signed_by(target, pid):
                    yield target.parent


def _signed_by(lock: Path, pid: int) -> bool:
    """Whether the lock says that this process holds it: others wait for one, and other tools have such files too."""
    try:
        return bool(json.loads(read_regular(lock, MAX_HOLDER_BYTES))["pid"] == pid)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def children_of(process: Process) -> list[Process]:
    """All processes below one, that live; it may have ended."""
    try:
        return [one for one in process.children(recursive=True) if lives(one)]
    except psutil.NoSuchProcess:
        return []


def ranks_of(processes: Iterable[Process]) -> dict[int, Process]:
    """The ranks among processes, by the number that torchrun and other launchers give each in its environment."""
    found: dict[int, Process] = {}
    for process in processes:  # parents come first, and a rank's children have its environment
        with contextlib.suppress(psutil.Error):
            number = process.environ().get("RANK", "")
            if number.isdecimal():
                found.setdefault(int(number), process)
    return found


def send(process: Process, number: signal.Signals) -> None:
    """A signal; to one that has ended none, and to another user's neither: :func:`end_all` reports what stays."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def end_all(strangers: frozenset[Process], process: Child | None = None) -> None:
    """Kill all that is left of a job, and wait until it is gone.

    Args:
        strangers: processes that are none of it.
        process: the one that was started, if it is known.

    Raises:
        CheckflowError: a process does not end.
    """
    patience = time.monotonic() + DEATH_SECONDS
    empty = 0
    while empty < _EMPTY_LOOKS:
        # Zombies count: one whose other threads are still ending holds its files and locks as long as they do.
        left = _remains(strangers)
        empty = 0 if left else empty + 1
        for one in left:
            send(one, signal.SIGKILL)
        if process is not None:
            process.poll()
        bury(strangers, process)
        if left and time.monotonic() > patience:
            raise CheckflowError(f"a process of the job was killed and does not end: {name_of(left[0])}")
        if left:
            time.sleep(POLL_SECONDS)


def bury(strangers: frozenset[Process], process: Child | None = None) -> None:
    """Orphans have come to this process, which alone can take their remains away."""
    for one in psutil.Process().children():
        if one not in strangers and (process is None or one.pid != process.pid):
            with contextlib.suppress(ChildProcessError, psutil.NoSuchProcess):
                if one.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(one.pid, os.WNOHANG)


def tail(job: JobProcess, lines: int = 8) -> str:
    """What the job said last, its lines as one; "" if nothing, or if somebody has taken its file away.

    Of ranks under torchrun, what the first one that failed has said.
    """
    found = []
    with contextlib.suppress(OSError), open(job.log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(job.log_begin, size - _TAIL_BYTES))
        found = file.read().decode(errors="replace").splitlines()
    for number, line in enumerate(found):
        if banner := _BANNER.search(line):
            before, mark = found[:number], f"[rank{banner[1]}]: "
            found = [one.removeprefix(mark) for one in before if one.startswith(mark)] or before
            break
    return " / ".join([" ".join(line.split()) for line in found if line.strip()][-lines:])


def shared_memory(pids: Iterable[int]) -> dict[str, int]:
    """Files of shared memory that carry the number of one of these processes in their names, and their bytes."""
    wanted = {str(pid) for pid in pids}
    found = {}
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:
        for entry in entries:
            if wanted.intersection(entry.name.replace("-", "_").split("_")):
                with contextlib.suppress(OSError):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
    return found
