"""Small random timelines, and the exhaustive search over every schedule that replay's rules allow on them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hypothesis import strategies

from checkflow.core.graph import BOUNDARY
from checkflow.core.plan import Fingerprint, Policy, StateSpec
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.exact import greedy
from checkflow.planner.exact.problem import Flow, Problem


def best_flow(problem: Problem, policy: Policy) -> Flow | None:
    """A schedule of the least peak under a policy, with any number of snapshots; None if there is none."""
    if policy == "direct":
        return greedy.direct_flow(problem)
    peak_bytes = greedy.least_peak_bytes(problem, policy)
    return None if peak_bytes is None else greedy.snapshot_flow(problem, peak_bytes)


def make_timeline(
    steps: list[tuple[int, int]], groups: list[tuple[int | None, list[int]]], link_bytes: dict[int, int] | None = None
) -> Timeline:
    """Steps as (seconds, live bytes), the boundary first; groups as (first write, sizes of its members)."""
    own = link_bytes or {}
    return Timeline(
        "operator",
        tuple(
            Step("operator" if i else "anchor", f"op{i}", float(lasts), live, own.get(i, 0), None if i else BOUNDARY)
            for i, (lasts, live) in enumerate(steps)
        ),
        tuple(
            StateGroup(first, tuple((f"model/t{first}.{i}", size) for i, size in enumerate(sizes)))
            for first, sizes in groups
        ),
    )


def make_fingerprint(timeline: Timeline) -> Fingerprint:
    state = tuple(StateSpec(name, (size,), "uint8", size) for group in timeline.groups for name, size in group.members)
    return Fingerprint("random", state, (), (), 1, "", (), "cpu")


def random_timeline(rng: random.Random, *, most_steps: int = 6, most_bytes: int = 5) -> Timeline:
    """The boundary and a few steps, some of no length; a few bytes, some never written, some due at the boundary.

    Meant for a link of one byte per second and units of one byte.
    """
    count = rng.randint(2, most_steps)
    steps = [(0 if i == 0 else rng.choice([0, 0, 1, 1, 2, 3]), rng.randint(0, 4)) for i in range(count)]
    own = {i: rng.randint(0, 1) for i in range(count) if rng.random() < 0.1}
    groups: dict[int, list[int]] = {}
    left = rng.randint(0, most_bytes)
    while left:
        size = rng.randint(0, left)  # tensors of no bytes too
        groups.setdefault(rng.randint(1, count), []).append(size)
        left -= max(size, 1)
    return make_timeline(
        steps, [(None if first == count else first, sizes) for first, sizes in sorted(groups.items())], own
    )


timelines = strategies.integers(0, 2**32).map(lambda seed: random_timeline(random.Random(seed)))


@dataclass(frozen=True, order=True)
class Best:
    """The best schedule's objectives, in order."""

    peak_bytes: int
    snapshot_bytes: int
    held: int  # bytes x steps held


def search(
    timeline: Timeline,
    policy: Policy,
    *,
    most_snapshots: int | None = None,
    iterations: int = 1,
    waits: Mapping[int, int] | None = None,
) -> Best | None:
    """Try every schedule of single bytes over a link of one byte per second; None if there is none.

    Written from the rules alone: a byte leaves in one step; directly not after its deadline; or from a snapshot made
    at an earlier step, itself not after the deadline; a step's link carries its capacity; what is held is held from
    the step of the snapshot to the step in which it leaves, both included. Further iterations repeat the steps, and
    have no deadlines.

    Args:
        waits: bytes that leave while training waits, by step.
    """
    count = iterations * len(timeline.steps)
    capacity = timeline.capacities_bytes(1.0) * iterations  # whole bytes: nothing is rounded
    for step, more in (waits or {}).items():
        capacity[step] += more
    start = (0,) * count
    states = {(start, start, 0)}
    for group in timeline.groups:
        last = count - 1 if group.first_write is None else group.first_write - 1
        for _ in range(group.size_bytes):
            reached = set()
            for used, held, made in states:
                for leaves, taken in _ways(count, last, policy):
                    if used[leaves] == capacity[leaves]:
                        continue
                    link = (*used[:leaves], used[leaves] + 1, *used[leaves + 1 :])
                    memory = held
                    if taken is not None:
                        memory = tuple(h + (taken <= i <= leaves) for i, h in enumerate(held))
                    reached.add((link, memory, made + (taken is not None)))
            states = reached
    found = [
        Best(
            max(step.live_bytes + h for step, h in zip(timeline.steps * iterations, held, strict=True)), made, sum(held)
        )
        for _, held, made in states
        if most_snapshots is None or made <= most_snapshots
    ]
    return min(found, default=None)


def _ways(count: int, deadline: int, policy: Policy) -> Iterator[tuple[int, int | None]]:
    for leaves in range(count):
        if policy == "direct" and leaves <= deadline:
            yield leaves, None
        for taken in range(min(leaves, deadline + 1)):
            yield leaves, taken
