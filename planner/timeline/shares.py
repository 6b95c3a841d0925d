"""What one of several ranks copies of the state: replicas share it, so that together they copy all once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from checkflow.core.boxes import Held, shares, whole
from checkflow.core.graph import StateEntry, TrainingGraph
from checkflow.core.timeline import StateGroup, Timeline

Part = tuple[str, tuple[int, ...]]  # name and shape


def take_parts(
    graph: TrainingGraph, timeline: Timeline, parts: Mapping[str, Sequence[Part]]
) -> tuple[TrainingGraph, Timeline]:
    """Return graph and timeline with the state that a rank copies.

    Args:
        parts: by state tensor. A tensor that is missing is another rank's.
    """
    kept = {
        entry.name: [_part(entry, name, shape) for name, shape in parts.get(entry.name, ())] for entry in graph.state
    }
    groups = []
    for group in timeline.groups:
        members = [(one.name, one.size_bytes) for name, _ in group.members for one in kept[name]]
        if members:
            groups.append(StateGroup(group.first_write, tuple(sorted(members))))
    state = tuple(one for entry in graph.state for one in kept[entry.name])
    return replace(graph, state=state), replace(timeline, groups=tuple(groups))


def _part(entry: StateEntry, name: str, shape: tuple[int, ...]) -> StateEntry:
    if shape == entry.shape:
        return replace(entry, name=name)
    element_bytes = entry.size_bytes // math.prod(entry.shape)
    return replace(entry, name=name, shape=shape, size_bytes=math.prod(shape) * element_bytes)


def last_share(graph: TrainingGraph, timeline: Timeline) -> tuple[TrainingGraph, Timeline]:
    """Return graph and timeline with the state that the last replica copies.

    Its share of each group is the largest, as cuts move back (:func:`checkflow.core.boxes.shares`): 1/R of the bytes,
    and less than ``SMALL_BYTES`` more. A part of a tensor that is no single box has the shape of its elements in a row.
    """
    entries = {entry.name: entry for entry in graph.state}
    parts = {entry.name: [(entry.name, entry.shape)] for entry in graph.state if entry.placement == "host"}
    for group in timeline.groups:
        parts |= _last_of([entries[name] for name, _ in group.members])
    return take_parts(graph, timeline, parts)


def _last_of(members: Iterable[StateEntry]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    by_replicas: dict[int, list[StateEntry]] = {}
    for entry in members:
        by_replicas.setdefault(entry.replicas, []).append(entry)
    for replicas, entries in by_replicas.items():
        sizes = {entry.name: max(1, entry.size_bytes // max(1, math.prod(entry.shape))) for entry in entries}
        holders = tuple(range(replicas))
        held = [Held(entry.name, whole(entry.shape), sizes[entry.name], holders) for entry in entries]
        for name, boxes in shares(held, replicas - 1).items():
            shape = boxes[0].lengths if len(boxes) == 1 else (sum(box.volume for box in boxes),)
            found[name] = [(name, shape)]
    return found


def global_bytes(state: Iterable[StateEntry], ranks: int) -> int:
    """Return the bytes of the state of all ranks together, each replica once."""
    return sum(entry.whole_bytes * ranks // entry.ranks for entry in state)


def replicas_of(state: Iterable[StateEntry]) -> Mapping[int, int]:
    """Return this rank's bytes by the number of ranks that hold the same."""
    found: dict[int, int] = {}
    for entry in state:
        if entry.placement == "device":
            found[entry.replicas] = found.get(entry.replicas, 0) + entry.size_bytes
    return found
