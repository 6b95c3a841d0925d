"""What is possible at all: an integer program over single bytes, written from the rules that replay checks alone.

No units, no running sums, no blocks: for each deadline how many bytes leave directly in each step, how many through a
snapshot from which step to which, and how many leave while training waits, in any number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import highspy
import numpy as np

from checkflow.core.plan import Policy
from checkflow.core.timeline import Timeline

_ROUNDS = 60  # iterations after which the queue of training's own traffic repeats itself
_TOLERANCE = 1e-4  # of seconds, which are multiples of more


@dataclass(frozen=True)
class Asked:
    """What a checkpoint may cost. The link gives a byte a second, or what ``bytes_per_second`` says."""

    timeline: Timeline
    policy: Policy
    overhead: float | None  # None: any snapshots, no waiting
    snapshot_seconds: float  # of one byte
    limit_bytes: int | None = None
    bytes_per_second: float = 1.0
    free: bool = False  # of the overhead: any stall, waiting too


def capacities(timeline: Timeline, bytes_per_second: float, iterations: int) -> list[int]:
    """Whole bytes, by running training's own traffic through the link until it settles."""
    rate, queue, left = Fraction(bytes_per_second), Fraction(0), [Fraction(0)]
    takes = [Fraction(step.duration_seconds) * rate for step in timeline.steps]
    if sum(step.link_bytes for step in timeline.steps) >= sum(takes) and any(s.link_bytes for s in timeline.steps):
        return [0] * len(takes) * iterations
    for _ in range(_ROUNDS):
        left = []
        for step, taken in zip(timeline.steps, takes, strict=True):
            queue += step.link_bytes
            left.append(max(Fraction(0), taken - queue))
            queue = max(Fraction(0), queue - taken)
    total, given, whole = Fraction(0), 0, []
    for part in left * iterations:
        total += part
        whole.append(math.floor(total) - given)
        given = math.floor(total)
    return whole


def queues(timeline: Timeline, bytes_per_second: float) -> list[float]:
    """What of training's own traffic each step finds before the link, once that has settled."""
    own, rate = [step.link_bytes for step in timeline.steps], Fraction(bytes_per_second)
    takes = [Fraction(step.duration_seconds) * rate for step in timeline.steps]
    if not any(own):
        return [0.0] * len(own)
    if sum(own) >= sum(takes):
        return [math.inf] * len(own)
    queue, found = Fraction(0), []
    for _ in range(_ROUNDS):
        found = []
        for issued, taken in zip(own, takes, strict=True):
            found.append(float(queue + issued))
            queue = max(Fraction(0), queue + issued - taken)
    return found


class _Program:
    def __init__(self) -> None:
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.count = 0

    def variable(self, most: float, *, whole: bool = True) -> int:
        self.solver.addVar(0, most)
        if whole:
            self.solver.changeColIntegrality(self.count, highspy.HighsVarType.kInteger)
        self.count += 1
        return self.count - 1

    def row(self, low: float, high: float, terms: dict[int, float]) -> None:
        values = {index: value for index, value in terms.items() if value}
        self.solver.addRow(low, high, len(values), np.array(list(values), np.int32), np.array([*values.values()]) * 1.0)

    def least(self, terms: dict[int, float]) -> float | None:
        cost = np.array([terms.get(index, 0.0) for index in range(self.count)])
        self.solver.changeColsCost(self.count, np.arange(self.count, dtype=np.int32), cost)
        self.solver.run()
        status = self.solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        assert status == highspy.HighsModelStatus.kOptimal, status
        found: float = self.solver.getInfo().objective_function_value
        return found


def best(asked: Asked, iterations: int) -> tuple[int, float] | None:
    """The least peak of a checkpoint in so many iterations, and the least stall at that peak; None: there is none."""
    built = _build(asked, iterations)
    if built is None:
        return None
    program, peak, stall = built
    least = program.least(peak)
    if least is None:
        return None
    program.row(-highspy.kHighsInf, round(least), peak)
    seconds = program.least(stall)
    assert seconds is not None
    return round(least), seconds


def shortest_stall(asked: Asked, iterations: int) -> float | None:
    """Whatever the peak within the limit; None: there is no schedule."""
    built = _build(asked, iterations)
    return None if built is None else built[0].least(built[2])


def _build(asked: Asked, iterations: int) -> tuple[_Program, dict[int, float], dict[int, float]] | None:
    """The rules, the peak, and the stall; None where some bytes have no way at all."""
    timeline, steps = asked.timeline, len(asked.timeline.steps) * iterations
    program, stall = _Program(), dict[int, float]()
    link: list[dict[int, float]] = [{} for _ in range(steps)]
    memory: list[dict[int, float]] = [{} for _ in range(steps)]
    if asked.policy == "direct" and (asked.free or asked.overhead is not None):
        queued = queues(timeline, asked.bytes_per_second)
        for step in range(steps):
            if queued[step % len(queued)] == 0:
                wait = program.variable(timeline.state_bytes)
                link[step][wait], stall[wait] = -1.0, 1 / asked.bytes_per_second
        if 0 < queued[0] < math.inf:  # what training itself has queued goes first: plans wait at the boundary
            wait, waits = program.variable(timeline.state_bytes), program.variable(1)
            link[0][wait], stall[wait] = -1.0, 1 / asked.bytes_per_second
            stall[waits] = float(queued[0]) / asked.bytes_per_second
            program.row(-highspy.kHighsInf, 0.0, {wait: 1.0, waits: -float(timeline.state_bytes)})
    for group in timeline.groups:
        deadline = steps - 1 if group.first_write is None else group.first_write - 1
        ways: dict[int, float] = {}
        for leaves in range(steps):
            if asked.policy == "direct" and leaves <= deadline:
                way = program.variable(group.size_bytes)
                ways[way] = link[leaves][way] = 1.0
            for made in range(min(leaves, deadline + 1)):
                way = program.variable(group.size_bytes)
                ways[way] = link[leaves][way] = 1.0
                stall[way] = asked.snapshot_seconds
                for held in range(made, leaves + 1):
                    memory[held][way] = -1.0
        if group.size_bytes and not ways:
            return None
        if ways:
            program.row(group.size_bytes, group.size_bytes, ways)
    peak = program.variable(highspy.kHighsInf, whole=False)
    for step, capacity in enumerate(capacities(timeline, asked.bytes_per_second, iterations)):
        program.row(-highspy.kHighsInf, capacity, link[step])
        live = timeline.steps[step % len(timeline.steps)].live_bytes
        program.row(live, highspy.kHighsInf, memory[step] | {peak: 1.0})
    if asked.overhead is not None and not asked.free:
        most = asked.overhead * iterations * timeline.iteration_seconds
        program.row(-highspy.kHighsInf, (most + _TOLERANCE / 1000) * 1000, {way: 1000 * s for way, s in stall.items()})
    if asked.limit_bytes is not None:
        program.row(-highspy.kHighsInf, asked.limit_bytes, {peak: 1.0})
    return program, {peak: 1.0}, stall
