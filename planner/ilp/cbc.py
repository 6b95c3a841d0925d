"""Runs CBC as a child process of its own, since PuLP's interface cannot kill it."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from checkflow.core.errors import SolverError
from checkflow.planner.ilp.search import Solve, Watch, found, infeasible, nothing_found, solver_files

if TYPE_CHECKING:
    import pulp

_GRACE_SECONDS = 10.0  # CBC reads the clock only now and then


def search(problem: pulp.LpProblem, seconds: float, tolerance: float | None) -> Solve:
    """Minimise, as :func:`.solvers.solve`."""
    import pulp

    program = next((path for path in (pulp.PULP_CBC_CMD.pulp_cbc_path, shutil.which("cbc")) if _runs(path)), None)
    if program is None:
        raise SolverError("CBC is not installed: apt install coinor-cbc, or choose --solver highs")
    reader = pulp.COIN_CMD(path=program, msg=False)
    with solver_files() as folder:
        model, solution, log = (folder / name for name in ("model.mps", "model.sol", "cbc.log"))
        variables, names, rows, _ = problem.writeMPS(str(model), rename=1)
        limit = [] if math.isinf(seconds) else ["-sec", str(seconds)]
        exact = [] if tolerance is None else ["-integerTolerance", str(tolerance), "-primalTolerance", str(tolerance)]
        command = [
            program, str(model), *limit, *exact, "-timeMode", "elapsed", "-ratio", "0", "-allow", "0",
            "-threads", "0", "-solve", "-printingOptions", "all", "-solution", str(solution),
        ]  # fmt: skip
        Watch("CBC", seconds).tell()
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
        return infeasible("cbc", version)
    if solution_status == pulp.LpSolutionNoSolutionFound:
        raise nothing_found("CBC", seconds)
    if solution_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverError(f"CBC failed: {pulp.LpSolution[solution_status].lower()}")
    # The solution file has eight digits, so a sum over its values may be below the bound; the log has all digits.
    logged = re.search(r"^Objective value:\s*(\S+)", text, re.MULTILINE)
    objective = float(logged[1]) if logged else float(pulp.value(problem.objective))
    lower = re.search(r"^Lower bound:\s*(\S+)", text, re.MULTILINE)
    optimal = solution_status == pulp.LpSolutionOptimal
    return found("cbc", version, optimal, objective, objective if optimal else float(lower[1]) if lower else -math.inf)


def _run_cbc(command: list[str], log: Path, seconds: float) -> None:
    """Run CBC to its end; the process never outlives this call."""
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
    """Refuse a solution file with fewer than ``lines`` lines: a missing row would be read as zeros."""
    try:
        text = solution.read_text()
    except FileNotFoundError:
        raise SolverError("CBC failed: it wrote no solution") from None
    except UnicodeDecodeError:
        raise SolverError("CBC failed: its solution file is damaged") from None
    if len(text.splitlines()) != lines or not text.endswith("\n"):
        raise SolverError("CBC failed: its solution file is cut short")


def _runs(path: str | None) -> bool:
    return path is not None and os.path.isfile(path) and os.access(path, os.X_OK)
