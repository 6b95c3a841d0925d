"""One life of a job: started, watched, killed at the moment that was drawn for it, and cleared away.

The signal follows a look at once, so what was seen was there before. A killed trainer takes the rest of its processes
with it; a job that is only asked to end (SIGTERM), or has lost a child, is watched on until it ends, goes on, or hangs.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkflow.runtime.memory_tier.orphans import left_step
from checkflow.torture.checks import Listing, look, vanished
from checkflow.torture.processes import (
    POLL_SECONDS,
    JobProcess,
    Process,
    children_of,
    end_all,
    lives,
    members,
    name_of,
    process_of,
    ranks_of,
    send,
    tail,
    writers,
)

SEARCH_SECONDS = 0.1  # between two searches among the job's open files
GAPS = 1.5  # from one checkpoint to the next: kills meet every part of it
_LEAST_GAPS = 3  # before their median says something

Moment = Literal["start-up", "writing", "training"]  # before its first checkpoint, while it writes one, and else
End = Literal["killed", "went on", "ended", "failed", "hung", "proved", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom to signal, and when: drawn by lot.

    Attributes:
        child: rather one of the processes that the trainer has started, or another rank, if there is one.
        wait: in [0, 1), of the time in which the moment can be.
        pick: in [0, 1), which of several children.
    """

    signal: signal.Signals
    child: bool
    moment: Moment
    wait: float
    pick: float


@dataclass(frozen=True, slots=True)
class JobSpeed:
    """How fast the job is, as far as its lives have shown."""

    startup_seconds: float | None = None  # from the start to the first checkpoint
    gaps_seconds: tuple[float, ...] = ()  # from one checkpoint to the next

    def training_seconds(self, startup_seconds: float) -> float:
        """How long a life trains at most before its kill."""
        known = len(self.gaps_seconds) >= _LEAST_GAPS
        gap_seconds = statistics.median(self.gaps_seconds) if known else startup_seconds
        return max(GAPS * gap_seconds, startup_seconds / 2)


class JobLife:
    """A running job, and what is seen of it; when :meth:`run` has returned, nothing of it runs any more.

    Args:
        directory: of its checkpoints; None: to be found by the lock that the job holds.
        newest: the newest checkpoint that was found whole before; None: there was none.
        aim: None: it is left alone until it has made a checkpoint, and asked to end then.
        speed: of the lives before.

    Attributes:
        end: "killed" by our signal; "went on" after it, without its child, or started again by its launcher; "ended"
            and "failed" by itself; "hung": no checkpoint for too long; "proved": saved after the last kill, and was
            ended; "elsewhere": writes to other directories, ``others``.
        code: of the command, negative for a signal; None: we ended it after ``end``.
        victim: the process that got the signal; "": none.
        ranks: of the job, when it got the signal; 0: it is none of several ranks.
        alone: whether one rank was killed, so that the others could save no more.
        moment: where the job was at its signal, or its end.
        before: what was in the directory when it was first looked at.
        newest: the newest checkpoint that is known to have been there; None: there was none.
        gone: the newest step, if it vanished while the job ran.
        back: a step that it made, though a later one was whole before it was started.
        saved: step and inode of each checkpoint that it was seen to make.
        left_running: whether processes of it ran on when the command had ended by itself.
    """

    def __init__(
        self, job: JobProcess, directory: Path | None, newest: int | None, aim: Aim | None, speed: JobSpeed
    ) -> None:
        self.job, self.directory, self._aim = job, directory, aim
        self._begun = self._news = time.monotonic()  # ``_news``: when the last checkpoint came
        # Saved at its start, which does not show that it trains.
        self._kept = None if directory is None else left_step(directory)
        self.before = self._seen = Listing() if directory is None else look(directory)
        self.newest = self._whole = newest
        self._given = directory is not None
        self._speed_before = speed
        self._startup_seconds: float | None = None
        self._gaps_seconds: list[float] = []
        self._searched = 0.0
        self._trainer: Process | None = None
        self.others: dict[Path, Listing] = {}
        self.pids: set[int] = set()
        self.saved: set[tuple[int, int]] = set()
        self.gone: int | None = None
        self.back: int | None = None
        self.end: End | None = None
        self.code: int | None = None
        self.victim = self.said = ""
        self.ranks = 0
        self.alone = False
        self.moment: Moment = "start-up"
        self.seconds = 0.0
        self.left_running = False

    @property
    def words(self) -> str:
        return f"it said: {self.said}" if self.said else "it said nothing"

    @property
    def speed(self) -> JobSpeed:
        """Of this life and those before."""
        startup, gaps = self._startup_seconds, (*self._speed_before.gaps_seconds, *self._gaps_seconds)
        return JobSpeed(self._speed_before.startup_seconds if startup is None else startup, gaps[-100:])

    def run(self, patience_seconds: float, over: Callable[[], bool]) -> None:
        """Watch it until it has ended by itself, or its moment has come and it has been signalled.

        Args:
            over: whether all time is over: then the moment comes as soon as the job has made a checkpoint.

        Raises:
            CheckflowError: it does not die.
        """
        process = self.job.process
        try:
            while self.end is None:
                self._look()
                self.moment = self._moment()
                self.end = self._ended(patience_seconds)
                if self.end is None and self._is_due(over):
                    self.end = self._strike(patience_seconds)
                elif self.end is None:
                    time.sleep(POLL_SECONDS)
            self.seconds = time.monotonic() - self._begun
            self.code = process.poll()
            self.left_running = self.end == "ended" and bool(members(self.job.strangers))
        finally:
            end_all(self.job.strangers, process)
        self.said = tail(self.job)

    def _look(self) -> None:
        now = time.monotonic()
        # One that was found may be the first of several, as long as nothing was saved there.
        found = self._trainer is not None and self.directory is not None and (self._given or bool(self.saved))
        if now - self._searched >= SEARCH_SECONDS and not found:
            self._search()
            self._searched = time.monotonic()
        if self.directory is None:
            return
        self._seen = look(self.directory)
        made = {(step, self._seen.published[step]) for step in self._seen.newer_than(self.before)} - self.saved
        if made:
            self.saved |= made
            if self._startup_seconds is None:
                self._startup_seconds = now - self._begun
                self._search()  # for other directories
            else:
                self._gaps_seconds.append(now - self._news)
            self._news = now
        for step, _ in made:
            self.newest = step if self.newest is None else max(self.newest, step)
            # An older one under the same name may have got a metric.
            if self._whole is not None and step < self._whole and step not in self.before.published:
                self.back = step
        newest = self.newest
        if newest is not None and newest not in self._seen.published and vanished(self.directory, newest):
            self.gone = newest

    def _search(self) -> None:
        """Who of the job writes checkpoints, and where."""
        found = members(self.job.strangers)
        self.pids.update(one.pid for one in found)
        writing = writers(found)
        if self.directory is None and len(writing) == 1:
            self.directory = next(iter(writing))
            self.before = self._seen = look(self.directory)
        if self.directory is not None:
            home = self.directory.resolve()
            self._trainer = next((one for path, one in writing.items() if path.resolve() == home), None)
            writing = {path: one for path, one in writing.items() if path.resolve() != home}
        for path in writing:
            self.others.setdefault(path, look(path))

    def _is_elsewhere(self) -> bool:
        """Whether it is clear that the directory is not the one: another one gets checkpoints, or one of several."""
        if not self._given:
            return len(self.others) > (self.directory is None)
        unused = not self.saved and self._trainer is None
        return unused and any(look(path).newer_than(before) for path, before in self.others.items())

    def _moment(self) -> Moment:
        if not self.saved:
            return "start-up"
        return "writing" if self._seen.writing else "training"

    def _ended(self, patience_seconds: float) -> End | None:
        """How this life has ended by itself, if it has."""
        if (code := self.job.process.poll()) is not None:
            self._look()  # what came before its end
            self.moment = self._moment()
            return "failed" if code else "ended"
        if self._is_elsewhere():
            return "elsewhere"
        return "hung" if time.monotonic() - self._news > patience_seconds else None

    def _is_due(self, over: Callable[[], bool]) -> bool:
        """Whether the moment has come."""
        aim, startup_seconds = self._aim, self._startup_seconds
        elapsed = time.monotonic() - self._begun
        if aim is not None and aim.moment == "start-up" and self._speed_before.startup_seconds is not None:
            return elapsed >= aim.wait * self._speed_before.startup_seconds
        if startup_seconds is None:
            return False
        if over():
            return True
        if aim is None:
            return any(self._kept is None or step > self._kept for step, _ in self.saved)
        longest = self.speed.training_seconds(startup_seconds)
        trained = elapsed - startup_seconds
        if trained < aim.wait * longest:
            return False
        return aim.moment != "writing" or self._seen.writing or trained > 2 * longest

    def _strike(self, patience_seconds: float) -> End:
        """Send the signal, and see what becomes of the job."""
        aim, job = self._aim, self.job
        number = signal.SIGTERM if aim is None else aim.signal
        target = self._trainer if self._trainer is not None and lives(self._trainer) else process_of(job)
        child = aim is not None and aim.child
        ranks = ranks_of(members(job.strangers))
        self.ranks = len(ranks)
        others = [one for one in ranks.values() if one != target]
        if aim is not None and child and (children := [*others, *children_of(target)]):
            target = children[int(aim.pick * len(children))]
        elif aim is not None and number == signal.SIGTERM and ranks:  # any of them ends all
            target = list(ranks.values())[int(aim.pick * len(ranks))]
        self.alone = child and target in ranks.values()
        self.victim = next((f"rank {rank}" for rank, one in ranks.items() if one == target), name_of(target))
        if number == signal.SIGKILL and not child:
            send(target, number)
            self.pids.update(one.pid for one in members(job.strangers))
            end_all(job.strangers, job.process)
            return self._end_of_killed(target)
        self.pids.update(one.pid for one in members(job.strangers))
        send(target, number)
        signalled = self._news = time.monotonic()
        least = len(self.saved) if child else None  # checkpoints that another one means going on after
        while job.process.poll() is None:
            gone = not lives(target)
            self._look()
            # What it saved itself was there when it had ended; whatever started it has started it again.
            least = len(self.saved) if gone and least is None else least
            if least is not None and len(self.saved) > least:
                return "proved" if aim is None else "went on"
            if time.monotonic() - (self._news if child else signalled) > patience_seconds:
                return "proved" if aim is None else "hung"
            time.sleep(POLL_SECONDS)
        self._look()
        return "proved" if aim is None else "killed"

    def _end_of_killed(self, target: Process) -> End:
        """A job may have ended by itself in the instant of its kill."""
        code = self.job.process.returncode
        if target.pid != self.job.process.pid or code == -signal.SIGKILL:
            return "killed"
        return "failed" if code else "ended"
