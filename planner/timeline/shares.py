"""What one of several replicas copies: its share of each deadline group, so that together they copy all once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from checkflow.core.graph import StateEntry, TrainingGraph
from checkflow.core.timeline import StateGroup, Timeline

WHOLE_BYTES = 64 * 2**10  # a smaller tensor is not cut


def first_share(graph: TrainingGraph, timeline: Timeline) -> tuple[TrainingGraph, Timeline]:
    """Return graph and timeline with the state that the first replica copies.

    The tensors of a group that have as many replicas lie end to end, in the order of their names. Each replica takes
    one part, cut at rows of the first dimension, so that it is a box of each tensor. The first one's is the largest, by
    less than a row.
    """
    entries = {entry.name: entry for entry in graph.state}
    kept = {entry.name: entry for entry in graph.state if entry.placement == "host"}
    groups = []
    for group in timeline.groups:
        mine = list(_first_of(entries[name] for name, _ in group.members))
        kept.update((entry.name, entry) for entry in mine)
        if mine:
            members = tuple((entry.name, entry.size_bytes) for entry in mine)
            groups.append(StateGroup(group.first_write, tuple(sorted(members))))
    state = tuple(kept[name] for name in entries if name in kept)
    return replace(graph, state=state), replace(timeline, groups=tuple(groups))


def _first_of(members: Iterable[StateEntry]) -> Iterable[StateEntry]:
    by_replicas: dict[int, list[StateEntry]] = {}
    for entry in members:
        by_replicas.setdefault(entry.replicas, []).append(entry)
    for replicas, entries in by_replicas.items():
        left = math.ceil(sum(entry.size_bytes for entry in entries) / replicas)
        for entry in sorted(entries, key=lambda entry: entry.name):
            if left <= 0 and entry.size_bytes:
                continue
            part = entry if entry.size_bytes <= max(left, WHOLE_BYTES) else _rows(entry, left)
            left -= part.size_bytes
            yield part


def _rows(entry: StateEntry, size_bytes: int) -> StateEntry:
    """Return the first rows of a tensor that hold so many bytes."""
    rows = math.ceil(size_bytes / (entry.size_bytes // entry.shape[0]))
    part_bytes = entry.size_bytes // entry.shape[0] * rows
    return replace(entry, shape=(rows, *entry.shape[1:]), size_bytes=part_bytes)


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
