"""Kill a real training job at random moments, again and again, and check L1 to L6: ``make kills``, ``run --help``.

SIGKILL meets the training process at a random time or in a phase drawn by lot, or a loader worker, or the planner. A
fresh process examines a copy of the directory each time (``checks``); then the job is started again, until its end. All
are forked from this one, which has imported what they need and computes nothing: a life costs what it trains.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkflow.runtime.store.discovery import find
from checkflow.torture.checks import size_bytes
from checkflow.torture.journal import read_journal
from checkflow.torture.processes import (
    Process,
    below,
    bury,
    members,
    name_of,
    nothing_left,
    process_of,
    send,
    shared_memory,
    tail,
)
from tests.faults.kills import processes as kill_processes
from tests.faults.kills.breaks import BREAKS
from tests.faults.kills.checks import (
    Record,
    check_disk,
    check_end,
    check_left,
    check_reclaimed,
    check_replayed,
    examine,
    make_record,
    step_of,
)  # fmt: skip
from tests.faults.kills.job import PLANNER, VARIANTS, Variant, live, make_plan, preload
from tests.faults.kills.notes import STORAGE, TRAINING, Whereabouts
from tests.faults.kills.processes import JobProcess, abort, children, fork, run
from tests.faults.kills.tally import Tally, as_json, table

LOOK_SECONDS = 0.001
SHARED_MEMORY = Path("/dev/shm")
BEFORE_A_PLAN = ("recording", "timing", "making the plan")
# Times that a phase is passed, at most, before it is deadly: those of every iteration often, those of an epoch seldom.
PHASES = (
    [("training thread", phase, 1) for phase in ("start-up", "resume", "end of training")]
    + [("training thread", phase, 3) for phase in ("validation", "end of epoch")]
    + [("training thread", phase, 20) for phase in TRAINING if phase in ("batch and boundary", "after the step")]
    + [("storage", phase, 20) for phase in STORAGE if phase != "idle"]
)


@dataclass(frozen=True)
class Aim:
    """Whom to kill, and when."""

    target: str  # "training", "worker" or "planner"
    seconds: float  # since the start, at the latest where a phase is aimed at
    deadly: tuple[str, str, int] | None = None  # kind, phase, and the how manieth: the job kills itself there
    stage: str | None = None  # of planning: to be seen first
    delay_seconds: float = 0.0  # since then


@dataclass(frozen=True)
class Dead:
    """A life that was killed, when a fresh process had examined it."""

    record: Record  # of all lives up to it
    begun: int  # iterations finished and under way
    stored: int  # the step that storage gives


def draw_aim(source: random.Random, variant: Variant, usual_seconds: float) -> Aim:
    """Half at a time drawn by lot, half in a phase drawn by lot; now and then another process than the job's own."""
    target = source.choices(("training", "worker", "planner"), (24, 4, 0 if variant.given else 3))[0]
    seconds, late_seconds = (source.uniform(0, share * usual_seconds) for share in (0.6, 1.0))
    stage = source.choice(BEFORE_A_PLAN)
    delay_seconds = source.uniform(0, 1.0 if stage == "making the plan" else 0.03)
    if target == "planner":
        return Aim(target, usual_seconds, stage="making the plan", delay_seconds=source.uniform(0, 1.0))
    if target == "worker" or source.random() < 0.5:
        return Aim(target, seconds)
    if not variant.given and source.random() < 0.25:
        return Aim(target, late_seconds, stage=stage, delay_seconds=delay_seconds)
    kind, phase, most = source.choice(PHASES)
    return Aim(target, late_seconds, deadly=(kind, phase, source.randint(1, most)))


class Killing:
    """Kills one job after the other, and keeps the tally.

    Args:
        folder: empty; everything that is written lies below it.
        breaking: the name of what is taken away of the runtime, "" for nothing. Kills go on then, whatever is found.
    """

    def __init__(self, folder: Path, source: random.Random, breaking: str) -> None:
        self._folder, self._source = folder, source
        self._break = BREAKS[breaking] if breaking else None
        self.tally = Tally()
        self._where = Whereabouts()
        self._references: dict[tuple[int, bool], tuple[Record, float]] = {}
        self._strangers = below()
        self._left: dict[Process, float] = {}  # processes of dead lives, and since when they are left over
        self._temporary = folder / "temporary"
        self._excused: set[Path] = set()
        self._ours: set[int] = set()
        self._shared = {path.name for path in SHARED_MEMORY.iterdir()}  # before any of it
        self._plan = folder / "plan.json"
        run(make_plan, self._plan, log=folder / "plan.log", temporary=self._temporary / "plan")

    @property
    def over(self) -> bool:
        """What was found is left as it is, for people to look at."""
        return bool(self.tally.problems) and self._break is None

    def plan(self, variant: Variant) -> Path | None:
        return self._plan if variant.given else None

    def reference(self, variant: Variant) -> tuple[Record, float]:
        """The notes of such a job when nothing happens to it, and how long it takes."""
        if variant.trajectory not in self._references:
            directory = self._folder / f"reference-{len(self._references)}"
            notes, log = directory.with_suffix(".notes"), directory.with_suffix(".log")
            begun = time.monotonic()
            run(
                live, variant, directory, self.plan(variant), notes, 0, Whereabouts(),
                log=log, temporary=self._temporary / directory.name,
            )  # fmt: skip
            self._references[variant.trajectory] = make_record(read_journal(notes)), time.monotonic() - begun
            shutil.rmtree(directory)
        return self._references[variant.trajectory]

    def job(self, variant: Variant, most_kills: int) -> None:
        """One job, from its first start to its end, killed ``most_kills`` times at most."""
        tally = self.tally
        tally.jobs += 1
        directory = self._folder / f"job-{tally.jobs}"
        notes, log = directory.with_suffix(".notes"), directory.with_suffix(".log")
        expected, usual_seconds = self.reference(variant)
        life, before, ended = 0, tally.kills, False
        dead: Dead | None = None
        while not ended and not self.over and life < 3 * most_kills + 3:
            aim = draw_aim(self._source, variant, usual_seconds) if tally.kills - before < most_kills else None
            damage_seed = self._source.randrange(2**32) if self._source.random() < 0.4 else None
            if aim is not None and aim.stage is not None:  # or a kept plan would spare the job this stage
                shutil.rmtree(directory / "plans", ignore_errors=True)
            ended, hit = self._live(variant, directory, life, aim)
            if dead is not None and (restored := make_record(read_journal(notes)).restored.get(life)) is not None:
                self._after_start(variant, log, dead, restored)
                dead = None
            if hit:
                dead = self._after_kill(variant, directory, life, damage_seed) or dead
            self._look_at_leftovers()
            life += 1
        record = make_record(read_journal(notes))
        tally.acknowledged += record.acknowledgements
        tally.boundaries += len(record.boundaries)
        if not self.over:
            self._say(log, check_end(record, expected, variant) + check_left(variant, directory))
        if not self.over:
            shutil.rmtree(directory)

    def _say(self, log: Path, problems: list[str]) -> None:
        self.tally.problems += [f"{problem} ({log.stem}, kill {self.tally.kills})" for problem in problems]

    # A life and its end

    def _live(self, variant: Variant, directory: Path, life: int, aim: Aim | None) -> tuple[bool, bool]:
        """One life; returns whether the job came to its end, and whether something was killed."""
        where, notes, log = self._where, directory.with_suffix(".notes"), directory.with_suffix(".log")
        where.clear(None if aim is None else aim.deadly)
        temporary = self._temporary / f"{directory.name}-{life}"
        job = fork(
            live, variant, directory, self.plan(variant), notes, life, where, self._break, log=log, temporary=temporary
        )
        self._ours.add(job.process.pid)
        victim = self._watch(job, aim, notes)
        code, fine, hit = job.process.returncode, False, False
        if aim is None or (victim is None and not (aim.deadly and code == -signal.SIGKILL)):
            fine = code == 0
        else:
            fine, hit = self._note_kill(aim, job), True
            if aim.target != "planner":
                self._excused.add(temporary)
        if not fine:
            self._say(log, [f"L5 the job ended by itself with {code}: {tail(job, lines=12)}"])
        return code == 0, hit

    def _watch(self, job: JobProcess, aim: Aim | None, notes: Path) -> Process | None:
        """Until it has ended, by its kill where it is due; returns whom that met."""
        begun = told = time.monotonic()
        size, victim = 0, None
        while job.process.poll() is None:
            now = time.monotonic()
            if aim is not None and victim is None and (victim := self._due(aim, job, now - begun)) is not None:
                send(victim, signal.SIGKILL)
            if notes.exists() and (noted := notes.stat().st_size) != size:
                size, told = noted, now
            elif now - told > kill_processes.hang_seconds:
                abort(job)
            time.sleep(LOOK_SECONDS)
        return victim

    def _due(self, aim: Aim, job: JobProcess, seconds: float) -> Process | None:
        """The process to be killed now, if it is time."""
        if seconds < aim.seconds:
            if aim.stage is None or self._where.read()["planning"] != aim.stage:
                return None
            time.sleep(aim.delay_seconds)
        if aim.target == "training":
            return process_of(job)
        found = [
            child for child, command in children(job.process.pid) if (PLANNER in command) == (aim.target == "planner")
        ]
        return self._source.choice(found) if found else None

    def _note_kill(self, aim: Aim, job: JobProcess) -> bool:
        """Count it; returns whether the job ended as it may."""
        tally, code = self.tally, job.process.returncode
        tally.kills += 1
        tally.targets[aim.target] += 1
        if aim.target == "planner":
            return code == 0  # training goes on
        if aim.target == "worker":  # torch has several errors for it, all of them its own
            return code == 0 or (code == 1 and "checkflow.core.errors" not in tail(job, lines=12))
        for kind, phase in self._where.read().items():
            tally.hits[kind][phase] += 1
        return code in (0, -signal.SIGKILL)

    def _after_start(self, variant: Variant, log: Path, dead: Dead, restored: Mapping[str, Any]) -> None:
        """What the next life went on from, in the same directory."""
        step = step_of(restored)
        self.tally.replayed.setdefault(variant.cadence, []).append(max(0, dead.begun - step))
        self.tally.reclaimed += step > dead.stored
        self._say(log, check_reclaimed(restored, dead.record, dead.stored))

    def _after_kill(self, variant: Variant, directory: Path, life: int, damage_seed: int | None) -> Dead | None:
        """A fresh process examines what storage has, in a copy: host memory is the directory's own."""
        tally, log = self.tally, directory.with_suffix(".log")
        record = make_record(read_journal(directory.with_suffix(".notes")))
        directory.mkdir(exist_ok=True)
        used_bytes = size_bytes(directory)
        checkpoint_bytes = max((size_bytes(path) for path in find(directory)), default=0)
        tally.most_bytes = max(tally.most_bytes, used_bytes)
        tally.checkpoint_bytes = max(tally.checkpoint_bytes, checkpoint_bytes)
        self._say(log, check_disk(used_bytes, checkpoint_bytes))
        folder = self._folder / "examined"
        folder.mkdir()
        dead = None
        try:
            answer = run(
                examine, variant, directory, self.plan(variant), record, folder, damage_seed, self._break,
                log=log, temporary=self._temporary / "examined",
            )  # fmt: skip
        except RuntimeError as error:
            self._say(log, [f"L5 a fresh process cannot go on: {error}"])
        else:
            problems = answer["problems"]
            tally.damaged += answer["damaged"]
            if life in record.begun:
                begun, restored = record.begun[life], answer["restored"]
                tally.behind.setdefault(variant.cadence, []).append(max(0, begun - restored))
                problems += check_replayed(begun, restored, record.interval[life], variant.every)
                dead = Dead(record, begun, restored)
            self._say(log, problems)
        shutil.rmtree(folder)
        return dead

    # What is left over

    def _look_at_leftovers(self, *, wait: bool = False) -> None:
        """Processes of dead lives have as long to end as one may hang."""
        while True:
            bury(self._strangers)
            now = time.monotonic()
            self._left = {one: self._left.get(one, now) for one in members(self._strangers)}
            late = [one for one, since in self._left.items() if now - since > kill_processes.hang_seconds]
            if late:
                self.tally.problems.append(f"L5 processes are left over: {', '.join(map(name_of, late))}")
            if late or not (wait and self._left):
                break
            time.sleep(0.05)
        for one in late:
            send(one, signal.SIGABRT)  # leaves a traceback in its job's log

    def finish(self) -> None:
        """When all is over: no process, no temporary directory, no shared memory may be left."""
        self._look_at_leftovers(wait=True)
        problems = self.tally.problems
        # Nobody knows of what multiprocessing and torch have made for processes that are killed, and for their workers.
        theirs = dict.fromkeys(self._excused, ("pymp-", "tmp"))
        left = [path for folder in self._temporary.iterdir() for path in folder.iterdir()]
        if odd := sorted(str(path) for path in left if not path.name.startswith(theirs.get(path.parent, ()))):
            problems.append(f"L5 left over among temporary files: {', '.join(odd)}")
        tiers = {one.parent.name for one in SHARED_MEMORY.glob("*/owner.json") if str(self._folder) in one.read_text()}
        if odd := sorted((tiers | shared_memory(self._ours).keys()) - self._shared):
            problems.append(f"L5 left over in shared memory: {', '.join(odd)}")


def kill(kills: int, seed: int, *, breaking: str = "", most_a_job: int = 8, variants: int = len(VARIANTS)) -> Tally:
    """So many kills, of as many jobs as it takes. Stops where something is wrong."""
    preload()
    folder = Path(tempfile.mkdtemp(prefix="checkflow-kills-"))
    with nothing_left(below()):
        killing = Killing(folder, random.Random(seed), breaking)
        tally = killing.tally
        while tally.kills < kills and not killing.over:
            killing.job(VARIANTS[tally.jobs % variants], min(most_a_job, kills - tally.kills))
            if sys.stderr.isatty():
                say(f"\r{tally.kills} of {kills} kills, {tally.jobs} jobs ", sys.stderr)
        killing.finish()
    if killing.over:
        say(f"what was found lies in {folder}\n", sys.stderr)
    else:
        shutil.rmtree(folder)
    return tally


# What is said


def say(text: str, stream: Any = sys.stdout) -> None:
    stream.write(text)
    stream.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn by lot; by default a new one, printed")
    parser.add_argument("--most-a-job", type=int, default=8, help="kills; then it is left to come to its end")
    parser.add_argument("--variants", type=int, default=len(VARIANTS), help="of jobs: the first so many")
    parser.add_argument("--break", dest="breaking", choices=sorted(BREAKS), default="", help="to see it fail")
    parser.add_argument("--hang-seconds", type=float, default=kill_processes.hang_seconds, help="what is silent hangs")
    parser.add_argument("--output", type=Path, default=None, help="the result as JSON")
    chosen = parser.parse_args()
    kill_processes.hang_seconds = chosen.hang_seconds
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    say(f"seed {seed}\n")
    begun = time.monotonic()
    tally = kill(
        chosen.kills, seed, breaking=chosen.breaking, most_a_job=chosen.most_a_job, variants=chosen.variants
    )  # fmt: skip
    result = as_json(tally, seed, time.monotonic() - begun)
    say(table(result))
    for problem in tally.problems:
        say(f"{problem}\n", sys.stderr)
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
