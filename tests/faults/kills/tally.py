"""What a series of kills came to: counted (``run``), as JSON, and as a table."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.kills.notes import KINDS


@dataclass
class Tally:
    """What a series of kills came to."""

    kills: int = 0
    jobs: int = 0
    acknowledged: int = 0
    boundaries: int = 0
    damaged: int = 0
    targets: collections.Counter[str] = field(default_factory=collections.Counter)
    hits: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: {kind: collections.Counter() for kind in KINDS}
    )
    replayed: dict[str, list[int]] = field(default_factory=dict)  # by the next life, whose memory may have more
    behind: dict[str, list[int]] = field(default_factory=dict)  # where storage alone is left
    reclaimed: int = 0  # lives that went on from host memory
    most_bytes: int = 0
    checkpoint_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def as_json(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed, "kills": tally.kills, "jobs": tally.jobs, "cores": os.cpu_count(), "seconds": round(seconds, 1),
        "killed": dict(tally.targets),
        "hits": {kind: {phase: tally.hits[kind][phase] for phase in phases} for kind, phases in KINDS.items()},
        "replayed_iterations": _counts(tally.replayed), "storage_behind_iterations": _counts(tally.behind),
        "reclaimed": tally.reclaimed,
        "boundaries_noted": tally.boundaries, "checkpoints_acknowledged": tally.acknowledged,
        "damaged_on_purpose": tally.damaged, "checkpoint_bytes": tally.checkpoint_bytes,
        "most_directory_bytes": tally.most_bytes, "losses": len(tally.problems), "problems": tally.problems,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    killed = result["killed"]
    rows = [(f"{kind}: {phase}", count) for kind, hits in result["hits"].items() for phase, count in hits.items()]
    rows += [("instead: a loader worker", killed.get("worker", 0)), ("instead: the planner", killed.get("planner", 0))]
    lines = [f"{'killed while':36} kills", *(f"{name:36} {count:5}" for name, count in rows)]
    for name, key in (("replayed", "replayed_iterations"), ("that storage was behind", "storage_behind_iterations")):
        for cadence, counts in result[key].items():
            lines.append(f"iterations {name}, {cadence}: {counts['most']} at most, {counts['mean']} in the mean")
    lines.append(f"{result['reclaimed']} times the next life went on from host memory")
    lines.append(
        f"{result['kills']} kills of {result['jobs']} jobs in {result['seconds']} s: {result['boundaries_noted']} "
        f"boundaries, {result['checkpoints_acknowledged']} checkpoints acknowledged, {result['damaged_on_purpose']} "
        f"damaged on purpose; {result['losses']} losses"
    )
    return "\n".join(lines) + "\n"


def _counts(counted: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    return {
        cadence: {"kills": len(counts), "most": max(counts), "mean": round(sum(counts) / len(counts), 2)}
        for cadence, counts in sorted(counted.items())
    }
