"""Kill a user's own job at random moments, again and again, and check what it leaves.

Between two lives, when nothing of the job runs, its directory is held against L1 to L6 (:mod:`.checks`). After the last
kill it is started once more, to see that it goes on. The first broken promise ends it all; everything stays as found.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from checkflow.core.errors import Preempted
from checkflow.core.reports.run_report import RunReport
from checkflow.core.units import format_size
from checkflow.runtime.memory_tier.orphans import memory_of
from checkflow.runtime.store.files import step_name
from checkflow.torture.checks import (
    BrokenPromise,
    Found,
    abandoned,
    check_audits,
    check_found,
    check_leftovers,
    check_replayed,
    check_resumed,
    examine,
    read_runs,
    refuse_locked,
)
from checkflow.torture.life import Aim, JobLife, JobSpeed, Moment
from checkflow.torture.processes import Process, below, nothing_left, shared_memory, start

Verdict = Literal["nothing lost", "lost", "not tried", "interrupted"]
MOMENTS: tuple[tuple[Moment, int], ...] = (("start-up", 2), ("writing", 3), ("training", 5))  # how often, of ten


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is to be done.

    Attributes:
        directory: of the checkpoints; None: to be found by the lock that the job holds.
        seconds: no kill waits for its moment longer than until then, and no life begins later but the last one.
        patience_seconds: for the next checkpoint, or an end.
        terms: the share of kills that are SIGTERM in place of SIGKILL.
        children: the share of kills that meet a process which the trainer has started.
        log: what the job says is appended to it.
    """

    command: tuple[str, ...]
    directory: Path | None
    kills: int
    seconds: float | None
    seed: int
    patience_seconds: float
    terms: float
    children: float
    log: Path


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, and what came of it.

    Attributes:
        seconds: since the start of the life that it ended.
        acknowledged: the newest checkpoint that was there before; None: there was none.
        restorable: the newest one that was whole afterwards.
        resumed_from: where the job went on, by its own report; None: it began anew, or ``told`` is false.
        replayed: iterations that were done again, at least; None: not known.
        told: whether the next life lived long enough to report it.
        code: the command's exit code, negative for a signal.
    """

    signal: str
    victim: str
    moment: Moment
    seconds: float
    acknowledged: int | None
    restorable: int | None
    code: int | None
    resumed_from: int | None = None
    replayed: int | None = None
    told: bool = False


@dataclass
class Torture:
    """Kills one job, and keeps the tally, which may be read at any time.

    Attributes:
        untried: why the job could not be killed as often as asked, or not at all; None: it could.
        acknowledged: the newest checkpoint that was seen in all lives, or found whole between them.
        over: whether it came to its end by itself.
        abandoned: checkpoints that the job left behind in its last life, as its script asked.
    """

    campaign: Campaign
    say: Callable[[str, float, float | None], None] = lambda part, done, total: None
    directory: Path | None = None
    kills: list[Kill] = field(default_factory=list)
    problems: list[BrokenPromise] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    untried: str | None = None
    lives: int = 0
    checkpoints: int = 0
    acknowledged: int | None = None
    most_bytes: int = 0
    seconds: float = 0.0
    over: bool = False
    found: Found = field(default_factory=Found)
    abandoned: tuple[str, ...] = ()
    _speed: JobSpeed = field(default_factory=JobSpeed)
    _pids: set[int] = field(default_factory=set)
    _known_runs: set[str] = field(default_factory=set)
    _begun: float = field(default_factory=time.monotonic)
    _started_unix_seconds: float = field(default_factory=time.time)

    @property
    def verdict(self) -> Verdict:
        """In two words."""
        if self.problems:
            return "lost"
        if self.untried is not None:
            return "not tried"
        return "nothing lost" if self.over else "interrupted"

    def run(self) -> None:
        """All kills, and the start after the last one.

        Raises:
            CheckflowError: a directory that another job writes to, or that cannot be read; a command that cannot be
                started, or a process that does not die.
        """
        source, strangers = random.Random(self.campaign.seed), below()
        try:
            self._look_before()
            with nothing_left(strangers):
                while not self._live_once(source, strangers):
                    pass
            self._look_at_memory()
            self.over = True
        finally:
            self.seconds = time.monotonic() - self._begun

    def _look_before(self) -> None:
        """What is there already is nobody's fault."""
        self.directory = self.campaign.directory
        if self.directory is None:
            return
        refuse_locked(self.directory, "another job")
        self.say("reading what is there", 0, None)
        self._known_runs = {run.run_id for run in read_runs(self.directory)}
        self.found = examine(self.directory, self.found)
        self.acknowledged = self.found.restorable
        if self.found.restorable is not None:
            self.remarks.append(
                f"a checkpoint of step {self.found.restorable} was there before: the job went on from it"
            )
        for name, fault in self.found.damaged:
            self.remarks.append(f"{name} was damaged before the job was started: {fault}")

    def _live_once(self, source: random.Random, strangers: frozenset[Process]) -> bool:
        """One life, and what it left; returns whether it was the last."""
        campaign = self.campaign
        last = bool(self.kills) and (len(self.kills) >= campaign.kills or self._late())
        aim = None if last else self._draw(source)
        what = "the start after the last kill" if aim is None else f"kill {len(self.kills) + 1} of {campaign.kills}"
        said = what if self.acknowledged is None else f"{what}, step {self.acknowledged}"
        self.say(said, len(self.kills), campaign.kills + 1)  # the last start is work, too
        known, job = self.directory is not None, start(campaign.command, campaign.log, strangers)
        life = JobLife(job, self.directory, self.acknowledged, aim, self._speed)
        life.run(campaign.patience_seconds, self._late)
        self.directory, self._speed = life.directory, life.speed
        self._pids |= life.pids
        self.checkpoints += len(life.saved)
        first = not self.kills
        runs = self._judge(life, known=known)
        self.lives += 1
        if aim is not None and life.end in ("killed", "went on"):
            newest, whole = life.newest, self.found.restorable
            kill = Kill(aim.signal.name, life.victim, life.moment, life.seconds, newest, whole, life.code)
            self.kills.append(kill)
            self._note_term(aim, life, runs)
        self.untried = None if self.problems else self._why_untried(life, first, wanted=not last)
        return last or bool(self.problems) or self.untried is not None or life.end == "ended"

    def _late(self) -> bool:
        return self.campaign.seconds is not None and time.monotonic() - self._begun > self.campaign.seconds

    def _draw(self, source: random.Random) -> Aim:
        """Whom, and when. All is drawn each time, so that a share which is changed changes nothing else."""
        termed, child = source.random() < self.campaign.terms, source.random() < self.campaign.children
        moment = source.choices([one for one, _ in MOMENTS], [weight for _, weight in MOMENTS])[0]
        wait, pick = source.random(), source.random()
        if moment == "start-up" and not self.kills:  # that it makes checkpoints at all is seen first
            moment = "training"
        if termed or child:
            moment = "training"
        number = signal.SIGTERM if termed else signal.SIGKILL
        return Aim(number, child and not termed, moment, wait, pick)

    # What a life has left

    def _judge(self, life: JobLife, *, known: bool) -> tuple[RunReport, ...]:
        """Hold the directory against what is promised; returns the runs that this life has reported.

        Args:
            known: whether what was in the directory before this life had been looked at.
        """
        if self.directory is None:
            return ()
        refuse_locked(self.directory, "a process that is none of the command's")
        before = self.found
        runs = read_runs(self.directory)
        if not known:
            self._known_runs = {run.run_id for run in runs if run.started_unix_seconds < self._started_unix_seconds}
        mine = [number for number, run in enumerate(runs) if run.run_id not in self._known_runs]
        self._known_runs |= {run.run_id for run in runs}
        self.found = after = examine(self.directory, before)
        self.most_bytes = max(self.most_bytes, after.size_bytes)
        if life.newest is not None:
            self.acknowledged = max(life.newest, -1 if self.acknowledged is None else self.acknowledged)
        excused = [name for name, _ in before.damaged] if known else [step_name(step) for step in life.before.published]
        wrong = [problem for number in mine for problem in check_audits(runs[number])]
        if not life.alone:
            self._note_failures([runs[number] for number in mine])
        self.abandoned = abandoned(before, after) if known else ()
        if self.abandoned:  # what the script asked to leave is not lost
            self.problems += wrong + check_found(None, after, excused)
            return tuple(runs[number] for number in mine)
        if mine:
            run = runs[mine[0]]
            wrong += check_resumed(before, after, run)
            if self.kills:  # what a run before all this had done nobody has looked at
                wrong += check_replayed(runs[mine[0] - 1] if mine[0] else None, run)
            self._note_resumed(run)
        wrong += [one for one in check_found(self.acknowledged, after, excused) if one.promise != "L1" or not wrong]
        if life.gone is not None and not wrong:
            wrong.append(
                BrokenPromise("L1", f"the checkpoint of step {life.gone} was the newest, and the job took it away")
            )
        if life.back is not None and not wrong:
            text = f"the job made a checkpoint of step {life.back}, though step {before.restorable} was there, whole"
            wrong.append(BrokenPromise("L1", text))
        wrong += check_leftovers(before, after, saved=bool(life.saved))
        self.problems += wrong
        if after.restorable is not None and not wrong:
            self.acknowledged = max(after.restorable, -1 if self.acknowledged is None else self.acknowledged)
        return tuple(runs[number] for number in mine)

    def _note_resumed(self, run: RunReport) -> None:
        """The kill before this run gets to know what came of it."""
        if self.kills:
            self.kills[-1] = dataclasses.replace(
                self.kills[-1], resumed_from=run.resumed_from, replayed=run.replayed_iterations, told=True
            )

    def _note_failures(self, runs: list[RunReport]) -> None:
        for run in runs:
            if run.failed:
                self.remarks.append(
                    f"{run.failed} checkpoints could not be made in the life after kill {len(self.kills)}: "
                    f"{run.last_failure}"
                )

    def _note_term(self, aim: Aim, life: JobLife, runs: tuple[RunReport, ...]) -> None:
        """Of a job that was asked to end: how it did, and whether its last boundary was saved."""
        if aim.signal != signal.SIGTERM or life.end == "went on":  # how it ended only its launcher knows
            return
        number, newest = len(self.kills), self.found.restorable
        closed = bool(runs) and runs[-1].closed
        if life.ranks and not closed:  # their launcher ends with a code of its own
            self.remarks.append(f"asked to end (kill {number}), the ranks did not report their end: {life.said}")
        elif not life.ranks and life.code != Preempted.EXIT_CODE:
            self.remarks.append(
                f"asked to end (kill {number}), the job ended with {life.code}, not {Preempted.EXIT_CODE}: {life.said}"
            )
        elif closed and (newest is None or newest < runs[-1].iteration):
            self.remarks.append(
                f"asked to end (kill {number}), the job came to iteration {runs[-1].iteration}, and saved {newest}: "
                "no boundary came in time, or saving it failed"
            )

    def _why_untried(self, life: JobLife, first: bool, *, wanted: bool) -> str | None:
        """Why there are no kills, or no more of them; None: there are, or all is done.

        Args:
            wanted: whether this life was to be killed.
        """
        after = "" if first else f" after kill {len(self.kills)}"
        if self.abandoned:
            return (
                f"the job goes back to an older step (resume=STEP) and has renamed its newest checkpoint to "
                f"{self.abandoned[0]}: let it resume from the newest one"
            )
        if life.end == "elsewhere":
            names = " and ".join(str(path) for path in life.others)
            if first and self.campaign.directory is None:
                here = "" if self.directory is None else f"{self.directory} and "
                return f"the job writes checkpoints to {here}{names}: say which by --directory"
            return f"the job writes its checkpoints to {names}{after}, not to {self.directory}"
        if life.end == "failed":
            return f"the job failed by itself{after}, with exit code {life.code}: {life.said or 'it said nothing'}"
        if life.end == "hung" and (life.saved or not first or life.victim):
            since = f" after its {life.victim} got the signal" if life.victim else after
            return (
                f"the job hangs{since}: no checkpoint and no end within {self.campaign.patience_seconds:g} s "
                f"(--patience); {life.words}"
            )
        if life.end in ("hung", "ended") and first and not life.saved:
            return self._why_none(life)
        if life.end == "ended" and first:
            return f"the job came to its end before it was killed{_left(life)}: let it train longer"
        if life.end == "ended" and wanted:
            return (
                f"the job came to its end after {len(self.kills)} of {self.campaign.kills} kills, which lost nothing: "
                "let it train longer, or ask for fewer by --kills"
            )
        return None

    def _why_none(self, life: JobLife) -> str:
        """No checkpoint was made."""
        how = f"came to its end{_left(life)}" if life.end == "ended" else f"ran for {life.seconds:.0f} s (--patience)"
        if self.directory is None:
            return (
                f"the job {how}, and none of its processes held the lock of a checkpoint directory: if it makes "
                f"checkpoints with checkflow, say where by --directory; {life.words}"
            )
        elsewhere = "".join(f"; it has {path} open" for path in life.others)
        return f"the job {how}, and made no checkpoint in {self.directory}{elsewhere}; {life.words}"

    def _look_at_memory(self) -> None:
        """Killed processes cannot take away what others made for them: multiprocessing and torch, for loaders. What
        checkflow leaves is meant to stay."""
        if left := shared_memory(self._pids):
            size = format_size(sum(left.values()))
            names = sorted(left)
            more = ", …" if len(names) > 3 else ""
            self.remarks.append(f"left in /dev/shm by killed processes: {size}, {', '.join(names[:3])}{more}")
        if self.directory is not None and (kept := memory_of(self.directory)) is not None:
            path, size_bytes = kept
            self.remarks.append(
                f"the last life's host memory stays for the job's next start in {self.directory}: "
                f"{format_size(size_bytes)}; delete {path} if there is none"
            )


def _left(life: JobLife) -> str:
    """What became of processes that a command began in the background."""
    return " (what it left running was ended: a command must wait for its training)" if life.left_running else ""
