"""Ranks on a simulated network: a deterministic event loop, one seed a schedule, and what must hold at its end.

The machines are the runtime's own (Rounds, Member, Chair, check_version). The network delays, reorders and loses what
is put, and is cut at times; ranks are killed, and stopped for a while or for good. All starts of a job share one place
without a prefix, so that old messages meet new ones.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from checkflow.core.errors import CheckflowError, MismatchError, StorageError
from checkflow.runtime.ranks import receipts, rounds
from checkflow.runtime.ranks.chair import Chair
from checkflow.runtime.ranks.member import Member, View
from checkflow.runtime.ranks.records import Attempt, Receipt, Refusal, StartReport
from checkflow.runtime.ranks.rounds import Event, Rounds

SILENT, START, RECEIPTS, GRACE, POLL = 3.0, 8.0, 4.0, 6.0, 0.25  # seconds
SLACK = 3.0  # seconds, for some rounds
LENGTH, LAST_STEP = 40.0, 60  # of a schedule; of training
Process = Iterator[float]


class BrokenError(AssertionError):
    """What must hold does not."""


@dataclass(frozen=True)
class Version:
    """What storage holds: of each rank's part the start of the job and the step that it was captured at."""

    generation: str
    step: int
    parts: tuple[tuple[str, int], ...]
    covered: tuple[int, ...]


@dataclass
class Wait:
    """A wait that must end."""

    what: str
    seat: Seat
    by: float
    ended: float | None = None


@dataclass
class Tally:
    """What has happened, so that a run can be seen to be about something."""

    committed: int = 0
    failed: int = 0
    agreed: int = 0
    given_up: int = 0
    refused: int = 0
    later: int = 0  # ends that were moved to a later boundary

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Seat:
    """One process: a rank of one start of the job."""

    def __init__(self, world: World, rank: int, generation: str, resume: int) -> None:
        self.world, self.rank, self.generation, self.resume = world, rank, generation, resume
        self.events: deque[Event] = deque()
        self.view = View()
        member = Member(rank, generation, world.now, SILENT)
        chair = (
            Chair(generation, world.size, world.now, silent_seconds=SILENT, start_seconds=START) if not rank else None
        )
        self.rounds = Rounds(member, chair, world.size, 1.0, self._publish)
        self.dead = self.finished = self.closing = self.trained = False
        self.stopped_until = self.stopped_seconds = 0.0
        self.entered = resume  # the iteration that it is in
        self.captures: list[int] = []
        self.scheduled: tuple[int, ...] = ()  # rank 0's
        self.ended_at: int | None = None  # by agreement
        self.stuck = False
        self.last_attempt = 0

    def _publish(self, view: View) -> None:
        self.view = view

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def put(self, key: str, value: Any) -> None:
        self.world.put(self, key, value)

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        return self.world.get(self, keys)

    def drop(self, keys: Sequence[str]) -> None:
        """Receipts that nobody reads stay, so that they can be taken for later ones."""

    def close(self, *, last: bool = False) -> None:
        """Nothing is open."""

    def drain(self) -> Iterator[Event]:
        while self.events:
            yield self.events.popleft()

    # The processes of a rank: generators that give the seconds until they go on.

    def council(self) -> Process:
        while True:
            self.rounds.run(self, self.world.now, self.drain)  # type: ignore[arg-type]
            if self.finished:
                return
            if self.closing and not self.events:
                self.finished = True
            yield POLL * self.world.random.uniform(0.2, 1.8)

    def train(self) -> Process:
        draw, world = self.world.random, self.world
        wait = world.expect("the start", self, START + 2 * SILENT + 6.0)
        yield from self._start()
        wait.ended = world.now
        step = self.resume
        while not (self.closing or step >= LAST_STEP):
            step += 1
            self.entered = step
            # A collective: no rank leaves it before all have come, and none comes that is dead or waits elsewhere.
            self.stuck = True
            while any(other.entered < step for other in world.peers(self)):
                if self.view.end_now:
                    world.tally.given_up += 1
                    self.closing = True
                    return
                yield 0.05
            self.stuck = False
            yield world.iteration_seconds * draw.uniform(0.9, 1.1)
            self.tell(lambda member, chair, now, step=step: member.arrived(step))  # type: ignore[misc]
            if draw.random() < 0.3:
                yield draw.uniform(0, 0.3)
            view = self.view
            if draw.random() < 0.3:
                yield draw.uniform(0, 0.3)
            due = self._is_due(step, view) and (not world.faults or draw.random() < 0.98)
            if due:
                self.captures.append(step)
            elif world.faults and draw.random() < 0.05 and self.captures:
                lost = self.captures.pop()
                self.tell(lambda member, chair, now, lost=lost: member.dropped(lost))  # type: ignore[misc]
            if view.stops_at(step):
                yield from self._wait_for_end(step, due)
                if self.closing:
                    break
            at = world.now
            self.tell(lambda member, chair, now, step=step, at=at, due=due: member.passed(step, at, captured=due))  # type: ignore[misc]
            if step == world.end_at and self.rank == world.end_by:
                self.tell(lambda member, chair, now: member.ask_end("SIGTERM", now, GRACE))
        self.trained = True
        while self.busy and not self.view.end_now:
            yield 0.1
        self.closing = True
        self.tell(lambda member, chair, now: member.leave("done"))
        self.tell(lambda member, chair, now: chair.leave("done") if chair else None)

    def _start(self) -> Process:
        draw, world = self.world.random, self.world
        if world.refusing == self.rank:
            self.tell(lambda member, chair, now: member.refuse(Refusal("LockedError", "locked")))
        self.tell(lambda member, chair, now: member.report(StartReport({"job": "one"})))
        while (chair := self.rounds.chair) is not None and not chair.overview().reports and not self._refused():
            yield 0.1
        resume = self.resume
        self.tell(lambda member, chair, now: chair.resume(resume, "run") if chair else None)
        while self.view.start.stage == "reports" and not self._refused():
            yield 0.1
        if not self._refused():
            if self.view.start.step != self.resume:
                raise BrokenError(f"rank {self.rank} restores {self.view.start.step}, not {self.resume}")
            yield draw.uniform(0, 2)
            self.tell(lambda member, chair, now: member.report(StartReport({"job": "one"}, restored=True)))
        while self.view.start.stage != "train" and not self._refused():
            yield 0.1
        if self._refused():
            world.tally.refused += 1
            self.closing = True
        elif world.refusing is not None and self.generation == world.generation:
            raise BrokenError(f"rank {self.rank} trains though rank {world.refusing} has refused")

    def _refused(self) -> bool:
        return self.view.refusal is not None or 0 in self.view.silent

    def _is_due(self, step: int, view: View) -> bool:
        """Each ``every``-th boundary, by its number, or by rank 0, which takes another interval from time to time."""
        world, chair = self.world, self.rounds.chair
        if world.by_number:
            return step % world.every == 0
        if chair is None:
            return step in view.scheduled
        if world.random.random() < 0.1:
            world.every = world.random.randint(1, 6)
        ahead = chair.overview().lead
        if ahead and (step + ahead) % world.every == 0 and (not self.scheduled or self.scheduled[-1] < step):
            self.scheduled = (*self.scheduled, step + ahead)[-16:]
            steps = self.scheduled
            self.tell(lambda member, chair, now: chair.schedule(steps) if chair else None)
        return step in self.scheduled

    def _wait_for_end(self, step: int, due: bool) -> Process:
        self.tell(lambda member, chair, now: member.waits(step, captured=due))
        wait = self.world.expect(f"the end at {step}", self, GRACE)
        while True:
            view = self.view
            agreed = view.end is not None and view.end.agreed and view.end.at == step
            if agreed or view.end_now:
                self.closing = True
                self.ended_at = step if agreed else None
                self.world.tally.agreed += agreed
                self.world.tally.given_up += not agreed
                break
            if view.end is not None and view.end.at != step:
                self.world.tally.later += 1
                break
            yield 0.05
        wait.ended = self.world.now

    @property
    def busy(self) -> bool:
        return bool(self.captures)

    def write(self) -> Process:
        """The writer's thread: captured steps -> versions."""
        while not self.finished:
            if self.rank == 0:
                yield from self._lead()
            else:
                yield from self._follow()
            yield 0.1

    def _receipt(self, attempt: int, step: int) -> Receipt:
        draw, world = self.world.random, self.world
        part = self.rank
        if world.faults and draw.random() < 0.02:
            part = draw.randrange(world.size)  # by another mesh: something is there twice, and something not at all
        written = f"{self.generation}-{step}-{part}"
        failure = "disk full" if world.faults and draw.random() < 0.03 else ""
        return Receipt(
            self.rank, world.size, self.generation, attempt, step, written,
            persist_seconds=0.1, failure=failure,
        )  # fmt: skip

    def _lead(self) -> Process:
        draw, world = self.world.random, self.world
        if not self.captures:
            return
        step = self.captures[-1]
        opened: list[int] = []
        self.tell(lambda member, chair, now: opened.append(chair.open(step, now)) if chair else None)
        while not opened:
            yield 0.05
        yield draw.uniform(0, 0.5)
        number = opened[0]
        receipt = self._receipt(number, step)
        self.tell(lambda member, chair, now: member.post(receipt))
        wait = world.expect(f"the receipts of step {step}", self, RECEIPTS)
        chair = self.rounds.chair
        assert chair is not None
        while (found := chair.collected())[0] != number and not self.finished:
            attempt = self.view.attempt(number)
            if attempt is not None and attempt.ended:
                break
            yield 0.05
        wait.ended = world.now
        if found[0] == number:
            try:
                whole = receipts.check_version(found[1], self.generation, number, step, world.size, covers)
            except CheckflowError as error:
                reason = str(error)
                self.tell(lambda member, chair, now: chair.conclude(number, "failed", reason) if chair else None)
                world.tally.failed += 1
            else:
                yield draw.uniform(0, 0.2)  # the manifest, the rename
                world.commit(self, step, whole)
                self.tell(lambda member, chair, now: chair.conclude(number, "committed") if chair else None)
        else:
            world.tally.failed += 1
        self.captures = [one for one in self.captures if one > step]

    def _follow(self) -> Process:
        draw = self.world.random
        attempt = next((one for one in self.view.attempts if one.number > self.last_attempt and not one.ended), None)
        if attempt is None:
            done = max((one.step for one in self.view.attempts if one.ended), default=-1)
            gone = self.trained and (0 in self.view.silent)
            self.captures = [] if gone else [one for one in self.captures if one > done]
            return
        if attempt.step not in self.captures:
            return  # not yet, or skipped, which the card says
        self.last_attempt = attempt.number
        yield draw.uniform(0, 0.8)
        receipt = self._receipt(attempt.number, attempt.step)
        self.tell(lambda member, chair, now: member.post(receipt))
        end = self.world.now + RECEIPTS + SLACK
        while not self._decided(attempt) and self.world.now < end:
            yield 0.1
        self.captures = [one for one in self.captures if one > attempt.step]

    def _decided(self, attempt: Attempt) -> bool:
        found = self.view.attempt(attempt.number)
        return found is not None and bool(found.ended)


def covers(ordered: Sequence[Receipt]) -> None:
    """That each rank's element is there once."""
    found = sorted(int(receipt.written.split("-")[2]) for receipt in ordered)
    if found != list(range(len(ordered))):
        raise MismatchError(f"w is covered at {found}")


@dataclass
class World:
    """The job, its storage, its network and what befalls them."""

    seed: int
    faults: bool = True
    now: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.random = draw = random.Random(self.seed)
        self.size = draw.randint(2, 4)
        self.iteration_seconds = draw.choice([0.02, 0.2, 0.5])
        self.every = draw.randint(1, 6)
        self.by_number = draw.random() < 0.5
        self.end_at, self.end_by = draw.randint(2, 40), draw.randrange(self.size)
        self.delay_seconds = draw.choice([0.0, 0.2, 1.5]) if self.faults else 0.05
        self.loss = draw.choice([0.0, 0.1, 0.4]) if self.faults else 0.0
        self.refusing = draw.randrange(self.size) if self.faults and draw.random() < 0.1 else None
        self.values: dict[str, Any] = {}
        self.cut_until: dict[int, float] = {}
        self.queue: list[tuple[float, int, Seat | None, Process]] = []
        self.counted = 0
        self.seats: list[Seat] = []
        self.versions: list[Version] = []
        self.waits: list[Wait] = []
        self.generation = ""
        self.starts = 0

    # The network

    def put(self, seat: Seat, key: str, value: Any) -> None:
        cut = self.now < self.cut_until.get(seat.rank, 0.0)
        lost = cut or self.random.random() < self.loss
        if not lost or (not cut and self.random.random() < 0.5):  # what is said to be lost may have arrived
            delay = self.random.uniform(0, self.delay_seconds)
            if self.faults and self.random.random() < 0.02:
                delay += self.random.uniform(0, 10)
            self.push(delay, None, self._arrive(key, value))
        if lost:
            raise StorageError("the network is broken")

    def _arrive(self, key: str, value: Any) -> Process:
        self.values[key] = value
        return
        yield 0.0

    def get(self, seat: Seat, keys: Sequence[str]) -> dict[str, Any]:
        if self.now < self.cut_until.get(seat.rank, 0.0) or self.random.random() < self.loss:
            raise StorageError("the network is broken")
        return {key: self.values[key] for key in keys if key in self.values}

    # The launcher and the faults

    def start_all(self) -> None:
        self.starts += 1
        self.generation = f"start{self.starts}"
        resume = max((version.step for version in self.versions), default=0)
        self.seats += (new := [Seat(self, rank, self.generation, resume) for rank in range(self.size)])
        for seat in new:
            if self.faults and self.random.random() < 0.03:
                seat.dead = True  # it does not come
            for process in (seat.council(), seat.train(), seat.write()):
                self.push(self.random.uniform(0, 0.5), seat, process)

    def disturb(self) -> Process:
        """Kills, stops and cuts; a killed job is started again."""
        draw = self.random
        for _ in range(draw.randint(0, 4)):
            yield draw.uniform(0, 8)
            seat = draw.choice(self.seats[-self.size :])
            kind = draw.choice(["kill", "kill", "stop", "cut", "cut"])
            if kind == "cut":
                self.cut_until[seat.rank] = self.now + draw.uniform(0.5, 8)
            elif kind == "stop":
                seconds = draw.choice([draw.uniform(0.5, 8), LENGTH])
                seat.stopped_until = self.now + seconds
                seat.stopped_seconds += seconds
            else:
                seat.dead = True
                yield draw.uniform(0, 6)
                for one in self.seats[-self.size :]:
                    # One that is stopped may outlive its job, but rank 0's lock would stay with it.
                    one.dead = one.dead or one.rank == 0 or one.stopped_until <= self.now or draw.random() < 0.5
                if self.starts < 3:
                    self.start_all()

    # The event loop

    def push(self, delay: float, seat: Seat | None, process: Process) -> None:
        self.counted += 1
        heapq.heappush(self.queue, (self.now + delay, self.counted, seat, process))

    def run(self) -> Tally:
        self.start_all()
        if self.faults:
            self.push(0, None, self.disturb())
        while self.queue and self.queue[0][0] < LENGTH:
            at, _, seat, process = heapq.heappop(self.queue)
            if seat is not None and seat.dead:
                continue
            if seat is not None and seat.stopped_until > at:
                self.push(seat.stopped_until - self.now, seat, process)
                continue
            self.now = max(self.now, at)
            delay = next(process, None)
            if delay is not None:
                self.push(delay, seat, process)
        self.check()
        return self.tally

    def peers(self, seat: Seat) -> list[Seat]:
        return [one for one in self.seats if one.generation == seat.generation]

    def expect(self, what: str, seat: Seat, seconds: float) -> Wait:
        self.waits.append(Wait(what, seat, self.now + seconds + SLACK))
        return self.waits[-1]

    def commit(self, seat: Seat, step: int, whole: Sequence[Receipt]) -> None:
        self.tally.committed += 1
        written = [receipt.written.split("-") for receipt in whole]
        parts = tuple((generation, int(at)) for generation, at, _ in written)
        self.versions.append(Version(seat.generation, step, parts, tuple(sorted(int(part) for _, _, part in written))))

    # What must hold

    def check(self) -> None:
        for version in self.versions:
            if set(version.parts) != {(version.generation, version.step)}:
                raise BrokenError(f"a version of mixed steps: {version}")
            if version.covered != tuple(range(self.size)):
                raise BrokenError(f"a version that is not covered: {version}")
        for wait in self.waits:
            seat = wait.seat
            over = self.now if wait.ended is None else wait.ended
            away = seat.dead or seat.stopped_until >= self.now
            if over > wait.by + seat.stopped_seconds and not (away and wait.ended is None):
                raise BrokenError(f"rank {seat.rank} of {seat.generation} waited too long for {wait.what}")
        for seat in self.seats:
            if seat.ended_at is None:
                continue
            for other in self.peers(seat):
                if other.entered > seat.ended_at or other.ended_at not in (None, seat.ended_at):
                    raise BrokenError(
                        f"rank {seat.rank} left at {seat.ended_at}, rank {other.rank} is at {other.entered}"
                    )
        if not self.faults:
            ends = {seat.ended_at for seat in self.seats}
            if len(ends) != 1 or (ends == {None} and not all(seat.trained for seat in self.seats)):
                raise BrokenError(f"a job without faults ended at {ends}")
            if not all(seat.finished for seat in self.seats):
                raise BrokenError("a job without faults does not end")


def simulate(seed: int, *, faults: bool = True, breaks: Callable[[], None] | None = None) -> Tally:
    """Run one schedule. Raises BrokenError if something does not hold."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(receipts, "LEAST_WAIT_SECONDS", RECEIPTS))
        # The records themselves travel: that they are read back as they were written is another test's.
        stack.enter_context(mock.patch.object(rounds, "dumps", lambda adapter, value: value))
        stack.enter_context(mock.patch.object(rounds, "loads", lambda adapter, value, what: value))
        return World(seed, faults).run()
