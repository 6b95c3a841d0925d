"""The ILP of the Checkflow paper, section III-A: one binary per chunk, action and step. The definition of a schedule.

Each function below encodes the equations whose numbers it gives. docs/explanation/proofs.md ("the paper's ILP") has the
variables and the correction of (7). None of the formulations that scale (:mod:`.ilp.flow`, :mod:`.exact.greedy`) uses
these equations; both are held against them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Literal, TypeAlias

from checkflow.core.errors import PlanError, SolverError
from checkflow.core.plan import Chunk
from checkflow.core.timeline import Timeline
from checkflow.planner.exact import greedy
from checkflow.planner.exact.problem import Problem
from checkflow.planner.ilp import solvers

if TYPE_CHECKING:
    import pulp

    Binaries: TypeAlias = dict[int, pulp.LpVariable]

MOST_VARIABLES = 2_000_000
_FIRST_OFFLOAD = 1  # the paper's step 2: equation (7) as corrected
_FINE = 1e-9  # hides no byte; the solvers' own tolerance, 1e-6, may hide 8 bytes of an 8 MiB chunk
_WHOLE = 1e-4  # how far a solver's binary may be from 0 or 1
_SLACK = 1e-4  # how far, in units, a solver's bound may be above the truth


@dataclass(frozen=True, slots=True)
class UnplacedChunk:
    """A chunk without a place in time yet: the e of the equations."""

    tensor: str
    offset_bytes: int
    length_bytes: int  # the paper's size of e
    created_in: tuple[int, ...]  # the steps in which its snapshot may be created
    deadline: int  # the step before the first write; the last step if never written


@dataclass(frozen=True)
class PerTensorModel:
    """The built ILP. Each list has one entry per piece: step index to binary, where that is not fixed at zero."""

    problem: Problem
    pieces: tuple[UnplacedChunk, ...]
    lp: pulp.LpProblem
    extra: pulp.LpVariable
    created: list[Binaries]  # C
    preserved: list[Binaries]  # P
    offloaded: list[Binaries]  # S


@dataclass(frozen=True)
class PerTensorSchedule:
    """The result of Algorithm 1 of the paper. Without chunks there is no schedule.

    Then either the link is too slow (the solve says "infeasible"), or the limit on the peak is below ``bound_bytes``.
    """

    chunks: tuple[Chunk, ...] | None  # sorted by (offload step, deadline, tensor, offset)
    bound_bytes: int  # on the peak: no schedule of chunks of this size is below it
    chunk_bytes: int  # reached by splitting; without a schedule, of the largest chunk
    solve: solvers.Solve  # of the last model


def find_chunks(
    timeline: Timeline,
    problem: Problem,
    chunk_bytes: int,
    *,
    peak_limit_bytes: int | None = None,
    solver: solvers.SolverChoice = "auto",
    time_limit_seconds: float = 60.0,
) -> PerTensorSchedule:
    """Run Algorithm 1 of the paper: solve, then halve the chunks and solve again while that can help.

    Tensors are cut into chunks of at most ``chunk_bytes``. Without a limit on the peak, only the link (9) can make a
    model infeasible: each snapshot may be created in step 1 and held to the end.

    Args:
        timeline: gives the state tensors and their deadlines, in bytes; it need not be as long as the problem.
        problem: gives the steps: their live bytes and what the link takes in them.
        peak_limit_bytes: of the whole peak; None: any.
        time_limit_seconds: for all solves together.

    Raises:
        PlanError: ``chunk_bytes`` is less than one.
        SolverError: the solver is missing or failed, or the model has more than 2,000,000 variables.
        NothingFoundError: the time ran out before a schedule within the limit was found, or proved not to exist.
    """
    end = time.perf_counter() + time_limit_seconds
    while True:
        pieces = cut(timeline, problem, chunk_bytes)
        model = build(problem, pieces)
        found, chunks = _solve_to_the_byte(model, solver, end)
        bound = peak_bound_bytes(model, found.bound)
        if chunks is not None:
            limit = math.inf if peak_limit_bytes is None else peak_limit_bytes
            if peak_bytes(problem, chunks) <= limit:
                return PerTensorSchedule(chunks, bound, chunk_bytes, found)
            if bound <= limit:
                raise solvers.NothingFoundError(
                    f"{found.name} found no schedule within {time_limit_seconds:g} s that keeps the limit on memory,"
                    " and no proof that there is none; give it more with --time-limit"
                )
        largest = max((piece.length_bytes for piece in pieces), default=0)
        if not _can_splitting_help(problem, largest, peak_limit_bytes):
            return PerTensorSchedule(None, bound, min(chunk_bytes, largest), found)
        units = -(-largest // (2 * problem.unit_bytes))
        chunk_bytes = units * problem.unit_bytes


def _solve_to_the_byte(
    model: PerTensorModel, solver: solvers.SolverChoice, end_seconds: float
) -> tuple[solvers.Solve, tuple[Chunk, ...] | None]:
    """Solve at the solver's own tolerance, and again at a finer one if the first hid bytes.

    Starting with the finer one would take up to four times as long. Infeasible at the coarser one is infeasible.
    """
    found, chunks = solve(model, solver, _left(end_seconds)), None
    if found.status == "infeasible":
        return found, None
    with contextlib.suppress(SolverError):
        chunks = extract(model)
        if found.status == "feasible" or peak_bytes(model.problem, chunks) == peak_bound_bytes(model, found.bound):
            return found, chunks
    try:
        finer = solve(model, solver, _left(end_seconds), _FINE)
    except solvers.NothingFoundError:
        if chunks is None:
            raise
        return found, chunks  # a schedule, whose bound is a few bytes lower
    return finer, None if finer.status == "infeasible" else extract(model)


def _left(end_seconds: float) -> float:
    return max(end_seconds - time.perf_counter(), 1e-3)


def _can_splitting_help(problem: Problem, largest_bytes: int, peak_limit_bytes: int | None) -> bool:
    if largest_bytes <= problem.unit_bytes:
        return False
    least = greedy.least_peak_bytes(problem, "snapshot")
    if least is None:
        return False
    # Single bytes beat whole units of a pooled string by less than two units.
    return peak_limit_bytes is None or peak_limit_bytes > least - 2 * problem.unit_bytes


def cut(timeline: Timeline, problem: Problem, chunk_bytes: int) -> tuple[UnplacedChunk, ...]:
    """Cut all state into pieces of at most ``chunk_bytes`` bytes, by deadline, tensor and offset.

    Each piece knows the steps in which its snapshot may be created:

    (6) C_{sn(e),t} <= l_{e,t}: the tensor is available. State is in device memory in every step; at segment granularity
    eager training lets it be copied at anchors only.
    (8) The sum of C_{sn(e),t'} over t' < t is at least u_{e,t}: the snapshot is created before the tensor is updated.
    With (4) no C is left in the step of the first write, nor after it.
    """
    if chunk_bytes < 1:
        raise PlanError(f"a chunk has at least one byte, not {chunk_bytes}")
    steps = timeline.steps
    available = [
        step
        for step in range(problem.steps)
        if timeline.granularity == "operator" or steps[step % len(steps)].anchor is not None
    ]
    pieces = []
    for group in timeline.groups:
        deadline = problem.steps - 1 if group.first_write is None else group.first_write - 1
        created_in = tuple(step for step in available if step <= deadline)
        for name, size in sorted(group.members):
            for offset in range(0, size, chunk_bytes):
                pieces.append(UnplacedChunk(name, offset, min(chunk_bytes, size - offset), created_in, deadline))
    return tuple(pieces)


def build(problem: Problem, pieces: tuple[UnplacedChunk, ...]) -> PerTensorModel:
    """Build the paper's model; its objective is ``extra``: (12) less a constant, in units.

    Raises SolverError for more than 2,000,000 variables.
    """
    import pulp

    windows = [_windows(problem, piece) for piece in pieces]
    count = 1 + sum(len(steps) for window in windows for steps in window)
    if count > MOST_VARIABLES:
        raise SolverError(
            f"the per-tensor formulation would have {count:,} variables for {len(pieces):,} chunks, more than"
            f" {MOST_VARIABLES:,}: take larger chunks, or --formulation flow"
        )
    lp = pulp.LpProblem("checkflow", pulp.LpMinimize)
    extra = pulp.LpVariable("extra", 0)
    lp += extra  # (12) minimise the peak
    # (1) C, P and S are binary
    created, preserved, offloaded = (
        [_binaries(name, index, window[place]) for index, window in enumerate(windows)]
        for place, name in enumerate("CPS")
    )
    model = PerTensorModel(problem, pieces, lp, extra, created, preserved, offloaded)
    _one_action(model)
    _preserve(model)
    _exactly_once(model)
    _offload(model)
    _link(model)
    _memory(model)
    return model


def solve(
    model: PerTensorModel,
    solver: solvers.SolverChoice = "auto",
    time_limit_seconds: float = 60.0,
    tolerance: float | None = None,
) -> solvers.Solve:
    """Minimise, as :func:`checkflow.planner.ilp.solvers.solve`. "infeasible" means that the link (9) is too slow."""
    return solvers.solve(model.lp, solver, time_limit_seconds, tolerance)


def extract(model: PerTensorModel) -> tuple[Chunk, ...]:
    """Return the solved model's schedule, sorted by (offload step, deadline, tensor, offset).

    Raises SolverError if a value is not binary, or the values break an equation.
    """
    placed = []
    link = [0] * model.problem.steps
    for piece, created, preserved, offloaded in zip(
        model.pieces, model.created, model.preserved, model.offloaded, strict=True
    ):
        made, kept, left = (_chosen(binaries) for binaries in (created, preserved, offloaded))
        if len(made) != 1 or len(left) != 1 or kept != list(range(made[0] + 1, left[0])) or made[0] >= left[0]:
            raise SolverError(
                f"the solver's answer breaks its own rules: byte {piece.offset_bytes} of {piece.tensor} is created in"
                f" steps {made}, preserved in {kept} and offloaded in {left}"
            )
        link[left[0]] += piece.length_bytes
        placed.append((left[0], piece.deadline, piece.tensor, piece.offset_bytes, piece.length_bytes, made[0]))
    for step, (used, capacity) in enumerate(zip(link, model.problem.capacity, strict=True)):
        if used > capacity * model.problem.unit_bytes:
            raise SolverError(f"the solver's answer breaks its own rules: {used} bytes leave in step {step}")
    return tuple(
        Chunk(tensor, offset, length, offload_step, snapshot_step)
        for offload_step, _, tensor, offset, length, snapshot_step in sorted(placed)
    )


def peak_bytes(problem: Problem, chunks: Iterable[Chunk]) -> int:
    """Return the peak of device memory; a snapshot is held from the step that creates it through its offload."""
    change = [0] * (problem.steps + 1)
    for chunk in chunks:
        if chunk.snapshot_step is not None:
            change[chunk.snapshot_step] += chunk.length_bytes
            change[chunk.offload_step + 1] -= chunk.length_bytes
    memory: list[int] = list(map(add, problem.live_bytes, accumulate(change)))
    return max(memory)


def peak_bound_bytes(model: PerTensorModel, bound_units: float | None) -> int:
    """Return the least peak, in bytes, that a solver's bound on ``extra`` (None: unknown) allows.

    A peak is the live memory of some step plus whole chunks, so a multiple of their common divisor. Rounding the bound
    up to such a number makes up for the solver's tolerance.
    """
    problem = model.problem
    training = problem.training_peak_bytes
    if bound_units is None or not math.isfinite(bound_units):
        return training
    # A Fraction, since a float holds no odd number of bytes above 2**53.
    least = training + Fraction(bound_units - _SLACK) * problem.unit_bytes
    if least <= training:
        return training
    grain = math.gcd(*(piece.length_bytes for piece in model.pieces))
    above = {live: max(0, math.ceil((least - live) / grain)) for live in problem.live_bytes}  # in grains
    return min(live + grain * more for live, more in above.items())


def _windows(problem: Problem, piece: UnplacedChunk) -> tuple[list[int], range, list[int]]:
    """Return the steps in which the piece's C, P and S are not fixed at zero.

    (5) At the beginning no snapshot is held: P_{e,1} = 0. The same holds for S_{e,1}, which (7) leaves free.
    """
    left = [
        step
        for step in range(_FIRST_OFFLOAD, problem.steps)
        if problem.capacity[step] * problem.unit_bytes >= piece.length_bytes
    ]
    last = left[-1] if left else 0
    return [step for step in piece.created_in if step < last], range(1, last), left


def _binaries(name: str, index: int, steps: Iterable[int]) -> Binaries:
    import pulp

    return {step: pulp.LpVariable(f"{name}_{index}_{step}", 0, 1, pulp.LpInteger) for step in steps}


def _row(
    model: PerTensorModel, terms: Mapping[pulp.LpVariable, float], sense: Literal["<=", "=="], bound: float
) -> None:
    """Add one row without PuLP's slow expressions: there may be a million of them."""
    import pulp

    code = pulp.LpConstraintEQ if sense == "==" else pulp.LpConstraintLE
    model.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), code, rhs=bound))


def _one_action(model: PerTensorModel) -> None:
    """(2) Only one action is permitted in a step: C_{e,t} + P_{e,t} + S_{e,t} <= 1."""
    for created, preserved, offloaded in zip(model.created, model.preserved, model.offloaded, strict=True):
        for step in range(model.problem.steps):
            actions = [binaries[step] for binaries in (created, preserved, offloaded) if step in binaries]
            if len(actions) > 1:
                _row(model, dict.fromkeys(actions, 1), "<=", 1)


def _preserve(model: PerTensorModel) -> None:
    """(3) Preserved only if created or preserved in the previous step: P_{e,t} <= C_{e,t-1} + P_{e,t-1}."""
    for created, preserved in zip(model.created, model.preserved, strict=True):
        for step, binary in preserved.items():
            _row(model, {binary: 1, **_held_before(created, preserved, step)}, "<=", 0)


def _exactly_once(model: PerTensorModel) -> None:
    """(4) Created and offloaded exactly once: the sums of S_{e,t} and of C_{e,t} over all steps are 1."""
    for created, offloaded in zip(model.created, model.offloaded, strict=True):
        for binaries in (offloaded, created):
            if binaries:
                _row(model, dict.fromkeys(binaries.values(), 1), "==", 1)
            else:  # 0 = 1: no step's link takes the chunk
                _row(model, {model.extra: 1}, "<=", -1)


def _offload(model: PerTensorModel) -> None:
    """(7) Offloaded only if created or preserved in the previous step: S_{e,t} <= C_{e,t-1} + P_{e,t-1}."""
    for created, preserved, offloaded in zip(model.created, model.preserved, model.offloaded, strict=True):
        for step, binary in offloaded.items():
            if step:
                _row(model, {binary: 1, **_held_before(created, preserved, step)}, "<=", 0)


def _held_before(created: Binaries, preserved: Binaries, step: int) -> dict[pulp.LpVariable, float]:
    return {binaries[step - 1]: -1 for binaries in (created, preserved) if step - 1 in binaries}


def _link(model: PerTensorModel) -> None:
    """(9) In each step the link carries at most its capacity, in whole units: sum of S_{e,t} size(e) <= B_S tau_t."""
    crossing: list[dict[pulp.LpVariable, float]] = [{} for _ in range(model.problem.steps)]
    for piece, offloaded in zip(model.pieces, model.offloaded, strict=True):
        for step, binary in offloaded.items():
            crossing[step][binary] = piece.length_bytes / model.problem.unit_bytes
    for terms, capacity in zip(crossing, model.problem.capacity, strict=True):
        if sum(terms.values()) > capacity:
            _row(model, terms, "<=", capacity)


def _memory(model: PerTensorModel) -> None:
    """(10) The peak is at least live memory and the snapshots that occupy memory, sum of alpha_{e,t} size(e).

    (11) alpha_{e,t} >= max(C_{e,t}, P_{e,t}, S_{e,t}): by (2), that is their sum. In units, above training's peak.
    """
    problem = model.problem
    held: list[dict[pulp.LpVariable, float]] = [{model.extra: -1} for _ in range(problem.steps)]
    for piece, *actions in zip(model.pieces, model.created, model.preserved, model.offloaded, strict=True):
        for binaries in actions:
            for step, binary in binaries.items():
                held[step][binary] = piece.length_bytes / problem.unit_bytes
    for terms, live in zip(held, problem.live_bytes, strict=True):
        room = (problem.training_peak_bytes - live) / problem.unit_bytes
        if sum(terms.values()) - terms[model.extra] > room:
            _row(model, terms, "<=", room)


def _chosen(binaries: Binaries) -> list[int]:
    chosen = []
    for step, variable in binaries.items():
        value: float | None = variable.varValue
        if value is None or min(abs(value), abs(value - 1)) > _WHOLE:
            raise SolverError(f"the solver's answer is no schedule: {variable.name} is {value}, not 0 or 1")
        if value > 0.5:
            chosen.append(step)
    return chosen
