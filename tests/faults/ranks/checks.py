"""What must hold after kills of several ranks, from the notes of all ranks and those of a job that was never killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = dict[str, Any]
Notes = Sequence[Sequence[Line]]  # by rank
State = tuple[str, str, str]


def make_reference(notes: Notes, replicas: Sequence[int]) -> list[dict[int, State]]:
    """By rank and step, what a job holds that was never killed. Its replicas must agree."""
    found = []
    for lines in notes:
        assert lines[-1]["event"] == "ended", f"the job that is not killed does not end: {lines[-1]}"
        found.append({line["step"]: _state(line) for line in lines if "shared" in line})
    for rank, number in enumerate(replicas):
        first = found[replicas.index(number)]
        unlike = [step for step, state in found[rank].items() if state[0] != first[step][0]]
        assert not unlike, f"replicas differ without any kill, at steps {unlike}"
    return found


def check(notes: Notes, reference: Sequence[Mapping[int, State]]) -> list[str]:
    """What does not hold."""
    problems = []
    starts: dict[str, dict[int, int]] = {}  # by start of the job, what each rank restored
    acknowledged = sorted((line["at"], line["step"]) for lines in notes for line in lines if line["event"] == "durable")
    for rank, lines in enumerate(notes):
        started = 0.0
        for line in lines:
            if line["event"] == "starts":
                started = line["at"]
            if line["event"] == "restored":
                starts.setdefault(line["start"], {})[rank] = line["step"]
                known = max((step for at, step in acknowledged if at < started), default=0)
                if line["step"] < known:
                    problems.append(f"rank {rank} restored step {line['step']}, and step {known} was acknowledged")
            if "shared" in line and not _is_same(line, reference[rank].get(line["step"])):
                problems.append(f"rank {rank} holds another state at step {line['step']} ({line['event']})")
    for start, steps in starts.items():
        if len(set(steps.values())) > 1:
            problems.append(f"start {start}: the ranks restored different steps, {steps}")
    return problems


def _state(line: Line) -> State:
    return line["shared"], line["own"], line["drawn"]


def _is_same(line: Line, expected: State | None) -> bool:
    """Random numbers come back with the first batch: the next boundary shows them."""
    known = 2 if line["event"] == "restored" else 3
    return expected is not None and _state(line)[:known] == expected[:known]
