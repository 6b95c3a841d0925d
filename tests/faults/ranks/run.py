"""Kills jobs of several ranks, in each phase: one rank, all, or the launcher, by SIGKILL or SIGSTOP.

Ranks run under torchrun's agent; all are forked from this process, which has imported what they need. After each kill
the job goes on, by its launcher or by a new one. What must hold is in checks.py; and within 30 seconds of a death
nothing of ours may be alive, or wait. Where a rank was only stopped it goes on, in most cases, and the job with it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from checkflow.torture.journal import JournalReader
from checkflow.torture.processes import JobProcess, below, bury, members, nothing_left, send, tail
from tests.faults.kills.job import preload
from tests.faults.kills.processes import fork
from tests.faults.ranks.breaks import BREAKS
from tests.faults.ranks.checks import Line, State, check, make_reference
from tests.faults.ranks.job import KINDS, Kind, Life, launch
from tests.faults.ranks.places import PHASES, WAYS, Aim, Places

LOOK_SECONDS = 0.002
DEATH_SECONDS = 30.0  # after which nothing of ours may be alive, or wait
REFUSAL_SECONDS = 10.0  # within which all ranks raise what one refuses with
HANG_SECONDS = 90.0  # so long nobody says anything
QUIET_SECONDS = 5.0  # after which what was said is looked at: ranks that restored different steps may hang
ONCE = ("joining", "agreeing the start", "restored", "closing")
PATIENT_SHARE = 0.1  # of the kills: what is left is looked at when DEATH_SECONDS are over


@dataclass
class Tally:
    """What a series of kills came to."""

    kills: int = 0
    jobs: int = 0
    starts: int = 0
    ways: collections.Counter[str] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    phases: collections.Counter[str] = field(default_factory=collections.Counter)
    went_on: int = 0  # after a stop
    looked_at_late: int = 0
    restores: int = 0
    boundaries: int = 0
    acknowledged: int = 0
    longest_death_seconds: float = 0.0
    refusals: int = 0
    longest_refusal_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class NotesReader:
    """What all ranks of a job have noted."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._readers = [JournalReader(Path(f"{path}-{rank}")) for rank in range(ranks)]

    def look(self) -> list[list[Line]]:
        for reader in self._readers:
            reader.look()
        return [reader.lines for reader in self._readers]


class Killing:
    """Kills one job after the other, and keeps the tally.

    Args:
        folder: empty; everything that is written lies below it.
        breaking: the name of what is taken away of the runtime; "": nothing.
    """

    def __init__(self, folder: Path, draw: random.Random, breaking: str) -> None:
        self._folder, self._draw = folder, draw
        self._break = BREAKS[breaking] if breaking else None
        self._places, self._rival_places = Places(), Places()
        self._references: dict[str, tuple[list[dict[int, State]], float]] = {}
        self._strangers = below()
        self._lives = 0
        self.tally = Tally()

    def job(self, kind: Kind, most_kills: int) -> None:
        """One job, from its first start to its end, killed so many times at most."""
        reference, usual_seconds = self._reference(kind)
        tally = self.tally
        tally.jobs += 1
        begun, base = tally.kills, self._folder / f"job-{tally.jobs}"
        notes, log = NotesReader(Path(f"{base}.notes"), kind.ranks), Path(f"{base}.log")
        rival_due = self._draw.random() < 0.3
        ended = False
        while not ended and not tally.problems:
            life = self._life(kind, base, restarts=self._draw.choice((0, 3)))
            self._places.clear()
            process = fork(launch, life, self._places, self._break, log=log, temporary=self._folder / "temporary")
            while process.process.poll() is None and not tally.problems:
                left = most_kills - (tally.kills - begun)
                if rival_due and not left:
                    self._rival(life, notes)
                    rival_due = False
                if not self._watch(life, process, self._draw_aim(kind, usual_seconds) if left else None, notes):
                    self._end_all(process)
            ended = process.process.returncode == 0
            self._end_all(process)
            found = notes.look()
            if not ended and process.process.returncode not in (None, -signal.SIGKILL) and self._places.dealt is None:
                tally.problems.append(f"the job ended by itself: {tail(process, lines=12)}")
            tally.problems = tally.problems or check(found, reference)
        found = notes.look()
        if ended and (missing := [rank for rank, lines in enumerate(found) if lines[-1]["event"] != "ended"]):
            tally.problems.append(f"ranks {missing} did not come to the end")
        events = collections.Counter(line["event"] for lines in found for line in lines)
        tally.starts += events["starts"]
        tally.restores += events["restored"]
        tally.boundaries += events["boundary"]
        tally.acknowledged += len({line["step"] for line in found[0] if line["event"] == "durable"})
        if not tally.problems:
            shutil.rmtree(base)
        tally.problems = [one if "(job-" in one else f"{one} ({base.name}, {kind.name})" for one in tally.problems]

    def _life(self, kind: Kind, base: Path, restarts: int) -> Life:
        self._lives += 1
        every = self._draw.choice(("1", "2", "0.1s"))
        return Life(kind, base, Path(f"{base}.notes"), self._lives, every, restarts)

    def _reference(self, kind: Kind) -> tuple[list[dict[int, State]], float]:
        """What such a job notes that is never killed, and its seconds from the first rank's start."""
        if kind.name not in self._references:
            base = self._folder / f"reference-{kind.name}"
            notes = NotesReader(Path(f"{base}.notes"), kind.ranks)
            self._places.clear()
            process = fork(
                launch, self._life(kind, base, 0), self._places, None,
                log=Path(f"{base}.log"), temporary=self._folder / "temporary",
            )  # fmt: skip
            while process.process.poll() is None:
                time.sleep(LOOK_SECONDS)
            found = notes.look()
            assert process.process.returncode == 0, tail(process, lines=12)
            seconds = found[0][-1]["at"] - min(lines[0]["at"] for lines in found)
            self._references[kind.name] = make_reference(found, kind.replicas), seconds
            shutil.rmtree(base)
        return self._references[kind.name]

    def _draw_aim(self, kind: Kind, usual_seconds: float) -> Aim:
        """A quarter at a time drawn by lot, the others in a phase drawn by lot."""
        draw = self._draw
        way, rank = draw.choice(WAYS), draw.randrange(kind.ranks)
        if draw.random() < 0.25:
            return Aim(way, rank, draw.uniform(0, 0.8 * usual_seconds))
        phase = draw.choice(list(PHASES))
        who = PHASES[phase][0]
        rank = {"all": rank, "lead": 0, "others": draw.randrange(1, kind.ranks)}[who]
        return Aim(way, rank, usual_seconds, phase, 1 if phase in ONCE else draw.randint(1, 12))

    # A launcher's life

    def _watch(self, life: Life, process: JobProcess, aim: Aim | None, notes: NotesReader) -> bool:
        """Until the job is over, or has been hit; returns whether its launcher goes on with it."""
        places = self._places
        before = sum(map(len, notes.look()))
        if aim is not None:
            places.arm(aim)
        started = told = time.monotonic()
        while process.process.poll() is None:
            if aim is not None and places.dealt is not None:
                return self._after(aim, process)
            now = time.monotonic()
            if aim is not None and places.pids() and now - started >= aim.seconds:
                places.deal(aim.rank)
            if not places.pids():
                started = now
            if (noted := sum(map(len, notes.look()))) != before:
                before, told = noted, now
            elif now - told > QUIET_SECONDS:
                self.tally.problems += check(notes.look(), self._reference(life.kind)[0])
                if now - told > HANG_SECONDS:
                    self.tally.problems.append(f"the job hangs: {tail(process, lines=12)}")
                if self.tally.problems:
                    return False
                time.sleep(0.2)
            time.sleep(LOOK_SECONDS)
        if aim is not None and places.dealt is not None:
            self._count(aim)
        return False

    def _count(self, aim: Aim) -> None:
        tally = self.tally
        tally.kills += 1
        tally.ways[aim.way] += 1
        tally.phases[self._places.met] += 1

    def _after(self, aim: Aim, process: JobProcess) -> bool:
        """After a blow; returns whether the job goes on under its launcher."""
        self._count(aim)
        draw, places = self._draw, self._places
        dealt, pids = places.dealt or time.monotonic(), places.pids()
        who, _, how = aim.way.partition(" ")
        patient = draw.random() < PATIENT_SHARE
        if how == "stopped" and not patient and draw.random() < 0.6:
            time.sleep(draw.uniform(0, 1.5))
            for pid in (*pids, places.launcher):
                _continue(pid)
            self.tally.went_on += 1
            return True
        if (
            how == "killed"
            and who != "launcher"
            and (process.process.poll() is None and (patient or draw.random() < 0.4))
        ):
            return self._await_death(pids, dealt, process)
        if patient and who != "all":
            self._look_late(pids, dealt, stopped=[pids[aim.rank]] if aim.way == "one stopped" else [])
        else:
            time.sleep(draw.uniform(0, 1))
        return False

    def _await_death(self, pids: list[int], dealt: float, process: JobProcess) -> bool:
        """The launcher ends the ranks that are left; returns whether it starts them again."""
        while left := _alive(pids):
            seconds = time.monotonic() - dealt
            ours = [rank for rank, pid in enumerate(pids) if pid in left and self._places.has_joined(rank)]
            if seconds > DEATH_SECONDS - 1 and (ours or seconds > 2 * DEATH_SECONDS):  # by SIGKILL it ends them then
                self.tally.problems.append(f"ranks {ours} live {seconds:.0f} s after another one's death")
                return False
            bury(self._strangers, process.process)
            time.sleep(LOOK_SECONDS)
        self.tally.longest_death_seconds = max(self.tally.longest_death_seconds, time.monotonic() - dealt)
        while process.process.poll() is None and self._places.pids() == pids:
            time.sleep(LOOK_SECONDS)
        return process.process.poll() is None

    def _look_late(self, pids: list[int], dealt: float, stopped: list[int]) -> None:
        """When DEATH_SECONDS are over: who lives may train, or wait for torch, but not for us."""
        while time.monotonic() - dealt < DEATH_SECONDS + 1 and _alive(pids):
            time.sleep(0.05)
        self.tally.looked_at_late += 1
        for rank, pid in enumerate(pids):
            waited = self._places.longest_wait_seconds(rank)
            if _alive([pid]) and pid not in stopped and waited > DEATH_SECONDS:
                self.tally.problems.append(f"rank {rank} waits for {waited:.0f} s already")

    def _rival(self, life: Life, notes: NotesReader) -> None:
        """A second job on the directory of one that trains: each rank must be refused in time."""
        while not all(_trains(lines, life) for lines in notes.look()):
            if not _alive([self._places.launcher]):
                return
            time.sleep(LOOK_SECONDS)
        pids = self._places.pids()
        for pid in pids:  # or the first job ends before the second has come
            if _alive([pid]):
                os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(LOOK_SECONDS)
            if len(_alive(pids)) == life.kind.ranks and all(_trains(lines, life) for lines in notes.look()):
                self._refuse(life)
        finally:
            for pid in pids:
                _continue(pid)

    def _refuse(self, life: Life) -> None:
        rival = replace(life, notes=Path(f"{life.notes}-rival"), number=0, restarts=0)
        said = NotesReader(rival.notes, life.kind.ranks)
        self._rival_places.clear()
        process = fork(
            launch, rival, self._rival_places, self._break,
            log=Path(f"{life.directory}-rival.log"), temporary=self._folder / "temporary",
        )  # fmt: skip
        while process.process.poll() is None:
            time.sleep(LOOK_SECONDS)
        found = said.look()
        seconds = []
        begun = max((line["at"] for lines in found for line in lines if line["event"] == "starts"), default=0.0)
        for rank, lines in enumerate(found):
            refused = [line for line in lines if line["event"] == "refused" and line["kind"] == "LockedError"]
            if not refused or refused[0]["at"] - begun > REFUSAL_SECONDS:
                self.tally.problems.append(f"rank {rank} of a second job was not refused in time: {lines[-1:]}")
                return
            seconds.append(refused[0]["at"] - begun)
        self.tally.refusals += 1
        self.tally.longest_refusal_seconds = max(self.tally.longest_refusal_seconds, *seconds)

    def _end_all(self, process: JobProcess) -> None:
        while left := members(self._strangers):
            for one in left:
                send(one, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)
            process.process.poll()  # before anybody else takes its remains away
            bury(self._strangers, process.process)


def _trains(lines: list[Line], life: Life) -> bool:
    """Whether a rank has come to a boundary since this life has started it."""
    starts = max((at for at, line in enumerate(lines) if line["event"] == "starts"), default=None)
    if starts is None or not lines[starts]["start"].startswith(f"{life.number}."):
        return False
    events = {line["event"] for line in lines[starts:]}
    return "boundary" in events and not events & {"ended", "raised"}


def _alive(pids: list[int]) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if lives(pid)]


def _continue(pid: int) -> None:
    if _alive([pid]):
        os.kill(pid, signal.SIGCONT)


def kill(
    kills: int, seed: int, folder: Path, *, breaking: str = "", most_a_job: int = 6, kinds: list[str] | None = None
) -> Iterator[Tally]:
    """Kill so many times, or until something is lost; yields the tally after each job."""
    preload()
    torch.set_num_threads(1)
    draw = random.Random(seed)
    names = kinds or list(KINDS)
    with nothing_left(below()):
        killing = Killing(folder, draw, breaking)
        tally = killing.tally
        while tally.kills < kills and not tally.problems:
            kind, before = KINDS[names[tally.jobs % len(names)]], tally.kills
            killing.job(kind, min(most_a_job, kills - tally.kills))
            tally.kinds[kind.name] += tally.kills - before
            yield tally


def as_json(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed, "kills": tally.kills, "losses": len(tally.problems), "problems": tally.problems,
        "jobs": tally.jobs, "cores": os.cpu_count(), "torch": torch.__version__, "seconds": round(seconds, 1),
        "ways": {way: tally.ways[way] for way in WAYS}, "kinds": {kind: tally.kinds[kind] for kind in KINDS},
        "phases": {phase: tally.phases[phase] for phase in ("before", *PHASES)},
        "stopped_and_went_on": tally.went_on, "looked_at_after_30_seconds": tally.looked_at_late,
        "rank_starts": tally.starts, "restores_compared": tally.restores, "boundaries_compared": tally.boundaries,
        "versions_acknowledged": tally.acknowledged,
        "longest_death_seconds": round(tally.longest_death_seconds, 2),
        "second_jobs_refused": tally.refusals, "longest_refusal_seconds": round(tally.longest_refusal_seconds, 2),
    }  # fmt: skip


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn by lot; by default a new one, printed")
    parser.add_argument("--most-a-job", type=int, default=6, help="kills; then it is left to come to its end")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), help="kinds of jobs")
    parser.add_argument("--break", dest="breaking", choices=sorted(BREAKS), default="", help="to see it fail")
    parser.add_argument("--output", type=Path, help="the result as JSON")
    asked = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    say(f"seed {seed}")
    begun = time.monotonic()
    tally = Tally()
    folder = Path(tempfile.mkdtemp(prefix="checkflow-ranks-kills-"))
    for tally in kill(
        asked.kills, seed, folder, breaking=asked.breaking, most_a_job=asked.most_a_job, kinds=asked.only
    ):
        result = as_json(tally, seed, time.monotonic() - begun)
        if asked.output is not None:
            asked.output.write_text(json.dumps(result, indent=2) + "\n")
        say(f"{tally.kills} kills of {tally.jobs} jobs in {result['seconds']} s, {len(tally.problems)} losses")
    say(", ".join(f"{count} x {way}" for way, count in tally.ways.items()))
    for problem in tally.problems:
        sys.stderr.write(f"{problem}\n")
    if tally.problems:
        sys.stderr.write(f"what is left of it: {folder}\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
