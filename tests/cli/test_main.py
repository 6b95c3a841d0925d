"""The command line: what it prints, its JSON, its exit codes, and one clear line for every bad input."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

import checkflow
from checkflow.cli.main import FAILED, FOUND, INFEASIBLE, USAGE, main
from checkflow.core import plan as plans
from checkflow.core.machine.device import CATALOGUE, Device
from checkflow.core.units import format_rate
from checkflow.planner.ilp import solvers
from checkflow.runtime import log_handler
from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.store.store import Store
from tests.support.store_tools import record

ROOT = Path(__file__).parents[2]
KEYS = [
    "model",
    "status",
    "formulation",
    "policy",
    "granularity",
    "solver",
    "operators",
    "steps",
    "state_tensors",
    "state_bytes",
    "parameters",
    "flops",
    "chunks",
    "iteration_seconds",
    "measured",
    "bandwidth_bytes_per_second",
    "link_share",
    "pieces",
    "piece_bandwidth_bytes_per_second",
    "least_bandwidth_bytes_per_second",
    "graph_peak_bytes",
    "training_peak_bytes",
    "plan_peak_bytes",
    "checkfreq_peak_bytes",
    "checkfreq_released_peak_bytes",
    "synchronous_stall_seconds",
    "interval",
    "stall_seconds",
    "wait_seconds",
    "durable_bytes_per_second",
    "frontier",
    "explanation",
    "ranks",
    "trace_seconds",
    "plan_seconds",
]
SOLVER_KEYS = [
    "name",
    "version",
    "status",
    "objective_bytes",
    "bound_bytes",
    "gap",
    "seconds",
    "variables",
    "constraints",
]

MODEL = """
import torch
import torch.nn.functional as F
import checkflow

def build(batch_size: int = 4, width: int = 64) -> checkflow.TrainingStep:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(batch_size, 16), torch.randint(10, (batch_size,))
    return checkflow.TrainingStep(model, optimizer, loss=lambda model, x, y: F.cross_entropy(model(x), y), batch=batch)
"""
# Numbers that make iterations long and the link easy to reason about.
SLOW = dataclasses.replace(CATALOGUE["cpu"], name="slow", launch_seconds=1e-3)


@dataclass(frozen=True)
class Said:
    """What one command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        data = json.loads(self.out)
        assert isinstance(data, dict)
        return data


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in a folder that holds model.py and slow.json."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "slow.json").write_bytes(TypeAdapter(Device).dump_json(SLOW))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


EXTREMES = [
    "1e308",
    "5e-324",
    "1e-300",
    "-0.0",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "1e999",
    "1e-6",
    "1",
    f"{10**18 - 1}",
]


@pytest.mark.parametrize("value", EXTREMES, ids=lambda text: text if len(text) < 20 else f"{len(text)} digits")
def test_a_device_file_with_an_extreme_number_is_planned_with_or_refused_in_one_line(
    call: Any, tmp_path: Path, value: str
) -> None:
    plain = json.loads((tmp_path / "slow.json").read_text())
    rates = ("plain_flops_per_second", "matrix_flops_per_second")
    names = [name for name, one in plain.items() if one is None or isinstance(one, float | int) or name in rates]
    for name in sorted({*names} - {"compute_capability"}):
        changed = {**plain, name: {"float32": "?"} if name in rates else "?"}
        (tmp_path / "odd.json").write_text(json.dumps(changed).replace('"?"', value))
        said = call("plan", "model.py", "--device", "odd.json", "--json")
        assert said.code in (0, FAILED, INFEASIBLE), (name, said.err)
        assert "internal error" not in said.err
        if said.code == FAILED:
            assert said.err.startswith("checkflow: odd.json: ")
            assert said.err.count("\n") == 1
            assert name in said.err or "JSON" in said.err


def test_a_device_file_of_the_least_and_the_largest_numbers_is_planned_with(call: Any, tmp_path: Path) -> None:
    plain = json.loads((tmp_path / "slow.json").read_text())
    for rate, share, bytes_, seconds in ((1, 1e-6, 1, 5e-324), (9e17, 1, 10**17, 1e-9), (1, 1e-6, 10**17, 9e17)):
        of_rates = {name: rate for name in plain if "bytes_per_second" in name}
        changed = {**plain, **of_rates, "plain_flops_per_second": {"float32": rate}, "matrix_flops_per_second": {}}
        changed |= {"compute_efficiency": share, "memory_efficiency": share, "memory_bytes": bytes_}
        changed |= {"launch_seconds": seconds, "copy_seconds": seconds}
        (tmp_path / "odd.json").write_text(json.dumps(changed))
        said = call("plan", "model.py", "--device", "odd.json")
        assert said.code in (0, FAILED, INFEASIBLE)
        assert "internal error" not in said.err
        assert said.err.count("\n") <= 1


def process(arguments: Sequence[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "checkflow", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


# Plans that exist


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
@pytest.mark.parametrize("granularity", ["segment", "operator"])
def test_json_has_exactly_the_documented_keys(call: Any, policy: str, granularity: str) -> None:
    said = call("plan", "model.py", "--device", "slow.json", "--policy", policy, "--granularity", granularity, "--json")
    assert (said.code, said.err) == (FOUND, "")
    data = said.json
    assert list(data) == KEYS
    assert list(data["solver"]) == SOLVER_KEYS
    assert all(set(row) == {"interval", "stall_seconds", "extra_bytes"} for row in data["frontier"])
    assert data["status"] == "optimal"
    assert (data["policy"], data["granularity"], data["interval"]) == (policy, granularity, 1)
    assert data["solver"]["bound_bytes"] == data["solver"]["objective_bytes"] == data["plan_peak_bytes"]
    # Two linear layers (with biases) and a batch norm of four tensors and a counter.
    parameters = 16 * 64 + 64 + 2 * 64 + 64 * 10 + 10
    assert data["parameters"] == parameters
    assert data["state_bytes"] == 4 * parameters + 2 * 4 * 64 + 8
    assert data["checkfreq_peak_bytes"] == data["training_peak_bytes"] + data["state_bytes"]
    assert data["plan_peak_bytes"] <= data["checkfreq_released_peak_bytes"] <= data["checkfreq_peak_bytes"]


def test_options_reach_the_plan(call: Any) -> None:
    small = call("plan", "model.py", "--device", "slow.json", "--json").json
    wide = call("plan", "model.py", "--device", "slow.json", "--set", "width=128", "--batch-size", "8", "--json").json
    adam = call("plan", "model.py", "--device", "slow.json", "--optimizer", "adam", "--json").json
    fast = call("plan", "model.py", "--device", "slow.json", "--bandwidth", "63GB/s", "--json").json
    huge = call("plan", "model.py", "--device", "slow.json", "--set", "width=4096", "--json").json
    chunky = call(
        "plan", "model.py", "--device", "slow.json", "--set", "width=4096", "--chunk-size", "64KiB", "--json"
    ).json
    assert wide["parameters"] > small["parameters"]
    assert wide["flops"] > 2 * small["flops"]
    # Two moments for each parameter, and a step counter for each of six parameter tensors.
    assert adam["state_bytes"] == small["state_bytes"] + 2 * 4 * small["parameters"] + 6 * 4
    assert fast["bandwidth_bytes_per_second"] == 63e9
    assert small["bandwidth_bytes_per_second"] == SLOW.link_bandwidth_bytes_per_second
    assert chunky["chunks"] > huge["chunks"]


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(call: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        done = process(
            ["plan", "model.py", "--device", "slow.json", "-o", f"{number}.json"], tmp_path, PYTHONHASHSEED=str(number)
        )
        assert done.returncode == FOUND, done.stderr
        assert done.stderr == ""
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    assert call("plan", "model.py", "--device", "slow.json", "-o", "3.json").code == FOUND
    assert (tmp_path / "3.json").read_bytes() == (tmp_path / "1.json").read_bytes()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_for_no_device_in_particular_says_which(call: Any, as_json: bool) -> None:
    said = call("plan", "model.py", *(["--json"] if as_json else []))
    assert said.code == FOUND
    assert said.err == (
        "checkflow: no --device given: this plan is for the RTX 3090; --device auto: this machine, measured\n"
    )
    assert not as_json or list(said.json) == KEYS
    assert call("plan", "model.py", "--device", "RTX 3090").err == ""


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_newcomer_is_told_what_checkfreq_is(call: Any, command: str) -> None:
    said = call(command, "model.py", "--device", "slow.json")
    (line,) = (line.strip() for line in said.out.splitlines() if line.startswith("CheckFreq"))
    assert line == "CheckFreq: an earlier system (FAST 2021), which copies all state at once"


def test_the_table_names_what_counts(call: Any) -> None:
    said = call("plan", "model.py", "--device", "slow.json")
    assert (said.code, said.err) == (FOUND, "")
    for word in ("segment", "optimal", "bound", "CheckFreq", "synchronous", "least bandwidth", "durable", "kB"):
        assert word in said.out, word
    assert "\x1b[" not in said.out


# Plans that do not exist


def test_infeasible_is_explained_and_least_bandwidth_is_tight(call: Any) -> None:
    arguments = ["plan", "model.py", "--device", "slow.json", "--max-interval", "1", "--json"]
    said = call(*arguments, "--bandwidth", "1kB/s")
    assert said.code == INFEASIBLE
    data = said.json
    assert list(data) == KEYS
    assert data["status"] == "infeasible"
    assert data["plan_peak_bytes"] is None
    assert data["explanation"]
    assert said.err == f"checkflow: {data['explanation']}\n"
    least = data["least_bandwidth_bytes_per_second"]
    assert call(*arguments, "--bandwidth", f"{least}B/s").code == FOUND
    assert call(*arguments, "--bandwidth", f"{least - 1}B/s").code == INFEASIBLE


def test_what_does_not_fit_every_iteration_is_planned_for_more(call: Any, tmp_path: Path) -> None:
    arguments = ["plan", "model.py", "--device", "slow.json", "--bandwidth", "1kB/s"]
    said = call(*arguments, "-o", "plan.json", "--json")
    assert said.code == FOUND
    data = said.json
    assert data["interval"] > 1
    assert data["explanation"].startswith(
        f"a checkpoint every {data['interval']} iterations; for one every iteration: from"
    )
    assert data["stall_seconds"] <= 0.035 * data["interval"] * data["iteration_seconds"]
    assert {row["interval"] for row in data["frontier"]} >= {1}
    assert call("check", "plan.json").out.endswith(f"a checkpoint every {data['interval']} iterations\n")
    assert f"every    {data['interval']} iterations" in call("show", "plan.json").out
    shorter = call(*arguments, "--max-interval", str(data["interval"] - 1), "--json")
    assert shorter.code == INFEASIBLE
    assert "B/s" in shorter.json["explanation"]
    table = call(*arguments).out
    assert f"a checkpoint every {data['interval']} iterations" in table
    assert "What checkpoints cost, limits aside" in table
    compared = call("compare", "plan.json").out
    assert f"checkflow makes a checkpoint every {data['interval']} iterations" in compared


def test_infeasible_writes_no_plan(call: Any, tmp_path: Path) -> None:
    said = call(
        "plan", "model.py", "--device", "slow.json", "--bandwidth", "1kB/s", "--max-interval", "1", "-o", "plan.json"
    )
    assert said.code == INFEASIBLE
    assert not (tmp_path / "plan.json").exists()
    assert len(said.err.splitlines()) == 1


def test_infeasible_says_what_an_older_plan_is(call: Any, tmp_path: Path) -> None:
    plan = ["plan", "model.py", "--device", "slow.json", "-o", "plan.json"]
    assert call(*plan).code == FOUND
    before = (tmp_path / "plan.json").read_bytes()
    said = call(*plan, "--bandwidth", "1kB/s", "--max-interval", "1")
    assert said.code == INFEASIBLE
    assert (tmp_path / "plan.json").read_bytes() == before
    assert said.err.splitlines()[1:] == ["checkflow: plan.json was not written; what it holds was there before"]


def test_no_time_limit(call: Any) -> None:
    said = call("plan", "model.py", "--device", "slow.json", "--time-limit", "inf", "--solver", "cbc", "--json")
    assert (said.code, said.json["solver"]["name"]) == (FOUND, "cbc")


def test_a_warning_is_one_line_and_not_in_the_answer(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A licence that fails (here: none where one is said to be) is told once, however often a solver is asked."""

    def warn_twice(*given: Any, **named: Any) -> Any:
        for _ in range(2):
            logging.getLogger("checkflow").warning("Gurobi does not start: no licence; solving with HiGHS instead")
        return asked(*given, **named)

    asked = solvers.solve
    monkeypatch.setattr(solvers, "solve", warn_twice)
    said = call("plan", "model.py", "--device", "slow.json", "--formulation", "flow", "--json")
    assert said.code == FOUND
    assert said.json["solver"]["name"] == "highs"
    assert said.err == "checkflow: Gurobi does not start: no licence; solving with HiGHS instead\n"


def test_memory_limit_is_hard_unless_relaxed(call: Any) -> None:
    arguments = ["plan", "model.py", "--device", "slow.json", "--json", "--memory-limit", "1kB"]
    assert call(*arguments).code == INFEASIBLE
    relaxed = call(*arguments, "--relax-memory")
    assert relaxed.code == FOUND
    assert relaxed.json["plan_peak_bytes"] > 1000


# Bad input

BAD = [
    # What the folder gets (a file's name and text), the arguments, the exit code, what the one line says.
    pytest.param({}, ["plan", "missing.py"], FAILED, "missing.py: no such file", id="model missing"),
    pytest.param({}, ["plan", "nosuchmodel"], FAILED, "no model 'nosuchmodel'", id="unknown model"),
    pytest.param({"m.py": "raise KeyError('x')\n"}, ["plan", "m.py"], FAILED, "m.py", id="model file raises"),
    pytest.param(
        {"m.py": "def build():\n    return 1 / 0\n"}, ["plan", "m.py"], FAILED, "division by zero", id="build raises"
    ),
    pytest.param(
        {"m.py": "def build():\n    return 3\n"}, ["plan", "m.py"], FAILED, "TrainingStep", id="build returns a number"
    ),
    pytest.param({"m.py": "def build(:\n"}, ["plan", "m.py"], FAILED, "m.py", id="syntax error"),
    pytest.param({}, ["plan", "model.py", "--set", "depth=3"], FAILED, "depth", id="unknown setting"),
    pytest.param({}, ["plan", "model.py", "--set", "width=x"], FAILED, "width", id="setting of the wrong type"),
    pytest.param({}, ["plan", "model.py", "--set", "width"], USAGE, "key=value", id="setting without value"),
    pytest.param({}, ["plan", "model.py", "--batch-size", "0"], USAGE, "batch-size", id="batch of none"),
    pytest.param({}, ["plan", "model.py", "--device", "GTX 9999"], USAGE, "GTX 9999", id="unknown device"),
    pytest.param(
        {}, ["plan", "model.py", "--device", "no.json"], USAGE, "no device file no.json", id="device file missing"
    ),
    pytest.param({"d.json": "{}"}, ["plan", "model.py", "--device", "d.json"], FAILED, "d.json", id="device damaged"),
    pytest.param({}, ["plan", "model.py", "--bandwidth", "fast"], USAGE, "63GB/s", id="not a bandwidth"),
    pytest.param({}, ["plan", "model.py", "--bandwidth", "0"], USAGE, "more than zero", id="no bandwidth"),
    pytest.param({}, ["plan", "model.py", "--bandwidth", "1e400"], USAGE, "more than any", id="no such link"),
    *(
        pytest.param({}, [command, "model.py", f"--link-share={share}"], USAGE, "share", id=f"{command}: {share} links")
        for command in ("plan", "compare")
        for share in ("0", "-0.5", "1.01", "nan", "half")
    ),
    pytest.param({}, ["plan", "model.py", "--memory-limit", "1e999GB"], USAGE, "more than any", id="no such memory"),
    pytest.param({}, ["plan", "model.py", "--memory-limit", "1e19"], USAGE, "more than any", id="memory beyond counts"),
    pytest.param({}, ["plan", "model.py", "--memory-limit", "many"], USAGE, "24GB", id="not a size"),
    pytest.param({}, ["plan", "model.py", "--bandwidth", "63"], USAGE, "write 63GB/s", id="bandwidth without unit"),
    pytest.param({}, ["plan", "model.py", "--bandwidth", "25.6/s"], USAGE, "25.6GB/s", id="half a unit"),
    pytest.param({}, ["plan", "model.py", "--memory-limit", "24"], USAGE, "write 24GB", id="memory without unit"),
    pytest.param({}, ["plan", "model.py", "--extra-memory", "1.5"], USAGE, "write 1.5GB", id="extra without unit"),
    pytest.param({}, ["plan", "model.py", "--chunk-size", "0"], USAGE, "at least 64KiB", id="empty chunks"),
    pytest.param({}, ["plan", "model.py", "--chunk-size", "1B"], USAGE, "at least 64KiB", id="chunks of a byte"),
    pytest.param({}, ["plan", "model.py", "--chunk-size", "65535B"], USAGE, "at least 64KiB", id="one byte less"),
    pytest.param({}, ["plan", "model.py", "--time-limit", "nan"], USAGE, "time limit", id="no time limit"),
    pytest.param({}, ["plan", "model.py", "--time-limit", "0"], USAGE, "time limit", id="no time"),
    pytest.param({}, ["plan", "model.py", "--time-limit", "-inf"], USAGE, "time limit", id="less than no time"),
    pytest.param({}, ["plan", "model.py", "--time-limit", "soon"], USAGE, "seconds", id="not a time"),
    pytest.param(
        {},
        ["plan", "model.py", "--formulation", "greedy", "--solver", "cbc"],
        USAGE,
        "asks no solver",
        id="a solver that is not asked",
    ),
    pytest.param({}, ["compare", "p.json", "--bandwidth", "20GB/s"], USAGE, "--bandwidth does nothing", id="its link"),
    pytest.param({}, ["compare", "p.json", "--overhead", "0.1"], USAGE, "--overhead does nothing", id="its stalls"),
    pytest.param({"p.json": "{"}, ["check", "p.json"], FAILED, "make it anew", id="plan cut short"),
    pytest.param({"p.json": ""}, ["check", "p.json"], FAILED, "make it anew", id="plan emptied"),
    pytest.param({}, ["plan", "model.py", "--solver", "simplex"], USAGE, "simplex", id="unknown solver"),
    pytest.param({}, ["plan", "model.py", "--fast"], USAGE, "--fast", id="unknown option"),
    pytest.param({}, ["plan"], USAGE, "MODEL", id="no model"),
    pytest.param({}, ["flan", "model.py"], USAGE, "flan", id="unknown command"),
    pytest.param({}, ["plan", "model.py", "-o", "no/such/plan.json"], FAILED, "no/such/plan.json", id="no folder"),
    pytest.param({}, ["check", "missing.json"], FAILED, "missing.json", id="plan missing"),
    pytest.param({"p.json": "{"}, ["check", "p.json"], FAILED, "p.json: not a valid plan", id="plan damaged"),
    pytest.param({"p.json": "[]"}, ["show", "p.json"], FAILED, "p.json: not a valid plan", id="plan of another kind"),
    pytest.param({"p.json": ""}, ["compare", "p.json"], FAILED, "p.json: not a valid plan", id="plan empty"),
    pytest.param({}, ["plan", "p.json"], USAGE, "checkflow show p.json", id="a plan to be planned"),
    pytest.param({}, ["demo", "--epochs", "1"], USAGE, "epochs", id="too short a demo"),
]


@pytest.mark.parametrize(("files", "arguments", "code", "text"), BAD)
def test_bad_input_is_one_line(
    call: Any, tmp_path: Path, files: dict[str, str], arguments: list[str], code: int, text: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    said = call(*arguments)
    assert said.code == code
    assert said.out == "" or "-o" in arguments  # the plan was made, and shown, before it could not be written
    assert len(said.err.splitlines()) == 1, said.err
    assert said.err.startswith("checkflow: ")
    assert text in said.err


def test_a_file_without_build_gets_a_template_that_works(call: Any, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("x = 1\n")
    said = call("plan", "m.py")
    assert (said.code, said.out) == (FAILED, "")
    line, _, template = said.err.partition("\n")
    assert "m.py" in line
    assert "build" in line
    (tmp_path / "template.py").write_text(template[template.index("import torch") :])
    assert call("plan", "template.py", "--device", "slow.json").code == FOUND


def test_a_step_that_cannot_be_traced_names_operator_and_line(call: Any, tmp_path: Path) -> None:
    bad = MODEL.replace("F.cross_entropy(model(x), y)", "untraceable(model(x), y)") + (
        "\ndef untraceable(logits, labels):\n"
        "    if logits.sum() > 0:  # the line at fault\n"
        "        return logits.sum()\n"
        "    return -logits.sum()\n"
    )
    (tmp_path / "bad.py").write_text(bad)
    number = next(n for n, line in enumerate(bad.splitlines(), 1) if "at fault" in line)
    said = call("plan", "bad.py")
    assert (said.code, said.out) == (FAILED, "")
    assert len(said.err.splitlines()) == 1
    assert "aten._local_scalar_dense" in said.err
    assert f"bad.py:{number}" in said.err


def test_debug_shows_the_traceback(call: Any) -> None:
    quiet, loud = call("plan", "missing.py"), call("plan", "missing.py", "--debug")
    assert "Traceback" not in quiet.err
    assert "Traceback" in loud.err
    assert loud.err.endswith(quiet.err)
    assert quiet.code == loud.code == FAILED


def test_verify_is_proposed_for_a_directory_and_not_for_another_programs_file(call: Any, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x08")
    said = call("import", "weights.safetensors", "imported")
    assert (said.code, said.err.count("\n")) == (FAILED, 1)
    assert "checkflow verify" not in said.err
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text("{")
    said = call("diff", "checkpoints", "checkpoints")
    assert said.code == FAILED
    assert said.err.endswith("; checkflow verify DIRECTORY shows which checkpoints are whole\n")


def test_a_fault_of_our_own_is_one_line_too(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(plans, "load", broken)
    said = call("check", "plan.json")
    assert (said.code, said.out) == (FAILED, "")
    assert said.err == "checkflow: internal error: RuntimeError: two lines (--debug shows where)\n"
    assert "in broken" in call("check", "plan.json", "--debug").err


# check, show, compare


@pytest.fixture
def plan_file(call: Any, tmp_path: Path) -> Path:
    assert call("plan", "model.py", "--device", "slow.json", "-o", "plan.json").code == FOUND
    return tmp_path / "plan.json"


def test_check_accepts_a_plan_and_its_model(call: Any, plan_file: Path) -> None:
    for arguments in (["check", "plan.json"], ["check", "plan.json", "model.py"]):
        said = call(*arguments)
        assert (said.code, said.err) == (FOUND, "")
        assert "plan holds" in said.out
    data = call("check", "plan.json", "--json").json
    assert data["holds"] is True
    assert data["plan_peak_bytes"] == plans.load(plan_file).plan_peak_bytes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["--set", "width=128"], "128"),
        (["--batch-size", "8"], "batch: float32 8×16, int64 8 in the model, float32 4×16, int64 4 in the plan"),
        (["--optimizer", "adam"], "Adam"),
    ],
)
def test_check_names_what_differs_from_the_model(call: Any, plan_file: Path, changes: list[str], text: str) -> None:
    said = call("check", "plan.json", "model.py", *changes)
    assert (said.code, said.out) == (FAILED, "")
    assert len(said.err.splitlines()) == 1
    assert text in said.err


def test_check_refuses_a_changed_byte(call: Any, plan_file: Path) -> None:
    data = plan_file.read_bytes()
    plan_file.write_bytes(data.replace(b'"interval":1', b'"interval":2'))
    said = call("check", "plan.json")
    assert said.code == FAILED
    assert "changed" in said.err


def test_show_fits_a_screen_and_names_peak_and_limit(call: Any, plan_file: Path) -> None:
    said = call("show", "plan.json")
    assert (said.code, said.err) == (FOUND, "")
    lines = said.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert "█" in said.out
    assert "peak" in said.out
    assert "binding" in said.out


def test_show_as_json_has_what_the_screen_shows(call: Any, plan_file: Path) -> None:
    said = call("show", "plan.json", "--json")
    assert (said.code, said.err) == (FOUND, "")
    plan, data = plans.load(plan_file), said.json
    assert data["plan_peak_bytes"] == plan.plan_peak_bytes
    assert data["certificate"] == dataclasses.asdict(plan.certificate)
    assert data["interval"] == plan.interval
    steps = data["steps"]
    assert len(steps) == plan.interval * len(plan.timeline.steps)
    assert sum(step["sent_bytes"] for step in steps) == plan.timeline.state_bytes == data["state_bytes"]
    assert max(step["live_bytes"] + step["snapshot_bytes"] for step in steps) == data["plan_peak_bytes"]
    peak = steps[data["peak_at"]["step"]]
    assert peak["live_bytes"] + peak["snapshot_bytes"] == data["plan_peak_bytes"]
    assert peak["label"] == data["peak_at"]["label"]
    assert steps[data["ends_at"]["step"]]["sent_bytes"] > 0
    assert all(step["sent_bytes"] <= step["capacity_bytes"] for step in steps)
    screen = call("show", "plan.json").out
    for fact in (data["peak_at"]["label"], data["ends_at"]["label"], data["device"], data["binding"]["end"]):
        assert fact in screen


def test_compare_takes_models_and_plans(call: Any, plan_file: Path) -> None:
    said = call("compare", "model.py", "plan.json", "--device", "slow.json", "--json")
    assert (said.code, said.err) == (FOUND, "")
    one, other = said.json["rows"]
    own = ("source", "link_share")  # a plan file does not say which share of the link its bandwidth is
    assert {key: one[key] for key in one if key not in own} == {key: other[key] for key in other if key not in own}
    table = call("compare", "model.py", "plan.json", "--device", "slow.json")
    for word in ("synchronous", "CheckFreq", "checkflow", "model"):
        assert word in table.out, word


@pytest.mark.parametrize("arguments", [["check"], ["show"], ["compare", "model.py"]])
def test_a_plan_that_lies_is_not_printed(call: Any, plan_file: Path, arguments: list[str]) -> None:
    """Sealed, so that only the replay can tell."""
    honest = plans.load(plan_file)
    lie = dataclasses.replace(honest, plan_peak_bytes=honest.plan_peak_bytes - 1)
    plan_file.write_bytes(plans.dumps(lie))
    said = call(*arguments, "plan.json")
    assert (said.code, said.out) == (FAILED, "")
    assert "claims a peak" in said.err


TWO_OPTIMIZERS = """
import torch
import checkflow

def build(swapped: bool = False) -> checkflow.TrainingStep:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    one, two = reversed(model) if swapped else model
    optimizers = {"one": torch.optim.SGD(one.parameters(), lr=0.1), "two": torch.optim.SGD(two.parameters(), lr=0.1)}

    def step(x):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()

    return checkflow.TrainingStep(step=step, models={"model": model}, optimizers=optimizers, batch=torch.randn(4, 8))

def swapped() -> checkflow.TrainingStep:
    return build(swapped=True)
"""


def test_check_sees_two_optimizers_swapped(call: Any, tmp_path: Path) -> None:
    """Steps, sizes and state are equal: only the deadlines differ."""
    (tmp_path / "two.py").write_text(TWO_OPTIMIZERS)
    assert call("plan", "two.py", "--device", "slow.json", "-o", "two.json").code == FOUND
    assert call("check", "two.json", "two.py").code == FOUND
    said = call("check", "two.json", "two.py:swapped")
    assert (said.code, said.out) == (FAILED, "")
    assert "model/0.weight is first written in step" in said.err


def test_a_model_that_prints_does_not_spoil_the_answer(call: Any, plan_file: Path, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        MODEL.replace("import torch\n", "import torch\nprint('loading')\n", 1)
        .replace("    model =", "    print('building')\n    model =")
        .replace("loss=lambda model, x, y: F", "loss=lambda model, x, y: print('running') or F")
    )
    for arguments in (["plan", "loud.py"], ["compare", "loud.py"], ["check", "plan.json", "loud.py"]):
        device = [] if arguments[0] == "check" else ["--device", "slow.json"]
        said = call(*arguments, *device, "--json")
        assert said.code == FOUND, said.err
        assert said.json
        for word in ("loading", "building", "running"):
            assert word in said.err


def test_a_share_of_the_link_is_planned_with_and_shown(call: Any, plan_file: Path) -> None:
    whole = call("plan", "model.py", "--device", "slow.json", "--json").json
    assert whole["link_share"] == 1.0
    arguments = ["plan", "model.py", "--device", "slow.json", "--link-share", "0.5"]
    half = call(*arguments, "--json").json
    assert half["link_share"] == 0.5
    assert half["bandwidth_bytes_per_second"] == SLOW.link_bandwidth_bytes_per_second / 2
    assert half["least_bandwidth_bytes_per_second"] == whole["least_bandwidth_bytes_per_second"]
    assert half["synchronous_stall_seconds"] == 2 * whole["synchronous_stall_seconds"]
    assert "3.20 GB/s" in (table := call(*arguments).out)
    assert "half of 6.40 GB/s; least bandwidth" in table
    part = call("plan", "model.py", "--device", "slow.json", "--bandwidth", "10GB/s", "--link-share", "0.3", "--json")
    assert part.json["bandwidth_bytes_per_second"] == 3e9
    said = call("compare", "model.py", "plan.json", "--device", "slow.json", "--link-share", "0.25", "--json")
    ours, read = said.json["rows"]
    assert (ours["link_share"], ours["bandwidth_bytes_per_second"]) == (0.25, 1.6e9)
    assert (read["link_share"], read["bandwidth_bytes_per_second"]) == (None, 6.4e9)  # a plan brings its own link
    shown = call("compare", "model.py", "--device", "slow.json", "--link-share", "0.25").out
    assert "1.60 GB/s (25 % of 6.40 GB/s)" in shown


def test_what_pieces_cost_is_planned_with_and_shown(call: Any, tmp_path: Path) -> None:
    (tmp_path / "dear.json").write_bytes(TypeAdapter(Device).dump_json(dataclasses.replace(SLOW, copy_seconds=1e-6)))
    arguments = ["plan", "model.py", "--device", "dear.json", "-o", "dear-plan.json"]
    data, table = call(*arguments, "--json").json, call(*arguments).out
    free = call("plan", "model.py", "--device", "slow.json", "--json").json
    state = data["state_bytes"]
    assert data["bandwidth_bytes_per_second"] == free["piece_bandwidth_bytes_per_second"] == 6.4e9
    assert data["pieces"] == free["pieces"] == data["state_tensors"] == 9
    rate = data["piece_bandwidth_bytes_per_second"]
    assert rate == pytest.approx(state / (state / 6.4e9 + 9e-6))
    assert f"│ {format_rate(rate)} in 9 pieces; least bandwidth" in table
    assert " pieces;" not in call("plan", "model.py", "--device", "slow.json").out
    assert data["synchronous_stall_seconds"] == pytest.approx(free["synchronous_stall_seconds"] + 9e-6)
    # The plan's link is that of the pieces, and every way is compared on it.
    assert plans.load(tmp_path / "dear-plan.json").bandwidth_bytes_per_second == rate
    ours, read = call("compare", "model.py", "dear-plan.json", "--device", "dear.json", "--json").json["rows"]
    assert ours["bandwidth_bytes_per_second"] == read["bandwidth_bytes_per_second"] == rate
    assert ours["synchronous_stall_seconds"] == data["synchronous_stall_seconds"]


def test_a_share_of_the_link_may_be_too_small(call: Any) -> None:
    least = call("plan", "model.py", "--device", "slow.json", "--json").json["least_bandwidth_bytes_per_second"]
    share = least / SLOW.link_bandwidth_bytes_per_second
    assert 0 < share < 0.9
    fits = call("plan", "model.py", "--device", "slow.json", "--max-interval=1", f"--link-share={1.01 * share}")
    assert fits.code == FOUND
    short = call("plan", "model.py", "--device", "slow.json", "--max-interval=1", f"--link-share={0.97 * share}")
    assert short.code == INFEASIBLE


def test_compare_keeps_rows_that_have_no_plan(call: Any) -> None:
    slow = ["--device", "slow.json", "--bandwidth", "1kB/s", "--max-interval", "1"]
    said = call("compare", "model.py", *slow, "--json")
    assert said.code == INFEASIBLE
    (row,) = said.json["rows"]
    assert row["checkflow_peak_bytes"] is None
    assert row["synchronous_stall_seconds"] > 0
    assert row["explanation"] in said.err


def test_control_characters_of_files_are_shown_and_not_obeyed(call: Any, tmp_path: Path) -> None:
    """In the names of tensors, metrics, devices and directories: in tables, lines and errors."""
    evil, obeyed = "\x1b[2J\x9b1m\u202e\x07", {"\x1b", "\x9b", "\u202e", "\x07"}
    directory, device = tmp_path / f"job{evil}", tmp_path / f"{evil}.json"
    for step in (1, 2):
        with Store(directory, run_id="r") as store:
            layout = make_layout([record(f"model/layer{evil}.weight", (2,))])
            staging = memoryview(bytearray([step]) * layout.buffer_bytes)
            store.commit(step, layout, staging, b"\xc0", {"metrics": {evil: 1.0 * step}})
    device.write_text('{"name": "x"}')
    model = type(f"Net{evil}", (torch.nn.Linear,), {})(2, 2)
    with checkflow.Checkpointer(model, directory=tmp_path / "run") as checkpointer:
        checkpointer.step()
    for arguments in (
        ("ls", str(directory)), ("diff", f"{directory}@1", f"{directory}@2"), ("show", str(directory)),
        ("compare", str(tmp_path / "run" / "report.json")),
        ("plan", "model.py:build", "--device", str(device)),
    ):  # fmt: skip
        said = call(*arguments)
        assert not obeyed & {*said.out, *said.err}, arguments
        assert "\\x1b[2J" in said.out + said.err, arguments


def test_control_characters_in_lines_of_the_log_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_handler, "_taken", lambda: False)
    log_handler._HANDLER.emit(logging.makeLogRecord({"msg": "passing over \x1b[2J.json"}))
    assert capsys.readouterr().err == "checkflow: passing over \\x1b[2J.json\n"
