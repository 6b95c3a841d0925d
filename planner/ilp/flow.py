"""The aggregate ILP: it counts units, not chunks, since bytes with the same deadline are interchangeable.

docs/explanation/proofs.md ("the flow ILP") lists its variables. It is a function of a :class:`~.exact.problem.Problem`
only and knows nothing of :mod:`.exact.greedy`; tests hold the two against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from checkflow.core.errors import SolverError
from checkflow.core.plan import Policy
from checkflow.planner.exact.optimum import Budget, Prices
from checkflow.planner.exact.problem import Flow, Problem

if TYPE_CHECKING:
    import pulp

    Sum: TypeAlias = pulp.LpVariable | int

_WHOLE = 1e-4  # how far a solver's whole number may be from one
_SLACK = 1e-4  # how far, in units, a solver's bound may be above the truth


@dataclass(frozen=True)
class FlowModel:
    """The built ILP. Each list has the running sum after each step, or a number where it cannot have changed."""

    problem: Problem
    policy: Policy
    lp: pulp.LpProblem
    wait: Sum  # units that leave while training waits at the boundary
    waits: Sum  # whether it waits at all, where its own traffic must go first
    through: list[Sum]  # D_t, or X_t under the snapshot policy
    drained: list[Sum]  # Y_t
    made: list[Sum]  # Z at each step


def build(problem: Problem, policy: Policy, prices: Prices | None = None, budget: Budget | None = None) -> FlowModel:
    """Build the ILP of a horizon; its objective is ``extra``.

    Without ``prices`` and ``budget``: any number of snapshots, and no waiting for the link.
    """
    import pulp

    lp = pulp.LpProblem("checkflow", pulp.LpMinimize)
    extra = pulp.LpVariable("extra", 0)
    lp += extra
    most_waiting = _most_waiting(problem, prices, budget)
    model = FlowModel(
        problem,
        policy,
        lp,
        pulp.LpVariable("wait", 0, most_waiting, pulp.LpInteger) if most_waiting else 0,
        pulp.LpVariable("waits", 0, 1, pulp.LpInteger) if most_waiting and prices and prices.queue_seconds else 0,
        _running_sum(
            "X" if policy == "snapshot" else "D", problem, first=1 if policy == "snapshot" else 0, also=most_waiting > 0
        ),
        _running_sum("Y", problem, first=1),
        _snapshot_sum(problem),
    )
    _link(model)
    _deadlines(model)
    _everything_leaves(model)
    _memory(model, extra)
    if prices is not None and budget is not None:
        _stall(model, prices, budget)
    return model


def extract(model: FlowModel) -> Flow:
    """Return the solved model's schedule; SolverError if a value is not a whole number, or a running sum falls."""
    through, drained, made = (_steps(sums) for sums in (model.through, model.drained, model.made))
    if model.policy == "direct":
        return Flow(through, made, drained)
    # A short-lived copy is made one step before it leaves.
    ahead = (*through[1:], 0)
    return Flow(
        (0,) * model.problem.steps,
        tuple(a + b for a, b in zip(made, ahead, strict=True)),
        tuple(a + b for a, b in zip(drained, through, strict=True)),
    )


def extract_wait(model: FlowModel) -> int:
    """Return the units that leave while training waits at the boundary; SolverError if not a whole number."""
    return model.wait if isinstance(model.wait, int) else _whole(model.wait)


def peak_bound_bytes(problem: Problem, bound_units: float) -> int:
    """Return the least peak, in bytes, that a solver's bound on ``extra`` allows.

    A peak is the live memory of some step plus whole units. Rounding the bound up to such a number makes up for the
    solver's tolerance.
    """
    if not math.isfinite(bound_units):
        return problem.training_peak_bytes
    # A Fraction, since a float holds no odd number of bytes above 2**53.
    least = problem.training_peak_bytes + Fraction(bound_units - _SLACK) * problem.unit_bytes
    if least <= problem.training_peak_bytes:
        return problem.training_peak_bytes
    return min(
        live + problem.unit_bytes * max(0, math.ceil((least - live) / problem.unit_bytes))
        for live in set(problem.live_bytes)
    )


def _most_waiting(problem: Problem, prices: Prices | None, budget: Budget | None) -> int:
    """Return the units that may leave while training waits, if the whole budget goes into that."""
    if prices is None or budget is None or not budget.may_wait:
        return 0
    most = budget.most(prices.wait_seconds, prices.queue_seconds)
    return problem.total if most >= problem.total else max(0, int(most))


def _running_sum(name: str, problem: Problem, first: int, *, also: bool = False) -> list[Sum]:
    """Make one variable for each step in which the link can carry something; with ``also``, for the first step, too."""
    import pulp

    sums: list[Sum] = []
    for step, capacity in enumerate(problem.capacity):
        if step >= first and (capacity or (also and not step)):
            sums.append(pulp.LpVariable(f"{name}_{step}", 0, problem.total, pulp.LpInteger))
        else:
            sums.append(sums[-1] if sums else 0)
    return sums


def _snapshot_sum(problem: Problem) -> list[Sum]:
    import pulp

    sums: list[Sum] = []
    for step, (before, due) in enumerate(pairwise((0, *problem.due))):
        if due > before:
            sums.append(pulp.LpVariable(f"Z_{step + 1}", 0, due, pulp.LpInteger))
        else:
            sums.append(sums[-1] if sums else 0)
    return sums


def _row(lp: pulp.LpProblem, row: pulp.LpConstraint | bool, otherwise: str = "a rule without variables fails") -> None:
    """Add a row; one without variables is true, or makes the model infeasible."""
    import pulp

    if row is False:
        lp += pulp.lpSum(lp.objective) <= -1, otherwise
    elif row is not True:
        lp += row


def _link(model: FlowModel) -> None:
    """Nothing returns; each step carries at most its capacity, plus the wait at the boundary: d_t + y_t <= c_t."""
    for step, capacity in enumerate(model.problem.capacity):
        d, y = _difference(model.through, step), _difference(model.drained, step)
        for amount in (d, y):
            _row(model.lp, amount >= 0)
        most = min(capacity, model.problem.total)  # keeps the solver's numbers small
        _row(model.lp, d + y <= (most if step else most + model.wait))


def _deadlines(model: FlowModel) -> None:
    """Before its first write a unit has left or is snapshotted. Earliest deadline first is feasible iff, for every u,
    D_{u-1} + sum of z up to u >= sum of N up to u (snapshot policy: X_u in place of D_{u-1}).
    """
    ahead = 1 if model.policy == "snapshot" else 0
    for step, (before, due) in enumerate(pairwise((0, *model.problem.due))):
        z = _difference(model.made, step)
        _row(model.lp, z >= 0)
        _row(model.lp, z <= due - before)
        if due > before:
            _row(model.lp, _at(model.through, step + ahead) + model.made[step] >= due)


def _everything_leaves(model: FlowModel) -> None:
    """D_H + sum of z = sum of N; Y_H = sum of z; a snapshot leaves only after the step that made it: Y_t <= Z_{t-1}."""
    _row(model.lp, model.through[-1] + model.made[-1] == model.problem.total)
    _row(model.lp, model.drained[-1] - model.made[-1] == 0)
    for step in range(1, model.problem.steps):
        if model.drained[step] is not model.drained[step - 1]:
            _row(model.lp, model.drained[step] - model.made[step - 1] <= 0)


def _memory(model: FlowModel, extra: pulp.LpVariable) -> None:
    """M_t + Z_t - Y_{t-1} <= peak (snapshot policy: + x_t + x_{t+1}). Among steps that hold the same, the largest."""
    problem = model.problem
    largest: dict[tuple[int, ...], tuple[int, int]] = {}
    for step, live in enumerate(problem.live_bytes):
        sums: tuple[Sum, ...] = (model.made[step], _at(model.drained, step - 1))
        if model.policy == "snapshot":
            sums += (_at(model.through, step + 1), _at(model.through, step - 1))
        key = tuple(id(part) for part in sums)
        if key not in largest or live > largest[key][0]:
            largest[key] = (live, step)
    for live, step in largest.values():
        room = (problem.training_peak_bytes - live) / problem.unit_bytes
        if room >= problem.total:
            continue  # all state at once would fit
        held = model.made[step] - _at(model.drained, step - 1)
        if model.policy == "snapshot":
            held = held + _at(model.through, step + 1) - _at(model.through, step - 1)
        _row(model.lp, held - extra <= room)


def _stall(model: FlowModel, prices: Prices, budget: Budget) -> None:
    """The wait, what training itself queued before it, and the device copies fit the budget; in units of snapshots."""
    snapshots = model.made[-1] + (model.through[-1] if model.policy == "snapshot" else 0)
    most = budget.most(prices.snapshot_seconds)
    ratio = prices.wait_seconds / prices.snapshot_seconds if prices.snapshot_seconds else 0.0
    queue = 0.0
    if not isinstance(model.waits, int):
        queue = prices.queue_seconds / prices.snapshot_seconds if prices.snapshot_seconds else 0.0
        _row(model.lp, model.wait - model.waits * model.problem.total <= 0)
    if most < model.problem.total * (1 + ratio) + queue:  # else the budget never binds
        _row(model.lp, snapshots + model.wait * ratio + model.waits * queue <= most)


def _at(sums: list[Sum], step: int) -> Sum:
    """Return a running sum after a step: zero before the first, the total after the last."""
    return 0 if step < 0 else sums[min(step, len(sums) - 1)]


def _difference(sums: list[Sum], step: int) -> pulp.LpAffineExpression | int:
    now, before = sums[step], _at(sums, step - 1)
    return 0 if now is before else now - before


def _steps(sums: list[Sum]) -> tuple[int, ...]:
    values = [0, *(part if isinstance(part, int) else _whole(part) for part in sums)]
    amounts = tuple(now - before for before, now in pairwise(values))
    if min(amounts, default=0) < 0:
        raise SolverError("the solver's answer breaks its own rules: something that has left returns")
    return amounts


def _whole(variable: pulp.LpVariable) -> int:
    value: float | None = variable.varValue
    if value is None or abs(value - round(value)) > _WHOLE:
        raise SolverError(f"the solver's answer is no schedule: {variable.name} is {value}, not a whole number")
    return round(value)
