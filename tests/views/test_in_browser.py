"""The pages as a browser shows them: drawn whole, without an error or a request, and with the data's own numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.cli.main import FOUND, main
from checkflow.core import plan as plans
from checkflow.core.reports import run_report
from checkflow.core.reports.run_report import RankCosts, RunReport
from checkflow.core.units import format_seconds
from checkflow.planner.schedule.baselines import baselines
from checkflow.planner.schedule.compare import compare_plan
from checkflow.planner.schedule.replay import check_plan
from checkflow.simulate.scaling import Point
from checkflow.simulate.simulation import RunSpread
from checkflow.simulate.strategies import StorageSpeed
from checkflow.views.page import write
from checkflow.views.simulation import simulation_page
from tests.support.horizons import make_step
from tests.support.html.browser import Browser, browser
from tests.support.html.page_data import HOSTILE, make_page_plan
from tests.support.oracle import random_plan
from tests.support.planned_jobs import plan_by_trace

SHOWN = HOSTILE.replace("\x1b", "\\x1b")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that was started three times, and once ended by an error."""
    directory = tmp_path_factory.mktemp("job") / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "check_plan", plans.validate)
        for until, fails in ((5, False), (8, True), (12, False)):
            done = 0
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            plan = random_plan({"model": model}, {"optimizer": optimizer}, 1)
            with pytest.raises(AssertionError, match="this run fails") if fails else pytest.MonkeyPatch.context():  # noqa: SIM117
                with Checkpointer(model, optimizer, directory=directory, plan=plan, every=1) as checkpointer:
                    for _ in checkpointer.steps(until):
                        optimizer.zero_grad()
                        model(torch.randn(6, 4)).square().sum().backward()
                        optimizer.step()
                        done += 1
                        assert not fails or done < 3, "this run fails"
    return directory


def change_newest(job: Path, tmp_path: Path, **changes: object) -> Path:
    """The same report with another newest run."""
    *before, newest = run_report.load(job / "report.json")
    runs = [*before, dataclasses.replace(newest, **changes)]  # type: ignore[arg-type]
    (tmp_path / "report.json").write_bytes(run_report.dump_file(map(run_report.dump_run, runs)))
    return tmp_path


def assert_quiet(window: Browser, page: Path) -> None:
    """No error in the console, and no request but for the page."""
    assert window.errors() == []
    assert {address for address in window.requests() if not address.startswith(("data:", "blob:"))} == {page.as_uri()}


def assert_all_drawn(window: Browser, chart: str) -> None:
    """As many bars as the data has lengths, and a line for each trace of lines."""
    data = window.data(chart)
    lengths = [one["x" if one.get("orientation") == "h" else "y"] for one in data if one["type"] == "bar"]
    assert window.marks(chart) == sum(bool(length) for each in lengths for length in each)
    lines = [one for one in data if "lines" in one.get("mode", "")]
    script = "return document.querySelectorAll(`#${arguments[0]} .scatterlayer .js-line`).length"
    assert window.run(script, chart) >= len(lines)


def test_a_plan(window: Browser, tmp_path: Path) -> None:
    plan, page = make_page_plan(), tmp_path / "plan.html"
    plans.save(plan, tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(page)]) == FOUND
    window.open(page)
    assert_quiet(window, page)
    for chart in ("iteration", "links", "frontier"):
        assert_all_drawn(window, chart)
    # The figures, and the marks of chunks, are the plan's.
    base, replay = baselines(plan.timeline, plan.bandwidth_bytes_per_second), check_plan(plan)
    assert window.fact("plan_peak_bytes") == plan.plan_peak_bytes
    assert window.fact("training_peak_bytes") == plan.timeline.training_peak_bytes
    assert window.fact("checkfreq_peak_bytes") == base.checkfreq_peak_bytes
    assert window.fact("stall_seconds") == plan.stall_seconds
    assert window.fact("interval") == plan.interval == 3
    traces = {trace["name"]: trace for trace in window.data("iteration")}
    assert {"forward", "forward into backward", "backward", "optimizer", "wait", "traffic", "kept"} <= set(traces)
    copies = [traces["direct"], traces["from snapshot"]]
    assert sum(len(trace["x"]) for trace in copies) == len(plan.chunks)
    assert max(traces["with the plan's snapshots"]["y"]) * 1e6 == pytest.approx(plan.plan_peak_bytes)
    assert max(traces["training"]["y"]) * 1e6 == pytest.approx(plan.timeline.training_peak_bytes)
    whole = (plan.interval * plan.timeline.iteration_seconds + plan.wait.seconds) * 1000 if plan.wait else 0
    assert max(traces["training"]["x"]) == pytest.approx(whole)
    for one in copies:
        assert min(one["base"]) >= 0
        assert all(base + x <= whole * 1.000001 for base, x in zip(one["base"], one["x"], strict=True))
    assert f"{replay.peak_step} of {plan.horizon_steps}" in window.run("return document.body.innerText")
    # A chunk tells its tensor and deadline, and a name that looks like code is text.
    chunks = [chunk for chunk in plan.chunks if chunk.snapshot_step is None]
    index = next(place for place, chunk in enumerate(chunks) if chunk.tensor == HOSTILE)
    lines = window.hover("iteration", "direct", index)
    assert lines[0] == SHOWN
    assert f"({chunks[index].length_bytes:,} bytes)" in lines[2]
    assert plan.wait is not None
    deadline = format_seconds(0.008 + plan.wait.seconds)  # training waits there for what is due
    assert f"deadline: the start of optimizer.step(), at {deadline}" in lines
    assert any(line.startswith("leaves in ") for line in lines)
    assert window.run("return document.querySelectorAll('body > script').length") == 3  # the name ended none


@pytest.mark.slow
def test_a_job_of_several_runs(window: Browser, tmp_path: Path, job: Path) -> None:
    ranks = run_report.sum_up(3, (2,), [RankCosts(0, 1.5, 2.5, 10, 100, 0), RankCosts(1, 3.0, 0.5, 11, 101, 1)])
    newest = run_report.load(job / "report.json")[-1]
    history = [dataclasses.replace(point, failed=int(point.iteration > 10)) for point in newest.history]
    directory = change_newest(job, tmp_path, ranks=ranks, failed=1, last_failure="<b>disk</b>", history=tuple(history))
    page = tmp_path / "run.html"
    assert main(["report", str(directory), "--html", str(page)]) == FOUND
    window.open(page)
    assert_quiet(window, page)
    for chart in ("lives", "phases", "intervals", "lag", "holds", "ranks"):
        assert_all_drawn(window, chart)
    runs = run_report.load(directory / "report.json")
    assert [run.iteration for run in runs] == [5, 7, 12]
    assert window.fact("iteration") == 12
    assert window.fact("runs") == 3
    assert window.fact("committed") == sum(run.committed for run in runs)
    traces = {trace["name"]: trace for trace in window.data("lag")}
    lags = [point.lag_iterations for run in runs for point in run.history]
    assert [y for y in traces["lag"]["y"] if y is not None] == lags
    assert len(traces["checkpoints failed"]["x"]) == 1
    text = window.run("return document.body.innerText")
    assert "closed; <b>disk</b>" in text
    assert "1 of 3 ranks have told nothing" in text
    held = sum(sum(y or 0 for y in trace["y"]) for trace in window.data("holds"))
    assert held == 2 * runs[-1].phases.iterations


@pytest.mark.slow
def test_a_comparison(window: Browser, tmp_path: Path) -> None:
    page, made = tmp_path / "page.html", [make_page_plan(), make_page_plan(8e9, model="</script>other")]
    for place, plan in enumerate(made):
        plans.save(plan, tmp_path / f"{place}.json")
    assert main(["compare", *(str(tmp_path / f"{place}.json") for place in (0, 1)), "--html", str(page)]) == FOUND
    window.open(page)
    assert_quiet(window, page)
    rows = [compare_plan("", plan) for plan in made]
    for chart in ("peaks", "added", "stalls"):
        assert_all_drawn(window, chart)
        assert [len(trace["y"]) for trace in window.data(chart)] == [2] * 5
    peaks = {trace["name"]: trace["y"] for trace in window.data("peaks")}
    assert peaks["checkflow"] == pytest.approx([plan.plan_peak_bytes / 1e6 for plan in made])
    assert peaks["CheckFreq, GPU snapshot"] == pytest.approx([row.checkfreq_peak_bytes / 1e6 for row in rows])
    stalls = {trace["name"]: trace["y"] for trace in window.data("stalls")}
    shares = [100 * plan.stall_seconds / (plan.interval * plan.timeline.iteration_seconds) for plan in made]
    assert stalls["checkflow"] == pytest.approx(shares)
    assert "</script>other" in window.run("return document.body.innerText")


@pytest.mark.slow
def test_on_a_phone_and_at_night(window: Browser, tmp_path: Path, job: Path) -> None:
    plans.save(make_page_plan(), tmp_path / "plan.json")
    pages = [tmp_path / name for name in ("plan.html", "run.html", "comparison.html")]
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(pages[0])]) == FOUND
    assert main(["report", str(job), "--html", str(pages[1])]) == FOUND
    assert main(["compare", str(tmp_path / "plan.json"), "--html", str(pages[2])]) == FOUND
    ink = "return getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    for page in pages:
        window.open(page)
        day = window.run(ink)
        window.open(page, width=390, height=844, dark=True)
        assert window.errors() == []
        assert window.run("return document.documentElement.scrollWidth") <= 390
        widths = window.run("return [...document.querySelectorAll('.chart .main-svg')].map(one => one.clientWidth)")
        assert max(widths) <= 390
        plotted = window.run("return [...document.querySelectorAll('.chart .bglayer')].map(one => 1)")
        assert plotted
        assert window.run(ink) != day


@pytest.mark.slow
def test_a_large_plan_opens_with_few_marks(window: Browser, tmp_path: Path) -> None:
    plan, page = make_page_plan(8e9, layers=600), tmp_path / "plan.html"
    plans.save(plan, tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(page)]) == FOUND
    window.open(page)
    assert_quiet(window, page)
    assert len(plan.chunks) > 6000
    assert 0 < window.marks("iteration") < 6000
    text = window.run("return document.body.innerText")
    assert f"{len(plan.chunks)} chunks are drawn as " in text


@pytest.mark.slow
def test_the_newest_run_may_be_its_first(tmp_path: Path, job: Path, window: Browser) -> None:
    """A report from before there were histories, and a run without one whole iteration."""
    run: RunReport = run_report.load(job / "report.json")[0]
    none = run_report.PhaseTimes(0.0, None, None)
    names = [field.name for field in dataclasses.fields(run_report.Phases) if field.name not in ("clock", "iterations")]
    empty = run_report.Phases("host", 0, **dict.fromkeys(names, none))
    old = dataclasses.replace(run, history=(), held_iterations=(), phases=empty, plan=None, checkpoint_bytes=None)
    (tmp_path / "report.json").write_bytes(run_report.dump_file([run_report.dump_run(old)]))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == FOUND
    window.open(page)
    assert_quiet(window, page)
    assert "without a history" in window.run("return document.body.innerText")


@pytest.mark.slow
def test_simulated_clusters(window: Browser, tmp_path: Path) -> None:
    plan = plan_by_trace(make_step())
    points = [Point(seconds, {"checkflow": RunSpread(0.9, 0.8, 1.0)}, 0.7) for seconds in (3600.0, 60.0)]
    speed = StorageSpeed(1e9, 1e9)
    page = tmp_path / "page.html"
    write(simulation_page(points, points, plan, speed, restart_seconds=60, duration_seconds=86400, shape=1.0), page)
    window.open(page)
    assert_quiet(window, page)
    assert_all_drawn(window, "gpus")
    assert_all_drawn(window, "failures")
