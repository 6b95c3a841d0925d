"""A small plan that is right in every way, for tests that break it. Free of torch."""

from __future__ import annotations

from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Certificate, Chunk, Fingerprint, Plan, StateSpec
from checkflow.core.timeline import StateGroup, Step, Timeline

FORWARD = AnchorKey(AnchorKind.FORWARD, "model/norm")
UPDATE = AnchorKey(AnchorKind.OPTIMIZER_PRE, "optimizer")


def good_plan() -> Plan:
    """Segments of a second over a link of 8 bytes per second: a buffer is due in forward, a weight at the optimizer."""
    timeline = Timeline(
        "segment",
        (
            Step("anchor", str(BOUNDARY), 0.0, 10, anchor=BOUNDARY),
            Step("segment", "conv", 1.0, 20),
            Step("anchor", str(FORWARD), 0.0, 20, anchor=FORWARD),
            Step("segment", "norm", 1.0, 30),
            Step("anchor", str(UPDATE), 0.0, 20, anchor=UPDATE),
            Step("segment", "step", 1.0, 20),
        ),
        (StateGroup(3, (("model/mean", 8),)), StateGroup(5, (("model/w", 12),)), StateGroup(None, (("model/z", 1),))),
    )
    specs = (
        StateSpec("model/mean", (2,), "float32", 8),
        StateSpec("model/w", (2, 3), "float16", 12),
        StateSpec("model/z", (), "bool", 1),
    )
    return Plan(
        Fingerprint("m", specs, (), (), 1, "", (("optimizer", "SGD foreach"),), "cpu"), "direct", 8.0, 1, timeline,
        (
            Chunk("model/mean", 0, 8, 1),
            Chunk("model/w", 0, 8, 3),
            Chunk("model/w", 8, 4, 5, 4),
            Chunk("model/z", 0, 1, 5),
        ), 20, 30, 4.0, 1, Certificate("optimal", "greedy", "none", "", 30, 30), memory_bandwidth_bytes_per_second=2.0,
    )  # fmt: skip
