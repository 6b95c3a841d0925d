"""One function over three solvers, through PuLP: Gurobi, HiGHS, CBC.

What a solver calls itself, and what PuLP makes of it, is not trusted: "optimal" is said only of a proof, a schedule
found when time ran out is "feasible" (PuLP reports CBC's and HiGHS's as status 1 with sol_status 2), and the caller
checks the values themselves. Nothing is written to standard output.

Whatever stops the main thread (Ctrl-C, or another signal whose handler raises) ends the search too: CBC is a process of
its own and is killed; HiGHS and Gurobi run in a thread, since no handler of Python's runs while the main thread is in
their code, and are told to stop.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkflow.errors import SolverError
from checkflow.planner import highs

if TYPE_CHECKING:
    import pulp

SolverName = Literal["gurobi", "highs", "cbc"]
SolverChoice = Literal["auto", "gurobi", "highs", "cbc"]
SolveStatus = Literal["optimal", "feasible", "infeasible"]
# Gurobi's errors of a licence: none that counts (expired, another machine's, no token server), too small for the model
# (the restricted one ends at 2,000 variables or constraints), or a server or a cloud that does not let us in.
_GUROBI_LICENCE = frozenset({10009, 10010, 10022, 10023, 10028, 10030})
# Up to so many, a search for a first solution takes a third of the time, and the root's relaxation gives one anyway.
_SMALL_VARIABLES = 10_000
_GRACE_SECONDS = 10.0  # CBC looks at the clock only now and then
_POLL_SECONDS = 0.05
# HiGHS and Gurobi look for a cancellation between two steps of their search. Some steps are long (presolve); then the
# thread is left to itself, and ends later, or with the process.
_CANCEL_SECONDS = 1.0
_LARGEST = 1e15  # HiGHS takes no larger coefficients, and beside such numbers a whole one is lost in rounding
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


def solve(
    problem: pulp.LpProblem,
    solver: SolverChoice = "auto",
    time_limit_seconds: float = 60.0,
    tolerance: float | None = None,
) -> Solve:
    """Minimise a PuLP problem; the variables hold the solution afterwards.

    Args:
        solver: "auto": Gurobi if it has a licence of the user's own, else HiGHS, else CBC. An explicit "gurobi" takes
            the restricted licence that comes with pip's gurobipy too. Where Gurobi's licence does not admit the model,
            HiGHS (or CBC) solves it, and one warning says so.
        time_limit_seconds: for the search; what was found until then is returned as "feasible". Infinite: no limit.
        tolerance: how far a value may be from a whole one, and a row from its bound; None: the solver's own, some 1e-6.
            Coefficients of 1e6 and more need less: a binary that is a millionth short of one would hide a whole unit.

    Raises:
        SolverError: the solver is missing, failed or was killed; or the problem holds a number that is not finite, or
            one that solvers cannot carry.
        NothingFoundError: it found nothing within the time.
    """
    import pulp

    if not time_limit_seconds > 0:
        raise SolverError(f"the time limit must be more than zero, not {time_limit_seconds} s")
    check_numbers(problem)
    started = time.perf_counter()
    try:
        found = _dispatch(problem, solver, time_limit_seconds, tolerance)
    except pulp.PulpSolverError as error:
        raise SolverError(f"the solver failed: {_one_line(error)}") from error
    if found.status != "infeasible":
        for variable in problem.variables():
            if variable.varValue is None or not math.isfinite(variable.varValue):
                raise SolverError(f"{found.name} failed: it gives {variable.name} the value {variable.varValue}")
    return replace(
        found,
        seconds=time.perf_counter() - started,
        variables=len(problem.variables()),
        constraints=problem.numConstraints(),
    )


def check_numbers(problem: pulp.LpProblem) -> None:
    """Refuse what solvers answer wrongly, or each in its own way.

    Raises:
        SolverError: a coefficient, a bound or a right-hand side is not finite, or larger than 1e15; a variable's bounds
            cross (model files cannot say so); the objective is missing, or has a constant (not all of them count it).
    """
    if problem.objective is None or problem.objective.constant:
        raise SolverError("the model cannot be solved: its objective is missing, or has a constant")
    for where, value in _numbers(problem):
        if not abs(value) <= _LARGEST:  # no number compares with NaN
            raise SolverError(f"the model cannot be solved: {where} is {value:g}; solvers carry numbers up to 1e15")
    for variable in problem.variables():
        if None not in (variable.lowBound, variable.upBound) and variable.lowBound > variable.upBound:
            raise SolverError(f"the model cannot be solved: the bounds of {variable.name} cross")


def _numbers(problem: pulp.LpProblem) -> Iterator[tuple[str, float]]:
    for variable in problem.variables():
        for bound in (variable.lowBound, variable.upBound):
            if bound is not None:
                yield f"a bound of {variable.name}", bound
    for variable, coefficient in problem.objective.items():
        yield f"the objective's coefficient of {variable.name}", coefficient
    for row in problem.constraints():
        yield f"the right-hand side of row {row.name}", row.constant
        for variable, coefficient in row.items():
            yield f"the coefficient of {variable.name} in row {row.name}", coefficient


def _dispatch(problem: pulp.LpProblem, solver: SolverChoice, seconds: float, tolerance: float | None) -> Solve:
    if solver == "cbc":
        return _cbc(problem, seconds, tolerance)
    if solver != "highs":
        found = _licensed_gurobi(problem, solver, seconds, tolerance)
        if found is not None:
            return found
    if solver != "highs" and not _installed("highspy"):
        return _cbc(problem, seconds, tolerance)
    return _highs(problem, seconds, tolerance)


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


class _LicenceError(SolverError):
    """There is no valid licence of Gurobi, or it does not admit the model."""


def _licensed_gurobi(
    problem: pulp.LpProblem, solver: SolverChoice, seconds: float, tolerance: float | None
) -> Solve | None:
    """None: another solver has to do it. That is told where Gurobi was asked for, or a licence of one's own fails."""
    if solver == "auto" and not _installed("gurobipy"):
        return None
    try:
        with _gurobi_environment() as (environment, restricted):
            if not restricted:
                return _gurobi(problem, environment, seconds, tolerance)
            if solver == "auto":
                return None
            found = _gurobi(problem, environment, seconds, tolerance)
            _logger.warning("Gurobi ran with its restricted licence, which is for non-production use only")
            return found
    except _LicenceError as error:
        _logger.warning("%s; solving with %s instead", error, "HiGHS" if _installed("highspy") else "CBC")
        return None


@contextlib.contextmanager
def _gurobi_environment() -> Iterator[tuple[Any, bool]]:
    """A silent Gurobi environment, and whether its licence is the restricted one (Gurobi says so only in its log)."""
    try:
        import gurobipy
    except ImportError:
        raise SolverError("Gurobi is not installed: pip install gurobipy, or choose --solver highs") from None
    with _files() as folder, contextlib.ExitStack() as stack:
        log = folder / "gurobi.log"
        try:
            environment = stack.enter_context(gurobipy.Env(empty=True))
            environment.setParam("LogToConsole", 0)
            environment.setParam("LogFile", str(log))
            environment.start()
        except gurobipy.GurobiError as error:
            raise _gurobi_error("Gurobi does not start", error) from error
        restricted = _is_restricted(log.read_text(errors="replace"))
        environment.setParam("OutputFlag", 0)
        yield environment, restricted


@contextlib.contextmanager
def _files() -> Iterator[Path]:
    """A folder for a solver's files, gone afterwards."""
    try:
        with tempfile.TemporaryDirectory(prefix="checkflow-") as folder:
            yield Path(folder)
    except OSError as error:
        raise SolverError(f"the solver's files cannot be written: {error.strerror or error}") from error


def _is_restricted(log: str) -> bool:
    return "restricted license" in log.lower()


def _gurobi(problem: pulp.LpProblem, environment: Any, seconds: float, tolerance: float | None) -> Solve:
    import gurobipy
    import pulp

    codes = gurobipy.GRB
    options = {"MIPGap": 0.0, "MIPGapAbs": 0.0, "Threads": _threads(), "Seed": 0}
    if tolerance is not None:
        options |= {"IntFeasTol": tolerance, "FeasibilityTol": tolerance}
    solver = pulp.GUROBI(msg=False, env=environment, timeLimit=seconds, **options)
    try:
        try:
            solver.buildSolverModel(problem)
            model = problem.solverModel
            _in_thread(model.optimize, model.terminate)
            if model.Status == codes.INF_OR_UNBD:  # which of the two is known only without these reductions
                model.setParam("DualReductions", 0)
                _in_thread(model.optimize, model.terminate)
            solver.findSolutionValues(problem)
        except gurobipy.GurobiError as error:
            raise _gurobi_error("Gurobi failed", error) from error
        if model.Status == codes.INTERRUPTED:  # by Ctrl-C before the handler was back
            raise KeyboardInterrupt
        version = ".".join(str(part) for part in gurobipy.gurobi.version())
        if model.Status == codes.INFEASIBLE:
            return _infeasible("gurobi", version)
        if model.Status not in (codes.OPTIMAL, codes.TIME_LIMIT):
            raise SolverError(f"Gurobi failed: status {model.Status}")
        if model.SolCount == 0:
            raise _nothing_found("Gurobi", seconds)
        return _found("gurobi", version, model.Status == codes.OPTIMAL, model.ObjVal, model.ObjBound)
    finally:
        solver.close()
        problem.solverModel = None
        for variable in problem.variables():  # what PuLP keeps of a closed model would be taken for the next one's
            vars(variable).pop("solverVar", None)


def _gurobi_error(what: str, error: Any) -> SolverError:
    kind = _LicenceError if error.errno in _GUROBI_LICENCE else SolverError
    return kind(f"{what}: {_one_line(error)}")


def _highs(problem: pulp.LpProblem, seconds: float, tolerance: float | None) -> Solve:
    try:
        import highspy
    except ImportError:
        raise SolverError("HiGHS is not installed: pip install highspy, or choose --solver cbc") from None
    import pulp

    options = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "time_limit": seconds, "threads": _threads(), "random_seed": 0}
    if problem.numVariables() <= _SMALL_VARIABLES:
        options["mip_heuristic_run_feasibility_jump"] = False
    if tolerance is not None:
        options |= {"mip_feasibility_tolerance": tolerance, "primal_feasibility_tolerance": tolerance}
    model = highs.make_model(problem, options)
    model.HandleUserInterrupt = True  # else it cannot be cancelled
    _in_thread(model.run, model.cancelSolve)
    status, info, version = model.getModelStatus(), model.getInfo(), str(model.version())
    if status == highspy.HighsModelStatus.kInfeasible:
        return _infeasible("highs", version)
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        raise SolverError(f"HiGHS failed: {model.modelStatusToString(status).lower()}")
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise _nothing_found("HiGHS", seconds)
    highs.assign_values(problem, model)
    optimal = status == highspy.HighsModelStatus.kOptimal
    integer = any(variable.cat == pulp.LpInteger for variable in problem.variables())
    # HiGHS keeps a dual bound for integer models only; a linear one is proved or it is not.
    bound = info.mip_dual_bound if integer else info.objective_function_value if optimal else -math.inf
    return _found("highs", version, optimal, info.objective_function_value, bound)


def _in_thread(search: Callable[[], object], cancel: Callable[[], object]) -> None:
    """Run a search to its end, or, if an exception is raised here meanwhile, cancel it.

    A signal is handled by Python's code only, so the main thread must not be in a solver's. Not ``Thread.join``:
    interrupted once, it takes the thread for finished (CPython 3.11).
    """
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            search()
        except BaseException as error:  # noqa: BLE001 - it is raised below, where the caller is
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="checkflow-solver", daemon=True).start()
    try:
        while not done.wait(_POLL_SECONDS):
            _keep_interrupts()
    except BaseException:
        cancel()
        done.wait(_CANCEL_SECONDS)
        raise
    if failures:
        raise failures[0]


def _keep_interrupts() -> None:
    """Put Python's handler of Ctrl-C back: Gurobi's search replaces it by one that writes to standard output."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _cbc(problem: pulp.LpProblem, seconds: float, tolerance: float | None) -> Solve:
    """CBC is a program of its own. It is started here, not by PuLP, whose interface has no way to end it."""
    import pulp

    program = next((path for path in (pulp.PULP_CBC_CMD.pulp_cbc_path, shutil.which("cbc")) if _runs(path)), None)
    if program is None:
        raise SolverError("CBC is not installed: apt install coinor-cbc, or choose --solver highs")
    reader = pulp.COIN_CMD(path=program, msg=False)
    with _files() as folder:
        model, solution, log = (folder / name for name in ("model.mps", "model.sol", "cbc.log"))
        variables, names, rows, _ = problem.writeMPS(str(model), rename=1)
        limit = [] if math.isinf(seconds) else ["-sec", str(seconds)]
        exact = [] if tolerance is None else ["-integerTolerance", str(tolerance), "-primalTolerance", str(tolerance)]
        command = [
            program, str(model), *limit, *exact, "-timeMode", "elapsed", "-ratio", "0", "-allow", "0",
            "-threads", "0", "-solve", "-printingOptions", "all", "-solution", str(solution),
        ]  # fmt: skip
        _run_cbc(command, log, seconds)
        text = log.read_text(errors="replace")
        _check_whole(solution, lines=1 + problem.numConstraints() + len(variables))
        try:
            status, values, *_, solution_status = reader.readsol_MPS(str(solution), problem, variables, names, rows)
        except (ValueError, IndexError):
            raise SolverError("CBC failed: its solution file is damaged") from None
    problem.assignVarsVals(values)
    problem.assignStatus(status, solution_status)
    version = (re.search(r"^Version:\s*(\S+)", text, re.MULTILINE) or ["", "unknown"])[1]
    if status == pulp.LpStatusInfeasible:  # "Integer infeasible" too, to which PuLP gives another solution status
        return _infeasible("cbc", version)
    if solution_status == pulp.LpSolutionNoSolutionFound:
        raise _nothing_found("CBC", seconds)
    if solution_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverError(f"CBC failed: {pulp.LpSolution[solution_status].lower()}")
    # the solution file has eight digits, so that a sum over its values may be below the bound; the log has all
    told = re.search(r"^Objective value:\s*(\S+)", text, re.MULTILINE)
    objective = float(told[1]) if told else float(pulp.value(problem.objective))
    lower = re.search(r"^Lower bound:\s*(\S+)", text, re.MULTILINE)
    optimal = solution_status == pulp.LpSolutionOptimal
    return _found("cbc", version, optimal, objective, objective if optimal else float(lower[1]) if lower else -math.inf)


def _run_cbc(command: list[str], log: Path, seconds: float) -> None:
    """Run to its end; whatever happens here, the process does not outlive this call."""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise SolverError(f"CBC does not start: {command[0]}: {error.strerror or error}") from error
        try:
            code = process.wait(timeout=None if math.isinf(seconds) else 2 * seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise SolverError(f"CBC did not stop at its time limit of {seconds:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code:
        reason = f"it was killed by signal {-code}" if code < 0 else f"exit status {code}"
        last = log.read_text(errors="replace").split("\n")[-2:-1]
        raise SolverError(": ".join((f"CBC failed: {reason}", *(line.strip() for line in last if code > 0))))


def _check_whole(solution: Path, lines: int) -> None:
    """A row that is missing would be read as zeros.

    Args:
        lines: that a whole file has: the status, and each row and column of the model.
    """
    try:
        text = solution.read_text()
    except FileNotFoundError:
        raise SolverError("CBC failed: it wrote no solution") from None
    except UnicodeDecodeError:
        raise SolverError("CBC failed: its solution file is damaged") from None
    if len(text.splitlines()) != lines or not text.endswith("\n"):
        raise SolverError("CBC failed: its solution file is cut short")


def _found(name: SolverName, version: str, optimal: bool, objective: float, bound: float) -> Solve:
    return Solve(name, version, "optimal" if optimal else "feasible", objective, bound, 0.0, 0, 0)


def _infeasible(name: SolverName, version: str) -> Solve:
    return Solve(name, version, "infeasible", None, None, 0.0, 0, 0)


def _nothing_found(name: str, seconds: float) -> NothingFoundError:
    return NothingFoundError(f"{name} found nothing within {seconds:g} s; give it more with --time-limit")


def _threads() -> int:
    """What this process may use; a job's limits count, not the machine's size."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _runs(path: str | None) -> bool:
    return path is not None and os.path.isfile(path) and os.access(path, os.X_OK)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
