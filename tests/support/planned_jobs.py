"""Training steps on their whole way, small and on the CPU: planned, run, every checkpoint held against the truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checkflow.api import Checkpointer
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import find_device
from checkflow.core.plan import Plan
from checkflow.core.training_step import TrainingStep
from checkflow.planner.schedule.replay import check_plan
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from checkflow.runtime.store.discovery import find
from tests.support.oracle import assert_checkpoint_is, run_oracle


def plan_graph(graph: TrainingGraph, *, link_use: float = 0.9, chunk_bytes: int = 64 * 1024, **limits: Any) -> Plan:
    """The best plan of an iteration on the CPU, on a link that is used to this share: tight, so that it matters."""
    device = find_device("cpu")
    timeline = make_timeline(graph, durations_seconds(graph, device), "segment")
    request = PlanRequest(
        bandwidth_bytes_per_second=max(1.0, timeline.state_bytes / timeline.iteration_seconds / link_use),
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        chunk_bytes=chunk_bytes,
        **limits,
    )
    outcome = make_plan(timeline, fingerprint_of(graph, device), request, graph_peak_bytes=0)
    assert outcome.plan is not None
    assert outcome.status == "optimal"
    check_plan(outcome.plan)
    return outcome.plan


def plan_by_trace(step: TrainingStep, **options: Any) -> Plan:
    """As ``checkflow plan --device cpu`` makes it."""
    return plan_graph(trace(step, name="job", target="cpu"), **options)


def assert_every_checkpoint_is_true(
    step: TrainingStep,
    plan: Plan,
    directory: Path,
    *,
    iterations: int = 8,
    iterate: Callable[[int], Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Checkpointer:
    """Train by the plan, audits on, errors raised; returns the closed Checkpointer for further questions.

    Every checkpoint must hold the bits that a clone at its boundary held, and the plan must be what ran: after the
    optimizers have made their state nothing but what lies in host memory moves at the boundary itself, no audit fails,
    and the plan is never distrusted.

    Args:
        iterate: one iteration of the loop, given its number; by default the step, on its batch.
        state: further objects, as ``Checkpointer`` takes them.
        iterations: so many or fewer, whole intervals; two checkpoints in any case.
    """
    iterations = plan.interval * max(2, iterations // plan.interval)
    with Checkpointer(
        step.models, step.optimizers, directory=directory, plan=plan, state=state,
        every=plan.interval, audit=1, keep_latest=iterations + 1, on_error="raise",
    ) as checkpointer:  # fmt: skip
        truths = run_oracle(
            checkpointer,
            iterate or (lambda _: step.run(step.batch)),
            step.models,
            step.optimizers,
            iterations=iterations,
        )
    report = checkpointer.report()
    expected = list(range(plan.interval, iterations + 1, plan.interval))
    assert [int(path.name[5:]) for path in sorted(find(directory))] == expected
    assert report["committed"] == report["audited"] == len(expected)
    assert report["breaches"] == report["failed"] == 0
    for path in find(directory):
        assert_checkpoint_is(path, truths[int(path.name[5:])])
    sizes = {spec.name: spec.size_bytes for spec in plan.fingerprint.state}
    assert report["newest_capture"]["boundary_bytes"] == sum(sizes[name] for name in plan.host_tensors)
    return checkpointer
