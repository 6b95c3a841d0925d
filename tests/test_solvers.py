"""Three solvers behind one function: what they report, and what they do when time, licence or program fail."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import threading
import time
from pathlib import Path

import psutil
import pulp
import pytest

from checkflow.errors import SolverError
from checkflow.planner import solvers
from checkflow.planner.solvers import NothingFoundError, Solve, SolverName, solve

NAMES: list[SolverName] = ["gurobi", "highs", "cbc"]


def has_gurobi_licence() -> bool:
    """Where Gurobi looks for one."""
    files = (os.environ.get("GRB_LICENSE_FILE"), Path.home() / "gurobi.lic", "/opt/gurobi/gurobi.lic")
    return any(file is not None and Path(file).exists() for file in files)


restricted_only = pytest.mark.skipif(has_gurobi_licence(), reason="this machine has a Gurobi licence of its own")


def small() -> pulp.LpProblem:
    """max 5x + 4y + 3z: optimum 13 at (2, 0, 1), as a minimisation; its relaxation is better."""
    problem = pulp.LpProblem("small", pulp.LpMinimize)
    x, y, z = (pulp.LpVariable(name, 0, None, pulp.LpInteger) for name in "xyz")
    problem += -5 * x - 4 * y - 3 * z
    problem += 2 * x + 3 * y + z <= 5
    problem += 4 * x + y + 2 * z <= 11
    problem += 3 * x + 4 * y + 2 * z <= 8
    return problem


def hard() -> pulp.LpProblem:
    """A market split problem: solutions are found at once, proofs take hours."""
    rng = random.Random(0)
    problem = pulp.LpProblem("hard", pulp.LpMinimize)
    choice = [pulp.LpVariable(f"x{i}", cat=pulp.LpBinary) for i in range(40)]
    over, under = ([pulp.LpVariable(f"{name}{j}", 0) for j in range(5)] for name in ("over", "under"))
    problem += pulp.lpSum(over) + pulp.lpSum(under)
    for plus, minus in zip(over, under, strict=True):
        weights = [rng.randrange(100) for _ in choice]
        problem += pulp.lpSum(w * x for w, x in zip(weights, choice, strict=True)) + plus - minus == sum(weights) // 2
    return problem


def large() -> pulp.LpProblem:
    """More variables than the restricted licence of pip's gurobipy allows."""
    problem = pulp.LpProblem("large", pulp.LpMinimize)
    many = [pulp.LpVariable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(2100)]
    problem += pulp.lpSum(many)
    problem += pulp.lpSum(many) >= 7
    return problem


@pytest.mark.parametrize("name", NAMES)
def test_optimum(name: SolverName, capfd: pytest.CaptureFixture[str]) -> None:
    problem = small()
    found = solve(problem, name)
    assert (found.name, found.status) == (name, "optimal")
    assert found.objective == pytest.approx(-13)
    assert found.bound == pytest.approx(-13)
    assert found.gap == pytest.approx(0, abs=1e-9)
    assert (found.variables, found.constraints) == (3, 3)
    assert found.version[0].isdigit()
    assert [variable.varValue for variable in problem.variables()] == pytest.approx([2, 0, 1])
    assert capfd.readouterr().out == ""  # no banner


@pytest.mark.parametrize("name", NAMES)
def test_infeasible(name: SolverName) -> None:
    problem = small()
    problem += problem.variablesDict()["x"] >= 9
    found = solve(problem, name)
    assert (found.status, found.objective, found.bound, found.gap) == ("infeasible", None, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_time_out_is_never_called_optimal(name: SolverName) -> None:
    problem = hard()
    found = solve(problem, name, time_limit_seconds=1.0)
    assert found.status == "feasible"
    assert found.objective is not None
    assert found.bound is not None
    assert found.gap is not None
    assert found.bound < found.objective
    assert found.gap > 0.1
    assert pulp.value(problem.objective) == pytest.approx(found.objective)
    assert problem.valid(1e-6)  # the values are a solution


@pytest.mark.parametrize("name", ["highs", "cbc"])
def test_time_out_before_anything_is_found(name: SolverName) -> None:
    with pytest.raises(NothingFoundError, match=r"found nothing within 1e-05 s .* --time-limit"):
        solve(hard(), name, time_limit_seconds=1e-5)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_time_limit_must_be_positive(seconds: float) -> None:
    with pytest.raises(SolverError, match="time limit"):
        solve(small(), "highs", time_limit_seconds=seconds)


def test_one_problem_can_be_solved_by_all_in_turn() -> None:
    problem = small()
    assert [solve(problem, name).objective for name in [*NAMES, *NAMES]] == pytest.approx([-13.0] * 6)


@restricted_only
def test_restricted_licence_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "checkflow"):
        solve(small(), "gurobi")
    assert "non-production use" in caplog.text


@restricted_only
def test_too_large_for_the_restricted_licence(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, "checkflow"):
        found = solve(large(), "gurobi")
    assert (found.name, found.status) == ("highs", "optimal")
    assert found.objective == pytest.approx(7)
    told = [record.getMessage() for record in caplog.records if "2,000" in record.getMessage()]
    assert len(told) == 1
    assert "HiGHS" in told[0]
    assert capfd.readouterr().out == ""


@restricted_only
def test_pip_s_licence_is_not_ones_own() -> None:
    assert not solvers.own_gurobi_licence()
    assert solve(small()).name == "highs"


def test_auto_takes_gurobi_only_with_a_licence_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "own_gurobi_licence", lambda: True)
    assert solve(small()).name == "gurobi"
    monkeypatch.setattr(solvers, "own_gurobi_licence", lambda: False)
    assert solve(small()).name == "highs"


def test_auto_falls_back_to_cbc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gurobipy", "highspy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert solve(small()).name == "cbc"


@pytest.mark.parametrize(("name", "module"), [("gurobi", "gurobipy"), ("highs", "highspy")])
def test_missing_module(name: SolverName, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SolverError, match=rf"not installed: pip install {module}"):
        solve(small(), name)


def test_missing_cbc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(tmp_path / "cbc"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SolverError, match="CBC is not installed"):
        solve(small(), "cbc")


@pytest.mark.parametrize(
    ("script", "reason"),
    [("kill -9 $$", "killed by signal 9"), ("exit 3", "exit status 3"), ("exit 0", "wrote no solution")],
)
def test_failing_cbc(script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "cbc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    with pytest.raises(SolverError, match=f"^CBC failed: .*{reason}$"):
        solve(small(), "cbc")


def test_cbc_that_ignores_its_time_limit_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "cbc"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    monkeypatch.setattr(solvers, "_GRACE_SECONDS", 0.1)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(SolverError, match="did not stop"):
        solve(small(), "cbc", time_limit_seconds=0.1)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_killed_cbc_leaves_no_process_and_one_line() -> None:
    """The real program, killed from outside in the middle of its search."""
    before = set(psutil.Process().children(recursive=True))

    def kill() -> None:
        for _ in range(200):
            for child in set(psutil.Process().children(recursive=True)) - before:
                if "cbc" in child.name():
                    child.kill()
                    return
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SolverError) as caught:
        solve(hard(), "cbc", time_limit_seconds=30.0)
    killer.join()
    assert str(caught.value) == "CBC failed: it was killed by signal 9"
    assert set(psutil.Process().children(recursive=True)) <= before


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        solve(small(), name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("objective", "bound", "gap"), [(10.0, 9.0, 0.1), (0.0, 0.0, 0.0), (0.0, -1.0, math.inf), (-4.0, -5.0, 0.25)]
)
def test_gap(objective: float, bound: float, gap: float) -> None:
    assert Solve("cbc", "2", "feasible", objective, bound, 0.0, 1, 1).gap == pytest.approx(gap)
