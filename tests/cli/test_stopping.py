"""Signals in the midst of a solve: the command ends with one line, and no process of its own is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import blocked, wait_for

ROOT = Path(__file__).parents[2]
# `checkflow plan`, whose ILP is one that takes hours; it says when the solver is asked.
WHOLE = """
from pathlib import Path
from checkflow.cli import main
from checkflow.planner.ilp import solvers
from tests.planner.ilp.test_solvers import hard

asked = solvers.solve

def solve(problem, solver, seconds):
    Path("asked").touch()
    return asked(hard(), solver, seconds)

solvers.solve = solve
main.entry()
"""
# The same without the model: it starts sooner.
SHORT = """
from pathlib import Path
from checkflow.cli import main, planning
from checkflow.planner.ilp import solvers
from tests.planner.ilp.test_solvers import hard

def plan(subject, device, request, granularity, ranks=None):
    Path("asked").touch()
    return solvers.solve(hard(), request["solver"], request["time_limit_seconds"])

planning.subject_of = lambda *given: None
planning.request_of = lambda device, *given, **others: others
planning.plan_of = plan
main.entry()
"""
STUBBORN = f"""
import highspy
highspy.Highs.cancelSolve = lambda self: None
{SHORT}"""
# The demo's training, of which only the waiting matters here.
DEMO = """
import sys
from pathlib import Path
from checkflow.cli import main, planning
from checkflow.demo import kills

def plan(subject, device, request, granularity, ranks=None):
    training = kills.Run(Path("."), "run", 3, 0, None)
    training._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    Path("asked").touch()
    training.train()

planning.subject_of = lambda *given: None
planning.request_of = lambda device, *given, **others: others
planning.plan_of = plan
main.entry()
"""
# What is interrupted makes another error of it, or lets none out.
DEAF = """
from pathlib import Path
import time
from checkflow.cli import main, planning
from checkflow.core.errors import StoppedError

class Deaf:
    def __del__(self):
        time.sleep(600)

def plan(subject, device, request, granularity, ranks=None):
    Path("asked").touch()
    try:
        if request["solver"] == "gurobi":
            Deaf()
            raise SystemError("the answer is still computed")
        time.sleep(600)
    except StoppedError:
        raise ImportError("numpy is half imported") from None

planning.subject_of = lambda *given: None
planning.request_of = lambda device, *given, **others: others
planning.plan_of = plan
main.entry()
"""
MODEL = """
import torch
import checkflow

def build() -> checkflow.TrainingStep:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkflow.TrainingStep(
        model, optimizer, loss=lambda model, x: model(x).square().mean(), batch=(torch.randn(4, 8),)
    )
"""
PATIENCE_SECONDS = 300.0  # for what must come; a solve lasts longer


@contextlib.contextmanager
def planning(folder: Path, command: str, solver: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, in the midst of a solve."""
    (folder / "model.py").write_text(MODEL)
    arguments = ["plan", "model.py", "--formulation", "flow", "--solver", solver, "--time-limit", "600", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        wait_for(lambda: (folder / "asked").exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        if solver == "cbc":
            wait_for(lambda: bool(children_of(process)))
        if "hard()" in command:  # into the search, however slowly that goes
            begun = computed_seconds(process)
            wait_for(lambda: computed_seconds(process) > begun + 1.0)
        else:
            wait_for(
                blocked(children_of(process)[0].pid if solver == "cbc" else process.pid)
            )  # the demo looks at its own
        assert process.poll() is None
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def computed_seconds(process: subprocess.Popen[str]) -> float:
    """Of a core, by the command and what it has started."""
    times = [one.cpu_times() for one in (psutil.Process(process.pid), *children_of(process))]
    return sum(one.user + one.system for one in times)


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "solver", "whom", "number"),
    [
        # A terminal sends its signals to the whole group, `kill` to one process.
        pytest.param(WHOLE, "cbc", "group", INT, id="plan with CBC, Ctrl-C"),
        pytest.param(WHOLE, "highs", "group", INT, id="plan with HiGHS, Ctrl-C"),
        pytest.param(SHORT, "cbc", "parent", INT, id="CBC, SIGINT"),
        pytest.param(SHORT, "cbc", "parent", TERM, id="CBC, SIGTERM"),
        pytest.param(SHORT, "cbc", "group", TERM, id="CBC, SIGTERM to all"),
        pytest.param(SHORT, "cbc", "group", HUP, id="CBC, the terminal is closed"),
        pytest.param(DEMO, "cbc", "parent", INT, id="the demo's training, SIGINT"),
        pytest.param(SHORT, "highs", "parent", TERM, id="HiGHS, SIGTERM"),
        pytest.param(STUBBORN, "highs", "parent", TERM, id="HiGHS in a long step, SIGTERM"),
        pytest.param(DEAF, "highs", "group", INT, id="in an import, Ctrl-C"),
        pytest.param(DEAF, "gurobi", "group", INT, id="in a destructor, Ctrl-C"),
        pytest.param(SHORT, "gurobi", "group", INT, id="Gurobi, Ctrl-C"),
        pytest.param(SHORT, "gurobi", "parent", TERM, id="Gurobi, SIGTERM"),
    ],
)
def test_a_signal_ends_the_command_and_its_solver(
    tmp_path: Path, command: str, solver: str, whom: str, number: signal.Signals
) -> None:
    word = "interrupted" if number == INT else "terminated"
    with planning(tmp_path, command, solver) as process:
        children = children_of(process)
        assert bool(children) == (solver == "cbc")
        (os.killpg if whom == "group" else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, out, err) == (128 + number, "", f"checkflow: {word}\n")
        assert not any(child.is_running() for child in children)
    assert list(tmp_path.glob("checkflow-*")) == []  # a solver's files


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    with planning(tmp_path, f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{SHORT}", "cbc") as process:
        os.kill(process.pid, HUP)
        assert process.poll() is None
        (child,) = children_of(process)
        for one in (process.pid, child.pid):  # the system drops it then
            ignored = Path(f"/proc/{one}/status").read_text().partition("SigIgn:")[2].split()[0]
            assert int(ignored, 16) >> (HUP - 1) & 1
