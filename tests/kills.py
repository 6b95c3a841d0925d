"""Kill a real training job at random moments, again and again, and hold what is left against L1 to L6.

``make kills [KILLS=200] [SEED=n] [BREAK=name]``, or ``python tests/kills.py --help``: a table of where the job was when
it was killed, and the same as JSON. The tests run a short form (``test_kills.py``).

Jobs (:mod:`killed_job`) train with checkpoints of every iteration, with loader workers, by a plan that was given or one
that they make. SIGKILL meets the training process at a random time, or as soon as it is seen in a phase drawn by lot;
or one of its loader workers, or the process that plans for it. After each kill a fresh process examines the directory
(:mod:`kill_checks`), and the job is started again, until it comes to its end; then another one begins.

All processes are forked from this one, which has imported what they need and computes nothing: a life costs what it
trains. What is drawn by lot follows from the seed; where a kill hits follows from the clock too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HANG_SECONDS = 30.0
ROOT = Path(__file__).parent.parent
LOOK_SECONDS = 0.0005
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

from kill_breaks import BREAKS  # noqa: E402
from kill_checks import Record, check_disk, check_end, check_replayed, examine, make_record  # noqa: E402
from killed_job import (  # noqa: E402
    PLANNER, PLANNING, STORAGE, TRAINING, VARIANTS, Images, Net, Variant, Whereabouts, live, make, read_notes,
)  # fmt: skip

from checkflow.runtime.reader import find  # noqa: E402

_FORK = multiprocessing.get_context("fork")
AIMED = tuple(
    [("training", phase) for phase in TRAINING if phase not in ("forward", "backward", "optimizer step")]
    + [("storage", phase) for phase in STORAGE if phase != "idle"]
    + [("planning", stage) for stage in ("recording", "timing", "making the plan", "planned")]
)


@dataclass(frozen=True)
class Aim:
    """Whom to kill, and when."""

    target: str  # "training", "worker" or "planner"
    after_seconds: float  # since the start, or since the phase was first seen
    phase: tuple[str, str] | None = None  # wait for this one


@dataclass
class Tally:
    """What a series of kills came to."""

    kills: int = 0
    jobs: int = 0
    acknowledged: int = 0
    boundaries: int = 0
    damaged: int = 0
    targets: collections.Counter[str] = field(default_factory=collections.Counter)
    training: collections.Counter[str] = field(default_factory=collections.Counter)
    storage: collections.Counter[str] = field(default_factory=collections.Counter)
    planning: collections.Counter[str] = field(default_factory=collections.Counter)
    replayed: dict[str, list[int]] = field(default_factory=dict)
    most_bytes: int = 0
    checkpoint_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def draw_aim(source: random.Random, usual_seconds: float) -> Aim:
    """Half at a time drawn by lot, half in a phase drawn by lot; now and then another process than the job's own."""
    target = source.choices(("training", "worker", "planner"), (12, 3, 1))[0]
    if target == "training" and source.random() < 0.5:
        return Aim(target, source.choice((0.0, 0.0, source.uniform(0, 0.1))), source.choice(AIMED))
    return Aim(target, source.uniform(0, 1.2 * usual_seconds))


# Processes


def _call(work: Callable[..., Any], arguments: tuple[Any, ...], log: Path) -> None:
    """In the forked process: die with the one that forked it, and say what went wrong."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def fork(work: Callable[..., Any], *arguments: Any, log: Path) -> Any:
    process = _FORK.Process(target=_call, args=(work, arguments, log))
    process.start()
    return process


def run(work: Callable[..., Any], *arguments: Any, log: Path) -> None:
    """In a process of its own, to its end.

    Raises:
        RuntimeError: it failed, or hangs.
    """
    process = fork(work, *arguments, log=log)
    process.join(2 * HANG_SECONDS)
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGABRT)  # leaves a traceback
        process.join()
    if process.exitcode:
        raise RuntimeError(f"it ended with {process.exitcode}: {tail(log)}")


def tail(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-12:])


def descendants() -> list[psutil.Process]:
    """Every process below this one, orphans included, but no dead ones: those of others are buried here."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def bury() -> None:
    """Orphans come to this process, which alone can take their remains away."""
    own = {process.pid for process in multiprocessing.active_children()}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _answer(work: Callable[..., Any], arguments: tuple[Any, ...], file: Path) -> None:
    file.write_text(json.dumps(work(*arguments)))


# One job


class Killing:
    """Kills one job after the other, and keeps the tally.

    Args:
        folder: empty; everything that is written lies below it.
        breaking: the name of what is taken away of the runtime, "" for nothing.
    """

    def __init__(self, folder: Path, source: random.Random, breaking: str) -> None:
        self._folder, self._source = folder, source
        self._break = BREAKS[breaking] if breaking else None
        self.tally = Tally()
        self._where = Whereabouts()
        self._references: dict[tuple[int, bool], tuple[Record, float]] = {}
        self._left: dict[int, float] = {}  # processes of dead lives, and since when they are left over
        self._bereaved = 0  # lives that ended by an error of torch's, since a worker was killed
        self._ours: set[int] = set()
        self.plan = folder / "plan.json"
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(self._temporary)
        run(make_plan, self.plan, log=folder / "plan.log")

    def reference(self, variant: Variant) -> tuple[Record, float]:
        """The notes of such a job when nothing happens to it, and how long it takes."""
        if variant.trajectory not in self._references:
            name = self._folder / f"reference-{len(self._references)}"
            begun = time.monotonic()
            plan = self.plan if variant.given else None
            run(live, variant, name, plan, name.with_suffix(".notes"), 0, Whereabouts(), log=name.with_suffix(".log"))
            record = make_record(read_notes(name.with_suffix(".notes")))
            self._references[variant.trajectory] = record, time.monotonic() - begun
            shutil.rmtree(name)
        return self._references[variant.trajectory]

    def job(self, variant: Variant, most_kills: int) -> None:
        """One job, from its first start to its end, killed ``most_kills`` times at most."""
        tally = self.tally
        tally.jobs += 1
        directory = self._folder / f"job-{tally.jobs}"
        notes, log = directory.with_suffix(".notes"), directory.with_suffix(".log")
        expected, usual_seconds = self.reference(variant)
        said = len(tally.problems)
        life, kills = 0, 0
        ended = False
        while not ended and len(tally.problems) == said:
            aim = draw_aim(self._source, usual_seconds) if kills < most_kills else None
            damage_seed = self._source.randrange(2**32) if self._source.random() < 0.25 else None
            ended, hit = self._live(variant, directory, notes, log, life, aim)
            record = make_record(read_notes(notes))
            if hit:
                kills += 1
                self._after_kill(variant, directory, record, life, damage_seed, log)
            self._look_at_leftovers()
            life += 1
        tally.acknowledged += record.acknowledgements
        tally.boundaries += len(record.boundaries)
        if len(tally.problems) == said:
            self._say(log, check_end(record, expected, variant) + self._check_left(variant, directory))
        if len(tally.problems) == said:
            shutil.rmtree(directory)

    def _say(self, log: Path, problems: list[str]) -> None:
        self.tally.problems += [f"{problem} ({log.stem}, kill {self.tally.kills})" for problem in problems]

    def _live(
        self, variant: Variant, directory: Path, notes: Path, log: Path, life: int, aim: Aim | None
    ) -> tuple[bool, bool]:
        """One life; returns whether the job came to its end, and whether something was killed."""
        where = self._where
        where.clear()
        plan = self.plan if variant.given else None
        process = fork(live, variant, directory, plan, notes, life, where, self._break, log=log)
        self._ours.add(process.pid)
        victim = None
        for now in self._watch(process, notes):
            if aim is not None and victim is None and (victim := self._due(aim, process.pid, now)) is not None:
                self._kill(aim, victim)
        process.join()
        ended, target = process.exitcode == 0, None if aim is None else aim.target
        fine = ended or (victim is not None and process.exitcode == -signal.SIGKILL and target == "training")
        if victim is not None and target == "worker" and process.exitcode == 1:
            fine = "checkflow.errors" not in tail(log)  # torch has several errors for it, all of them its own
        if not fine:
            self._say(log, [f"L5 the job ended by itself with {process.exitcode}: {tail(log)}"])
        return ended, victim is not None

    def _watch(self, process: Any, notes: Path) -> Iterator[float]:
        """Again and again, until the process has ended: the seconds since its start."""
        begun = told = time.monotonic()
        size = 0
        while process.exitcode is None:
            now = time.monotonic()
            yield now - begun
            if notes.exists() and (noted := notes.stat().st_size) != size:
                size, told = noted, now
            elif now - told > HANG_SECONDS:
                os.kill(process.pid, signal.SIGABRT)  # leaves a traceback
                process.join()
            time.sleep(LOOK_SECONDS)

    def _due(self, aim: Aim, pid: int, seconds: float) -> int | None:
        """The process to be killed now, if it is time."""
        if aim.phase is not None:
            kind, phase = aim.phase
            if dict(zip(("training", "storage", "planning"), self._where.read(), strict=True))[kind] != phase:
                return None
            time.sleep(aim.after_seconds)
        elif seconds < aim.after_seconds:
            return None
        if aim.target == "training":
            return pid
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children():
                with contextlib.suppress(psutil.Error):
                    if (PLANNER in child.cmdline()) == (aim.target == "planner"):
                        found.append(child.pid)
        return self._source.choice(found) if found else None

    def _kill(self, aim: Aim, victim: int) -> None:
        tally = self.tally
        with contextlib.suppress(psutil.NoSuchProcess):
            self._left |= {one.pid: time.monotonic() for one in psutil.Process(victim).children(recursive=True)}
        at = self._where.read()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        tally.kills += 1
        tally.targets[aim.target] += 1
        self._bereaved += aim.target == "worker"
        if aim.target == "training":
            for counter, phase in zip((tally.training, tally.storage, tally.planning), at, strict=True):
                counter[phase] += 1

    def _after_kill(
        self, variant: Variant, directory: Path, record: Record, life: int, damage_seed: int | None, log: Path
    ) -> None:
        """A fresh process examines what is left."""
        tally = self.tally
        if directory.exists():
            used_bytes = size_bytes(directory)
            checkpoint_bytes = max((size_bytes(path) for path in find(directory)), default=0)
            tally.most_bytes = max(tally.most_bytes, used_bytes)
            tally.checkpoint_bytes = max(tally.checkpoint_bytes, checkpoint_bytes)
            self._say(log, check_disk(used_bytes, checkpoint_bytes))
        folder = self._folder / "examined"
        folder.mkdir()
        plan = self.plan if variant.given else None
        asked = (variant, directory, plan, record, folder, damage_seed)
        try:
            run(_broken, self._break, examine, asked, folder / "answer", log=log)
        except RuntimeError as error:
            self._say(log, [f"L5 a fresh process cannot go on: {error}"])
        else:
            answer = json.loads((folder / "answer").read_text())
            tally.damaged += damage_seed is not None
            problems = answer["problems"]
            if life in record.begun:
                begun, restored = record.begun[life], answer["restored"]
                every = "default" if variant.every is None else f"every={variant.every}"
                tally.replayed.setdefault(every, []).append(max(0, begun - restored))
                problems += check_replayed(begun, restored, record.interval[life], variant.every)
            self._say(log, problems)
        shutil.rmtree(folder)

    # What is left over

    def _look_at_leftovers(self, *, wait: bool = False) -> None:
        """Processes of dead lives have ``HANG_SECONDS`` to end."""
        while True:
            bury()
            alive = {process.pid for process in descendants()}
            now = time.monotonic()
            self._left = {pid: since for pid, since in self._left.items() if pid in alive}
            self._left |= {pid: now for pid in alive - self._left.keys()}
            late = sorted(pid for pid, since in self._left.items() if now - since > HANG_SECONDS)
            if late:
                self.tally.problems.append(f"L5 processes are left over: {late}")
                for pid in late:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if not (wait and self._left) or late:
                return
            time.sleep(0.05)

    def _check_left(self, variant: Variant, directory: Path) -> list[str]:
        """When a job has ended: what lies in its directory."""
        names = {path.name for path in directory.iterdir()} - {path.name for path in find(directory)}
        wrong = []
        if odd := sorted(names - {".lock", "plans"}):
            wrong.append(f"L5 left over in the directory: {', '.join(odd)}")
        if odd := sorted(path.name for path in directory.glob("plans/.*")):
            wrong.append(f"L5 left over among the plans: {', '.join(odd)}")
        if variant.steps not in {int(path.name[5:]) for path in find(directory)}:
            wrong.append(f"L5 the last boundary, {variant.steps}, is not saved")
        return wrong

    def finish(self) -> None:
        """When all is over: no process, no temporary directory, no shared memory may be left."""
        self._look_at_leftovers(wait=True)
        problems = self.tally.problems
        temporary = sorted(path.name for path in self._temporary.iterdir())
        # Workers that are killed, or ended by multiprocessing for that, cannot remove what multiprocessing made for
        # them, and nobody else knows of it.
        most = self._bereaved * max(variant.workers for variant in VARIANTS)
        if len(temporary) > most or any(not name.startswith("pymp-") for name in temporary):
            problems.append(f"L5 left over among temporary files: {', '.join(temporary)}")
        shared = [path.name for pid in self._ours for path in Path("/dev/shm").glob(f"*_{pid}_*")]
        if shared:
            problems.append(f"L5 left over in shared memory: {', '.join(shared)}")


def _broken(
    break_runtime: Callable[[], None] | None, work: Callable[..., Any], arguments: tuple[Any, ...], file: Path
) -> None:
    if break_runtime is not None:
        break_runtime()
    _answer(work, arguments, file)


def size_bytes(directory: Path) -> int:
    """Of all files below."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def make_plan(file: Path) -> None:
    """A plan of the job as ``checkflow plan`` makes it, on a link that it nearly fills."""
    import torch
    import torch.nn.functional as F
    from planned_jobs import plan_by_trace

    from checkflow import TrainingStep, plan

    model, optimizer, _ = make(VARIANTS[1])
    images = Images()
    step = TrainingStep(
        model, optimizer, loss=lambda model, x, y: F.cross_entropy(model(x), y),
        batch=(torch.stack([images.images[index] for index in range(4)]), images.labels[:4]),
    )  # fmt: skip
    assert isinstance(model, Net)
    plan.save(plan_by_trace(step), file)


# The whole


def kill(kills: int, seed: int, *, breaking: str = "", most_a_job: int = 8, variants: int = len(VARIANTS)) -> Tally:
    """So many kills, of as many jobs as it takes. Stops after the first job in which something is wrong."""
    preload()
    source = random.Random(seed)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="checkflow-kills-"))
    killing = Killing(folder, source, breaking)
    tally = killing.tally
    while tally.kills < kills and not tally.problems:
        killing.job(VARIANTS[tally.jobs % variants], min(most_a_job, kills - tally.kills))
        say(f"\r{tally.kills} of {kills} kills, {tally.jobs} jobs", terminal=True)
    killing.finish()
    say("\r", terminal=True)
    if tally.problems:
        say(f"what was found lies in {folder}\n", error=True)
    else:
        shutil.rmtree(folder)
    return tally


def preload() -> None:
    """What every job imports, here once."""
    import torch._dynamo

    import checkflow
    import checkflow.planner.live

    _ = torch._dynamo, checkflow.planner.live, checkflow.Checkpointer, checkflow.DataLoader  # hands over the planner


def say(text: str, *, terminal: bool = False, error: bool = False) -> None:
    """Progress goes to a terminal only."""
    if terminal and not sys.stderr.isatty():
        return
    stream = sys.stderr if terminal or error else sys.stdout
    stream.write(text)
    stream.flush()


def as_json(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    replayed = {
        every: {"kills": len(counts), "most": max(counts), "mean": round(sum(counts) / len(counts), 2)}
        for every, counts in sorted(tally.replayed.items())
    }
    hits = {
        "training thread": {phase: tally.training[phase] for phase in TRAINING},
        "storage": {phase: tally.storage[phase] for phase in STORAGE},
        "planning": {stage: tally.planning[stage] for stage in PLANNING if stage in tally.planning},
    }
    return {
        "seed": seed, "kills": tally.kills, "jobs": tally.jobs, "cores": os.cpu_count(), "seconds": round(seconds, 1),
        "killed": dict(tally.targets), "hits": hits, "replayed_iterations": replayed,
        "boundaries_noted": tally.boundaries, "checkpoints_acknowledged": tally.acknowledged,
        "damaged_on_purpose": tally.damaged, "checkpoint_bytes": tally.checkpoint_bytes,
        "most_directory_bytes": tally.most_bytes, "losses": len(tally.problems), "problems": tally.problems,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [f"{'killed while':44} kills"]
    for thread, hits in result["hits"].items():
        lines += [f"{thread + ': ' + phase:44} {count:5}" for phase, count in hits.items()]
    for target in ("worker", "planner"):
        lines.append(f"{'instead: a loader worker' if target == 'worker' else 'instead: the process that plans':44}"
                     f" {result['killed'].get(target, 0):5}")  # fmt: skip
    lines.append("")
    for every, counts in result["replayed_iterations"].items():
        lines.append(f"iterations replayed, {every}: {counts['most']} at most, {counts['mean']} in the mean")
    lines.append(
        f"{result['kills']} kills of {result['jobs']} jobs in {result['seconds']} s: {result['boundaries_noted']} boundaries, "
        f"{result['checkpoints_acknowledged']} checkpoints acknowledged, {result['damaged_on_purpose']} damaged on purpose; "
        f"{result['losses']} losses"
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn by lot; by default a new one, printed")
    parser.add_argument("--most-a-job", type=int, default=8, help="kills; then it is left to come to its end")
    parser.add_argument("--break", dest="breaking", choices=sorted(BREAKS), default="", help="to see it fail")
    parser.add_argument("--output", type=Path, default=None, help="the result as JSON")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    say(f"seed {seed}\n")
    begun = time.monotonic()
    tally = kill(chosen.kills, seed, breaking=chosen.breaking, most_a_job=chosen.most_a_job)
    result = as_json(tally, seed, time.monotonic() - begun)
    say(table(result))
    for problem in tally.problems:
        say(f"{problem}\n", error=True)
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
