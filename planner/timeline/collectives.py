"""What collectives cost on a cluster: their time, the bytes that they put on the link, the waits that they cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkflow.core.graph import Collective, TrainingGraph
from checkflow.core.machine.cluster import Cluster

_COPY_IN = "fsdp.all_gather_copy_in.default"


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the ranks of a group lie."""

    ranks: int
    per_node: int
    nodes: int


def _shape(collective: Collective, cluster: Cluster) -> _Shape:
    per_node = min(collective.ranks, max(1, cluster.ranks_per_node // collective.stride))
    return _Shape(collective.ranks, per_node, math.ceil(collective.ranks / per_node))


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the time of a collective alone on its wires: latency, and bytes over the narrowest of them.

    A ring sends all but one rank's part over each wire, an all-reduce twice (Thakur et al., "Optimization of collective
    communication operations in MPICH", 2005). Small messages go along trees, so latency counts by the logarithm.
    """
    shape = _shape(collective, cluster)
    if shape.ranks == 1:
        return 0.0
    sent = _sent_bytes(collective, shape)
    seconds = 0.0
    if shape.per_node > 1:
        seconds = sent / cluster.peer_bytes_per_second
    if shape.nodes > 1:
        assert cluster.nic_bytes_per_second is not None
        seconds = max(seconds, _between_nodes_bytes(collective, shape) / cluster.nic_bytes_per_second)
    twice = 2 if collective.kind == "all-reduce" else 1
    hops = math.ceil(math.log2(shape.per_node)) * cluster.peer_latency_seconds
    hops += math.ceil(math.log2(shape.nodes)) * cluster.nic_latency_seconds
    return cluster.call_seconds + twice * hops + seconds


def link_bytes(collective: Collective, cluster: Cluster) -> int:
    """Return the bytes that a collective sends over this device's link to the host."""
    shape = _shape(collective, cluster)
    between = _between_nodes_bytes(collective, shape) if shape.nodes > 1 else 0.0
    within = _sent_bytes(collective, shape) if shape.per_node > 1 else 0.0
    used = (between if cluster.nic_uses_link else 0.0) + (within if cluster.peer_uses_link else 0.0)
    return math.ceil(used)


def _sent_bytes(collective: Collective, shape: _Shape) -> float:
    """Return what each rank sends in all."""
    if collective.kind in ("send", "broadcast", "reduce"):
        return float(collective.size_bytes)
    if collective.kind == "receive" or shape.ranks == 1:
        return 0.0 if shape.ranks == 1 else float(collective.size_bytes)
    share = collective.size_bytes * (shape.ranks - 1) / shape.ranks
    return 2 * share if collective.kind == "all-reduce" else share


def _between_nodes_bytes(collective: Collective, shape: _Shape) -> float:
    """Return what each rank's network card sends: the cards of a node share what leaves it."""
    sent = _sent_bytes(collective, shape)
    if collective.kind in ("send", "receive"):
        return sent
    if collective.kind == "all-to-all":  # each rank sends its own parts
        return collective.size_bytes * (shape.ranks - shape.per_node) / shape.ranks
    if collective.kind in ("broadcast", "reduce"):
        return sent / shape.per_node
    return sent * (shape.ranks - shape.per_node) / (shape.ranks - 1) / shape.per_node


@dataclass(frozen=True, slots=True)
class Communication:
    """What the collectives of an iteration take."""

    seconds: float  # all together, one after the other
    exposed_seconds: float  # of them, while computation waits
    iteration_seconds: float  # of computation and these waits


def communication(graph: TrainingGraph, durations_seconds: Sequence[float], cluster: Cluster) -> Communication:
    """Follow an iteration on two streams: one computes, one communicates; each waits for what it reads.

    FSDP2 gathers the next parameters while the last gathered ones are used: such an all-gather waits for no
    computation but the begin of that one.
    """
    ready: dict[int, float] = {}  # by storage: when its last writer ends
    copied: set[int] = set()  # storages that FSDP2 gathers into
    computed = wired = total = 0.0
    window, opens = 0.0, False
    for operator, seconds in zip(graph.operators, durations_seconds, strict=True):
        storages = (*operator.reads, *operator.writes)
        inputs = max((ready.get(storage, 0.0) for storage in storages), default=0.0)
        if operator.collective is not None:
            takes = collective_seconds(operator.collective, cluster)
            total += takes
            gathers = operator.collective.kind == "all-gather" and not copied.isdisjoint(operator.writes)
            wired = max(wired, window if gathers else inputs) + takes
            ready.update(dict.fromkeys(operator.writes, wired))
            copied.difference_update(operator.writes)
            opens = opens or gathers
        elif operator.target == _COPY_IN:
            copied.update(operator.writes)
        else:
            begin = max(computed, inputs)
            if opens:
                window, opens = begin, False
            computed = begin + seconds
            ready.update(dict.fromkeys(operator.writes, computed))
    whole = max(computed, wired)
    return Communication(total, max(0.0, whole - math.fsum(_computing(graph, durations_seconds))), whole)


def overlapped(graph: TrainingGraph, durations_seconds: Sequence[float], cluster: Cluster) -> list[float]:
    """Return durations as if all communication overlapped, so that deadlines come as early as they can.

    Collectives take no time of their own. An iteration lasts no shorter than its wires are busy, though: where that is
    longer than it computes, all operators last longer in proportion.
    """
    computing = _computing(graph, durations_seconds)
    moved = (operator.collective for operator in graph.operators)
    wired = math.fsum(collective_seconds(collective, cluster) for collective in moved if collective is not None)
    alone = math.fsum(computing)
    stretched = max(1.0, wired / alone) if alone else 1.0
    return [stretched * seconds for seconds in computing]


def _computing(graph: TrainingGraph, durations_seconds: Sequence[float]) -> list[float]:
    """Return the durations without those of collectives, and of copies that FSDP2 makes on a stream beside."""
    return [
        0.0 if operator.collective is not None or operator.target == _COPY_IN else seconds
        for operator, seconds in zip(graph.operators, durations_seconds, strict=True)
    ]


def on_cluster(graph: TrainingGraph, cluster: Cluster) -> TrainingGraph:
    """Return the graph whose collectives put their bytes on the link, as the cluster's do."""
    return replace(
        graph,
        operators=tuple(
            operator
            if operator.collective is None
            else replace(operator, link_bytes=operator.link_bytes + link_bytes(operator.collective, cluster))
            for operator in graph.operators
        ),
    )
