"""Three solvers behind one function: what they report, and what they do when time, licence or program fail."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import highspy
import psutil
import pulp
import pytest

from checkflow.core.errors import SolverError
from checkflow.planner.ilp import cbc, gurobi, highs, solvers
from checkflow.planner.ilp.search import nothing_printed
from checkflow.planner.ilp.solvers import NothingFoundError, Solve, SolverChoice, SolverName, solve
from tests.support.waiting import PATIENCE_SECONDS, blocked, wait_for

ROOT = Path(__file__).parents[3]

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


def split() -> pulp.LpProblem:
    """The same, of which only exact splits are solutions: none is found for a long time, nor that there is none."""
    problem = hard()
    for variable in problem.variables():
        if variable.name.startswith(("over", "under")):
            variable.upBound = 0
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


def stopped(name: SolverName) -> tuple[pulp.LpProblem, Solve]:
    """A solve whose time ran out with something found: how much of it that takes is the machine's affair."""
    for seconds in (1.0, 4.0, 16.0, 64.0, 256.0):
        problem = hard()
        with contextlib.suppress(NothingFoundError):
            found = solve(problem, name, time_limit_seconds=seconds)
            if found.bound is not None:
                return problem, found
    pytest.fail("nothing is found")


@pytest.mark.parametrize("name", NAMES)
def test_time_out_is_never_called_optimal(name: SolverName) -> None:
    problem, found = stopped(name)
    assert found.status == "feasible"
    assert found.objective is not None
    assert found.bound is not None
    assert found.gap is not None
    assert found.bound < found.objective
    assert found.gap > 0.1
    assert pulp.value(problem.objective) == pytest.approx(found.objective)
    assert problem.valid(1e-6)  # the values are a solution


@pytest.mark.parametrize("name", NAMES)
def test_time_out_before_anything_is_found(name: SolverName) -> None:
    with pytest.raises(NothingFoundError, match=r"found nothing within 0.2 s; .* --time-limit"):
        solve(split(), name, time_limit_seconds=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_no_time_limit(name: SolverName) -> None:
    assert solve(small(), name, time_limit_seconds=math.inf).status == "optimal"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_time_limit_must_be_positive(seconds: float) -> None:
    with pytest.raises(SolverError, match="time limit"):
        solve(small(), "highs", time_limit_seconds=seconds)


def with_number(place: str, value: float) -> pulp.LpProblem:
    """The small problem with one number changed after it was built: PuLP refuses some of them itself, and some not."""
    problem = small()
    x = problem.variablesDict()["x"]
    if place == "objective":
        problem.objective[x] = value
    elif place == "coefficient":
        problem.constraints()[0].expr[x] = value
    elif place == "right-hand side":
        problem.constraints()[0].constant = -value
    elif place == "lower bound":
        x.lowBound = value
    elif place == "upper bound":
        x.upBound = value
    return problem


PLACES = ["objective", "coefficient", "right-hand side", "lower bound", "upper bound"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e18, -1e18, 1.1e15])
@pytest.mark.parametrize("place", PLACES)
def test_numbers_that_solvers_cannot_carry_are_refused(
    place: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solvers, "_dispatch", lambda *_: pytest.fail("a solver was started"))
    with pytest.raises(SolverError, match=r"^the model cannot be solved: .* solvers carry numbers up to 1e15$"):
        solve(with_number(place, value))


@pytest.mark.parametrize(
    ("place", "optimum"), [("objective", -12), ("coefficient", -13), ("right-hand side", None), ("lower bound", -13)]
)
@pytest.mark.parametrize("name", NAMES)
def test_negative_numbers_are_solved(name: SolverName, place: str, optimum: float | None) -> None:
    found = solve(with_number(place, -2.0), name)
    assert found.status == ("infeasible" if optimum is None else "optimal")
    assert found.objective == (None if optimum is None else pytest.approx(optimum))


def test_models_that_solvers_read_in_different_ways_are_refused() -> None:
    """A negative upper bound above no lower one means something else in a model file; constants are not reported."""
    with pytest.raises(SolverError, match="bounds of x cross"):
        solve(with_number("upper bound", -2.0))
    problem = small()
    problem.objective.constant = 1.0
    with pytest.raises(SolverError, match="objective is missing, or has a constant"):
        solve(problem)
    with pytest.raises(SolverError, match="objective is missing, or has a constant"):
        solve(pulp.LpProblem("empty", pulp.LpMinimize))


@pytest.mark.parametrize("name", NAMES)
def test_unbounded_is_not_called_infeasible(name: SolverName) -> None:
    problem = pulp.LpProblem("unbounded", pulp.LpMinimize)
    x, y = (pulp.LpVariable(letter, 0, None, pulp.LpInteger) for letter in "xy")
    problem += -x - y
    problem += x - y <= 3
    with pytest.raises(SolverError, match=r"failed: .*(unbounded|status 5)"):
        solve(problem, name)


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
    (told,) = caplog.messages
    assert "too large for size-limited license" in told
    assert "HiGHS" in told
    assert capfd.readouterr().out == ""


@restricted_only
def test_auto_leaves_the_restricted_licence_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "checkflow"):
        assert solve(small()).name == "highs"
    assert caplog.messages == []


@restricted_only
def test_auto_takes_gurobi_with_a_licence_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The licence here is the restricted one, taken for a full one: so it is too small as well."""
    monkeypatch.setattr(gurobi, "_is_restricted", lambda log: False)
    with caplog.at_level(logging.WARNING, "checkflow"):
        assert solve(small()).name == "gurobi"
        assert caplog.messages == []
        assert solve(large()).name == "highs"
    (told,) = caplog.messages
    assert "too large" in told
    assert "HiGHS" in told


@pytest.mark.parametrize("solver", ["auto", "gurobi"])
@pytest.mark.parametrize(
    ("licence", "reason"),
    [
        (None, "Unable to open"),
        ("TYPE=ACADEMIC\nVERSION=13\nHOSTID=1234abcd\nEXPIRATION=2020-01-01\nKEY=ABCDEFGH\n", "expired 2020-01-01"),
        ("TOKENSERVER=127.0.0.1\nPORT=1\n", "Failed to connect to token server"),
        ("not a licence\n", "No HostID"),
    ],
    ids=["missing", "expired", "token server away", "damaged"],
)
def test_a_licence_that_fails_is_told_once(
    solver: SolverChoice, licence: str | None, reason: str, tmp_path: Path
) -> None:
    """Gurobi reads its licence once a process: in a process of its own."""
    file = tmp_path / "gurobi.lic"
    if licence is not None:
        file.write_text(licence)
    script = f"from tests.planner.ilp.test_solvers import small, solve; print(solve(small(), {solver!r}).name)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "GRB_LICENSE_FILE": str(file)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "highs\n"), done.stderr
    (told,) = done.stderr.splitlines()
    assert told.startswith("Gurobi does not start: ")
    assert reason in told
    assert told.endswith("solving with HiGHS instead")


def test_what_a_solver_prints_is_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A banner from the constructor, before any option can silence it: through Python, the C library, the system."""
    c_library = ctypes.CDLL(None)

    class Chatty(highspy.Highs):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            sys.stdout.write("banner of Python's\n")
            os.write(1, b"banner of the system's\n")
            super().__init__()

    def search(*arguments: Any) -> Solve:
        try:
            return found(*arguments)
        finally:
            c_library.puts(b"farewell of C's, which nobody flushes")

    found = highs.search
    monkeypatch.setattr(highs, "search", search)
    monkeypatch.setattr(highspy, "Highs", Chatty)
    c_library.puts(b"before, kept by C")
    solve(small(), "highs")
    os.write(1, b"after\n")
    c_library.fflush(None)
    assert capfd.readouterr().out.splitlines() == ["before, kept by C", "after"]


def test_two_at_once_put_standard_output_back(capfd: pytest.CaptureFixture[str]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with nothing_printed():
            inside.set()
            leave.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=other)
    with nothing_printed():
        thread.start()
        stands_still = blocked(thread)
        wait_for(lambda: stands_still() or inside.is_set())
        assert not inside.is_set()  # it would put back what leads nowhere
    leave.set()
    thread.join()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_closed_standard_streams_hinder_no_solver() -> None:
    script = (
        "import os; os.closerange(0, 2); from tests.planner.ilp.test_solvers import small, solve; "
        "solve(small(), 'highs')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_auto_falls_back_to_cbc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gurobipy", "highspy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert solve(small()).name == "cbc"


@pytest.mark.parametrize(("name", "module"), [("gurobi", "gurobipy"), ("highs", "highspy")])
def test_missing_module(name: SolverName, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SolverError, match=rf"not installed: pip install {module}"):
        solve(small(), name)


# What CBC writes for the small problem.
SOLUTION = """\
Optimal - objective value -13.00000000
      0 C0000000               5                       0
      1 C0000001              10                       0
      2 C0000002               8                       0
      0 X0000000               2                      -5
      1 X0000001               0                      -4
      2 X0000002               1                      -3
"""


def test_missing_cbc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(tmp_path / "cbc"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SolverError, match="CBC is not installed"):
        solve(small(), "cbc")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "killed by signal 9"),
        ("exit 3", "exit status 3"),
        ("echo banner; echo no memory; exit 3", "exit status 3: no memory"),
        ("exit 0", "wrote no solution"),
        (': > "$SOLUTION"', "solution file is cut short"),
        ('head -c 5 "$WHOLE" > "$SOLUTION"', "solution file is cut short"),
        ('head -n -1 "$WHOLE" > "$SOLUTION"', "solution file is cut short"),
        ('head -c -1 "$WHOLE" > "$SOLUTION"', "solution file is cut short"),
        ('printf "\\377" > "$SOLUTION"', "solution file is damaged"),
        ('sed s/-5/five/ "$WHOLE" > "$SOLUTION"', "solution file is damaged"),
        ('sed s/10/"  "/ "$WHOLE" > "$SOLUTION"', "solution file is damaged"),
    ],
)
def test_failing_cbc(script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "cbc"
    (tmp_path / "whole").write_text(SOLUTION)
    program.write_text(f'#!/bin/sh\nfor SOLUTION; do :; done\nWHOLE="{tmp_path}/whole"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    with pytest.raises(SolverError, match=f"^CBC failed: .*{reason}$"):
        solve(small(), "cbc")


def test_a_whole_solution_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that the files above fail for what is cut off."""
    program = tmp_path / "cbc"
    (tmp_path / "whole").write_text(SOLUTION)
    program.write_text(f'#!/bin/sh\nfor SOLUTION; do :; done\ncp "{tmp_path}/whole" "$SOLUTION"\n')
    program.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    assert solve(small(), "cbc").objective == -13


def test_cbc_that_is_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "cbc"
    program.write_bytes(b"\x7fELF and no more")
    program.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    with pytest.raises(SolverError, match=r"^CBC does not start: .*/cbc: Exec format error$"):
        solve(small(), "cbc")


def test_cbc_that_ignores_its_time_limit_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "cbc"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(program))
    monkeypatch.setattr(cbc, "_GRACE_SECONDS", 0.1)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(SolverError, match="did not stop"):
        solve(small(), "cbc", time_limit_seconds=0.1)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_killed_cbc_leaves_no_process_and_one_line() -> None:
    """The real program, killed from outside in the middle of its search."""
    before = set(psutil.Process().children(recursive=True))

    def kill() -> bool:
        for child in set(psutil.Process().children(recursive=True)) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "cbc" in child.name():
                    child.kill()
                    return True
        return False

    killer = threading.Thread(target=wait_for, args=(kill,))
    killer.start()
    with pytest.raises(SolverError) as caught:
        solve(hard(), "cbc", time_limit_seconds=PATIENCE_SECONDS)
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
