"""A plan in words, for people: its steps, its proof, and what binds it."""

from __future__ import annotations

from checkflow.core.plan import Plan
from checkflow.core.units import format_rate, format_seconds, format_size, format_stall, round_up
from checkflow.planner.schedule.explain import TightInterval


def step_words(plan: Plan, step: int) -> str:
    """Return a step of the horizon in words."""
    iteration, index = divmod(step, len(plan.timeline.steps))
    return plan.timeline.steps[index].words + later(iteration)


def later(iteration: int) -> str:
    """What is added to the words of a step for iterations after the first, counted from 0."""
    return f" of iteration {iteration + 1}" if iteration else ""


def certificate_text(plan: Plan) -> str:
    proof = plan.certificate
    solver = "" if proof.solver == "none" else f" by {proof.solver} {proof.solver_version}"
    return (
        f"{proof.status}{solver} ({proof.formulation}): peak {format_size(proof.objective_bytes)}, "
        f"bound {format_size(proof.bound_bytes)}"
    )


def _besides(plan: Plan) -> str:
    return "" if plan.wait is None else f", besides what leaves in the wait of {format_stall(plan.wait.seconds)}"


def binding_text(plan: Plan, least_bandwidth: int | None, interval: TightInterval | None) -> str:
    """What would break first on a slower link."""
    if not least_bandwidth:
        return "nothing: there is nothing to move"
    needed, whole = format_rate(round_up(least_bandwidth)), format_rate(plan.bandwidth_bytes_per_second)
    end = f"this peak needs {needed} of the link's {whole}"
    if interval is None:
        return f"room for snapshots; {end}"
    return (
        f"{format_size(interval.leave_bytes)} must leave in {format_seconds(interval.seconds)}, "
        f"from the boundary to {interval.end}{_besides(plan)}; {end}"
    )
