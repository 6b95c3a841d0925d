"""One life of a tortured job: started, watched, killed at the moment that was drawn for it, and cleared away.

In words: until the job has made its first checkpoint of this life it is in *start-up*; after that it *trains*, and now
and then it is *writing* one. It is looked at again and again, the names in its checkpoint directory and whether it
lives; when its moment has come, the signal follows a look at once, so that what was seen was there before. A killed
trainer takes the rest of its processes with it. One that is only asked to end (SIGTERM), or has lost a child, is
watched on until it ends, or goes on, or nothing comes for as long as patience lasts.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkflow.torture.checks import Seen, look, vanished
from checkflow.torture.processes import (
    Job,
    Process,
    children_of,
    end_all,
    lives,
    members,
    name_of,
    process_of,
    send,
    start,
    tail,
    writers,
)

LOOK_SECONDS = 0.002
SEARCH_SECONDS = 0.1  # between two searches among the job's open files
GAPS = 1.5  # from one checkpoint to the next: kills meet every part of it
_LEAST_GAPS = 3  # before their median says something

Moment = Literal["start-up", "writing", "training"]
End = Literal["killed", "went on", "ended", "failed", "hung", "proved", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom to signal, and when: drawn by lot.

    Attributes:
        child: rather one of the processes that the trainer has started, if there is one.
        wait: in [0, 1), of the time in which the moment can be.
        pick: in [0, 1), which of several children.
    """

    signal: signal.Signals
    child: bool
    moment: Moment
    wait: float
    pick: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the job is, as far as its lives have shown."""

    startup_seconds: float | None = None  # from the start to the first checkpoint
    gaps_seconds: tuple[float, ...] = ()  # from one checkpoint to the next

    def training_seconds(self, startup_seconds: float) -> float:
        """How long a life trains at most before its kill."""
        known = len(self.gaps_seconds) >= _LEAST_GAPS
        gap_seconds = statistics.median(self.gaps_seconds) if known else startup_seconds
        return max(GAPS * gap_seconds, startup_seconds / 2)


@dataclass(frozen=True, slots=True)
class Life:
    """What was seen of one life, of which nothing runs any more.

    Attributes:
        end: "killed" by our signal; "went on" after it, without its child, or started again by its launcher; "ended"
            and "failed" by itself; "hung": no checkpoint for too long; "proved": saved after the last kill, and was
            ended; "elsewhere": writes to other directories, ``others``.
        code: of the command, negative for a signal.
        there: steps in the directory when it was first looked at.
        newest: the newest checkpoint that is known to have been there; None: there was none.
        gone: the newest step, if it vanished while the job ran.
        back: a step that it made, though a later one was whole before it was started.
        saved: how many checkpoints it was seen to make.
        left_running: whether processes of it ran on when the command had ended by itself.
    """

    end: End
    code: int | None
    victim: str
    moment: Moment
    seconds: float
    directory: Path | None
    others: tuple[Path, ...]
    there: frozenset[int]
    newest: int | None
    gone: int | None
    back: int | None
    saved: int
    pace: Pace
    pids: frozenset[int]
    said: str
    left_running: bool

    @property
    def words(self) -> str:
        return f"it said: {self.said}" if self.said else "it said nothing"


class Watch:
    """What is seen of a running job.

    Args:
        directory: of its checkpoints; None: to be found by the lock that the job holds.
        newest: the newest checkpoint that was found whole before; None: there was none.
    """

    def __init__(self, job: Job, directory: Path | None, newest: int | None) -> None:
        self.job, self.directory = job, directory
        self.begun = self.news = time.monotonic()  # ``news``: when the last checkpoint came
        self.before = self.seen = Seen() if directory is None else look(directory)
        self.newest = self.whole = newest
        self.gone: int | None = None
        self.back: int | None = None
        self._given = directory is not None
        self.saved: set[tuple[int, int]] = set()
        self.startup_seconds: float | None = None
        self.gaps_seconds: list[float] = []
        self.trainer: Process | None = None
        self.others: dict[Path, Seen] = {}
        self.pids: set[int] = set()
        self._searched = 0.0

    def look(self) -> None:
        """Look once."""
        now = time.monotonic()
        # One that was found may be the first of several, as long as nothing was saved there.
        found = self.trainer is not None and self.directory is not None and (self._given or bool(self.saved))
        if now - self._searched >= SEARCH_SECONDS and not found:
            self._search()
            self._searched = time.monotonic()
        if self.directory is None:
            return
        self.seen = look(self.directory)
        made = {(step, self.seen.published[step]) for step in self.seen.newer_than(self.before)} - self.saved
        if made:
            self.saved |= made
            if self.startup_seconds is None:
                self.startup_seconds = now - self.begun
                self._search()  # for other directories
            else:
                self.gaps_seconds.append(now - self.news)
            self.news = now
        for step, _ in made:
            self.newest = step if self.newest is None else max(self.newest, step)
            # An older one under the same name may have got a metric.
            if self.whole is not None and step < self.whole and step not in self.before.published:
                self.back = step
        newest = self.newest
        if newest is not None and newest not in self.seen.published and vanished(self.directory, newest):
            self.gone = newest

    def _search(self) -> None:
        """Who of the job writes checkpoints, and where."""
        found = members(self.job.strangers)
        self.pids.update(one.pid for one in found)
        writing = writers(found)
        if self.directory is None and len(writing) == 1:
            self.directory = next(iter(writing))
            self.before = self.seen = look(self.directory)
        if self.directory is not None:
            home = self.directory.resolve()
            self.trainer = next((one for path, one in writing.items() if path.resolve() == home), None)
            writing = {path: one for path, one in writing.items() if path.resolve() != home}
        for path in writing:
            self.others.setdefault(path, look(path))

    @property
    def elsewhere(self) -> bool:
        """Whether it is clear that the directory is not the one: another one gets checkpoints, or one of several."""
        if not self._given:
            return len(self.others) > (self.directory is None)
        return (
            not self.saved
            and self.trainer is None
            and any(look(path).newer_than(before) for path, before in self.others.items())
        )

    @property
    def moment(self) -> Moment:
        """Where the job is now."""
        if not self.saved:
            return "start-up"
        return "writing" if self.seen.writing else "training"


def live(
    command: Sequence[str],
    log: Path,
    strangers: frozenset[Process],
    directory: Path | None,
    newest: int | None,
    aim: Aim | None,
    pace: Pace,
    *,
    patience_seconds: float,
    over: Callable[[], bool],
) -> Life:
    """One life of the job.

    Args:
        newest: the newest checkpoint that was found whole before.
        aim: None: it is left alone until it has made a checkpoint, and asked to end then.
        pace: of the lives before.
        over: whether the time for all of it is over: then the moment comes as soon as the job has made a checkpoint.

    Raises:
        CheckflowError: the command cannot be started, or does not die.
    """
    job = start(command, log, strangers)
    try:
        watch = Watch(job, directory, newest)
        while True:
            watch.look()
            end = _end_of(watch, patience_seconds)
            if end is None and _due(watch, aim, pace, over):
                return _strike(watch, aim, pace, patience_seconds)
            if end is not None:
                return _life(watch, end, pace)
            time.sleep(LOOK_SECONDS)
    finally:
        end_all(job.strangers, job.process)


def _end_of(watch: Watch, patience_seconds: float) -> End | None:
    """How this life has ended, if it has."""
    code = watch.job.process.poll()
    if code is not None:
        watch.look()  # what came before its end
        return "failed" if code else "ended"
    if watch.elsewhere:
        return "elsewhere"
    return "hung" if time.monotonic() - watch.news > patience_seconds else None


def _due(watch: Watch, aim: Aim | None, pace: Pace, over: Callable[[], bool]) -> bool:
    """Whether the moment has come."""
    elapsed = time.monotonic() - watch.begun
    if aim is not None and aim.moment == "start-up" and pace.startup_seconds is not None:
        return elapsed >= aim.wait * pace.startup_seconds
    if watch.startup_seconds is None:
        return False
    if aim is None or over():
        return True
    longest = Pace(None, (*pace.gaps_seconds, *watch.gaps_seconds)).training_seconds(watch.startup_seconds)
    trained = elapsed - watch.startup_seconds
    if trained < aim.wait * longest:
        return False
    return aim.moment != "writing" or watch.seen.writing or trained > 2 * longest


def _strike(watch: Watch, aim: Aim | None, pace: Pace, patience_seconds: float) -> Life:
    """Send the signal, and see what becomes of the job."""
    moment, saved, job = watch.moment, len(watch.saved), watch.job
    target = watch.trainer if watch.trainer is not None and lives(watch.trainer) else process_of(job)
    if aim is not None and aim.signal == signal.SIGKILL and not aim.child:
        victim = name_of(target)
        send(target, signal.SIGKILL)
        watch.pids.update(one.pid for one in members(job.strangers))
        end_all(job.strangers, job.process)
        return _life(watch, _end_of_killed(target, job), pace, victim, moment)
    if aim is not None and aim.child and (children := children_of(target)):
        target = children[int(aim.pick * len(children))]
    victim = name_of(target)
    left: int | None = None  # checkpoints seen when the target had ended
    watch.pids.update(one.pid for one in members(job.strangers))
    send(target, signal.SIGTERM if aim is None else aim.signal)
    told = watch.news = time.monotonic()
    while job.process.poll() is None:
        gone = not lives(target)
        watch.look()
        if aim is not None and aim.child and len(watch.saved) > saved:
            return _life(watch, "went on", pace, victim, moment)
        # What it saved itself was there when it had ended; whatever started it has started it again.
        left = len(watch.saved) if gone and left is None else left
        if left is not None and len(watch.saved) > left:
            return _life(watch, "proved" if aim is None else "went on", pace, victim, moment)
        if time.monotonic() - (watch.news if aim is not None and aim.child else told) > patience_seconds:
            return _life(watch, "proved" if aim is None else "hung", pace, victim, moment)
        time.sleep(LOOK_SECONDS)
    watch.look()
    return _life(watch, "proved" if aim is None else "killed", pace, victim, moment)


def _end_of_killed(target: Process, job: Job) -> End:
    """A job may have ended by itself in the instant of its kill."""
    code = job.process.returncode
    if target.pid != job.process.pid or code == -signal.SIGKILL:
        return "killed"
    return "failed" if code else "ended"


def _life(watch: Watch, end: End, pace: Pace, victim: str = "", moment: Moment | None = None) -> Life:
    """The record of a life; everything of it is ended first."""
    code = watch.job.process.poll()
    left_running = end == "ended" and bool(members(watch.job.strangers))
    end_all(watch.job.strangers, watch.job.process)
    startup = pace.startup_seconds if watch.startup_seconds is None else watch.startup_seconds
    return Life(
        end,
        watch.job.process.returncode if code is None and end in ("killed", "failed", "ended") else code,
        victim,
        watch.moment if moment is None else moment,
        time.monotonic() - watch.begun,
        watch.directory,
        tuple(sorted(watch.others)),
        frozenset(watch.before.published),
        watch.newest,
        watch.gone,
        watch.back,
        len(watch.saved),
        Pace(startup, (*pace.gaps_seconds, *watch.gaps_seconds)[-100:]),
        frozenset(watch.pids),
        tail(watch.job),
        left_running,
    )
