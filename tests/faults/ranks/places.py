"""Where each rank of a job is, in memory that it shares with its killer, and who is killed where."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from checkflow.runtime.persist import rank_commit
from checkflow.runtime.ranks import council

MOST_RANKS = 4
RUNTIME = "checkflow.runtime."
#: By phase: who passes it, and the calls that it begins with.
PHASES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "joining": ("all", (("checkpointer", "join"),)),
    "agreeing the start": ("all", (("ranks.council.Council", "agree_start"),)),
    "restored": ("all", (("ranks.council.Council", "agree_restored"),)),
    "forward": ("all", ()),
    "backward": ("all", ()),
    "optimizer step": ("all", ()),
    "boundary": ("all", (("loop.agreement.Agreement", "arrive"),)),
    "closing": ("all", (("resources.Resources", "close"),)),
    "opening an attempt": ("lead", (("ranks.council.Council", "open_attempt"),)),
    "awaiting an attempt": ("others", (("ranks.council.Council", "await_attempt"),)),
    "write": ("all", (("system.fs", "pwrite"),)),
    "fsync": ("all", (("system.fs", "fsync"),)),
    "receipt": ("all", (("ranks.council.Council", "post_receipt"),)),
    "collecting": ("lead", (("ranks.council.Council", "collect"),)),
    "joining parts": ("lead", (("store.parts", "join"),)),
    "publishing": ("lead", (("store.store.Store", "_publish"),)),
    "rename": ("lead", (("system.fs", "rename"),)),
    "concluding": ("lead", (("ranks.council.Council", "conclude"),)),
    "retention": ("lead", (("store.store.Store", "_retire"),)),
    "awaiting the verdict": ("others", (("ranks.council.Council", "await_verdict"),)),
}
WAYS = ("one killed", "one stopped", "all killed", "all stopped", "launcher killed", "launcher stopped")
_NAMES = list(PHASES)
# In the memory: the blow, the launcher, ranks, phases, waits of the main and of other threads, and when it was dealt.
_AIM, _LAUNCHER, _PIDS, _PHASES, _WAITS, _DEALT = 0, 8, 16, 48, 64, 192


@dataclass(frozen=True)
class Aim:
    """A blow: the way, the rank that it comes from, and at which phase, the how manieth time.

    Without a phase the killer deals it after ``seconds``; with one, too, if it did not come.
    """

    way: str
    rank: int
    seconds: float
    phase: str = ""
    times: int = 1


class Places:
    """Shared with all processes that are forked after it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def clear(self) -> None:
        self._memory[:256] = bytes(256)

    def arm(self, aim: Aim) -> None:
        self._memory[_DEALT : _DEALT + 16] = bytes(16)
        phase = _NAMES.index(aim.phase) + 1 if aim.phase else 0
        self._memory[_AIM : _AIM + 4] = bytes((WAYS.index(aim.way), aim.rank, aim.times, phase))

    def enter(self, rank: int, pid: int) -> None:
        """This process is that rank now."""
        struct.pack_into("i", self._memory, _PIDS + 4 * rank, pid)
        self._memory[_PHASES + rank] = 0
        self._memory[_WAITS + 16 * rank : _WAITS + 16 * rank + 16] = bytes(16)

    def launches(self, pid: int) -> None:
        struct.pack_into("i", self._memory, _LAUNCHER, pid)

    def at(self, rank: int, phase: str) -> None:
        """The rank comes to this phase: maybe its last."""
        number = _NAMES.index(phase)
        self._memory[_PHASES + rank] = number + 1
        if self._memory[_AIM + 1] == rank and self._memory[_AIM + 3] == number + 1:
            self._memory[_AIM + 2] -= 1
            if not self._memory[_AIM + 2]:
                self.deal(rank)

    def leave(self, rank: int) -> None:
        """The rank is done with checkflow: torch's own calls come."""
        self._memory[_PHASES + rank] = 0

    def deal(self, rank: int) -> None:
        """Strike, from this rank's process or from the killer's."""
        way = WAYS[self._memory[_AIM]]
        self._memory[_AIM + 3] = 0
        struct.pack_into("d", self._memory, _DEALT, time.monotonic())
        self._memory[_DEALT + 8] = rank
        self._memory[_DEALT + 9] = self._memory[_PHASES + rank]
        who, _, how = way.partition(" ")
        number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        pids = self.pids()
        met = {"one": pids[rank : rank + 1], "all": pids, "launcher": [self.launcher]}[who]
        for pid in sorted(met, key=lambda pid: pid == os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def dealt(self) -> float | None:
        """When, by time.monotonic."""
        found: float = struct.unpack_from("d", self._memory, _DEALT)[0]
        return found or None

    @property
    def met(self) -> str:
        """The phase in which the blow met the rank that it came from."""
        number = self._memory[_DEALT + 9]
        return _NAMES[number - 1] if number else "before"

    def has_joined(self, rank: int) -> bool:
        """Whether a rank is at work in checkflow: before and after, it waits for others in torch's own calls."""
        return bool(self._memory[_PHASES + rank])

    @property
    def launcher(self) -> int:
        return int(struct.unpack_from("i", self._memory, _LAUNCHER)[0])

    def pids(self) -> list[int]:
        found = struct.unpack_from(f"{MOST_RANKS}i", self._memory, _PIDS)
        return [pid for pid in found if pid]

    @contextlib.contextmanager
    def waiting(self, rank: int) -> Iterator[None]:
        """This rank waits for others, on this thread."""
        slot = _WAITS + 16 * rank + 8 * (threading.current_thread() is not threading.main_thread())
        struct.pack_into("d", self._memory, slot, time.monotonic())
        try:
            yield
        finally:
            struct.pack_into("d", self._memory, slot, 0.0)

    def longest_wait_seconds(self, rank: int) -> float:
        now = time.monotonic()
        begun = [one for one in struct.unpack_from("2d", self._memory, _WAITS + 16 * rank) if one]
        return now - min(begun) if begun else 0.0


def watch(places: Places, rank: int) -> None:
    """Have this process say where it is, from now on."""
    for phase, (who, calls) in PHASES.items():
        if who == "all" or (who == "lead") == (rank == 0):
            for path, name in calls:
                _begin_with(owner_of(path), name, lambda phase=phase: places.at(rank, phase))
    _within(council.Council, "_wait", lambda: places.waiting(rank))
    _within(rank_commit, "wait_until", lambda: places.waiting(rank))


def owner_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if name[0].isupper():
        return getattr(importlib.import_module(RUNTIME + module), name)
    return importlib.import_module(RUNTIME + path)


def _begin_with(owner: Any, name: str, first: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        first()
        return real(*arguments, **named)

    setattr(owner, name, call)


def _within(owner: Any, name: str, manager: Callable[[], Any]) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        with manager():
            return real(*arguments, **named)

    setattr(owner, name, call)
