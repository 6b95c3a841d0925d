"""One function over three solvers, through PuLP: Gurobi, HiGHS, CBC.

What a solver calls itself, and what PuLP makes of it, is not trusted: "optimal" is said only of a proof, a schedule
found when time ran out is "feasible" (PuLP reports CBC's and HiGHS's as status 1 with sol_status 2), and the caller
checks the values themselves. Nothing is written to standard output.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkflow.errors import SolverError

if TYPE_CHECKING:
    import pulp

SolverName = Literal["gurobi", "highs", "cbc"]
SolverChoice = Literal["auto", "gurobi", "highs", "cbc"]
SolveStatus = Literal["optimal", "feasible", "infeasible"]
_GUROBI_TOO_LARGE = 10010  # the restricted licence ends at 2,000 variables or constraints
_GRACE_SECONDS = 10.0  # CBC looks at the clock only now and then
_logger = logging.getLogger("checkflow")


class NothingFoundError(SolverError):
    """The time ran out before any solution was found."""


@dataclass(frozen=True)
class Solve:
    """What a solver found. The values are in the problem's variables."""

    name: SolverName
    version: str
    status: SolveStatus
    objective: float | None  # of the solution found; None if infeasible
    bound: float | None  # no solution is below it (minimisation); None if infeasible
    seconds: float
    variables: int
    constraints: int

    @property
    def gap(self) -> float | None:
        """(objective - bound) / |objective|; None if infeasible, infinite if the objective is zero and not proved."""
        if self.objective is None or self.bound is None:
            return None
        distance = max(0.0, self.objective - self.bound)
        if distance == 0:
            return 0.0
        return math.inf if self.objective == 0 else distance / abs(self.objective)


def solve(problem: pulp.LpProblem, solver: SolverChoice = "auto", time_limit_seconds: float = 60.0) -> Solve:
    """Minimise a PuLP problem; the variables hold the solution afterwards.

    Args:
        solver: "auto": Gurobi if it has a licence of the user's own, else HiGHS, else CBC. An explicit "gurobi" takes
            the restricted licence that comes with pip's gurobipy too, and HiGHS where that one is too small.
        time_limit_seconds: for the search; what was found until then is returned as "feasible".

    Raises:
        SolverError: the solver is missing, failed or was killed.
        NothingFoundError: it found nothing within the time.
    """
    import pulp

    if not time_limit_seconds > 0:
        raise SolverError(f"the time limit must be more than zero, not {time_limit_seconds} s")
    started = time.perf_counter()
    try:
        found = _dispatch(problem, solver, time_limit_seconds)
    except pulp.PulpSolverError as error:
        raise SolverError(f"the solver failed: {_one_line(error)}") from error
    return replace(
        found,
        seconds=time.perf_counter() - started,
        variables=len(problem.variables()),
        constraints=problem.numConstraints(),
    )


def _dispatch(problem: pulp.LpProblem, solver: SolverChoice, seconds: float) -> Solve:
    if solver == "highs":
        return _highs(problem, seconds)
    if solver == "cbc":
        return _cbc(problem, seconds)
    if solver == "gurobi" or own_gurobi_licence():
        found = _gurobi(problem, seconds)
        if found is not None:
            return found
        _logger.warning(
            "the model is too large for gurobipy's restricted licence (2,000 variables or constraints):"
            " solving it with HiGHS"
        )
        return _highs(problem, seconds)
    try:
        import highspy  # noqa: F401
    except ImportError:
        return _cbc(problem, seconds)
    return _highs(problem, seconds)


def own_gurobi_licence() -> bool:
    """Whether Gurobi starts with another licence than the restricted one that comes with pip's gurobipy."""
    try:
        with _gurobi_environment() as (_, restricted):
            return not restricted
    except SolverError:
        return False


@contextlib.contextmanager
def _gurobi_environment() -> Iterator[tuple[Any, bool]]:
    """A silent Gurobi environment, and whether its licence is the restricted one (Gurobi says so only in its log)."""
    try:
        import gurobipy
    except ImportError:
        raise SolverError("Gurobi is not installed: pip install gurobipy, or choose --solver highs") from None
    with tempfile.TemporaryDirectory(prefix="checkflow-") as folder, contextlib.ExitStack() as stack:
        log = Path(folder) / "gurobi.log"
        try:
            environment = stack.enter_context(gurobipy.Env(empty=True))
            environment.setParam("LogToConsole", 0)
            environment.setParam("LogFile", str(log))
            environment.start()
        except gurobipy.GurobiError as error:
            raise SolverError(f"Gurobi does not start: {_one_line(error)}") from error
        restricted = "restricted license" in log.read_text(errors="replace").lower()
        environment.setParam("OutputFlag", 0)
        yield environment, restricted


def _gurobi(problem: pulp.LpProblem, seconds: float) -> Solve | None:
    """None: the licence is too small for this model."""
    import pulp

    with _gurobi_environment() as (environment, restricted):
        import gurobipy

        if restricted:
            _logger.warning("Gurobi runs with its restricted licence, which is for non-production use only")
        options = {"MIPGap": 0.0, "MIPGapAbs": 0.0, "Threads": _threads(), "Seed": 0}
        solver = pulp.GUROBI(msg=False, env=environment, timeLimit=seconds, **options)
        try:
            try:
                problem.solve(solver)
            except gurobipy.GurobiError as error:
                if error.errno == _GUROBI_TOO_LARGE:
                    return None
                raise SolverError(f"Gurobi failed: {_one_line(error)}") from error
            model = problem.solverModel
            codes = gurobipy.GRB
            version = ".".join(str(part) for part in gurobipy.gurobi.version())
            if model.Status in (codes.INFEASIBLE, codes.INF_OR_UNBD):
                return _infeasible("gurobi", version)
            if model.SolCount == 0:
                raise _nothing_found("Gurobi", seconds, f"status {model.Status}")
            return _found("gurobi", version, model.Status == codes.OPTIMAL, model.ObjVal, model.ObjBound)
        finally:
            solver.close()
            problem.solverModel = None


def _highs(problem: pulp.LpProblem, seconds: float) -> Solve:
    try:
        import highspy
    except ImportError:
        raise SolverError("HiGHS is not installed: pip install highspy, or choose --solver cbc") from None
    import pulp

    solver = pulp.HiGHS(
        msg=False, timeLimit=seconds, gapRel=0.0, gapAbs=0.0, threads=_threads(), random_seed=0, log_to_console=False
    )
    problem.solve(solver)
    model = problem.solverModel
    try:
        status, info, version = model.getModelStatus(), model.getInfo(), str(model.version())
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return _infeasible("highs", version)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise _nothing_found("HiGHS", seconds, model.modelStatusToString(status))
        optimal = status == highspy.HighsModelStatus.kOptimal
        integer = any(variable.cat == pulp.LpInteger for variable in problem.variables())
        # HiGHS keeps a dual bound for integer models only; a linear one is proved or it is not.
        bound = info.mip_dual_bound if integer else info.objective_function_value if optimal else -math.inf
        return _found("highs", version, optimal, info.objective_function_value, bound)
    finally:
        problem.solverModel = None  # it may be solved again, by another solver


def _cbc(problem: pulp.LpProblem, seconds: float) -> Solve:
    """CBC is a program of its own. It is started here, not by PuLP, whose interface has no way to end it."""
    import pulp

    program = next((path for path in (pulp.PULP_CBC_CMD.pulp_cbc_path, shutil.which("cbc")) if _runs(path)), None)
    if program is None:
        raise SolverError("CBC is not installed: apt install coinor-cbc, or choose --solver highs")
    reader = pulp.COIN_CMD(path=program, msg=False)
    with tempfile.TemporaryDirectory(prefix="checkflow-") as folder:
        model, solution, log = (Path(folder) / name for name in ("model.mps", "model.sol", "cbc.log"))
        variables, names, rows, _ = problem.writeMPS(str(model), rename=1)
        command = [
            str(program), str(model), "-sec", str(seconds), "-timeMode", "elapsed", "-ratio", "0", "-allow", "0",
            "-threads", "0", "-solve", "-printingOptions", "all", "-solution", str(solution),
        ]  # fmt: skip
        _run_cbc(command, log, seconds)
        text = log.read_text(errors="replace")
        if not solution.exists():
            raise SolverError("CBC failed: it wrote no solution")
        status, values, _, _, _, solution_status = reader.readsol_MPS(str(solution), problem, variables, names, rows)
    problem.assignVarsVals(values)
    problem.assignStatus(status, solution_status)
    version = (re.search(r"^Version:\s*(\S+)", text, re.MULTILINE) or ["", "unknown"])[1]
    if solution_status == pulp.LpSolutionInfeasible:
        return _infeasible("cbc", version)
    if solution_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise _nothing_found("CBC", seconds, pulp.LpSolution[solution_status])
    objective = float(pulp.value(problem.objective))
    lower = re.search(r"^Lower bound:\s*(\S+)", text, re.MULTILINE)
    optimal = solution_status == pulp.LpSolutionOptimal
    return _found("cbc", version, optimal, objective, objective if optimal else float(lower[1]) if lower else -math.inf)


def _run_cbc(command: list[str], log: Path, seconds: float) -> None:
    """Run to its end; whatever happens here, the process does not outlive this call."""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise SolverError(f"CBC does not start: {error.strerror or error}") from error
        try:
            code = process.wait(timeout=2 * seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise SolverError(f"CBC did not stop at its time limit of {seconds:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code:
        reason = f"it was killed by signal {-code}" if code < 0 else f"exit status {code}"
        raise SolverError(f"CBC failed: {reason}")


def _found(name: SolverName, version: str, optimal: bool, objective: float, bound: float) -> Solve:
    return Solve(name, version, "optimal" if optimal else "feasible", objective, bound, 0.0, 0, 0)


def _infeasible(name: SolverName, version: str) -> Solve:
    return Solve(name, version, "infeasible", None, None, 0.0, 0, 0)


def _nothing_found(name: str, seconds: float, status: str) -> NothingFoundError:
    return NothingFoundError(f"{name} found nothing within {seconds:g} s ({status}); give it more with --time-limit")


def _threads() -> int:
    """What this process may use; a job's limits count, not the machine's size."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _runs(path: str | None) -> bool:
    return path is not None and os.path.isfile(path) and os.access(path, os.X_OK)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
