"""Traces for Perfetto: the format's rules, and what must be on which track."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from checkflow.api import Checkpointer
from checkflow.cli.main import FAILED, FOUND, main
from checkflow.core import plan as plans
from checkflow.core.errors import ReportError
from checkflow.core.graph import AnchorKind
from checkflow.core.plan import Plan
from checkflow.core.reports import capture_times
from checkflow.core.reports.capture_times import CopyTimes, merge_copies
from checkflow.core.training_step import TrainingStep
from checkflow.runtime import reporter
from checkflow.runtime.loop import phase_clock
from checkflow.views import perfetto
from checkflow.views.perfetto import LINK, SNAPSHOTS, TRAINING, Slice, nested, phase_of, plan_trace
from tests.support.horizons import make_step, spread_plan, trace_job
from tests.support.planned_jobs import plan_by_trace
from tests.support.waiting import wait_for

Events = list[dict[str, Any]]


def check_trace(text: str) -> Events:
    """What the Trace Event Format demands of each event, and of the slices of a thread; returns the events."""
    whole = json.loads(text)
    events = whole["traceEvents"]
    open_slices: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str), event
        assert event["ph"] in set("XMCibnesftBEN"), event
        if event["ph"] == "M":
            assert "args" in event, event
            continue
        assert isinstance(event["ts"], int | float), event
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert {"pid", "tid"} <= event.keys(), event
            assert event["dur"] >= 0, event
            open_slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        if event["ph"] == "i":
            assert event.get("s", "t") in ("g", "p", "t"), event
    for slices in open_slices.values():
        ends: list[float] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, "slices of a thread overlap"
            ends.append(end)
    return list(events)


def on(events: Events, pid: int, track: int) -> Events:
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, track)]


def names_of(events: Events, what: str) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == what}


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan_by_trace(make_step())


def written(events: Events, path: Path) -> Events:
    perfetto.write_trace(events, path)
    return check_trace(path.read_text())


def test_the_rules_are_those_that_torchs_profiler_keeps(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    assert any(event["ph"] == "X" for event in check_trace((tmp_path / "torch.json").read_text()))


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_copied_once_in_time(interval: int, seed: int, tmp_path: Path) -> None:
    """Every byte is on the link once; none leaves a live tensor behind its deadline; snapshots leave after they are
    made.
    """
    plan = spread_plan(*trace_job(), interval, seed, waits=seed % 2 == 1)
    events = written(plan_trace(plan), tmp_path / "trace.json")
    link = on(events, 1, LINK)
    for name in {chunk.tensor for chunk in plan.chunks}:
        expected = sum(chunk.length_bytes for chunk in plan.chunks if chunk.tensor == name)
        assert sum(event["args"]["bytes"] for event in link if event["name"] == name) == expected
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(link)), "two copies at once"
    segments = {event["name"]: event for event in on(events, 1, TRAINING)}
    iterations = [event for name, event in segments.items() if name.startswith("iteration ")]
    assert len(iterations) == max(chunk.offload_step for chunk in plan.chunks) // len(plan.timeline.steps) + 1
    made = on(events, 1, SNAPSHOTS)
    assert sum(event["args"]["bytes"] for event in made) == plan.snapshot_bytes
    memory = [event["args"] for event in events if event["ph"] == "C"]
    assert max(one["training"] + one["snapshots"] for one in memory) <= plan.plan_peak_bytes


def test_deadlines_are_kept_on_the_picture(planned: Plan, tmp_path: Path) -> None:
    events = written(plan_trace(planned), tmp_path / "trace.json")
    steps = planned.timeline.steps
    begins = [event["ts"] for event in events if event["ph"] == "C"]  # of each step
    # The plan counts the link's capacity in units, rounded on the running sum.
    slack = 1e6 * planned.unit_bytes / planned.bandwidth_bytes_per_second + 1e-2
    assert on(events, 1, LINK)
    for event in on(events, 1, LINK):
        deadline = planned.deadlines[event["name"]]
        if deadline is not None and event["args"]["from"] == "the live tensor":
            assert event["ts"] + event["dur"] <= begins[deadline + 1] + slack, event
            assert event["args"]["deadline"] == steps[deadline].label
    phases = [event["name"] for event in on(events, 1, TRAINING)]
    assert [name for name in phases if name in ("forward", "backward", "optimizer")] == [
        "forward", "backward", "optimizer",
    ]  # fmt: skip


def test_phases_between_anchors() -> None:
    forward, gradient = AnchorKind.FORWARD, AnchorKind.GRADIENT
    before, after = AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST
    assert phase_of(AnchorKind.BOUNDARY, forward) == "forward"
    assert phase_of(forward, gradient) == phase_of(forward, before) == "forward, then backward"
    assert phase_of(gradient, gradient) == phase_of(gradient, before) == "backward"
    assert phase_of(gradient, forward) == "backward, then forward"
    assert phase_of(before, after) == "optimizer"
    assert phase_of(after, None) == "after the optimizer"
    assert phase_of(after, forward) == "forward"  # of another optimizer's turn


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12))
def test_slices_nest_whatever_rounding_does(spans: list[tuple[int, int]]) -> None:
    found = list(nested(Slice(1, "", begin, begin + length) for begin, length in spans))
    for one, other in itertools.combinations(found, 2):
        apart = one.end_ns <= other.begin_ns or other.end_ns <= one.begin_ns
        inside = one.begin_ns <= other.begin_ns and other.end_ns <= one.end_ns
        around = other.begin_ns <= one.begin_ns and one.end_ns <= other.end_ns
        assert apart or inside or around


@given(
    st.lists(
        st.tuples(st.sampled_from(["snapshot", "offload", "boundary"]), st.integers(0, 9), st.integers(0, 9)),
        max_size=60,
    ),
    st.integers(3, 10),
)
def test_merged_copies_lose_no_bytes(spans: list[tuple[Any, int, int]], most: int) -> None:
    copies = [CopyTimes(kind, "t", 1, size, n, float(seconds)) for n, (kind, size, seconds) in enumerate(spans)]
    merged = merge_copies(copies, most)
    assert len(merged) <= max(most, 0)
    for kind in ("snapshot", "offload", "boundary"):
        before, after = ([one for one in some if one.kind == kind] for some in (copies, merged))
        assert sum(one.size_bytes for one in before) == sum(one.size_bytes for one in after)
        assert sum(one.chunks for one in before) == sum(one.chunks for one in after)


# A run


def train(step: TrainingStep, directory: Path, plan: Plan | None) -> Checkpointer:
    with Checkpointer(
        step.models, step.optimizers, directory=directory, plan=plan, every=plan.interval if plan else 1
    ) as checkpointer:
        for _ in checkpointer.steps(5):
            step.run(step.batch)
    return checkpointer


def test_a_runs_copies_stand_beside_its_plans(
    planned: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, file = tmp_path / "checkpoints", tmp_path / "trace.json"
    checkpointer = train(make_step(), directory, planned)
    plans.save(planned, tmp_path / "plan.json")
    code = main(["report", str(directory), "--plan", str(tmp_path / "plan.json"), "--perfetto", str(file)])
    captured = capsys.readouterr()
    assert (code, captured.err) == (FOUND, "")
    assert captured.out.endswith(f"trace written to {file}\n")
    events = check_trace(file.read_text())
    titles = names_of(events, "process_name")
    assert list(titles.values()) == [
        text for step in (3, 4, 5) for text in (f"step {step}, planned", f"step {step}, measured on cpu")
    ]
    report = checkpointer.last_capture
    assert report is not None
    copied = [event for event in events if event["ph"] == "X" and "chunks" in event["args"]]
    moved = report.moved
    by_step = {pid: sum(event["args"]["bytes"] for event in copied if event["pid"] == pid) for pid in (2, 4, 6)}
    device_bytes = moved.direct_bytes + moved.snapshot_bytes
    host_bytes = moved.boundary_bytes
    assert all(device_bytes <= size <= device_bytes + moved.snapshot_bytes + host_bytes for size in by_step.values())
    tracks = names_of(events, "thread_name")
    for pid in (2, 4, 6):
        said = {tracks[event["pid"], event["tid"]] for event in events if event["ph"] == "X" and event["pid"] == pid}
        assert {"training, measured", "link: copies", "storage"} <= said
        stored = [
            e["name"] for e in events if e["ph"] == "X" and (e["pid"], tracks[e["pid"], e["tid"]]) == (pid, "storage")
        ]
        assert stored[-4:] == ["audit", "write and fsync", "commit", "delete older ones"]


def test_without_its_plan_a_run_is_traced_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    train(make_step(), tmp_path / "checkpoints", planned)
    assert main(["report", str(tmp_path / "checkpoints"), "--perfetto", str(tmp_path / "trace.json")]) == FOUND
    assert "--plan PLAN adds it" in capsys.readouterr().err
    titles = names_of(check_trace((tmp_path / "trace.json").read_text()), "process_name").values()
    assert [title for title in titles if "planned" in title] == []


def test_a_trace_of_another_run_than_the_newest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    train(make_step(), tmp_path / "checkpoints", None)
    file = tmp_path / "checkpoints" / "captures.json"
    earlier = dataclasses.replace(capture_times.load(file), run_id="another")
    file.write_bytes(capture_times.dumps(earlier))
    assert main(["report", str(tmp_path / "checkpoints"), "--perfetto", str(tmp_path / "trace.json")]) == FOUND
    assert capsys.readouterr().err == (
        "checkflow: captures.json is of another run than the report's newest: the trace shows that one\n"
    )


def test_what_training_did_is_known_of_captures_that_the_clock_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phase_clock, "SPELLS_KEPT", 40)
    monkeypatch.setattr(reporter, "REPORT_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "MOST_SHARE", float("inf"))
    ended: list[dict[str, float]] = []
    step = make_step()
    with Checkpointer(
        step.models, step.optimizers, directory=tmp_path, every=20, on_report=ended.append
    ) as checkpointer:
        for number, _ in enumerate(checkpointer.steps(80)):
            step.run(step.batch)
            wait_for(lambda: len(ended) == number // 20)  # noqa: B023 - called at once
    captures = capture_times.load(tmp_path / "captures.json").captures
    assert [capture.step for capture in captures] == [40, 60, 80]
    assert all(capture.training for capture in captures)


def test_what_cannot_be_traced_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    assert main(["report", str(tmp_path)]) == FAILED
    assert "report.json: No such file or directory" in capsys.readouterr().err
    train(make_step(), tmp_path / "checkpoints", planned)
    assert main(["report", str(tmp_path / "checkpoints"), "--perfetto", str(tmp_path / "no" / "t.json")]) == FAILED
    assert "cannot write" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "captures.json").write_text('{"format": "checkflow-captures"}')
    assert main(["report", str(tmp_path / "checkpoints"), "--perfetto", str(tmp_path / "t.json")]) == FAILED
    said = capsys.readouterr().err
    assert "captures.json holds no times of captures" in said
    assert said.count("\n") == 1
    (tmp_path / "checkpoints" / "captures.json").unlink()
    assert main(["report", str(tmp_path / "checkpoints"), "--perfetto", str(tmp_path / "t.json")]) == FAILED
    assert not (tmp_path / "t.json").exists()


def test_times_that_contradict_themselves_are_refused(tmp_path: Path, planned: Plan) -> None:
    train(make_step(), tmp_path, planned)
    text = (tmp_path / "captures.json").read_bytes()
    good = capture_times.loads(text, "x")
    assert len(good.captures) == 3
    assert capture_times.loads(capture_times.dumps(good), "x") == good
    many = dataclasses.replace(good, captures=good.captures * 2)
    with pytest.raises(ReportError, match="x holds no times of captures: it has more than 3 captures"):
        capture_times.loads(capture_times.dumps(many), "x")
    large = dataclasses.replace(good.captures[0], copies=good.captures[0].copies[:1] * 2001)
    with pytest.raises(ReportError, match=r"captures\.0: more than 2000 copies"):
        capture_times.loads(capture_times.dumps(dataclasses.replace(good, captures=(large,))), "x")
    for place, value in (("arrived_seconds", 1e12), ("step", -1), ("begun_unix_seconds", -5.0)):
        plain = json.loads(text)
        plain["captures"][1][place] = value
        with pytest.raises(ReportError, match=r"x holds no times of captures: captures\.1: a "):
            capture_times.loads(json.dumps(plain).encode(), "x")
    with pytest.raises(ReportError, match="is of version 2"):
        capture_times.loads(text.replace(b'"version": 1', b'"version": 2'), "x")
