"""TrainingGraph and durations -> Timeline, at the granularity of segments (where eager training can act) or operators.

docs/explanation/planning.md says which anchor stands for several that fire at one position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence

from checkflow.core.errors import PlanError
from checkflow.core.graph import Anchor, AnchorKey, AnchorKind, Operator, StateEntry, TrainingGraph
from checkflow.core.timeline import Granularity, StateGroup, Step, Timeline

_PREFERENCE = (
    AnchorKind.GRADIENT,
    AnchorKind.OPTIMIZER_POST,
    AnchorKind.FORWARD,
    AnchorKind.OPTIMIZER_PRE,
    AnchorKind.BOUNDARY,
)


def make_timeline(graph: TrainingGraph, durations_seconds: Sequence[float], granularity: Granularity) -> Timeline:
    """Return the steps of one iteration, with what eager training keeps in device memory, and the state by deadline.

    State in host memory is left out: it is copied at the boundary and uses no link. State that is never written has no
    deadline. A buffer is due at its module's first forward (``StateEntry.barrier``) at the latest, where it may be
    written unseen. "segment" alternates anchors and segments; "operator" has one step per operator, and a zero-length
    step before each one that first writes state.

    Raises PlanError unless there is one duration for each operator.
    """
    if len(durations_seconds) != len(graph.operators):
        raise PlanError(f"{len(durations_seconds)} durations for {len(graph.operators)} operators")
    guarded = {entry.barrier for entry in graph.state if entry.barrier is not None and entry.placement == "device"}
    anchors = _anchor_by_position(graph.anchors, guarded)
    stops: dict[int, AnchorKey | None] = {}
    if granularity == "segment":
        stops.update(anchors)
    else:
        stops.update(dict.fromkeys(_write_positions(graph)))
        stops[0] = anchors[0]
    steps, step_of_operator = _steps(graph, durations_seconds, stops, granularity)
    return Timeline(granularity, steps, _groups(graph, step_of_operator))


def _anchor_by_position(anchors: Iterable[Anchor], guarded: Container[AnchorKey]) -> dict[int, AnchorKey]:
    """Choose the anchor that stands for each position; buffers are copied before a ``guarded`` one fires."""
    chosen: dict[int, AnchorKey] = {}
    settled: set[int] = set()  # positions where a guarded anchor has fired: later ones there come too late
    for anchor in anchors:
        position, rival = anchor.position, chosen.get(anchor.position)
        if position in settled:
            continue
        if rival is None or _PREFERENCE.index(anchor.key.kind) >= _PREFERENCE.index(rival.kind):
            chosen[position] = anchor.key
        if anchor.key in guarded:
            settled.add(position)
    return chosen


def _write_positions(graph: TrainingGraph) -> set[int]:
    """Return the positions right before the operators by which some state tensor is due."""
    positions = {anchor.key: anchor.position for anchor in graph.anchors}
    due = (_due_operator(entry, positions, len(graph.operators)) for entry in graph.state)
    return {operator for operator in due if operator is not None}


def _due_operator(entry: StateEntry, positions: Mapping[AnchorKey, int], operators: int) -> int | None:
    """Return the operator before which a device tensor must have been copied or snapshotted; None: no deadline."""
    if entry.placement == "host" or not operators:
        return None
    due = [] if entry.first_write is None else [entry.first_write]
    if entry.barrier is not None:
        # A module that runs after the last operator is guarded before that one: early is safe, and the step exists.
        due.append(min(positions[entry.barrier], operators - 1))
    return min(due, default=None)


def _steps(
    graph: TrainingGraph,
    durations_seconds: Sequence[float],
    stops: Mapping[int, AnchorKey | None],
    granularity: Granularity,
) -> tuple[tuple[Step, ...], list[int]]:
    """Return the steps, and each operator's step; ``stops``: positions of zero-length steps, with their anchors."""
    during, at = graph.live_bytes(eager=True)
    count = len(graph.operators)
    cuts = sorted({0, count, *stops}) if granularity == "segment" else list(range(count + 1))
    steps: list[Step] = []
    step_of_operator: list[int] = []
    for begin, end in itertools.pairwise([*cuts, count]):
        if begin in stops:
            key = stops[begin]
            label = str(key) if key is not None else f"before {graph.operators[begin].name}"
            steps.append(Step("anchor", label, 0.0, at[begin], anchor=key))
        if begin < end:
            duration = math.fsum(durations_seconds[begin:end])
            step_of_operator.extend([len(steps)] * (end - begin))
            operators = graph.operators[begin:end]
            own_bytes = sum(operator.link_bytes for operator in operators)
            steps.append(Step(granularity, _label(operators), duration, max(during[begin:end]), own_bytes))
    return tuple(steps), step_of_operator


def _label(operators: Sequence[Operator]) -> str:
    return operators[0].name if len(operators) == 1 else f"{operators[0].name} … {operators[-1].name}"


def _groups(graph: TrainingGraph, step_of_operator: Sequence[int]) -> tuple[StateGroup, ...]:
    positions = {anchor.key: anchor.position for anchor in graph.anchors}
    members: dict[int | None, list[tuple[str, int]]] = {}
    for entry in graph.state:
        if entry.placement == "device":
            operator = _due_operator(entry, positions, len(graph.operators))
            step = None if operator is None else step_of_operator[operator]
            members.setdefault(step, []).append((entry.name, entry.size_bytes))
    ordered = sorted(members, key=lambda step: (step is None, step or 0))
    return tuple(StateGroup(step, tuple(sorted(members[step]))) for step in ordered)
