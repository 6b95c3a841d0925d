"""The report of a run: its schema and the page about it, its file in every condition, and what a person is told."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import nn

import checkflow
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.cli.main import FAILED, FOUND, USAGE, main
from checkflow.core import plan as plans
from checkflow.core.errors import ReportError, StorageError
from checkflow.core.reports import run_report
from checkflow.core.reports.run_history import HeldIterations
from checkflow.core.reports.run_report import RunReport
from checkflow.runtime import log_handler, reporter, resources
from checkflow.runtime.persist import writer
from checkflow.runtime.store.discovery import find
from checkflow.runtime.transfer import host
from checkflow.views.run import run_page
from tests.support import jobs
from tests.support.faults import Faults, Killed
from tests.support.oracle import random_plan
from tests.support.simulated import rule_pace
from tests.support.waiting import wait_for

HELD = "checkpoints held training for 700 ms in 3 iterations,"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "run-report.md"


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


class Job:
    """A small one, run in this process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.iterate()
        self.plan = random_plan({"model": self.model}, {"optimizer": self.optimizer}, 1)

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 4)).square().sum().backward()
        self.optimizer.step()

    def open(self, directory: Path, **options: Any) -> Checkpointer:
        options = {"plan": self.plan, "every": 1, "audit": 1, **options}
        return Checkpointer(self.model, self.optimizer, directory=directory, **options)


def train(directory: Path, until: int, **options: Any) -> Checkpointer:
    job = Job()
    with job.open(directory, **options) as checkpointer:
        for _ in checkpointer.steps(until):
            job.iterate()
    return checkpointer


def runs_of(directory: Path) -> tuple[RunReport, ...]:
    return run_report.load(directory / "report.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a real run."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "check_plan", plans.validate)
        train(directory, 6)
    return (directory / "report.json").read_bytes()


# The schema, and the page about it


def parts_of(kind: Any) -> Iterator[type]:
    """The dataclasses within a field's type."""
    if dataclasses.is_dataclass(kind):
        yield typing.cast(type, kind)
    for inner in typing.get_args(kind):
        yield from parts_of(inner)


def fields_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def test_the_page_has_every_field_and_no_other() -> None:
    sections: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0].strip("`")
        cells = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
        sections[title] = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    top = fields_of(RunReport)
    expected = {
        "A run": list(top),
        "A phase": list(fields_of(run_report.PhaseTimes)),
        "A change of frequency": list(fields_of(run_report.FrequencyChange)),
        "A rank's costs": list(fields_of(run_report.RankCosts)),
    }
    for name, kind in top.items():
        for part in parts_of(kind):
            expected.setdefault(name, []).extend(fields_of(part))
    assert {title: sorted(names) for title, names in sections.items()} == {
        title: sorted(names) for title, names in expected.items()
    }


def test_names_have_units() -> None:
    """A duration is in seconds and a size in bytes, by name, or by the group's."""
    for name, kind in fields_of(RunReport).items():
        for part in parts_of(kind):
            for field, inner in fields_of(part).items():
                if float in (inner, *typing.get_args(inner)):
                    assert "seconds" in f"{name} {field}" or field.endswith(("_per_second", "_share", "_allowed")), (
                        field
                    )


NUMBERS = {int: st.integers(0, 2**40), float: st.floats(0, 1e12), str: st.text(max_size=9), bool: st.booleans()}


def values(kind: Any) -> st.SearchStrategy[Any]:
    if kind in NUMBERS:
        return NUMBERS[kind]
    if kind is type(None):
        return st.none()
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(one) for one in arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    return st.builds(kind, **{name: values(inner) for name, inner in fields_of(kind).items()})


@hypothesis_settings(max_examples=25, deadline=None)
@given(st.lists(values(RunReport), max_size=3))
def test_what_is_written_is_read_back(reports: list[RunReport]) -> None:
    sensible = [make_sensible(report) for report in reports]
    data = run_report.dump_file(run_report.dump_run(report) for report in sensible)
    assert run_report.loads(data, "report.json") == tuple(sensible)
    assert [run_report.to_dict(report) for report in sensible] == json.loads(data)["runs"]
    if sensible:  # whatever a report holds, it can be shown
        late = dataclasses.replace(sensible[0], started_unix_seconds=9e17)
        assert run_page("checkpoints", [late, *sensible]).endswith("</html>\n")


def make_sensible(report: RunReport) -> RunReport:
    """Without the contradictions that chance brings."""
    parts = ("data", "forward_backward", "update", "snapshot_wait", "persist_wait", "planning", "other")
    whole = sum(getattr(report.phases, name).total_seconds for name in parts)
    iteration = dataclasses.replace(report.phases.iteration, total_seconds=whole)
    phases = dataclasses.replace(report.phases, iteration=iteration, iterations=min(3, report.iteration))
    plan = report.plan and dataclasses.replace(report.plan, interval=report.plan.interval + 1)
    audited = report.audits_passed + report.breaches
    held = (HeldIterations(0.5, phases.iterations, phases.iterations),) if report.held_iterations else ()
    return dataclasses.replace(report, phases=phases, plan=plan, audited=audited, held_iterations=held)


# Several ranks


def costs(rank: int, held_seconds: float = 0.0, persist_seconds: float = 0.0) -> run_report.RankCosts:
    return run_report.RankCosts(rank, held_seconds, persist_seconds, 10 + rank, 100 + rank, 0)


@pytest.mark.parametrize(
    ("told", "order", "slowest_writer"),
    [
        ([costs(0)], [0], 0),
        ([costs(0), costs(1)], [0, 1], 0),  # alike
        ([costs(0, 1, 9), costs(2, 3, 1)], [2, 0], 0),
        ([costs(rank, rank, -abs(rank - 3)) for rank in range(17)], list(range(16, 0, -1)), 3),
    ],
)  # fmt: skip
def test_the_costs_of_all_ranks(told: list[run_report.RankCosts], order: list[int], slowest_writer: int) -> None:
    found = run_report.sum_up(20, (5,), told)
    assert found is not None
    assert [one.rank for one in found.each] == order
    assert (found.count, found.heard, found.silent, found.slowest_writer) == (20, len(told), (5,), slowest_writer)
    assert found.copied_bytes == sum(10 + one.rank for one in told)
    assert found.written_bytes == sum(100 + one.rank for one in told)


def test_no_rank_has_told_its_costs() -> None:
    assert run_report.sum_up(2, (), ()) is None


def test_people_are_told_what_ranks_cost(written: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = run_report.loads(written, "report.json")
    found = run_report.sum_up(4, (3,), [costs(0, 1.0, 2.0), costs(1, 3.0), costs(2)])
    several = dataclasses.replace(run, ranks=found)
    line = reporter.end_line(several, tmp_path, str(tmp_path))
    assert "; 3 of 4 ranks wrote 303 B, and rank 1 was held longest (3.00 s); rank 3 did not answer; see " in line
    file = tmp_path / "report.json"
    file.write_bytes(run_report.dump_file([run_report.dump_run(several)]))
    assert main(["compare", str(file)]) == FOUND
    out = " ".join(capsys.readouterr().out.split())
    assert "│ 1 │ 3.00 s │" in out
    assert "rank 0 was the slowest to write; 1 of 4 ranks have told nothing; ranks that do not answer: 3" in out
    assert main(["compare", str(file), "--json"]) == FOUND
    (said,) = json.loads(capsys.readouterr().out)["reports"]
    assert said["ranks"] == run_report.to_dict(several)["ranks"]
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path)]) == FOUND
    assert "│ the start │" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(tmp_path), "--html", str(page)]) == FOUND
    assert "1 of 4 ranks have told nothing." in page.read_text()


# Hostile files


def change(place: str, value: Any) -> Callable[[bytes], bytes]:
    """Another value at this place of the newest run; the place may be new."""

    def run(data: bytes) -> bytes:
        whole = json.loads(data)
        inner = whole if place.startswith("/") else whole["runs"][-1]
        *path, last = place.strip("/").split(".")
        for key in path:
            inner = inner[int(key) if isinstance(inner, list) else key]
        inner[last] = value
        return json.dumps(whole).encode()

    return run


def without(data: bytes) -> bytes:
    whole = json.loads(data)
    del whole["runs"][-1]["lag"]
    return json.dumps(whole).encode()


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "Expecting value"),
    "no JSON": (lambda _: b"\xff\xfe\x00", "no run report"),
    "another file": (lambda _: b"[1, 2]", "no run report"),
    "truncated": (lambda data: data[: len(data) // 2], "no run report"),
    "a key twice": (lambda data: data.replace(b'"committed"', b'"captures"', 1), "a key occurs twice"),
    "deep": (lambda _: b"[" * 200_000, "no run report"),
    "a long number": (lambda data: data.replace(b'"captures": 6', b'"captures": ' + b"9" * 5000), "no run report"),
    "too large": (lambda data: data + b" " * run_report.MAX_BYTES, "more than"),
    "another version": (change("/version", 2), "version 2; this checkflow reads version 1"),
    "another format": (change("/format", "checkflow-plan"), "format: "),
    "a field too many": (change("surprise", 1), "surprise"),
    "a field too few": (without, "lag: "),
    "text for a number": (change("captures", "6"), "captures: "),
    "a float for a count": (change("captures", 6.5), "captures: "),
    "not a number": (change("longest_hold_seconds", float("nan")), "no run report"),
    "negative": (change("bytes.persisted_bytes", -1), "runs.0.bytes.persisted_bytes is negative"),
    "beyond all measure": (change("captures", 10**400), "runs.0.captures is beyond all measure"),
    "audits": (change("breaches", 1), "audited is not"),
    "phases": (change("phases.data.total_seconds", 1e6), "do not add up"),
    "iterations": (change("phases.iterations", 7), "phases.iterations is more"),
    "interval": (change("plan.interval", 0), "plan.interval"),
    "held iterations": (change("held_iterations.0.snapshot_wait", 99), "of 6 by snapshot_wait"),
    "another clock": (change("phases.clock", "device"), "phases.clock"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name: str, written: bytes) -> None:
    damage, says = HOSTILE[name]
    with pytest.raises(ReportError, match=re.escape(says)) as caught:
        run_report.loads(damage(written), "report.json")
    message = str(caught.value)
    assert message.startswith("report.json ")
    assert "\n" not in message
    assert len(message) < 300


def test_an_iteration_that_ctrl_c_left_out_of_a_histogram_is_no_contradiction(written: bytes) -> None:
    (run,) = run_report.loads(written, "report.json")
    held = [one.persist_wait for one in run.held_iterations]
    index = held.index(max(held))
    (read,) = run_report.loads(change(f"held_iterations.{index}.persist_wait", held[index] - 1)(written), "report.json")
    assert sum(one.persist_wait for one in read.held_iterations) == read.phases.iterations - 1


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, says in [("fifo", "no regular file"), ("folder", "no regular file"), ("missing", "No such file")]:
        with pytest.raises(ReportError, match=says):
            run_report.load(tmp_path / name)
        assert not run_report.is_report(tmp_path / name)
    with pytest.raises(ReportError, match="null"):
        run_report.load("a\0b")


# The file of real runs


def test_a_run_is_told_as_it_was(tmp_path: Path) -> None:
    checkpointer = train(tmp_path, 6)
    report = checkpointer.report()
    assert json.loads(json.dumps(report)) == report
    (run,) = runs_of(tmp_path)
    told = run_report.to_dict(run)
    changing = ("written_unix_seconds", "lag")
    assert {key: told[key] for key in told if key not in changing} == {
        key: report[key] for key in report if key not in changing
    }
    assert (run.closed, run.model, run.device, run.iteration, run.resumed_from) == (True, "Sequential", "cpu", 6, None)
    assert (run.captures, run.committed, run.superseded, run.failed, run.last_failure) == (6, 6, 0, 0, None)
    assert (run.audited, run.audits_passed, run.breaches) == (6, 6, 0)
    assert run.phases.iterations == 6
    assert run.lag.iterations == 0
    assert (run.lag.captured_step, run.lag.durable_step) == (6, 6)
    assert run.measured.peak_bytes is None  # a CPU: nobody measures it
    assert run.measured.iteration_seconds is not None
    assert run.measured.stall_seconds is not None
    assert (run.frequency.memory_interval, run.frequency.disk_interval, run.frequency.reason) == (1, 1, "every")
    assert [sum(getattr(one, wait) for one in run.held_iterations) for wait in ("snapshot_wait", "persist_wait")] == [
        6, 6,
    ]  # fmt: skip
    start, *points, end = run.history
    assert (start.checkpoints, start.iteration, start.durable_step, start.lag_iterations) == (0, 0, None, 0)
    assert [(point.checkpoints, point.durable_step, point.failed) for point in points] == [
        (1, step, 0) for step in range(1, 7)
    ]
    assert all(point.lag_iterations >= 1 and point.lag_seconds > 0 for point in points)  # the one before was newest
    assert (end.checkpoints, end.iteration, end.durable_step, end.disk_interval) == (0, 6, 6, 1)
    assert sorted(point.unix_seconds for point in run.history) == [point.unix_seconds for point in run.history]


def test_a_void_checkpoint_is_no_point_of_the_history(tmp_path: Path) -> None:
    job = Job()
    with job.open(tmp_path) as checkpointer:
        for _ in checkpointer.steps(2):
            job.iterate()
        report = checkpointer._reporter
        wait_for(lambda: len(report.make().history) == 3)
        report.checkpoint_ended()  # with none committed, and none failed
        assert [point.checkpoints for point in report.make().history] == [0, 1, 1]
    assert [point.checkpoints for point in runs_of(tmp_path)[0].history] == [0, 1, 1, 0]


def test_bytes_by_the_way_they_took(tmp_path: Path) -> None:
    checkpointer = train(tmp_path, 5)
    report, last = checkpointer.report(), checkpointer.last_capture
    moved, state = report["bytes"], sum(spec.size_bytes for spec in Job().plan.fingerprint.state)
    assert last is not None
    through = sum(record.length_bytes for record in last.log if record.kind == "snapshot")
    crossed = sum(record.length_bytes for record in last.log if record.kind == "offload")
    assert report["newest_capture"] == {
        "step": 5, "direct_bytes": crossed - through, "snapshot_bytes": through, "boundary_bytes": last.boundary_bytes,
        "snapshot_peak_bytes": last.statistics.snapshot_peak_bytes,
    }  # fmt: skip
    assert through > 0
    assert last.boundary_bytes > 0
    assert moved["state_bytes"] == state
    assert (
        moved["captured_bytes"] == 5 * state == sum(moved[f"{way}_bytes"] for way in ("direct", "snapshot", "boundary"))
    )
    sizes = [file.stat().st_size for file in find(tmp_path)[0].glob("*.safetensors")]
    assert report["checkpoint_bytes"] == sum(sizes)
    assert moved["persisted_bytes"] == 5 * sum(sizes)
    rates = report["bandwidths"]
    assert rates["offload_bytes_per_second"] * rates["offload_seconds"] == pytest.approx(5 * crossed)
    assert rates["persist_bytes_per_second"] * rates["persist_seconds"] == pytest.approx(5 * sum(sizes))


def test_the_rate_of_large_copies_stands_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = train(tmp_path / "small", 2).report()["bandwidths"]
    assert small["offload_bytes_per_second"] > 0
    assert small["large_offload_bytes_per_second"] is None
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "LARGE_BYTES", 1)  # every copy is a large one
    large = train(tmp_path / "large", 2).report()["bandwidths"]
    assert large["large_offload_bytes_per_second"] >= large["offload_bytes_per_second"]  # without what is around each


def test_each_start_adds_a_run_and_the_last_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "KEPT_RUNS", 3)
    for number in range(1, 5):
        train(tmp_path, 2 * number)
        runs = runs_of(tmp_path)
        assert [run.iteration for run in runs] == [2 * one for one in range(max(1, number - 2), number + 1)]
    assert [(run.resumed_from, run.replayed_iterations, run.replayed_exactly) for run in runs] == [
        (2, 0, True), (4, 0, True), (6, 0, True),
    ]  # fmt: skip
    assert len({run.run_id for run in runs}) == 3
    manifest = json.loads((find(tmp_path)[0] / "manifest.json").read_text())
    assert manifest["run_id"] == runs[-1].run_id


@pytest.mark.slow
def test_what_a_kill_costs_is_told_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that is really killed: its report is that of its newest checkpoint, which bounds what is done again."""
    job = jobs.Job(tmp_path, kill=("step", 1, 3), reports=True)
    assert jobs.start(job) == -9
    (killed,) = runs_of(tmp_path / "checkpoints")
    done = len((tmp_path / "samples").read_text().splitlines())
    restorable = int(find(tmp_path / "checkpoints")[0].name[5:])
    assert not killed.closed
    assert killed.committed >= 1
    assert 1 <= killed.iteration <= done
    model, optimizer, scheduler = jobs.make()
    loader = jobs.DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    with (
        caplog.at_level(logging.INFO, "checkflow"),
        Checkpointer(
            model, optimizer, loader, directory=tmp_path / "checkpoints", plan=jobs.make_plan(),
            state={"scheduler": scheduler},
        ) as checkpointer,
    ):  # fmt: skip
        report = checkpointer.report()
    resumed = report["resumed_from"]
    assert resumed >= restorable
    assert report["reclaimed_step"] == (resumed if resumed > restorable else None)
    assert report["replayed_iterations"] == max(0, killed.iteration - resumed)
    assert report["replayed_iterations"] <= done - resumed
    assert report["replayed_exactly"] is False
    words = f"resumed from step {resumed} of {tmp_path / 'checkpoints'}"
    words += " (which the run before had in host memory), " if resumed > restorable else ", "
    words += "the previous run did not report its end, and what it did after that step is repeated"
    if lost := report["replayed_iterations"]:
        words += f": {lost} iteration{'s' if lost > 1 else ''} up to its last report, and those since"
    assert f"{words}\n" in caplog.text
    assert [run.closed for run in runs_of(tmp_path / "checkpoints")] == [False, True]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("at its end", "no iteration is done again"),
        ("by an error", "1 iteration is done again"),
        ("by a signal", "no iteration is done again"),
        ("without close", "no iteration is done again"),
        ("by os._exit", "the previous run did not report its end, and what it did after that step is repeated"),
        ("killed", "the previous run did not report its end, and what it did after that step is repeated"),
        ("on a full disk", "the previous run did not report its end, and what it did after that step is repeated"),
        ("long after its report", "and what it did after that step is repeated: 2 iterations up to its last report"),
    ],
)
def test_how_the_run_before_ended_is_told_as_far_as_it_is_known(
    end: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a run that closed has said what it had done; of others nobody knows whether they were killed."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_end_somehow, args=(tmp_path, end))
    child.start()
    child.join()
    assert child.exitcode == {"killed": -9, "by a signal": 75}.get(end, 0)
    with caplog.at_level(logging.INFO, "checkflow"):
        train(tmp_path, 8)
    (line,) = (message for message in caplog.messages if "resumed from step" in message)
    assert f", {words}" in line
    assert "was killed" not in line


def _end_somehow(directory: Path, end: str) -> None:
    """A run of five iterations, in a process of its own."""
    job = Job()
    reporter.WRITTEN_EVERY_SECONDS, reporter.MOST_SHARE = 0.0, math.inf
    checkpointer = job.open(directory, every=5 if end == "by an error" else 1, keep_latest=5, host_buffers=1)
    with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
        if end in ("at its end", "by an error", "by a signal"):
            stack.enter_context(checkpointer)
        for n in checkpointer.steps(7 if end == "by an error" else 5):
            job.iterate()
            if end == "by an error" and n == 6:
                raise KeyError
            if end == "by a signal" and n == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: checkpointer.durable_step == 5)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "long after its report":
        checkpointer._reporter.write()
        for step in (4, 5):
            shutil.rmtree(directory / f"step-{step:08}")
    if end in ("by os._exit", "long after its report"):
        os._exit(0)
    if end == "on a full disk":
        checkpointer._reporter.write = lambda **options: None  # type: ignore[method-assign]
        checkpointer.close()
    if end == "without close":
        resources._close_all()  # as Python does at exit


def test_the_file_is_written_now_and_then_and_at_once_if_an_audit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "WRITTEN_EVERY_SECONDS", 1e9)
    monkeypatch.setattr(reporter, "MOST_SHARE", math.inf)
    job = Job()
    with pytest.raises(StorageError, match="is torn"), job.open(tmp_path) as checkpointer:
        for _ in checkpointer.steps(6):
            job.iterate()
            if checkpointer.iteration == 3:
                wait_for(lambda: checkpointer.durable_step is not None)
                assert runs_of(tmp_path)[-1].committed == 0
                monkeypatch.setattr(writer, "_is_staged", lambda *_: False)
        wait_for(lambda: runs_of(tmp_path)[-1].breaches > 0)


def test_what_is_lost_is_known_where_the_run_before_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with contextlib.suppress(KeyError), job.open(tmp_path, every=3) as checkpointer:
        for _ in checkpointer.steps(9):
            if checkpointer.iteration == 7:
                raise KeyError  # training that ends by itself is saved
            job.iterate()
    with caplog.at_level(logging.INFO, "checkflow"):
        assert train(tmp_path, 8).report()["replayed_iterations"] == 1
    assert "resumed from step 6" in caplog.text
    assert ", 1 iteration is done again" in caplog.text
    (tmp_path / "report.json").unlink()
    with caplog.at_level(logging.INFO, "checkflow"):
        assert train(tmp_path, 9).report()["replayed_iterations"] is None
    assert "how many iterations are done again is not known" in caplog.text


def test_a_report_that_cannot_be_read_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2)
    (tmp_path / "report.json").write_bytes(b"")
    report = train(tmp_path, 3).report()
    assert (report["resumed_from"], report["replayed_iterations"]) == (2, None)
    assert caplog.text.count("is set aside as .broken-report.json") == 1
    assert (tmp_path / ".broken-report.json").read_bytes() == b""
    assert [run.iteration for run in runs_of(tmp_path)] == [3]


def test_a_report_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".report.json.tmp").mkdir()  # what is in the way of the new one
    report = train(tmp_path, 4).report()
    assert (report["committed"], report["failed"]) == (4, 0)
    assert caplog.text.count("training and checkpoints go on without it") == 1


def test_a_fault_in_writing_it_ends_neither_writer_nor_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(run_report, "dump_run", fail)
    report = train(tmp_path, 4).report()
    assert (report["committed"], report["failed"]) == (4, 0)
    assert caplog.text.count("ZeroDivisionError: planted") == 1


def test_the_file_is_whole_whichever_call_the_process_is_killed_at(tmp_path: Path) -> None:
    train(tmp_path, 2)
    before = runs_of(tmp_path)
    job = Job()
    with job.open(tmp_path) as checkpointer:
        at = 0
        while True:
            at += 1
            faults = Faults(at)
            with faults(), contextlib.suppress(Killed):
                checkpointer._reporter.write()
            assert [run.run_id for run in runs_of(tmp_path)][: len(before)] == [run.run_id for run in before]
            if not faults.met:
                break
    assert at > 5


def test_failures_are_told_with_the_last_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkflow.core.errors import StorageError
    from checkflow.runtime.store.store import Store
    from checkflow.runtime.transfer.host import HostCopyEngine

    commit, snapshot = Store.commit, HostCopyEngine.snapshot

    def no_room(self: Store, step: int, *arguments: Any, **options: Any) -> Path:
        if step == 2:
            raise StorageError("no room for step 2")
        return commit(self, step, *arguments, **options)

    def no_memory(self: HostCopyEngine, *arguments: Any) -> None:
        if checkpointer.iteration == 5:
            raise MemoryError("none for a snapshot")
        snapshot(self, *arguments)

    monkeypatch.setattr(Store, "commit", no_room)
    monkeypatch.setattr(HostCopyEngine, "snapshot", no_memory)
    job, seen = Job(), []
    with job.open(tmp_path) as checkpointer:
        for _ in checkpointer.steps(7):
            job.iterate()
            seen.append(checkpointer.report()["last_failure"])
    (run,) = runs_of(tmp_path)
    assert (run.failed, run.committed) == (2, 5)
    assert run.last_failure == "MemoryError: none for a snapshot"
    assert seen[0] is None
    assert seen[4] == "StorageError: no room for step 2"  # with every=1, one checkpoint at most is outstanding


def test_the_lag_is_what_storage_has_not_got_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from checkflow.runtime.store.store import Store

    rule_pace(monkeypatch, rests=False)
    train(tmp_path, 2)
    gate, commit = threading.Event(), Store.commit

    def slow(self: Store, *arguments: Any, **options: Any) -> Path:
        gate.wait()
        return commit(self, *arguments, **options)

    monkeypatch.setattr(Store, "commit", slow)
    job, lags = Job(), []
    with job.open(tmp_path, every=None) as checkpointer:
        lags.append(checkpointer.report()["lag"])
        for _ in checkpointer.steps(7):
            job.iterate()
            lags.append(checkpointer.report()["lag"])
        gate.set()
    assert [(lag["captured_step"], lag["durable_step"], lag["iterations"]) for lag in lags] == [
        (None, 2, None), (None, 2, None), (3, 2, 1), (4, 2, 2), (5, 2, 3), (6, 2, 4),
    ]  # fmt: skip
    assert all(lag["seconds"] is lag["since_durable_seconds"] is None for lag in lags)
    after = checkpointer.report()["lag"]
    assert (after["captured_step"], after["durable_step"], after["iterations"], after["seconds"]) == (7, 7, 0, 0.0)
    assert after["since_durable_seconds"] >= 0


# What a person is told


def test_a_line_at_the_begin_and_one_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "checkflow"):
        checkpointer = train(tmp_path, 3)
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert first == (
        f"the given plan runs: a checkpoint every iteration, predicted stall none; checkpoints go to {tmp_path}; "
        "nothing to go on from, training begins anew"
    )
    assert last.startswith("3 checkpoints committed, the newest of step 3; checkpoints held training for ")
    assert re.search(r" % of its own time( \(.* at the ends of epochs and of training\))?; ", last)
    assert last.endswith(f"; see {tmp_path / 'report.json'}")
    assert repr(checkpointer) == (
        f"<Checkpointer of Sequential on cpu, plan given: iteration 3, 3 checkpoints committed to {tmp_path}, closed>"
    )


@pytest.mark.parametrize(
    ("parts", "frequency", "says"),
    [
        ({}, {}, [f"{HELD} 7.8 % of its own time", "planning held it for 300 ms"]),
        ({"planning": 0.0}, {}, [f"{HELD} 7.5 % of its own time"]),
        (
            {"held_measuring_seconds": 0.45, "held_at_ends_seconds": 0.18, "planning": 0.0},
            {"overhead_share": 0.0312, "overhead_allowed": 0.035},
            [
                f"{HELD} 7.5 % of its own time (4.8 % to measure what they cost, 1.9 % at the ends of epochs and of "
                "training)",
                "at this interval they cost 3.1 % with what they slow down, and overhead allows 3.5 %",
            ],
        ),
        ({"planning": 0.0}, {"overhead_share": 0.5, "reason": "every"}, [f"{HELD} 7.5 % of its own time"]),
        ({"planning": 9.3}, {}, []),  # nothing but what held it was seen
    ],
)  # fmt: skip
def test_what_held_training_is_named_by_its_parts(
    parts: dict[str, float], frequency: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    """All of it as shares of training's own time, which ``overhead`` is a share of."""
    (report,) = (train(tmp_path, 3), runs_of(tmp_path))[1]
    seconds = {"iteration": 10.0, "snapshot_wait": 0.5, "persist_wait": 0.2, "planning": parts.pop("planning", 0.3)}
    phases = {
        name: dataclasses.replace(getattr(report.phases, name), total_seconds=total) for name, total in seconds.items()
    }
    report = dataclasses.replace(
        report,
        phases=dataclasses.replace(report.phases, iterations=3, **phases),
        frequency=dataclasses.replace(report.frequency, **{"overhead_share": None, "reason": "overhead", **frequency}),
        **{"held_measuring_seconds": 0.0, "held_at_ends_seconds": 0.0, **parts},
    )
    assert reporter.end_line(report, tmp_path, str(tmp_path)).split("; ")[1:-1] == says


@pytest.mark.parametrize("every", [None, 1, "1h"])
def test_a_short_run_is_held_by_what_it_measures_and_by_its_ends(every: int | str | None, tmp_path: Path) -> None:
    model, optimizer, scheduler = jobs.make()
    loader = jobs.DataLoader(jobs.data(1), jobs.BATCH, shuffle=True, seed=3)
    with Checkpointer(
        model, optimizer, loader, directory=tmp_path, plan=jobs.make_plan(), state={"scheduler": scheduler}, every=every
    ) as checkpointer:
        for _ in checkpointer.epochs(2):
            for _, x, _ in checkpointer.loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    (report,) = runs_of(tmp_path)
    assert report.frequency.reason == ("profile" if every is None else "every")
    named = report.held_measuring_seconds + report.held_at_ends_seconds
    assert report.held_at_ends_seconds > 0
    if every is None:
        assert named == pytest.approx(report.checkpoint_seconds)
    else:
        assert report.held_measuring_seconds == 0
        assert named < report.checkpoint_seconds
    assert report.own_seconds + report.checkpoint_seconds < report.phases.iteration.total_seconds


def test_the_line_at_the_begin_says_how_often(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    for every, often in (
        (2, "2 iterations"),
        ("30s", "so many seconds, as asked"),
        (None, "iteration until it is measured what one costs"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "checkflow"):
            Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=job.plan, every=every).close()
        assert f"runs: a checkpoint every {often}, predicted" in caplog.records[0].getMessage()


def test_without_logging_set_up_the_lines_are_seen_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as soon as somebody takes them, they are seen once."""
    logger, root, seen = logging.getLogger("checkflow"), logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    monkeypatch.setattr("sys.stderr", seen)
    logger.info("before")
    log_handler.show_lines()
    log_handler.show_lines()
    logger.info("a %s", "line")
    logger.warning("a warning")
    logger.debug("detail")
    assert seen.getvalue() == "checkflow: a line\ncheckflow: a warning\n"
    taken = io.StringIO()
    root.addHandler(logging.StreamHandler(taken))
    logger.info("taken")
    assert (taken.getvalue(), "taken" in seen.getvalue()) == ("taken\n", False)
    root.handlers.clear()
    logger.setLevel(logging.WARNING)
    logger.info("too quiet")
    assert "quiet" not in seen.getvalue()
    logger.manager._clear_cache()  # type: ignore[attr-defined]


def test_who_has_set_up_logging_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("checkflow")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    log_handler.show_lines()
    assert (len(logger.handlers), logger.level) == (1, logging.NOTSET)


# checkflow compare


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run's report, its plan and another."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "checkpoints", 4)
    plans.save(Job().plan, tmp_path / "own.json")
    other = Job()
    other.plan = random_plan({"model": other.model}, {"optimizer": other.optimizer}, 2)
    plans.save(other.plan, tmp_path / "other.json")
    return tmp_path


def test_compare_shows_planned_against_measured(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "checkpoints/report.json"]) == FOUND
    table = capsys.readouterr().out
    for words in (
        "Sequential on cpu, run 1 of 1: 4 iterations",
        "not measured on cpu",
        "given by the job",
        "persist wait",
        "forward, backward and update: the median",
        "an iteration here is all from one boundary to the next; above, and in plans, its forward, backward and update",
    ):
        assert words in " ".join(table.split()), words
    assert main(["compare", "checkpoints/report.json", "--json"]) == FOUND
    (said,) = json.loads(capsys.readouterr().out)["reports"]
    (run,), plan = runs_of(compared / "checkpoints"), Job().plan
    rows = {row["what"]: (row["unit"], row["planned"], row["measured"]) for row in said["rows"]}
    per_second = sum(spec.size_bytes for spec in plan.fingerprint.state) / plan.timeline.iteration_seconds
    assert rows == {
        "iteration": ("seconds", plan.timeline.iteration_seconds, run.measured.iteration_seconds),
        "stall": ("seconds", 0.0, run.measured.stall_seconds),
        "peak": ("bytes", plan.plan_peak_bytes, None),
        "link": ("bytes_per_second", plan.bandwidth_bytes_per_second, run.bandwidths.offload_bytes_per_second),
        "storage": ("bytes_per_second", pytest.approx(per_second), run.bandwidths.persist_bytes_per_second),
        "interval": ("iterations", 1, 1.0),
        "interval on storage": ("iterations", 1, 1.0),
    }
    assert (said["plan_ran"], said["plan_digest"], said["clock"]) == (True, plan.digest, "host")
    assert said["phases"]["iterations"] == 4


@pytest.mark.parametrize(("exactly", "says"), [(True, "allocated on the device"), (False, "its own is at most that")])
def test_compare_tells_a_peak_from_before_the_plan(
    compared: Path, capsys: pytest.CaptureFixture[str], exactly: bool, says: str
) -> None:
    file = compared / "checkpoints" / "report.json"
    for field, value in (("peak_bytes", 5000), ("peak_exactly", exactly)):
        file.write_bytes(change(f"measured.{field}", value)(file.read_bytes()))
    assert main(["compare", "checkpoints/report.json", "--json"]) == FOUND
    (said,) = json.loads(capsys.readouterr().out)["reports"]
    (row,) = (row for row in said["rows"] if row["what"] == "peak")
    assert row["measured"] == 5000
    assert says in row["note"]


def test_compare_takes_another_plan(
    compared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkflow.planner.schedule import replay

    monkeypatch.setattr(replay, "check_plan", plans.validate)  # a random plan obeys no link
    for name, ran in (("own.json", True), ("other.json", False)):
        assert main(["compare", "checkpoints/report.json", name, "--json"]) == FOUND
        (said,) = json.loads(capsys.readouterr().out)["reports"]
        assert (said["plan_ran"], said["plan_digest"]) == (ran, plans.load(compared / name).digest)
    assert main(["compare", "checkpoints/report.json", "other.json"]) == FOUND
    assert "this plan is not the one that ran" in capsys.readouterr().out


def test_compare_of_a_run_without_a_plan(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = compared / "checkpoints" / "report.json"
    file.write_bytes(change("plan", None)(file.read_bytes()))
    assert main(["compare", "checkpoints/report.json", "--json"]) == FOUND
    (said,) = json.loads(capsys.readouterr().out)["reports"]
    assert {row["planned"] for row in said["rows"] if row["what"] != "interval on storage"} == {None}
    assert main(["compare", "checkpoints/report.json"]) == FOUND
    assert "no plan ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["checkpoints/report.json", "alexnet"], USAGE, "not against a model"),
        (["checkpoints/report.json", "own.json", "other.json"], USAGE, "not against own.json and other.json"),
        (["checkpoints/report.json", "--bandwidth", "3GB/s"], USAGE, "--bandwidth does nothing here"),
        (["checkpoints/report.json", "missing.json"], FAILED, "missing.json"),
        (["nowhere/report.json"], FAILED, "cannot read the report nowhere/report.json: No such file"),
        (["empty.json"], FAILED, "holds no run"),
    ],
)
def test_compare_refuses_in_one_line(
    compared: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    (compared / "empty.json").write_bytes(run_report.dump_file([]))
    assert main(["compare", *arguments]) == code
    said = capsys.readouterr()
    assert (said.out, says in said.err, said.err.count("\n")) == ("", True, 1)


def test_the_error_is_a_public_name() -> None:
    assert checkflow.ReportError is ReportError
