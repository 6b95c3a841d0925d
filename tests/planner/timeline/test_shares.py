"""Shares of replicas: the last one's part of each deadline group, and the state of all ranks together."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from checkflow.core.boxes import SMALL_BYTES, Held, part_name, shares, tensor_of, whole
from checkflow.core.graph import StateEntry, TrainingGraph
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.timeline.shares import global_bytes, last_share, replicas_of, take_parts


def entry(name: str, shape: tuple[int, ...], replicas: int, **more: Any) -> StateEntry:
    size = 4 * math.prod(shape)
    more = {"placement": "device", "ranks": replicas, **more}
    return StateEntry(name, "parameter", shape, "float32", size, storage=0, first_write=None, replicas=replicas, **more)


def shared(*groups: list[StateEntry]) -> tuple[TrainingGraph, Timeline]:
    return last_share(*whole_timeline(*groups))


def whole_timeline(*groups: list[StateEntry]) -> tuple[TrainingGraph, Timeline]:
    state = tuple(one for group in groups for one in group)
    graph = TrainingGraph("n", (), 1, (), "", (), (), state, ())
    members = [tuple((one.name, one.size_bytes) for one in group if one.placement == "device") for group in groups]
    steps = tuple(Step("segment", f"s{index}", 0.0, 0) for index in range(len(groups) + 1))
    timeline = Timeline("segment", steps, tuple(StateGroup(i + 1, members[i]) for i in range(len(groups))))
    return graph, timeline


shapes = st.one_of(
    st.tuples(st.integers(0, 50_000)),
    st.tuples(st.integers(1, 3000), st.integers(1, 300)),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)),
)


@given(st.lists(st.lists(shapes, min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 16))
def test_the_last_share_is_its_part_and_at_most_a_row_or_a_small_tensor_more(
    groups: list[list[tuple[int, ...]]], replicas: int
) -> None:
    entries = [[entry(f"{i}.{j}", shape, replicas) for j, shape in enumerate(group)] for i, group in enumerate(groups)]
    graph, timeline = shared(*entries)
    mine = {one.name: one for one in graph.state}
    for index, group in enumerate(entries):
        size = sum(mine[one.name].size_bytes for one in group if one.name in mine)
        part = sum(one.size_bytes for one in group) / replicas
        assert part <= size < math.ceil(part) + SMALL_BYTES
        named = {name for found in timeline.groups if found.first_write == index + 1 for name, _ in found.members}
        assert named == {one.name for one in group if one.name in mine}
    for one in (one for group in entries for one in group if one.name in mine):
        part_of = mine[one.name]
        assert part_of.size_bytes == 4 * math.prod(part_of.shape)
        assert part_of == one or one.size_bytes >= SMALL_BYTES


@given(st.lists(st.lists(shapes, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 5))
def test_parts_of_all_ranks_are_the_state_once(groups: list[list[tuple[int, ...]]], ranks: int) -> None:
    """Each part is due as its tensor is, and lies in one place of the graph."""
    entries = [[entry(f"m/{i}.{j}", shape, ranks) for j, shape in enumerate(group)] for i, group in enumerate(groups)]
    graph, timeline = whole_timeline(*entries)
    held = [Held(one.name, whole(one.shape), 4, tuple(range(ranks))) for one in graph.state]
    due: Counter[tuple[str, int | None]] = Counter()
    for rank in range(ranks):
        boxes = shares(held, rank)
        parts = {name: [(part_name(name, box), box.lengths) for box in found] for name, found in boxes.items()}
        of_rank, its_timeline = take_parts(graph, timeline, parts)
        sizes = {one.name: one.size_bytes for one in of_rank.state}
        assert sizes == {name: size for group in its_timeline.groups for name, size in group.members}
        for group in its_timeline.groups:
            for name, size in group.members:
                due[tensor_of(name), group.first_write] += size
    assert due == {(name, group.first_write): size for group in timeline.groups for name, size in group.members}


def test_the_rank_s_own_state_and_state_on_the_host_stay_whole() -> None:
    own, host = entry("own", (500, 500), 1), entry("host", (), 8, placement="host")
    cut = entry("cut", (800, 500), 8)
    graph, timeline = shared([own, cut, host])
    sizes = {one.name: one.size_bytes for one in graph.state}
    assert sizes == {"own": own.size_bytes, "cut": cut.size_bytes // 8, "host": 4}
    assert dict(timeline.groups[0].members) == {"own": own.size_bytes, "cut": cut.size_bytes // 8}


def test_the_state_of_all_ranks_counts_each_replica_once() -> None:
    own = entry("own", (10,), 1)
    replicated = entry("replicated", (10,), 8)
    sharded = entry("sharded", (2, 5), 1, ranks=8, whole_shape=(16, 5))
    both = entry("both", (4, 5), 2, ranks=8, whole_shape=(16, 5))
    state = [own, replicated, sharded, both]
    assert global_bytes(state, 8) == 8 * 40 + 40 + 320 + 320
    assert global_bytes([sharded], 64) == 8 * 320  # eight groups of eight, each with its own
    assert replicas_of(state) == {1: 40 + 40, 8: 40, 2: 80}
