"""A plan with everything that a page shows: hostile names, snapshots, a wait, training's own traffic."""

from __future__ import annotations

from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Fingerprint, Plan, StateSpec
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan

HOSTILE = "model/</script><b>&amp;weight%{x}\x1b"
MEGABYTE = 1_000_000


def _anchor(kind: AnchorKind, name: str, live: int) -> Step:
    key = AnchorKey(kind, name)
    return Step("anchor", str(key), 0.0, live * MEGABYTE, anchor=key)


def _segment(label: str, milliseconds: float, live: int, own_bytes: int = 0) -> Step:
    return Step("segment", label, milliseconds / 1000, live * MEGABYTE, own_bytes)


def make_page_plan(bandwidth: float = 0.5e9, overhead: float = 0.05, model: str = "sample", layers: int = 1) -> Plan:
    """A plan of a step with ``layers`` layers, of 10 MB each."""
    steps = [Step("anchor", "boundary", 0.0, 40 * MEGABYTE, anchor=BOUNDARY), _segment("convolution", 2, 50, 100_000)]
    for layer in range(layers):
        steps += [_anchor(AnchorKind.FORWARD, f"model/layer{layer}", 52), _segment(f"addmm_{layer}", 3, 55, 100_000)]
    for layer in reversed(range(layers)):
        steps += [
            _anchor(AnchorKind.GRADIENT, f"model/layer{layer}.weight", 60),
            _segment(f"addmm_backward_{layer} … mm_{layer}", 3, 60),
        ]
    steps += [_anchor(AnchorKind.OPTIMIZER_PRE, "optimizer", 50), _segment("_foreach_add_", 2, 50)]
    steps.append(_anchor(AnchorKind.OPTIMIZER_POST, "optimizer", 45))
    written = len(steps) - 2
    weights = [HOSTILE, *(f"model/layer{layer}.weight" for layer in range(1, layers))]
    members = tuple(sorted((name, 10 * MEGABYTE) for name in weights))
    groups = (
        StateGroup(1, (("model/counter", 500_000),)),
        StateGroup(written, members),
        StateGroup(None, (("model/frozen", MEGABYTE),)),
    )
    state = [StateSpec(name, (size,), "uint8", size) for group in groups for name, size in group.members]
    fingerprint = Fingerprint(model, tuple(state), (), (((8, 3), "float32"),), 1, "", (), "RTX 3090", ranks=2)
    request = PlanRequest(bandwidth, 900e9, overhead=overhead, chunk_bytes=2**20)
    outcome = make_plan(Timeline("segment", tuple(steps), groups), fingerprint, request, graph_peak_bytes=MEGABYTE)
    assert outcome.plan is not None, outcome.explanation
    return outcome.plan
