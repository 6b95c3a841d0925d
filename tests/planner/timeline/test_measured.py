"""``--device auto``: steps that really run, measured by operator; the mathematics on recordings of the tests' own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkflow.cli.main import FAILED, FOUND, main
from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError, ModelError, TraceError
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import CATALOGUE, find_device
from checkflow.core.training_step import TrainingStep
from checkflow.planner import pipeline
from checkflow.planner.measure import probe as probes
from checkflow.planner.measure.machine import free_memory_bytes, this_machine
from checkflow.planner.measure.timing import Spread, spread_of
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.record.recorder import RecordedIteration
from checkflow.planner.timeline import measured as measuring
from checkflow.planner.timeline.measured import check_room, combine, measure_step, move, rooflines, with_predictions
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from tests.planner.measure.test_probe import TINY, FakeClock
from tests.support.planned_jobs import assert_every_checkpoint_is_true, plan_graph
from tests.support.steps import training_steps as steps

CPU = torch.device("cpu")
MODEL = """
import torch
import checkflow

def build() -> checkflow.TrainingStep:
    model = torch.nn.Sequential(torch.nn.Linear({width}, {width}), torch.nn.BatchNorm1d({width}))
    optimizer = torch.optim.Adam(model.parameters())
    return checkflow.TrainingStep(
        model, optimizer, loss=lambda model, x: model(x).square().mean(), batch=torch.randn(4, {width})
    )
"""


def digits() -> TrainingStep:
    return load_training_step("digits", batch_size=2, device=CPU)[1]


BUILDERS: dict[str, Callable[[], TrainingStep]] = {"digits": digits, "batch norm": steps.batch_norm}


def facts(graph: TrainingGraph) -> dict[str, Any]:
    """What of a graph a checkpoint depends on: the state, and before which operator it must have been copied."""
    return {
        "state": [(entry.name, entry.shape, entry.dtype, entry.placement) for entry in graph.state],
        "deadlines": [(entry.name, entry.first_write, entry.barrier) for entry in graph.state],
        "operators": [operator.target for operator in graph.operators],
        "anchors": graph.anchors,
        "peak": max(max(part) for part in graph.live_bytes(eager=True)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_a_measured_step_is_the_traced_one_with_times(name: str) -> None:
    found = measure_step(BUILDERS[name](), name=name, runs=3)
    assert facts(found.graph) == facts(trace(BUILDERS[name](), name=name, target="cpu"))
    assert len(found.durations_seconds) == len(found.graph.operators)
    assert all(seconds > 0 for seconds in found.durations_seconds)
    times = found.times
    assert sum(found.durations_seconds) == pytest.approx(times.step.median)
    assert 0 < times.step.least <= times.step.median <= times.step.most
    assert (times.step.count, times.recorded.count) == (3, 3)
    assert times.operator_quartile_share >= 0
    for granularity in ("segment", "operator"):
        timeline = make_timeline(found.graph, found.durations_seconds, granularity)
        assert timeline.iteration_seconds == pytest.approx(times.step.median)


def test_a_measured_plan_keeps_every_checkpoint_true(tmp_path: Path) -> None:
    step = steps.batch_norm()
    found = measure_step(step, name="job", runs=1)
    assert_every_checkpoint_is_true(step, plan_graph(found.graph), tmp_path)


@pytest.mark.slow
def test_only_the_unwatched_iterations_that_count_are_the_step_s_time() -> None:
    ran: list[int] = []
    step = steps.batch_norm()
    loss = step.loss
    assert loss is not None
    counted = TrainingStep(
        models=step.models,
        optimizers=step.optimizers,
        loss=lambda *given: ran.append(0) or loss(*given),  # type: ignore[func-returns-value]
        batch=step.batch,
    )
    found = measure_step(counted, name="job", runs=3, clock=FakeClock(9.0, 8.0, 1.0, 2.0, 4.0))
    assert found.times.step == Spread(1.0, 1.5, 2.0, 3.0, 4.0, 3)
    assert sum(found.durations_seconds) == pytest.approx(2.0)
    assert len(ran) == 2 + 3 + 3


# --- several recordings to one


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return trace(steps.parallel(), name="parallel", target="cpu")


def recorded(graph: TrainingGraph, *seconds: float) -> RecordedIteration:
    """An iteration of the first few operators only."""
    return RecordedIteration(dataclasses.replace(graph, operators=graph.operators[: len(seconds)]), seconds)


def test_operators_take_the_median_of_their_times_scaled_to_the_step(graph: TrainingGraph) -> None:
    runs = [recorded(graph, 1.0, 7.0), recorded(graph, 3.0, 6.0), recorded(graph, 2.0, 90.0)]
    found = combine("job", spread_of([18.0, 1.0, 99.0]), runs)
    assert found.durations_seconds == (4.0, 14.0)  # of 2 and 7, twice as long
    assert found.times.recorded == spread_of([8.0, 9.0, 92.0])
    assert found.times.operator_quartile_share == pytest.approx((1.0 + (48.5 - 6.5)) / 9)


@given(
    times=st.lists(st.lists(st.floats(1e-7, 1e3), min_size=4, max_size=4), min_size=1, max_size=6),
    step=st.floats(1e-6, 1e4),
)
def test_operators_add_up_to_the_step(graph: TrainingGraph, times: list[list[float]], step: float) -> None:
    found = combine("job", spread_of([step]), [recorded(graph, *each) for each in times])
    assert math.fsum(found.durations_seconds) == pytest.approx(step)
    assert all(seconds > 0 for seconds in found.durations_seconds)


def test_an_iteration_of_its_own_kind_is_left_out(graph: TrainingGraph) -> None:
    """A loss scaler skips a step now and then."""
    runs = [recorded(graph, 1.0, 1.0), recorded(graph, 50.0), *(recorded(graph, 1.0, 3.0) for _ in range(2))]
    found = combine("job", spread_of([4.0]), runs)
    assert len(found.graph.operators) == 2
    assert found.durations_seconds == (1.0, 3.0)
    assert found.times.recorded.count == 3


def test_iterations_that_all_differ_are_refused(graph: TrainingGraph) -> None:
    runs = [recorded(graph, *[1.0] * count) for count in (1, 2, 3, 3, 4)]
    with pytest.raises(TraceError, match=r"^cannot plan job by running it: 5 iterations gave 4 different [^\n]*$"):
        combine("job", spread_of([1.0]), runs)


def test_an_iteration_of_no_time_has_no_shares(graph: TrainingGraph) -> None:
    found = combine("job", spread_of([1.0]), [recorded(graph, 0.0, 0.0)])
    assert found.durations_seconds == (0.0, 0.0)
    assert found.times.operator_quartile_share == 0.0


def test_predictions_are_the_roofline_s_beside_the_measured(graph: TrainingGraph) -> None:
    found = combine("job", spread_of([2.0]), [RecordedIteration(graph, tuple([1.0] * len(graph.operators)))])
    devices = [CATALOGUE["cpu"], CATALOGUE["H200"]]
    predictions = with_predictions(found, devices).times.predictions
    assert [one.device for one in predictions] == ["cpu", "H200"]
    for one, device in zip(predictions, devices, strict=True):
        assert one.seconds == sum(durations_seconds(graph, device))
        assert one.ratio == one.seconds / 2.0


@pytest.mark.parametrize(
    ("name", "kind", "others"),
    [
        ("NVIDIA H200", "cuda", ["H200"]),
        ("NVIDIA GeForce GTX 9999", "cuda", []),
        ("Some Processor, 2 threads", "cpu", ["cpu"]),
    ],
)
def test_the_catalogue_s_entry_is_held_against_the_measured_too(name: str, kind: Any, others: list[str]) -> None:
    probed = dataclasses.replace(CATALOGUE["V100"], name=name, kind=kind)
    assert [device.name for device in rooflines(probed)] == [name, *others]


# --- what does not go


def test_a_step_that_is_too_large_is_refused_before_it_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was built")

    monkeypatch.setattr(pipeline, "move", refuse)
    (tmp_path / "huge.py").write_text(MODEL.format(width=10**7))
    subject = pipeline.Subject(str(tmp_path / "huge.py"), None, {}, None)
    with pytest.raises(CheckflowError, match=r"^[^\n]*huge\.py is too large to be run on [^\n]* --device H200[^\n]*$"):
        pipeline.measure_model(subject, find_device("cpu"))


def test_what_fits_exactly_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "free_memory_bytes", lambda device: 1000)
    check_room("job", 1000, CPU)
    with pytest.raises(CheckflowError, match=r"\(needs 1\.00 kB of 1\.00 kB free\)"):
        check_room("job", 1001, CPU)


@pytest.mark.slow
def test_memory_needed_is_the_trace_s_and_unknown_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = pipeline.Subject("digits", 2, {}, None)
    traced, device = pipeline._trace(subject, "cpu", None), find_device("cpu")
    assert pipeline._needed_bytes(subject, device) == max(max(part) for part in traced.live_bytes(eager=True))

    def refuse(*_: Any) -> TrainingGraph:
        raise TraceError("cannot trace")

    monkeypatch.setattr(pipeline, "_trace", refuse)
    assert pipeline._needed_bytes(subject, device) == 0


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), CheckflowError, "job is too large to be run on this machine"),
        (RuntimeError("[enforce fail] can't allocate memory: you tried"), CheckflowError, "its memory ran out"),
        (ValueError("wrong\nvalue"), TraceError, "cannot run job: ValueError at "),
    ],
)
def test_a_step_that_fails_is_one_line(error: Exception, kind: type[CheckflowError], text: str) -> None:
    def iteration(batch: Any) -> None:
        raise error

    step = TrainingStep(step=iteration, models={"model": torch.nn.Linear(1, 1)}, batch=None)
    with pytest.raises(kind) as caught:
        measure_step(step, name="job")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is kind


def test_hooks_and_modes_are_given_back_by_a_step_that_fails_later() -> None:
    step = steps.batch_norm()
    calls: list[int] = []
    original = step.loss
    assert original is not None

    def loss(*given: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 2 + 1 + 1:  # the first that is recorded
            raise ValueError("now")
        return original(*given)

    failing = TrainingStep(models=step.models, optimizers=step.optimizers, loss=loss, batch=step.batch)
    with pytest.raises(TraceError, match=r"^cannot run job: ValueError at [^\n]*: now$"):
        measure_step(failing, name="job", runs=1)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert all(not module._forward_pre_hooks for module in step.models["model"].modules())


def test_a_build_for_real_that_fails_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build():\n    return 1 / 0\n")
    with pytest.raises(ModelError, match=r"model\.py:2: ZeroDivisionError: division by zero \(while building [^\n]*$"):
        load_training_step(str(tmp_path / "model.py"), device=CPU)


def test_a_step_is_brought_to_its_device_whole() -> None:
    """To meta, which stands for any other device here."""
    step = steps.batch_norm()
    optimized = [id(parameter) for parameter in step.models["model"].parameters()]
    step.batch = {"images": step.batch[0], "rest": [step.batch[1], "text", 3]}
    move(step, torch.device("meta"))
    assert {tensor.device.type for tensor in step.models["model"].state_dict().values()} == {"meta"}
    assert [id(p) for group in step.optimizers["optimizer"].param_groups for p in group["params"]] == optimized
    assert step.batch["images"].is_meta
    assert step.batch["rest"][0].is_meta
    assert step.batch["rest"][1:] == ["text", 3]


# --- the command


@pytest.fixture(scope="module")
def probed() -> probes.Probed:
    return probes.probe(None, TINY)


@pytest.fixture
def call(
    probed: probes.Probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in a folder that holds model.py, on a machine that was probed before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL.format(width=64))
    asked: list[Any] = []

    def probe(directory: Path | None, effort: probes.Effort, *, progress: probes.Progress) -> probes.Probed:
        asked.append((directory, effort))
        progress("a part")
        return probed

    monkeypatch.setattr(probes, "probe", probe)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        asked.clear()
        code = main(arguments)
        assert asked == [(None, probes.QUICK)] * ("auto" in arguments)  # quickly, and not the disk
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.slow
def test_plan_auto_says_measured_and_predicted(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = call("plan", "model.py", "--device", "auto", "--json", "-o", "plan.json")
    assert (code, err) == (FOUND, "")
    data = json.loads(out)
    found = data["measured"]
    assert list(found) == ["step_seconds", "recorded_seconds", "operator_quartile_share", "predictions"]
    assert list(found["step_seconds"]) == ["least", "lower", "median", "upper", "most", "count"]
    assert found["step_seconds"]["count"] == found["recorded_seconds"]["count"] == 5
    assert data["iteration_seconds"] == pytest.approx(found["step_seconds"]["median"])
    name = this_machine().name
    for one in found["predictions"]:
        assert list(one) == ["device", "seconds", "predicted_to_measured"]
        assert one["predicted_to_measured"] == pytest.approx(one["seconds"] / data["iteration_seconds"])
    assert found["predictions"][0]["device"] == name
    made = plans.load("plan.json").fingerprint
    assert (made.device, made.device_kind) == (name, this_machine().kind)
    if made.device_kind == "cpu":  # elsewhere torch chooses other kernels than a trace can know
        code, _, err = call("check", "plan.json", "model.py")
        assert (code, err) == (FOUND, "")


@pytest.mark.slow
def test_tables_say_measured_and_predicted(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = call("plan", "model.py", "--device", "auto")
    assert (code, err) == (FOUND, "")
    assert "in 5 iterations; operators spread by" in " ".join(out.split())
    assert f"of the measured, for {this_machine().name}" in out
    code, out, err = call("compare", "model.py", "--device", "auto")
    assert (code, err) == (FOUND, "")
    assert "measured: " in out
    assert "of the measured, for" in out


@pytest.mark.slow
def test_compare_auto_tells_in_its_json_too(call: Callable[..., tuple[int, str, str]]) -> None:
    assert call("plan", "model.py", "--device", "cpu", "--bandwidth", "63GB/s", "-o", "plan.json")[0] == FOUND
    code, out, err = call("compare", "model.py", "plan.json", "--device", "auto", "--json")
    assert (code, err) == (FOUND, "")
    ran, read = json.loads(out)["rows"]
    assert ran["iteration_seconds"] == pytest.approx(ran["measured"]["step_seconds"]["median"])
    assert read["measured"] is None


def test_too_large_is_one_line(call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "free_memory_bytes", lambda device: 1000)
    code, out, err = call("plan", "model.py", "--device", "auto", "--json")
    assert (code, out) == (FAILED, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("checkflow: model.py is too large to be run on this ")


def test_help_says_that_measured_plans_differ(call: Callable[..., tuple[int, str, str]]) -> None:
    for command in ("plan", "compare"):
        assert "such plans differ from run to run" in " ".join(call(command, "--help")[1].split())


# --- with a GPU


@pytest.mark.cuda
def test_a_step_is_built_run_and_measured_on_the_gpu() -> None:
    device = this_machine().device
    _, step = load_training_step("digits", batch_size=8, device=device)
    move(step, device)
    assert all(tensor.device.type == "cuda" for tensor in (*step.batch, *step.models["model"].parameters()))
    found = measure_step(step, name="digits", runs=3)
    assert sum(found.durations_seconds) == pytest.approx(found.times.step.median)
    assert all(seconds > 0 for seconds in found.durations_seconds)
    traced = trace(digits(), name="digits", target="cuda")
    assert [entry.name for entry in found.graph.state] == [entry.name for entry in traced.state]
    assert found.graph.optimizers == traced.optimizers


@pytest.mark.cuda
def test_a_gpu_s_free_memory_bounds_what_is_run() -> None:
    device = this_machine().device
    with pytest.raises(CheckflowError, match="too large to be run on this GPU"):
        check_room("job", free_memory_bytes(device) * 2, device)
