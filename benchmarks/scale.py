"""The time of planning itself, on made-up timelines of 1,000, 10,000 and 100,000 steps.

Each has 2,000 state tensors, a link of which 95 % is used, and nearly level live memory, so that every snapshot raises
the peak. Seconds are those of the process (CPU), with the wall's beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

from checkflow.core.errors import SolverError
from checkflow.core.graph import BOUNDARY
from checkflow.core.plan import Fingerprint, StateSpec
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan

STEPS = (1_000, 10_000, 100_000)
TENSORS = 2_000
BANDWIDTH, MEMORY_BANDWIDTH = 25e9, 936e9  # bytes per second, of an RTX 3090
LINK_USED = 0.95
STEP_SECONDS = 1e-5  # on average
LIVE_BYTES = 40e9
RESULTS = Path(__file__).parent / "results" / "scale-2-cores.json"


def make_timeline(steps: int, seed: int) -> Timeline:
    """State falls due a little faster than the link takes it, from the first steps to the last."""
    rng = random.Random(seed)
    durations = [0.0, *(rng.expovariate(1 / STEP_SECONDS) for _ in range(steps - 1))]
    elapsed = list(itertools.accumulate(durations))
    state_bytes = LINK_USED * elapsed[-1] * BANDWIDTH
    shares = [rng.uniform(0.05, 1.05) for _ in range(TENSORS)]
    sizes = [int(state_bytes * share / sum(shares)) for share in shares]
    groups: dict[int, list[tuple[str, int]]] = {}
    taken = 0
    for index, size in enumerate(sizes):
        taken += size
        due = max(0.0, LINK_USED * taken / state_bytes - rng.uniform(0.02, 0.04)) * elapsed[-1]
        first = min(max(1, bisect_left(elapsed, due)), steps - 1)
        while first in groups and first < steps - 1 and steps > 2 * TENSORS:
            first += 1  # a deadline of its own, where there are steps enough
        groups.setdefault(first, []).append((f"model/t{index:05}", size))
    return Timeline(
        "operator",
        tuple(
            Step(
                "operator" if index else "anchor", f"op{index}", duration, int(LIVE_BYTES * rng.uniform(0.9, 1.0)),
                anchor=None if index else BOUNDARY,
            )
            for index, duration in enumerate(durations)
        ),
        tuple(StateGroup(first, tuple(members)) for first, members in sorted(groups.items())),
    )  # fmt: skip


def make_fingerprint(timeline: Timeline) -> Fingerprint:
    state = tuple(StateSpec(name, (size,), "uint8", size) for group in timeline.groups for name, size in group.members)
    return Fingerprint("scale", state, (), (), 1, "", (), "RTX 3090")


def measure(timeline: Timeline, overhead: float | None, *, ilp: bool) -> dict[str, Any]:
    """One plan: what it cost, and what came of it."""
    request = PlanRequest(
        BANDWIDTH, MEMORY_BANDWIDTH, overhead=overhead, max_interval=1, formulation="flow" if ilp else "auto"
    )
    wall, cpu = time.perf_counter(), time.process_time()
    row: dict[str, Any] = {
        "steps": len(timeline.steps),
        "deadlines": len(timeline.groups),
        "overhead": overhead,
        "formulation": "flow" if ilp else "auto",
    }
    try:
        outcome = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0)
    except SolverError as error:
        row["error"] = str(error)
    else:
        extra = None if outcome.plan is None else outcome.plan.plan_peak_bytes - timeline.training_peak_bytes
        row |= {
            "status": outcome.status,
            "proof": f"{outcome.formulation}, {outcome.solver.name}",
            "gap": outcome.solver.gap,
            "variables": outcome.solver.variables,
            "extra_bytes": extra,
            "stall_seconds": outcome.stall_seconds,
            "chunks": outcome.chunks,
        }
    return row | {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", type=int, default=list(STEPS), help="numbers of steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ilp", action="store_true", help="also by a solver")
    asked = parser.parse_args()
    rows = []
    print(f"{'steps':>7} {'deadlines':>9} {'overhead':>8} {'CPU s':>7} {'wall s':>7} {'times':>6}  outcome")
    for ilp, overhead in itertools.product((False, True) if asked.ilp else (False,), (None, 0.003)):
        before = None
        for steps in asked.only:
            row = measure(make_timeline(steps, asked.seed), overhead, ilp=ilp)
            rows.append(row)
            times = "" if before is None else f"{row['cpu_seconds'] / before:.1f}"
            before = row["cpu_seconds"]
            outcome = row.get("error") or (
                f"{row['status']} ({row['proof']}), {row['chunks']} chunks, extra {row['extra_bytes']} bytes,"
                f" stall {row['stall_seconds']} s"
            )
            print(
                f"{steps:>7} {row['deadlines']:>9} {overhead!s:>8} {row['cpu_seconds']:>7.2f}"
                f" {row['wall_seconds']:>7.2f} {times:>6}  {outcome}",
                flush=True,
            )
    where = {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    RESULTS.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
