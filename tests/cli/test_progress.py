"""Progress of long work: on a terminal (a real one: pty), never in a pipe, and nothing left of it after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkflow.api import Checkpointer
from checkflow.cli.progress import working
from checkflow.core import plan as plans
from tests.support.horizons import make_step
from tests.support.planned_jobs import plan_by_trace
from tests.support.terminals import left_on_screen, terminal

ROOT = Path(__file__).parents[2]
# The command line, with no patience: what is short shows its progress, too.
EAGER = """
import sys
from rich.progress import Progress
from checkflow.cli import main, progress

class AtOnce:
    def __init__(self, seconds, start):
        self.start = start
    def cancel(self): pass
    def join(self): pass

progress.threading.Timer = AtOnce
shown = Progress.update
Progress.update = lambda self, task, **more: shown(self, task, refresh=True, **more)
"""
RUN = EAGER + "main.entry()\n"
# An ILP that takes hours, in the place of a plan's.
SOLVE = (
    EAGER
    + """
from checkflow.cli import planning
from checkflow.cli.progress import working
from checkflow.planner.ilp import search, solvers
from tests.planner.ilp.test_solvers import hard

def plan(subject, device, request, granularity, ranks=None):
    with working("planning") as say, search.watched(say):
        return solvers.solve(hard(), request["solver"], request["time_limit_seconds"])

planning.subject_of = lambda *given: None
planning.request_of = lambda device, *given, **others: others
planning.plan_of = plan
main.entry()
"""
)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and with checkpoints."""
    folder = tmp_path_factory.mktemp("progress")
    step = make_step()
    plans.save(plan_by_trace(step), folder / "plan.json")
    with Checkpointer(step.models, step.optimizers, directory=folder / "checkpoints", every=1) as checkpointer:
        for _ in checkpointer.steps(3):
            step.run(step.batch)
    return folder


COMMANDS = {
    "verify": (["verify", "checkpoints"], r"verifying: step-0000000\d, [\d.]+ kB of [\d.]+ kB"),
    "export": (["export", "checkpoints", "-o", "out.pt", "--force"], r"exporting to out.pt: reading [\d.]+ kB"),
    "import": (["import", "checkpoints@3", "imported", "--step", "{n}"], r"importing checkpoints@3: \S+"),
    "simulate": (
        ["simulate", "plan.json", "--mtbf", "10min", "--duration", "7d", "--runs", "50", "--storage", "1GB/s"],
        r"simulating failures: 50 runs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_long_work_shows_itself_on_a_terminal_alone(command: str, home: Path) -> None:
    arguments, pattern = COMMANDS[command]
    with terminal(
        sys.executable, "-c", RUN, *(one.format(n=1) for one in arguments), cwd=home, stdout=subprocess.PIPE
    ) as there:
        code, shown = there.end()
    assert code == 0, there.text
    assert re.search(pattern, there.text), there.text
    assert left_on_screen(there.text) == []
    assert there.text.rindex(SHOW) > there.text.rindex(HIDE)
    piped = subprocess.run(
        [sys.executable, "-c", RUN, *(one.format(n=2) for one in arguments)],
        cwd=home, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (piped.returncode, piped.stderr) == (0, "")
    assert shown.splitlines()[0].split("imported")[0] == piped.stdout.splitlines()[0].split("imported")[0]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_solver_tells_its_bound_and_ctrl_c_leaves_a_clean_terminal(solver: str, home: Path) -> None:
    of_highs = r"planning: HiGHS searches, at most 10 min, bound [\d.e+-]+, best [\d.e+-]+, gap [\d.]+ %"
    arguments = ["plan", "digits", "--device", "cpu", "--solver", solver, "--time-limit", "600"]
    with terminal(sys.executable, "-c", SOLVE, *arguments, cwd=home, stdout=subprocess.PIPE) as there:
        there.read_until(of_highs if solver == "highs" else "planning: CBC searches, at most 10 min")
        there.process.send_signal(signal.SIGINT)
        code, shown = there.end()
        assert there.settings == there.before
    assert (code, shown) == (130, "")
    assert left_on_screen(there.text) == ["checkflow: interrupted"]
    assert there.text.rindex(SHOW) > there.text.rindex(HIDE)


def test_what_is_left_is_told_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = EAGER + (
        "from checkflow.cli.progress import working\nimport time\n"
        "with working('w') as say:\n"
        "    for n in range(40):\n        say(f'known {n}', n, 1000)\n        time.sleep(0.02)\n"
        "    for n in range(10):\n        say(f'open {n}')\n        time.sleep(0.02)\n"
    )
    with terminal(sys.executable, "-c", program, cwd=tmp_path) as there:
        there.end()
    lines = re.split(r"\r", there.text)
    assert any(re.search(r"known \d+.*about .* left", line) for line in lines), there.text
    assert [line for line in lines if "open" in line]
    assert not [line for line in lines if "open" in line and "left" in line]


def test_a_terminal_that_cannot_take_back_a_line_gets_none(tmp_path: Path) -> None:
    program = "from checkflow.cli.progress import working\nwith working('w') as say:\n    say('part', 1, 2)\n"
    for before in ("", EAGER):  # short work, and long
        with terminal("env", "TERM=dumb", sys.executable, "-c", before + program, cwd=tmp_path) as there:
            assert there.end()[0] == 0
            assert there.text == ""


def test_a_pipe_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("nothing") as say:
        say("at all", 1, 2)
    assert capsys.readouterr() == ("", "")
