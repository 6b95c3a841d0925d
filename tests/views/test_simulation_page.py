"""The page of ``checkflow simulate``: its points, what it says of them, and that it opens without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from checkflow.cli.main import FOUND, USAGE, main
from checkflow.core import plan as plans
from checkflow.core.plan import Plan
from checkflow.simulate import scaling
from checkflow.simulate.simulation import RunSpread, check_size
from checkflow.simulate.strategies import StorageSpeed, dcp_way
from checkflow.views.page import write
from checkflow.views.simulation import simulation_page
from tests.support.horizons import make_step
from tests.support.planned_jobs import plan_by_trace

GB = 1e9
STORAGE = StorageSpeed(10e3, 10e3)  # slow, since the state is small


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_by_trace(make_step())


def simulated(plan: Plan, *mtbfs: float) -> tuple[scaling.Point, ...]:
    return scaling.points(
        plan, STORAGE, mtbfs, restart_seconds=60.0, duration_seconds=30 * 86400.0, shape=1.0, overhead=0.035,
        memory_limit_bytes=None, every_seconds=[3600.0], seed=0,
    )  # fmt: skip


def test_more_failures_leave_less_and_daly_agrees(plan: Plan) -> None:
    rare, often = simulated(plan, 8 * 3600.0, 1800.0)
    for name, share in often.useful.items():
        assert 0 <= share.mean < rare.useful[name].mean <= 1, name
    for point in (rare, often):
        assert point.daly == pytest.approx(point.useful["synchronous, least waste"].mean, abs=0.003)
        assert point.useful["checkflow"].mean > point.useful["synchronous, least waste"].mean
        assert point.useful["synchronous, every 1 h"].mean < point.useful["synchronous, least waste"].mean


def test_what_floats_cannot_hold_is_nothing_left() -> None:
    assert scaling.daly_share(1e9, 1.0, 60.0, 1.0) == 0.0
    assert scaling.daly_share(100.0, 0.0, 0.0, 1e9) == pytest.approx(1)


def test_dcp_waits_for_the_link_and_saves_one_after_the_other(plan: Plan) -> None:
    way = dcp_way(plan, STORAGE, mtbf_seconds=1800.0)
    assert way.stall_seconds == plan.timeline.state_bytes / plan.bandwidth_bytes_per_second
    assert way.durable_seconds == way.stall_seconds + plan.fingerprint.state_bytes / STORAGE.write_bytes_per_second
    assert way.interval * plan.timeline.iteration_seconds >= way.durable_seconds - way.stall_seconds


def charts_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    charts: list[dict[str, Any]] = json.loads(found[1])
    return charts


def written(plan: Plan, path: Path) -> str:
    points = [
        scaling.Point(seconds, {"checkflow": RunSpread(0.9, 0.8, 1.0), "</script><b>": RunSpread(0.5, 0.4, 0.6)}, 0.7)
        for seconds in (scaling.GPU_SECONDS_A_FAILURE, scaling.GPU_SECONDS_A_FAILURE / 16384)
    ]
    write(simulation_page(points, points, plan, STORAGE, restart_seconds=60, duration_seconds=86400, shape=1.0), path)
    return path.read_text()


def test_the_page_holds_the_points_and_obeys_no_name(plan: Plan, tmp_path: Path) -> None:
    page = written(plan, tmp_path / "page.html")
    gpus, failures = charts_of(page)
    by_name = {trace["name"]: trace for trace in gpus["data"]}
    assert by_name["checkflow"]["x"] == [1, 16384]
    assert by_name["checkflow"]["y"] == [90.0, 90.0]
    assert by_name["checkflow"]["customdata"] == [[80.0, 100.0]] * 2
    assert by_name["synchronous, by Young and Daly's formulas"]["y"] == pytest.approx([70.0, 70.0])
    assert {trace["name"] for trace in failures["data"]} == by_name.keys()
    assert "<b>" not in page
    for word in ("Published: 419", "Assumed:", "Computed:", "From the plan:", "Philly"):
        assert word in page


def test_the_command_writes_it_beside_its_table(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "GPU_COUNTS", (1, 16384))
    monkeypatch.setattr(scaling, "MTBF_SECONDS", (1800.0,))
    plans.save(plan, tmp_path / "plan.json")
    asked = ["simulate", str(tmp_path / "plan.json"), "--mtbf", "1h", "--duration", "1d", "--storage", "10kB/s"]
    assert main([*asked, "--runs", "20", "--html", str(tmp_path / "page.html")]) == FOUND
    assert "synchronous, least waste" in capsys.readouterr().out
    gpus, _ = charts_of((tmp_path / "page.html").read_text())
    assert {"synchronous, every 1 h", "DCP async_save, least waste"} <= {trace["name"] for trace in gpus["data"]}


def test_what_a_page_cannot_simulate_is_refused_before_the_work(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans.save(plan, tmp_path / "plan.json")
    asked = ["simulate", str(tmp_path / "plan.json"), "--mtbf", "30d", "--storage", "1GB/s", "--runs", "10"]
    assert main([*asked, "--duration", "3650d", "--html", str(tmp_path / "page.html")]) == USAGE
    told = capsys.readouterr()
    assert "the page simulates runs with a failure every 15 min, too: ask for a --duration of at most 208 d" in told.err
    assert told.out == ""
    scaling.check_duration(208 * 86400.0)
    check_size(min(scaling.MTBF_SECONDS), 208 * 86400.0, scaling.RUNS)
