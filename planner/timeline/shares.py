"""What one of several replicas copies: its share of each deadline group, so that together they copy all once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from checkflow.core.boxes import Held, shares, whole
from checkflow.core.graph import StateEntry, TrainingGraph
from checkflow.core.timeline import StateGroup, Timeline


def last_share(graph: TrainingGraph, timeline: Timeline) -> tuple[TrainingGraph, Timeline]:
    """Return graph and timeline with the state that the last replica copies.

    Its share of each group is the largest, as cuts move back (:func:`checkflow.core.boxes.shares`): 1/R of the bytes,
    and less than ``SMALL_BYTES`` more. A part of a tensor that is no single box has the shape of its elements in a row.
    """
    entries = {entry.name: entry for entry in graph.state}
    kept = {entry.name: entry for entry in graph.state if entry.placement == "host"}
    groups = []
    for group in timeline.groups:
        mine = list(_last_of([entries[name] for name, _ in group.members]))
        kept.update((entry.name, entry) for entry in mine)
        if mine:
            members = tuple((entry.name, entry.size_bytes) for entry in mine)
            groups.append(StateGroup(group.first_write, tuple(sorted(members))))
    state = tuple(kept[name] for name in entries if name in kept)
    return replace(graph, state=state), replace(timeline, groups=tuple(groups))


def _last_of(members: Iterable[StateEntry]) -> Iterable[StateEntry]:
    by_replicas: dict[int, list[StateEntry]] = {}
    for entry in members:
        by_replicas.setdefault(entry.replicas, []).append(entry)
    for replicas, entries in by_replicas.items():
        sizes = {entry.name: max(1, entry.size_bytes // max(1, math.prod(entry.shape))) for entry in entries}
        holders = tuple(range(replicas))
        held = [Held(entry.name, whole(entry.shape), sizes[entry.name], holders) for entry in entries]
        boxes = shares(held, replicas - 1)
        for entry in entries:
            if parts := boxes.get(entry.name):
                volume = sum(box.volume for box in parts)
                shape = parts[0].lengths if len(parts) == 1 else (volume,)
                yield replace(entry, shape=shape, size_bytes=volume * sizes[entry.name])


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
