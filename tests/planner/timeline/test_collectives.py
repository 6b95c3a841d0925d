"""What collectives cost on a cluster, and which waits they cause."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.core.errors import CheckflowError
from checkflow.core.graph import Collective, CollectiveKind, Operator, TrainingGraph
from checkflow.core.machine.cluster import CLUSTERS, Cluster, cluster_of
from checkflow.core.machine.device import CATALOGUE
from checkflow.planner.timeline.collectives import collective_seconds, communication, link_bytes, on_cluster, overlapped

H100, CARDS = CLUSTERS["H100"], CLUSTERS["RTX 3090"]
# One that makes sums easy: four ranks a node, 100 B/s within it, 10 B/s for each card, no latencies.
PLAIN = Cluster("plain", 4, 100.0, 10.0, False, True, "made up", 0.0, 0.0, 0.0)


def of(kind: CollectiveKind, size: int, ranks: int, stride: int = 1) -> Collective:
    return Collective(kind, size, ranks, stride)


@pytest.mark.parametrize(
    ("collective", "seconds", "between"),
    [
        (of("all-gather", 400, 1), 0.0, 0),
        (of("all-gather", 400, 4), 3.0, 0),  # three quarters over 100 B/s
        (of("reduce-scatter", 400, 4), 3.0, 0),
        (of("all-reduce", 400, 4), 6.0, 0),  # both
        (of("all-gather", 800, 8), 10.0, 100),  # half of it leaves the node over four cards
        (of("all-reduce", 800, 8), 20.0, 200),
        (of("all-gather", 800, 2, stride=4), 40.0, 400),  # one rank a node: each its own card
        (of("all-gather", 800, 4, stride=2), 20.0, 200),  # two a node
        (of("all-to-all", 800, 8), 40.0, 400),  # each rank sends half of its parts elsewhere
        (of("broadcast", 100, 4), 1.0, 0),
        (of("send", 100, 2, stride=4), 10.0, 100),
    ],
    ids=str,
)
def test_costs_by_hand(collective: Collective, seconds: float, between: int) -> None:
    assert collective_seconds(collective, PLAIN) == pytest.approx(seconds)
    assert link_bytes(collective, PLAIN) == between
    assert link_bytes(collective, dataclasses.replace(PLAIN, nic_uses_link=False)) == 0


def test_peers_on_the_link_count_there_too() -> None:
    assert link_bytes(of("all-reduce", 400, 4), CARDS) == 600
    assert link_bytes(of("all-reduce", 400, 8), H100) == 0


def test_published_rates_come_out() -> None:
    """Of large collectives: 360 GB/s on the bus of eight H100s, 340 GB/s over 32 nodes of them."""
    size = 16 * 2**30
    for ranks, rate in ((8, 360e9), (256, 340e9)):
        bus = size * (ranks - 1) / ranks / collective_seconds(of("all-gather", size, ranks), H100)
        assert bus == pytest.approx(rate, rel=0.03)


KINDS: tuple[CollectiveKind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "reduce")


@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**40),
    st.integers(1, 4096),
    st.sampled_from((1, 2, 8, 64)),
    st.integers(1, 9),
)
def test_more_bytes_and_twice_the_nodes_never_take_less(
    kind: CollectiveKind, size: int, ranks: int, stride: int, more: int
) -> None:
    now = collective_seconds(of(kind, size, ranks, stride), H100)
    assert collective_seconds(of(kind, size + more, ranks, stride), H100) >= now >= 0.0
    assert link_bytes(of(kind, size, ranks, stride), H100) <= 2 * size + 1


def test_the_catalogue_names_devices_and_refuses_others() -> None:
    assert set(CLUSTERS) <= set(CATALOGUE)
    assert all(cluster.source for cluster in CLUSTERS.values())
    assert cluster_of("RTX 3090", 4) is CARDS
    assert cluster_of("NVIDIA H100 80GB HBM3", 64) is H100  # as a probe finds it
    with pytest.raises(CheckflowError, match="one node of 4, without a network: not for 8 ranks"):
        cluster_of("RTX 3090", 8)
    with pytest.raises(CheckflowError, match="no cluster is known for V100; --ranks plans these devices: H100"):
        cluster_of("V100", 8)


def operator(name: str, reads: tuple[int, ...], writes: tuple[int, ...], **more: Any) -> Operator:
    return Operator(name, more.pop("target", "aten.op"), "forward", "", "float32", 0, 0, 0, reads, writes, **more)


def graph(*operators: Operator) -> TrainingGraph:
    return TrainingGraph("n", (), 1, (), "", operators, (), (), ())


GATHER = of("all-gather", 400, 4)  # 3 s
REDUCE = of("all-reduce", 400, 4)  # 6 s


def gathered(number: int) -> list[Operator]:
    """FSDP2's all-gather of one layer into storage 10 + number, and the computation that needs it."""
    place = 10 + number
    return [
        operator("copy_in", (number,), (place,), target="fsdp.all_gather_copy_in.default"),
        operator("gather", (place,), (place,), collective=GATHER),
        operator("copy_out", (place,), (20 + number,)),
        operator("compute", (20 + number, 1), (1,)),
    ]


def exposed(found: TrainingGraph, durations: list[float]) -> tuple[float, float]:
    parts = communication(found, durations, PLAIN)
    return parts.seconds, parts.exposed_seconds


def test_a_collective_of_a_result_is_waited_for() -> None:
    chain = graph(operator("a", (), (1,)), operator("reduce", (1,), (1,), collective=REDUCE), operator("b", (1,), (2,)))
    assert exposed(chain, [5.0, 99.0, 5.0]) == (6.0, 6.0)  # the roofline's 99 s do not count


def test_a_collective_hides_behind_what_does_not_need_it() -> None:
    free = graph(
        operator("a", (), (1,)),
        operator("reduce", (1,), (1,), collective=REDUCE),
        operator("b", (), (2,)),
        operator("step", (1, 2), ()),
    )
    assert exposed(free, [1.0, 0.0, 4.0, 1.0]) == (6.0, 2.0)
    assert exposed(free, [1.0, 0.0, 9.0, 1.0]) == (6.0, 0.0)


def test_layers_are_gathered_one_ahead() -> None:
    layers = [one for number in (2, 3, 4) for one in gathered(number)]
    durations = [0.0, 0.0, 0.0, 5.0] * 3
    assert exposed(graph(*layers), durations) == (9.0, 3.0)  # only the first is waited for
    short = [0.0, 0.0, 0.0, 1.0] * 3
    assert exposed(graph(*layers), short) == (9.0, 3.0 + 2.0 + 2.0)


def test_deadlines_come_as_if_all_overlapped() -> None:
    chain = graph(operator("a", (), (1,)), operator("reduce", (1,), (1,), collective=REDUCE), operator("b", (1,), (2,)))
    assert overlapped(chain, [5.0, 99.0, 5.0], PLAIN) == [5.0, 0.0, 5.0]
    assert overlapped(chain, [1.0, 99.0, 2.0], PLAIN) == [2.0, 0.0, 4.0]  # the wires alone take 6 s
    assert communication(chain, [1.0, 99.0, 2.0], PLAIN).iteration_seconds == 9.0


def test_collectives_put_their_bytes_on_the_link() -> None:
    across = of("all-reduce", 800, 8)
    found = on_cluster(
        graph(operator("reduce", (1,), (1,), collective=across, link_bytes=7), operator("a", (), ())), PLAIN
    )
    assert [one.link_bytes for one in found.operators] == [207, 0]
