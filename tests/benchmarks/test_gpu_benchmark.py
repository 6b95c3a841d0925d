"""``make test-gpu`` as far as it goes without a GPU: figures, budget, processes, and the whole flow on the CPU."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing.process
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import weakref
import zipfile
from collections import Counter
from collections.abc import Iterator
from ctypes import c_char_p, c_int
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import case as gpu_case
from benchmarks.gpu import figures as gpu_figures
from benchmarks.gpu import link as gpu_link
from benchmarks.gpu import loop as gpu_loop
from benchmarks.gpu import packages as gpu_packages
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.figures import CHECKPOINTED, PLAIN, Part
from benchmarks.gpu.worker import Worker
from benchmarks.memory import Before
from checkflow.core.errors import CheckflowError
from checkflow.core.machine.device import find_device
from checkflow.runtime.interval.controller import Controller
from checkflow.runtime.loop.training_loop import TrainingLoop
from checkflow.runtime.memory_tier import records
from checkflow.runtime.memory_tier.records import RunLife
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.persist.saver import FIRST_AUDITS
from checkflow.runtime.transfer.cuda_device import _Prepared
from checkflow.runtime.transfer.cudart import Copies, CudaRuntime
from checkflow.runtime.transfer.engine import Transfer
from tests.runtime.transfer.test_cudart import Library
from tests.support.dead_jobs import folders_below, give_back, needs_memory
from tests.support.gpu.fake_device import FakeDevice, simulate_gpu
from tests.support.gpu.locked_memory import skip_where_unable
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20)

# --- figures


@given(SECONDS, st.floats(0, 1))
def test_a_quantile_lies_among_the_samples(samples: list[float], share: float) -> None:
    value = gpu_figures.quantile(samples, share)
    assert min(samples) <= value <= max(samples)
    assert gpu_figures.quantile(samples, 0.0) == min(samples)
    assert gpu_figures.quantile(samples, 1.0) == max(samples)
    assert gpu_figures.quantile(samples, 0.5) == pytest.approx(statistics.median(samples))


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_no_quantile_of_nothing_or_beyond_all(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        gpu_figures.quantile(samples, share)


def test_every_block_with_checkpoints_lies_between_two_without() -> None:
    assert gpu_figures.interleaved(1) == (PLAIN, CHECKPOINTED, PLAIN)
    assert gpu_figures.interleaved(3) == (PLAIN, CHECKPOINTED) * 3 + (PLAIN,)
    with pytest.raises(ValueError, match="at least one"):
        gpu_figures.interleaved(0)


@given(first=st.floats(1e-3, 1.0), drift=st.floats(0, 1e-4), cost=st.floats(0, 0.5), rounds=st.integers(1, 4))
def test_a_steady_drift_is_no_overhead(first: float, drift: float, cost: float, rounds: int) -> None:
    blocks = [
        (kind, [(first + drift * i) * (1 + cost * (kind == CHECKPOINTED))] * 3)
        for i, kind in enumerate(gpu_figures.interleaved(rounds))
    ]
    found = gpu_figures.overhead(blocks)
    assert found["block_overheads"] == pytest.approx([cost] * rounds, abs=1e-9)
    assert found["median_overhead"] == pytest.approx(cost, abs=1e-9)  # both kinds have the same middle
    assert found["noise"] == pytest.approx(2 * rounds * drift / first, abs=1e-9)
    assert found["checkpointed_seconds"]["count"] == 3 * rounds


def test_tails_are_told_apart_from_medians() -> None:
    rare = [(PLAIN, [1.0] * 50), (CHECKPOINTED, [1.0] * 48 + [3.0] * 2), (PLAIN, [1.0] * 50)]
    found = gpu_figures.overhead(rare)
    assert found["median_overhead"] == 0
    assert found["p99_overhead"] == pytest.approx(2.0)


def test_the_cost_of_a_checkpoint_in_the_iterations_after_it() -> None:
    at_once = [1.5] + [1.0] * 13  # held at the boundary itself
    slower = [1.2 * one for one in [1.0] * 10 + [3.0] + [1.0] * 3]  # the clock has dropped meanwhile
    dear = [1.0] * 5 + [6.0] + [1.0] * 8
    found = gpu_figures.following_cost([*at_once, *slower, *dear, *[9.0] * 13], 14, 10)
    assert found["each"] == pytest.approx([0.5, 2.4, 5.0])  # what follows is no whole stretch
    assert found["seconds"] == pytest.approx(2.4)
    assert found["usual_seconds"] == pytest.approx((1 + 1.2 + 1) / 3)
    late = [1.0] * 11 + [2.0] + [1.0] * 2  # after ten iterations, and before it is over
    assert gpu_figures.following_cost(late, 14, 11)["seconds"] == 0
    assert gpu_figures.following_cost(late, 14, 10)["seconds"] < 0


@pytest.mark.parametrize(("count", "every", "settled"), [(13, 14, 10), (14, 14, 13), (14, 14, 9), (0, 14, 10)])
def test_no_cost_of_a_checkpoint_without_iterations_to_compare_with(count: int, every: int, settled: int) -> None:
    with pytest.raises(ValueError, match="none to compare with"):
        gpu_figures.following_cost([1.0] * count, every, settled)


def event(category: str, name: str, begin: float, length: float, size_bytes: int = 0) -> dict[str, Any]:
    """As torch's profiler writes it: microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": {"bytes": size_bytes}}


def test_copies_by_a_profilers_trace() -> None:
    events = [
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 100, 4_000_000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 200, 100, 6_000_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 10, 5),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 10, 7),
        event("kernel", "gemm", 50, 100),
        event("kernel", "copy DtoH by name alone", 120, 100),
        event("cuda_runtime", "cudaMemcpyAsync DtoH", 0, 1000),
        {"ph": "M", "name": "process_name"},
    ]
    found = gpu_figures.copies({"traceEvents": events}, 3)
    assert (found["bytes"], found["copies"], found["largest_copy_bytes"]) == (10_000_000, 2, 6_000_000)
    assert found["busy_seconds"] == pytest.approx(200e-6)
    assert found["bytes_per_second"] == pytest.approx(50e9)
    assert found["beside_kernels"] == pytest.approx((50 + 20) / 200)
    assert (found["snapshot_bytes"], found["to_device_bytes"], found["iterations"]) == (7, 5, 3)


def test_a_profiler_by_whose_names_nothing_crossed_is_no_failure() -> None:
    events = [
        event("kernel", "gemm", 50, 100),
        event("gpu_memcpy", "Memory copy (Device -> Pinned)", 0, 100, 4_000_000),
        {"ph": "M", "name": "process_name"},
        *(event("cuda_runtime", f"call {number}", 0, 1) for number in range(100)),
    ]
    found = gpu_figures.copies({"traceEvents": events}, 3)
    assert found["skipped"] == "the profiler saw no copy from device to host"
    assert found["seen"][0] == "gpu_memcpy: Memory copy (Device -> Pinned)"
    assert len(found["seen"]) == gpu_figures.MOST_NAMES
    assert gpu_figures.copies({"traceEvents": []}, 3)["seen"] == []


@pytest.mark.parametrize(("left", "allowed"), [(9.9, None), (10.0, 10.0), (30.0, 30.0), (31.0, 30.0), (-1.0, None)])
def test_a_part_takes_what_is_left_or_is_not_begun(left: float, allowed: float | None) -> None:
    assert gpu_figures.allowed_seconds(Part("p", "", 30.0, 10.0), left) == allowed


def case_rows(
    interval: int, overhead: float, rate: float, captures: tuple[int, ...] | None = None
) -> list[dict[str, Any]]:
    made = {"interval": interval, "iterations_a_block": 24, "captures_a_block": [24 // interval] * 2}
    if captures is not None:
        made["captures_a_block"] = list(captures)
    return [
        {"section": "plan", "interval": interval},
        {"section": "step_time", **made, "median_overhead": overhead, "p99_overhead": 0.0, "held_seconds": 0.0},
        {"section": "copies", "bytes_per_second": rate},
        {"section": "memory", "error": "why"},
    ]


def test_targets_are_judged_by_the_worst_case() -> None:
    cases = {"a": case_rows(1, 0.005, 52e9), "b": case_rows(1, 0.02, 49e9), "c": case_rows(4, 0.9, 60e9)}
    by_key = dict(zip(((t.section, t.key) for t in gpu_figures.TARGETS), gpu_figures.judge(cases), strict=True))
    added = by_key["step_time", "median_overhead"]
    assert (added["met"], added["worst"], added["worst_case"]) == (False, 0.02, "b")
    assert set(added["cases"]) == {"a", "b"}  # the third has no checkpoint every iteration
    assert by_key["step_time", "p99_overhead"]["met"] is True
    assert (by_key["copies", "bytes_per_second"]["met"], by_key["copies", "bytes_per_second"]["worst"]) == (False, 49e9)
    assert by_key["memory", "plan_error"]["met"] is None
    assert all(row["met"] is None for row in gpu_figures.judge({}))
    lines = list(gpu.lines_of(list(by_key.values())))
    assert any(line.split()[0] == "MISSED" and "0.02 (b), at most 0.01" in line for line in lines)
    assert sum("not measured" in line for line in lines) == sum(row["met"] is None for row in by_key.values())


@pytest.mark.parametrize("captures", [(24, 23), (3,), ()])
def test_what_was_not_captured_every_iteration_is_no_figure_of_that(captures: tuple[int, ...]) -> None:
    cases = {"whole": case_rows(1, 0.02, 60e9), "some": case_rows(1, 0.001, 60e9, captures)}
    rows = gpu_figures.judge(cases)
    added, _, _, held = rows[:4]
    assert (added["cases"], added["met"]) == ({"whole": 0.02}, False)
    assert list(added["left_out"]) == ["some"]
    assert added["left_out"]["some"].endswith("captures a block, not 24")
    assert set(held["cases"]) == {"whole", "some"}
    alone = gpu_figures.judge({"some": cases["some"]})
    assert [row["met"] for row in alone[:2]] == [None, None]
    lines = list(gpu.lines_of(alone))
    assert "not measured" in lines[0]
    assert lines[1].split() == ["without", "some:", *alone[0]["left_out"]["some"].split()]


@pytest.mark.parametrize(
    ("ran", "reason"),
    [
        ({"buffers_locked": True, "batches": True}, None),
        ({"buffers_locked": False}, None),  # no GPU: nothing is to be locked
        ({"buffers_locked": False, "batches": True}, "its buffers were not locked in place"),
        ({"buffers_locked": True, "batches": False}, "its copies were made one by one"),
        ({"buffers_locked": False, "batches": False}, "not locked in place, and its copies were made one by one"),
    ],
)
@pytest.mark.parametrize("place", [1, 2])
def test_what_was_hampered_is_no_figure(ran: dict[str, bool], reason: str | None, place: int) -> None:
    """The copies' own rows say so, or else, for every section, those of the iterations."""
    rows = case_rows(1, 0.02, 49e9)
    rows[place]["ran"] = ran
    judged = {
        (t.section, t.key): row for t, row in zip(gpu_figures.TARGETS, gpu_figures.judge({"a": rows}), strict=True)
    }
    copies, added = judged["copies", "bytes_per_second"], judged["step_time", "median_overhead"]
    assert copies["met"] is (False if reason is None else None)
    assert (added["met"] is None) == (reason is not None and place == 1)
    for row in (copies, added):
        assert row.get("left_out", {}).get("a", "").endswith(reason or "") == (row["met"] is None or reason is None)


TAKEN = {"single": True, "batched": True, "batches": True}


@pytest.mark.parametrize(
    ("kinds", "unable"),
    [
        ({}, {}),  # nothing is known
        ({"shared": TAKEN, "anonymous": TAKEN, "unlocked": {"single": True}}, {}),
        (
            {"shared": {"refused": "why"}, "allocated": TAKEN},
            {"locked shared memory": "CUDA does not take shared memory: why"},
        ),
        (
            {"shared": {"refused": "why"}, "anonymous": {"refused": "that"}, "unlocked": {"single": True}},
            {
                "locked shared memory": "CUDA does not take shared memory: why",
                "locked memory": "CUDA does not take shared memory: why; CUDA does not take anonymous memory: that",
            },
        ),
        (
            {"shared": TAKEN | {"batches": False}, "anonymous": {"refused": "why"}},
            {"batches": "many copies in a call are not to be had here"},
        ),
        ({"shared": {"single": True}}, {"batches": "many copies in a call are not to be had here"}),
        ({"shared": TAKEN | {"batches": False}, "anonymous": TAKEN}, {}),
        (
            {"shared": TAKEN | {"batched": False}, "anonymous": TAKEN, "unlocked": {"single": False}},
            {"right copies": "what arrives is not what left: batched to shared memory, single to unlocked memory"},
        ),
    ],
)
def test_what_a_machine_is_unable_to(kinds: dict[str, Any], unable: dict[str, str]) -> None:
    assert gpu_figures.unable(kinds) == unable


def test_what_is_missing_in_a_result_is_told() -> None:
    parts = [Part(name, "", 1.0, 1.0) for name in "abcd"]
    done = {"status": "done", "reason": "", "rows": [{}]}
    result = {"parts": {"a": done, "b": {**done, "rows": []}, "c": {"status": "skipped", "reason": "", "rows": []}}}
    assert gpu_figures.incomplete(result, parts) == [
        "b: done, and no rows", "c: skipped, no reason given", "d: missing",
    ]  # fmt: skip


def test_cases_have_names_of_their_own() -> None:
    names = [gpu.name_of(case) for case in gpu.CASES]
    assert len(set(names)) == len(names)
    for case, name in zip(gpu.CASES, names, strict=True):
        assert gpu_loop.Case(**case).name == name
    assert names[0] == "gpt2 mixed batch 16"
    parts = [task.part.name for task in gpu.tasks("a-card", Path("out"), quick=False)]
    assert len(set(parts)) == len(parts)


# --- processes


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with contextlib.closing(Worker(tmp_path / "log")) as worker:
        yield worker


def task(name: str, *, most_seconds: float = 1800.0, least_seconds: float = 1.0) -> gpu.Task:
    """The first word of the name is the function."""
    part = Part(name, "", most_seconds, least_seconds, on_cpu=True)
    return gpu.Task(part, f"tests.support.gpu.faults:{name.partition(' ')[0]}")


def run_in(folder: Path, budget_seconds: float = 3600.0) -> gpu.Run:
    return gpu.Run(folder / "r.json", folder / "log", "card", {}, budget_seconds, time.monotonic())


def is_gone(process: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code yet."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_parts_that_go_wrong_cost_the_others_nothing(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[Any]] = []
    perform = Worker.run

    def noting(self: Worker, function: str, options: Any, limit_seconds: float, rows: list[Any]) -> Any:
        given.append(rows)
        return perform(self, function, options, limit_seconds, rows)

    def leaping() -> float:
        """The time of what hangs is over when it has said what it has started."""
        return time.monotonic() + (1e6 if any("child" in row for row in given[-1]) else 0.0)

    monkeypatch.setattr(Worker, "run", noting)
    monkeypatch.setattr(gpu_worker, "time", SimpleNamespace(monotonic=leaping, sleep=time.sleep))
    names = [
        "go_well",
        "go_well 2",
        "fail",
        "go_well 3",
        "fail_in_a_section",
        "go_well 4",
        "hang",
        "crash",
        "leave_out",
    ]
    chosen = [task(name) for name in names]
    run = run_in(tmp_path)
    gpu.perform(run, chosen, {"device": "cpu"}, worker)
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert list(parts) == names
    assert {name: (entry["status"], entry["reason"]) for name, entry in parts.items()} == {
        **{name: ("done", "") for name in names if name.startswith("go_well")},
        "fail": ("failed", "ValueError: with a reason"),
        "fail_in_a_section": ("failed", "one: it went wrong"),
        "hang": ("ended", "it was ended after 1800 s; log says where it was"),
        "crash": ("failed", "its process ended with signal SIGSEGV"),
        "leave_out": ("skipped", "not installed"),
    }
    assert parts["fail"]["rows"] == parts["crash"]["rows"] == [{"before": "it"}]
    assert [row["section"] for row in parts["fail_in_a_section"]["rows"]] == ["one", "two"]
    assert parts["go_well"]["rows"][0]["options"] == ["device", "host_memory", "numbers", "traced"]
    processes = [entry["rows"][0]["process"] for name, entry in parts.items() if name.startswith("go_well")]
    assert processes[0] == processes[1]  # only a failure makes it another one
    assert len(set(processes)) == 3
    (child,) = [row["child"] for row in parts["hang"]["rows"]]
    wait_for(lambda: is_gone(child))
    said = (tmp_path / "log").read_text()
    assert "ValueError: with\na reason" in said
    for function in ("hang", "crash"):
        assert re.search(rf"faults\.py\", line \d+ in {function}$", said, re.MULTILINE)
    assert gpu_figures.incomplete({"parts": parts}, [one.part for one in chosen]) == []


def test_what_the_budget_leaves_no_time_for_is_skipped_and_says_so(tmp_path: Path, worker: Worker) -> None:
    run = run_in(tmp_path)
    gpu.perform(
        run, [task("hang", least_seconds=5000.0), task("go_well", least_seconds=5.0)], {"device": "cpu"}, worker
    )
    parts = run.result["parts"]
    assert parts["hang"]["status"] == "skipped"
    assert parts["hang"]["reason"].endswith("s are left of the budget")
    assert parts["go_well"]["status"] == "done"


def test_some_parts_alone_keep_what_the_others_found(tmp_path: Path, worker: Worker) -> None:
    first = run_in(tmp_path)
    probed = [{"section": "probe", "device": {"name": "card"}}]
    traced = [{"case": "go_well", "training_peak_bytes": 7}, {"case": "other", "error": "why"}]
    first.note(Part("link", "", 1.0, 1.0), "done", "", 0.5, probed)
    first.note(Part("traces", "", 1.0, 1.0), "done", "", 0.5, traced)
    first.note(Part("go_well", "", 1.0, 1.0), "failed", "why", 0.5, [])
    again = run_in(tmp_path)
    assert again.recall(json.loads((tmp_path / "r.json").read_text()))
    gpu.perform(again, [task("go_well")], {"device": "cpu"}, worker)
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert {name: entry["status"] for name, entry in parts.items()} == dict.fromkeys(
        ("link", "traces", "go_well"), "done"
    )
    told = parts["go_well"]["rows"][0]
    assert (told["numbers"], told["traced"]) == ({"name": "card"}, traced[0])
    other = run_in(tmp_path)
    for earlier in ({"schema": 0, "card": "card"}, {"schema": gpu.SCHEMA, "card": "another"}, {}):
        assert not other.recall({**earlier, "parts": {"old": {}}})
    assert other.result["parts"] == {}


def test_of_a_part_that_two_runs_have_done_the_later_one_is_joined(tmp_path: Path) -> None:
    """In whichever order they are given; and what is joined twice is told once."""
    runs: list[dict[str, Any]] = []
    for number in range(3):
        run = run_in(tmp_path)
        run.result["begun"] = f"run {number}"
        if number == 2:
            assert run.recall(runs[0])
        else:
            run.note(
                Part("link", "", 1.0, 1.0), "done", "", 0.5, [{"section": "probe", "device": {"name": str(number)}}]
            )
            run.result["parts"]["link"]["ended"] = f"2026-01-0{number + 1}"
        runs.append(json.loads(json.dumps(run.result)))
    for order in ((0, 1, 2), (2, 1, 0)):
        joined = run_in(tmp_path)
        for number in order:
            assert joined.recall(runs[number])
        assert joined._numbers == {"name": "1"}
        assert sorted(one["begun"] for one in joined.result["earlier"]) == ["run 0", "run 1", "run 2"]


def test_parts_that_the_machine_is_unable_to_are_skipped_with_the_reason(tmp_path: Path, worker: Worker) -> None:
    kinds = {kind: {"kind": kind, "refused": "why"} for kind in gpu_figures.LOCKED}
    run = run_in(tmp_path)
    run.note(Part("smoke", "", 1.0, 1.0), "failed", "", 0.5, [{"section": "device"}, *kinds.values()])
    needing = [
        gpu.Task(Part(what, "", 1800.0, 1.0, on_cpu=True, needs=(what,)), "tests.support.gpu.faults:go_well")
        for what in (gpu_figures.LOCKED_MEMORY, gpu_figures.RIGHT_COPIES)
    ]
    gpu.perform(run, needing, {"device": "cpu"}, worker)
    parts = run.result["parts"]
    assert parts["locked memory"]["status"] == "skipped"
    assert parts["locked memory"]["reason"].startswith("CUDA does not take shared memory: why")
    assert parts["right copies"]["rows"][0]["host_memory"] == kinds


def test_parts_that_time_nothing_run_beside_each_other(tmp_path: Path, worker: Worker) -> None:
    beside = [
        gpu.Task(Part(name, "", 1800.0, 1.0, beside="all"), f"tests.support.gpu.faults:{name}")
        for name in ("go_well", "crash", "fail")
    ]
    run = run_in(tmp_path)
    gpu.perform(run, [*beside, task("leave_out")], {"device": "cuda"}, worker)
    assert list(run.result["parts"])[-1] == "leave_out"
    assert {name: entry["status"] for name, entry in run.result["parts"].items()} == {
        "go_well": "done", "crash": "failed", "fail": "failed", "leave_out": "skipped",
    }  # fmt: skip


def test_a_part_that_is_the_last_of_its_process(tmp_path: Path, worker: Worker) -> None:
    parts = [Part(f"part {number}", "", 1800.0, 1.0, on_cpu=True, last=number == 1) for number in range(4)]
    run = run_in(tmp_path)
    gpu.perform(run, [gpu.Task(part, "tests.support.gpu.faults:go_well") for part in parts], {"device": "cpu"}, worker)
    first, last, other, same = (run.result["parts"][part.name]["rows"][0]["process"] for part in parts)
    assert first == last != other == same


def test_parts_of_one_word_meet_and_others_come_after_them(tmp_path: Path, worker: Worker) -> None:
    pairs = [
        gpu.Task(
            Part(f"{pair} {number}", "", 1800.0, 1.0, beside=pair), "tests.support.gpu.faults:meet",
            {"folder": str(tmp_path / "met"), "pair": pair},
        )
        for pair in ("first", "second") for number in range(2)
    ]  # fmt: skip
    (tmp_path / "met").mkdir()
    run = run_in(tmp_path)
    gpu.perform(run, pairs, {"device": "cuda"}, worker)
    parts = run.result["parts"]
    assert {name: entry["status"] for name, entry in parts.items()} == {one.part.name: "done" for one in pairs}
    assert [parts[f"first {number}"]["rows"][0]["others"] for number in range(2)] == [["first"]] * 2


@pytest.mark.parametrize("call", gpu.CALLS)
def test_a_call_of_ten_minutes_has_time_for_all_of_its_parts(call: int) -> None:
    parts = [task.part for task in gpu.tasks("a-card", Path("out"), quick=False) if task.part.call == call]
    together = [list(group) for _, group in itertools.groupby(parts, lambda part: part.beside or part.name)]
    seconds = gpu.FIRST_SECONDS + sum(max(part.most_seconds for part in group) for group in together)
    assert 0.5 * gpu.CALL_SECONDS < seconds <= gpu.CALL_SECONDS <= 570


def test_three_calls_join_to_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each writes into a folder of its own, and a later one is told what an earlier one has found."""
    asked: dict[str, Any] = {}

    def answer(self: Worker, function: str, options: Any, limit_seconds: float, rows: list[Any]) -> Any:
        if function.endswith(":environment"):
            rows.append({"gpu": None, "torch": "2.11", "python": "3.12", "machine": len(files)})
        elif function.endswith(":link"):
            rows.append({"section": "probe", "device": {"name": "probed"}})
        asked[function.partition(":")[2]] = options
        return "done", ""

    monkeypatch.setattr(Worker, "run", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    files: list[str] = []
    for call in gpu.CALLS:
        joined = ["--join", *files] if files else []
        output = tmp_path / str(call)
        assert gpu.main(["--device", "cpu", "--call", str(call), "--output", str(output), *joined]) == 0
        files.append(str(output / "gpu-cpu.json"))
    result = json.loads(Path(files[-1]).read_text())
    assert set(result["parts"]) == {task.part.name for task in gpu.tasks("cpu", tmp_path, quick=False)}
    assert [one["environment"]["machine"] for one in result["earlier"]] == [0, 1]
    assert asked["case"]["numbers"] == {"name": "probed"}
    capsys.readouterr()
    (tmp_path / "other.json").write_text(json.dumps({"schema": gpu.SCHEMA, "card": "another"}))
    for file, says in (("missing.json", "cannot join"), ("other.json", "is not of this card")):
        arguments = ["--device", "cpu", "--join", str(tmp_path / file), "--output", str(tmp_path / "no")]
        assert gpu.main(arguments) == 2
        assert says in capsys.readouterr().err


def test_the_order_of_a_run() -> None:
    parts = [task.part for task in gpu.tasks("a-card", Path("out"), quick=False)]
    names = [part.name for part in parts]
    assert names[:6] == ["smoke", "link", f"copies {gpu.name_of(gpu.CASES[0])}", "tests", "traces", "tests alone"]
    assert {part.name: part.beside for part in parts if part.beside} == {
        "tests": "tests", "traces": "tests", "tests alone": "alone", "memcheck": "tools", "racecheck": "tools",
    }  # fmt: skip
    assert names.index("racecheck") - names.index("memcheck") == 1
    thorough = {f"case {gpu.name_of(case)}" for case in gpu.CASES if case.get("thorough")}
    assert {part.name for part in parts if part.last} == {*thorough, names[2]}  # a profiler watches in these
    reached = {name.split()[1] for name in names[: names.index("live")] if name.startswith("case ")}
    assert reached == {case["model"] for case in gpu.CASES}
    assert sum(name.startswith("case ") for name in names) == len(gpu.CASES)


def test_what_a_killed_part_had_in_temporary_folders_goes_with_it(tmp_path: Path, worker: Worker) -> None:
    others = tmp_path / gpu_worker.scratch(1)
    others.mkdir()
    rows: list[dict[str, Any]] = []
    status, reason = worker.run("tests.support.gpu.faults:leave_a_folder", {"folder": str(tmp_path)}, 1800.0, rows)
    assert (status, reason) == ("failed", "its process ended with signal SIGKILL")
    (row,) = rows
    assert len(row["folders"]) == 2
    assert not [folder for folder in row["folders"] if Path(folder).exists()]
    assert others.exists()


@needs_memory
def test_what_a_killed_part_had_in_shared_memory_goes_with_it(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_worker, "_SECONDS_TO_END", 0.0)
    rows: list[dict[str, Any]] = []
    context = {"numbers": 0, "traced": 0, "host_memory": 0}
    assert worker.run("tests.support.gpu.faults:go_well", context, 1800.0, rows) == ("done", "")
    its_own = tmp_path / f"{gpu_worker.scratch(rows[0]['process'])}alive"  # as of a process that it started, and lives
    others = tmp_path / "others"
    with contextlib.ExitStack() as ending:
        for directory in (its_own, others):
            directory.mkdir()
            tier = MemoryTier(directory, RunLife("run"))
            ending.callback(tier.close)
            assert tier.allocate(1, 4096, None)
        (tmp_path / "dead").mkdir()
        dead = subprocess.run(
            [sys.executable, "-c", LEAVE_MEMORY, str(tmp_path / "dead")], capture_output=True, text=True, cwd=ROOT
        )
        assert dead.returncode == -signal.SIGKILL, dead.stderr
        assert len(folders_below(tmp_path)) == 3
        status, _ = worker.run("tests.support.gpu.faults:leave_memory", {"folder": str(tmp_path)}, 1800.0, rows)
        assert status == "failed"
        left = Path(rows[1]["left"])
        assert left.parent == records.ROOT
        assert not left.exists()
        assert len(folders_below(tmp_path)) == 3  # of one that lives, and of others, be they dead
    give_back(tmp_path)


LEAVE_MEMORY = """
import os, signal, sys
from pathlib import Path
from checkflow.runtime.memory_tier.records import RunLife
from checkflow.runtime.memory_tier.tier import MemoryTier
MemoryTier(Path(sys.argv[1]), RunLife("run")).allocate(1, 4096, None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_torch_gives_gpu_memory_back_after_each_part(tmp_path: Path, worker: Worker) -> None:
    said = []
    for used in (True, False):
        assert worker.run("tests.support.gpu.faults:use_memory", {"used": used}, 1800.0, []) == ("done", "")
        said.append((tmp_path / "log").read_text())
    assert said == ["given back\n"] * 2


class Stuck(SimpleNamespace):
    """A process that a driver does not let go of."""

    __hash__ = object.__hash__


def test_a_process_that_does_not_end_holds_nobody_up(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float | None] = []
    stuck = Stuck(pid=4711, kill=lambda: None, is_alive=lambda: True, join=lambda seconds=None: waited.append(seconds))
    monkeypatch.setattr(gpu_worker.os, "killpg", lambda group, number: None)
    worker._process, worker._connection = stuck, SimpleNamespace(close=lambda: None)
    with monkeypatch.context() as patch:
        children = {stuck}
        patch.setattr(multiprocessing.process, "_children", children)
        worker.close()
    assert len(waited) == 1
    assert waited[0] is not None
    assert not children  # which are waited for when Python ends
    assert (tmp_path / "log").read_text() == "process 4711 was killed, and does not end\n"
    worker.close()


def test_a_command_has_its_temporary_folders_where_they_go_with_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "says_its_folder.py").write_text(
        "import tempfile; print('{\"folder\": \"' + tempfile.gettempdir() + '\"}')"
    )
    rows: list[dict[str, Any]] = []
    gpu_parts.command({"arguments": ["says_its_folder"]}, rows.append)
    folder = Path(rows[0]["json"]["folder"])
    assert folder.name.startswith(gpu_worker.scratch())
    assert not folder.exists()


@pytest.mark.parametrize("alone", [False, True])
def test_tests_that_spoil_their_process_run_without_the_others(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def main(arguments: list[str], plugins: list[Any]) -> int:
        asked.extend(arguments)
        with pytest.raises(pytest.skip.Exception, match="CUDA does not take shared memory: why"):
            skip_where_unable(gpu_figures.LOCKED_MEMORY)
        skip_where_unable(gpu_figures.BATCHES)
        return 0

    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.chdir(ROOT)
    rows: list[dict[str, Any]] = []
    gpu_parts.tests({"alone": alone, "host_memory": {"shared": {"refused": "why"}}}, rows.append)
    monkeypatch.undo()
    assert asked[:2] == ["-m", "cuda and alone" if alone else "cuda and not alone"]
    assert ("test_engine.py" in rows[0]["files"]) != alone
    assert "test_cuda.py" in rows[0]["files"]
    assert gpu_figures.UNABLE not in os.environ


def test_tests_that_spoil_their_process_come_last() -> None:
    files = ["tests/gpu/test_cuda.py", "tests/runtime/transfer/test_engine.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "cuda", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = re.findall(r"::(test_\w+)", done.stdout)
    assert len(names) > 20, done.stdout + done.stderr
    assert [i for i, name in enumerate(names) if "cannot_be_locked" in name] == [len(names) - 2, len(names) - 1]


# --- compute-sanitizer


def stand_in(folder: Path, code: int, *said: str) -> None:
    """A program of its name, that says what it was given, and this."""
    folder.mkdir(exist_ok=True)
    program = folder / "compute-sanitizer"
    lines = "\n".join(f"echo '{line}'" for line in said)
    program.write_text(f'#!/bin/sh\necho "given: $*"\n{lines}\nexit {code}\n')
    program.chmod(0o755)


HAZARDS = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
ERRORS = "========= ERROR SUMMARY: 2 errors"
NONE = "========= ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("tool", "code", "said", "well"),
    [
        ("memcheck", 0, (gpu_parts.WENT_WELL, NONE), True),
        ("memcheck", 86, (gpu_parts.WENT_WELL, ERRORS), False),
        ("memcheck", 0, (gpu_parts.WENT_WELL,), False),  # it never began to watch
        ("memcheck", 1, (NONE,), False),
        ("racecheck", 86, (gpu_parts.WENT_WELL, HAZARDS), True),
        ("racecheck", 86, (HAZARDS,), False),
    ],
)
def test_what_compute_sanitizer_finds(
    tool: str, code: int, said: tuple[str, ...], well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "bin", code, *said)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    rows: list[dict[str, Any]] = []
    with contextlib.nullcontext() if well else pytest.raises(RuntimeError, match="compute-sanitizer ended with"):
        gpu_parts.sanitized({"tool": tool}, rows.append)
    (row,) = rows
    assert (row["tool"], row["exit"], row["went_well"]) == (tool, code, gpu_parts.WENT_WELL in said)
    assert row["errors"] == next((int(line.split()[3]) for line in said if "SUMMARY" in line), None)
    assert ("--report-api-errors no" in row["said"]) == (tool == "memcheck")


def test_compute_sanitizer_is_looked_for_where_cuda_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_parts, "CUDA_PROGRAMS", tmp_path / "bin")
    rows: list[dict[str, Any]] = []
    gpu_parts.sanitized({"tool": "racecheck"}, rows.append)
    assert rows[0]["skipped"] == f"compute-sanitizer is neither on PATH nor in {tmp_path / 'bin'}"
    stand_in(tmp_path / "bin", 0, gpu_parts.WENT_WELL)
    gpu_parts.sanitized({"tool": "racecheck"}, rows.append)
    assert rows[1]["exit"] == 0


# --- packages


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.11.0+cu130", (2, 11, 0)), ("3.0,<4", (3, 0)), ("1", (1,)), ("", ()), ("x1", ())]
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert gpu_packages.version_of(text) == numbers


def test_all_that_is_missing_is_named_at_once() -> None:
    least = gpu_packages.minima()
    assert {"pydantic", "highspy", "pytest", "hypothesis"} <= least.keys()
    assert not {"torch", "gurobipy", "ruff", "mypy"} & least.keys()
    assert least["pulp"] == (3, 0)
    assert gpu_packages.lacking(least) == []  # the tests run with all of them
    missing = gpu_packages.lacking({"no-such-package": (1,), "torch": (2, 11), "pytest": (10**6,)})
    assert missing == ["no-such-package", "pytest"]
    told = gpu_packages.how_to_bring(missing)
    assert f"--python-version {sys.version_info.major}.{sys.version_info.minor} " in told
    assert "--dest wheels no-such-package pytest iniconfig packaging pluggy pygments\n" in told
    last = told.splitlines()[-1]
    assert "lacks no-such-package, pytest: bring the wheels of no-such-package, pytest, iniconfig, packaging" in last
    assert last.endswith("make test-gpu WHEELS=wheels")


def test_what_packages_need_is_known() -> None:
    """As the ones that are installed here say, torch's own needs left out."""

    def needs_of(name: str) -> set[str]:
        requirements = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        direct = {one.name.lower().replace("_", "-") for one in requirements if not one.marker or one.marker.evaluate()}
        return direct.union(*(needs_of(one) for one in direct - asked_for))

    asked_for = gpu_packages.minima().keys()
    torch_has = {"torch", *needs_of("torch")}
    for name in asked_for:
        assert needs_of(name) - torch_has <= {*gpu_packages.NEEDS.get(name, ()), *asked_for}, name


@pytest.mark.parametrize(
    ("modules", "last"),
    [
        ({"pydantic": "import pydantic_core_that_is_gone"}, "wheels of pydantic, annotated-types, pydantic-core, typ"),
        ({"a_package": "import typing_inspection_x.y"}, "wheels of typing-inspection-x, and then: make test-gpu WHEE"),
        ({"a_package": "raise OSError('libx.so:\\nno such file')"}, "cannot import a_package (OSError: libx.so: no su"),
        ({"a_package": "pass"}, None),
    ],
)  # fmt: skip
def test_what_is_there_and_cannot_be_imported_is_told_before_anything_starts(
    modules: dict[str, str], last: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rows: list[dict[str, Any]] = []
    with contextlib.closing(Worker(tmp_path / "log")) as worker:  # begun now: it looks where this process looks
        options = {"modules": list(modules)}
        assert worker.run("benchmarks.gpu.packages:try_imports", options, 1800.0, rows) == ("done", "")
    if last is None:
        assert rows == []
    else:
        assert last in gpu_packages.how_to_mend(rows).splitlines()[-1]
        assert next(iter(modules)) in gpu_packages.how_to_mend(rows).splitlines()[-1]


def test_a_run_ends_before_it_begins_where_something_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(self: Worker, function: str, options: Any, limit_seconds: float, rows: list[Any]) -> Any:
        asked.append(function.partition(":")[2])
        if asked[-1] == "environment":
            rows.append({"gpu": None, "torch": "2.11", "python": "3.11"})
        else:
            rows.append({"module": "pulp", "absent": "pulp", "said": "ModuleNotFoundError: No module named 'pulp'"})
        return "done", ""

    monkeypatch.setattr(Worker, "run", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--device", "cpu", "--quick", "--output", str(tmp_path)]) == 2
    assert asked == ["environment", "try_imports"]
    assert "bring the wheels of pulp, and then: make test-gpu" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_run_imports_first_can_be_imported_here(worker: Worker) -> None:
    rows: list[dict[str, Any]] = []
    assert worker.run("benchmarks.gpu.packages:try_imports", {}, 1800.0, rows) == ("done", "")
    assert rows == []


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel with one module, ``name``, that knows its version."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        lines = []
        for path, content in files.items():
            wheel.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(content)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))


def test_wheels_bring_what_is_missing_or_older_and_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(sys, "path", list(sys.path))
    make_wheel(tmp_path, "brought_by_a_wheel", "1.5")
    make_wheel(tmp_path, "torch", "99.0")
    make_wheel(tmp_path, "numpy", "1.0")
    make_wheel(tmp_path, "iniconfig", "99.0")
    with gpu.wheels_at_hand(tmp_path):
        places = os.environ["PYTHONPATH"].split(os.pathsep)
        assert places[1:] == ["before"]
        brought = sorted(path.name for path in Path(places[0]).glob("*.py"))
        assert brought == ["brought_by_a_wheel.py", "iniconfig.py"]  # the older one here is older than it
        assert gpu_packages.lacking({"brought_by_a_wheel": (1, 5)}) == []
        assert gpu_packages.lacking({"brought_by_a_wheel": (1, 6)}) == ["brought_by_a_wheel"]
    assert not Path(places[0]).exists()


def test_wheels_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there are no wheels in"):
        gpu_packages.install(tmp_path, tmp_path / "target")
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no wheel")
    with pytest.raises(SystemExit, match=r"^checkflow: pip does not install the wheels in [^\n]*$"):
        gpu_packages.install(tmp_path, tmp_path / "target")


# --- loops


class Script:
    """Marks that say what happened in which order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def mark(self) -> int:
        self.said.append("mark")
        return len(self.said)

    def wait(self) -> None:
        self.said.append("wait")

    def seconds(self, earlier: int, later: int) -> float:
        return later - earlier


def test_what_waits_before_the_update_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = gpu_loop.TrainingJob(gpu_loop.Case("digits", 2, settings={"width": 8}), torch.device("cpu"))
    job.iterate()
    plan = gpu_case.make_case_plan(job, find_device("cpu"), gpu_case.QUICK, {})
    job.marks = script = Script()
    original = TrainingLoop.on_anchor

    def on_anchor(owner: TrainingLoop, key: Any) -> None:
        script.said.append(str(key.kind))
        original(owner, key)

    monkeypatch.setattr(TrainingLoop, "on_anchor", on_anchor)
    with gpu_loop.Phases(job) as phases, gpu_loop.checkpointing(job, plan, tmp_path) as checkpointer:
        found = gpu_loop.train(job, checkpointer, warm_up=1, iterations=2, phases=phases)
    in_step = ["mark", "optimizer_pre", "mark", "mark", "optimizer_post"]
    places = [i for i, word in enumerate(script.said) if word == "optimizer_pre"]
    assert len(places) == 4
    assert all(script.said[i - 1 : i + 4] == in_step for i in places)
    assert [len(row) for row in found.phases] == [len(gpu_loop.PHASES)] * 2
    assert found.report["captures"] == 2
    assert list(tmp_path.iterdir()) == []


def test_every_interval_is_captured_however_long_the_loop_and_training_waits_for_no_storage(tmp_path: Path) -> None:
    """By itself the controller has profiled the job by then, and leaves some out."""
    job = gpu_loop.TrainingJob(gpu_loop.Case("digits", 2, settings={"width": 8}), torch.device("cpu"))
    job.iterate()
    plan = gpu_case.make_case_plan(job, find_device("cpu"), gpu_case.QUICK, {})
    asked = Controller.is_due, Controller.is_durable
    with gpu_loop.Phases(job) as phases, gpu_loop.checkpointing(job, plan, tmp_path) as checkpointer:
        found = gpu_loop.train(job, checkpointer, warm_up=9, iterations=120, phases=phases)
        assert not checkpointer._saving._each
        assert checkpointer._loop.pace.durable
    assert (plan.interval, found.report["captures"]) == (1, 120)
    assert (Controller.is_due, Controller.is_durable) == asked


def test_a_short_run_commits_what_it_audits() -> None:
    gpu_parts.short_run("cpu")


def test_a_rate_ends_when_the_device_has_done_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = gpu_loop.TrainingJob(gpu_loop.Case("digits", 2, settings={"width": 8}), torch.device("cpu"))
    job.iterate()
    plan = gpu_case.make_case_plan(job, find_device("cpu"), gpu_case.QUICK, {})
    job.marks = script = Script()
    clock = itertools.count()

    def perf_counter() -> float:
        script.said.append("clock")
        return float(next(clock))

    monkeypatch.setattr(gpu_loop, "time", SimpleNamespace(perf_counter=perf_counter))
    with gpu_loop.Phases(job) as phases, gpu_loop.checkpointing(job, plan, tmp_path, every=1) as checkpointer:
        found = gpu_loop.train(job, checkpointer, warm_up=2, iterations=3, phases=phases)
    at = [i for i, word in enumerate(script.said) if word == "clock"]
    assert [script.said[i - 1] for i in at] == ["wait", "wait"]
    iterations = [sum(word == "mark" for word in script.said[:i]) / len(gpu_loop.PHASES) for i in at]
    assert iterations == [1, 6]  # beyond those that count, on both sides: in them the device does not stand still
    assert (found.loop_seconds, len(found.seconds)) == (1.0, 3)
    assert 3 <= found.stored <= 6


def test_single_checkpoints_begin_their_stretches_and_are_not_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = gpu_loop.TrainingJob(gpu_loop.Case("digits", 2, settings={"width": 8}), torch.device("cpu"))
    job.iterate()
    plan = gpu_case.make_case_plan(job, find_device("cpu"), gpu_case.QUICK, {})
    captures: list[int] = []

    def train(job: Any, checkpointer: Any, *, warm_up: int, **rest: Any) -> gpu_loop.Block:
        at = dict.fromkeys((warm_up, warm_up + 1), lambda: captures.append(checkpointer.report()["captures"]))
        return gpu_loop.train(job, checkpointer, warm_up=warm_up, at=at, **rest)

    monkeypatch.setattr(gpu_case, "train", train)
    found = gpu_case.following(job, plan, tmp_path, dataclasses.replace(gpu_case.QUICK, singles=2))
    assert captures == [FIRST_AUDITS, FIRST_AUDITS + 1]
    assert (found["checkpoints"], len(found["each"])) == (2, 2)
    assert found["every"] > 2 * found["steps"]


def test_an_error_in_a_section_is_its_row() -> None:
    rows: list[dict[str, Any]] = []
    with gpu_case.section(rows.append, "one") as row:
        row["kept"] = 1
        raise KeyError("gone")
    assert rows[0] | {"traceback": ""} == {"section": "one", "kept": 1, "error": "KeyError: 'gone'", "traceback": ""}
    assert "KeyError" in rows[0]["traceback"]


class TimedEvent:
    """Stands for CUDA's: each is recorded 1 ms after the one before."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        TimedEvent.recorded += 1
        self.at = TimedEvent.recorded

    def elapsed_time(self, later: TimedEvent) -> float:
        return later.at - self.at


class SideDevice:
    """The part of a device that copies go through."""

    side = "side"

    def __init__(self) -> None:
        self.copied: list[tuple[int, str]] = []

    def copy(self, copies: Any, stream: str) -> None:
        self.copied.append((len(copies.transfers), stream))


def test_copies_on_the_engines_stream_are_timed_and_others_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_loop, "LARGE_BYTES", 1500)  # of each, in the mean: three pieces in two copies
    device = SideDevice()
    pieces = [Transfer(0, 0, 1000)] * 3
    # Two of them are neighbours.
    many = _Prepared(pieces, False, Copies(pieces[:2], asynchronous=True, batched=True), True)
    one = _Prepared(pieces[:1], False, Copies(pieces[:1], asynchronous=True, batched=True), True)
    owner: Any = SimpleNamespace(_saving=SimpleNamespace(engine=SimpleNamespace(_device=device)))
    watch = gpu_loop.SideCopies(owner)
    device.copy(many, "side")
    watch.start()
    device.copy(many, "side")
    device.copy(one, "training")
    device.copy(one, "side")
    watch.stop()
    device.copy(many, "side")
    assert device.copied == [(3, "side"), (3, "side"), (1, "training"), (1, "side"), (3, "side")]
    assert watch.row() == {
        "bytes": 4000, "copies": 3, "calls": 2, "busy_seconds": 0.002, "bytes_per_second": 2e6,
        "large_bytes_per_second": 3e6,
    }  # fmt: skip
    monkeypatch.setattr(gpu_loop, "LARGE_BYTES", 1501)
    assert watch.row()["large_bytes_per_second"] is None
    with pytest.raises(AttributeError):
        gpu_loop.SideCopies(cast(Any, SimpleNamespace(_saving=SimpleNamespace(engine=object()))))


def test_memory_that_cannot_be_registered_costs_no_figure_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refuse(kind: str, size_bytes: int, *_: object) -> Iterator[torch.Tensor]:
        raise CheckflowError("CUDA: out of memory (error 2)")
        yield

    @contextlib.contextmanager
    def allow(kind: str, size_bytes: int, *_: object) -> Iterator[torch.Tensor]:
        if kind != "shared":
            raise OSError("no room")
        yield torch.empty(size_bytes, dtype=torch.uint8)

    ways = ("to host", "to device")
    monkeypatch.setattr(gpu_link, "load_runtime", lambda: None)
    for stand_in, kinds in ((refuse, ("pinned",)), (allow, ("shared", "pinned"))):
        monkeypatch.setattr(gpu_link, "host_memory", stand_in)
        found = gpu_link.bare_link(torch.device("cpu"), 4096, 3)
        assert {name for name in found if "," in name} == {f"{kind}, {way}" for kind in kinds for way in ways}
        assert found.get("shared") == (None if stand_in is allow else "refused: CUDA: out of memory (error 2)")
        assert found["anonymous"].startswith("refused: ")
        assert gpu_link.usual_to_host(found, "shared") == found[f"{kinds[0]}, to host"]["median"] > 0
        assert gpu_link.usual_to_host(found, "anonymous") == found["pinned, to host"]["median"]


class HostLibrary(Library):
    """CUDA's runtime for what looks at host memory: what it allocates is there, and its device is at no PCI address."""

    def __init__(self) -> None:
        super().__init__(13_000)
        self.allocated = ctypes.create_string_buffer(1 << 20)
        self.cudaDeviceGetPCIBusId = self._function(lambda text, size, index: 0, c_char_p, c_int, c_int)

    def _allocate(self, place: Any, size: int, flags: int) -> int:
        code = super()._allocate(place, size, flags)
        place[0] = ctypes.addressof(self.allocated)
        return code


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> HostLibrary:
    library = HostLibrary()
    runtime = CudaRuntime(library)
    monkeypatch.setattr(gpu_link, "load_runtime", lambda: runtime)
    monkeypatch.setattr(gpu_link, "CHECKED_BYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: library.calls.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=4711, synchronize=lambda: None))
    return library


def test_what_a_device_says_of_itself(library: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    library.attributes |= {88: 5, 91: 6, 99: 7}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 4))
    found = gpu_link.what_it_allows(torch.device("cuda", 0))
    assert found["attributes"] == {
        "can use host pointer for registered memory": 6, "pageable memory access": 5, "host register supported": 7,
    }  # fmt: skip
    assert (found["free_bytes"]["device"], found["free_bytes"]["device, at most"]) == (3, 4)


@needs_memory
@pytest.mark.parametrize(
    ("kind", "mapped", "before", "after"),
    [
        ("shared", r"rw-s .* /dev/shm/", "register", "unregister"),
        ("anonymous", r"rw-p .* 0 *$", "register", "unregister"),
        ("allocated", "", "allocate", "free"),
        ("unlocked", r"rw-p .* 0 *$", "", ""),
    ],
)
def test_host_memory_is_of_the_kind_that_staging_buffers_are(
    library: HostLibrary, kind: str, mapped: str, before: str, after: str
) -> None:
    size_bytes = 1 << 16
    with gpu_link.host_memory(kind, size_bytes, gpu_link.load_runtime(), 0) as memory:
        begin = memory.data_ptr()
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = ((line, *(int(end, 16) for end in line.split()[0].split("-"))) for line in maps)
        (line,) = (line for line, low, high in spans if low <= begin < high)
        assert re.search(mapped, line), line
        assert (memory.numel(), int(memory.sum())) == (size_bytes, 0)
        during = library.calls.copy()
    sized = {"register": ("register", begin, size_bytes, 1), "allocate": ("allocate", size_bytes, 1)}
    assert during == ([sized[before]] if before else [])
    assert library.calls[len(during) :] == [("synchronize",), *([(after, begin)] if after else [])]


@needs_memory
def test_copies_that_do_not_arrive_are_told(library: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu", 0)

    def tried(kind: str) -> dict[str, Any]:
        found = gpu_link.try_host_memory(kind, device)
        assert found.pop("kind") == kind
        return found

    for kind in gpu_figures.LOCKED:
        library.calls.clear()
        assert tried(kind) == TAKEN
        sizes = [size for call in library.calls if call[0] == "batch" for size in call[1]]
        assert (len(sizes), sum(sizes), min(sizes)) == (gpu_link.PIECES, 1 << 20, 1)
    library.calls.clear()
    assert tried("unlocked") == {"single": True}
    library.attributes[91] = 0  # a batch would be taken, and fault
    assert tried("shared") == {"single": True}
    assert not [call for call in library.calls if call[0] == "batch"]
    library.attributes[91] = 1
    library.batch_code = 1  # nothing of a batch is copied, and the runtime says so: one by one it is
    assert tried("shared") == tried("anonymous") == TAKEN | {"batches": False}
    assert gpu_link.load_runtime().batches  # the jobs that follow find out by themselves
    copied = CudaRuntime.copy

    def lose(self: CudaRuntime, copies: Any, stream: int, *, beside: bool = False) -> None:
        if len(copies.singly) == 1:
            copied(self, copies, stream, beside=beside)

    monkeypatch.setattr(CudaRuntime, "copy", lose)
    assert tried("shared") == TAKEN | {"batched": False}
    library.code = 2  # of the next call
    assert tried("anonymous") == {"refused": "CUDA: out of order (error 2)"}


class Pieces(tuple[Transfer, ...]):
    """Prepared copies that the simulated device takes, and what times copies looks into."""

    @property
    def transfers(self) -> Pieces:
        return self

    @property
    def copies(self) -> Copies:
        return Copies(self, asynchronous=True, batched=True)


class Watching:
    """Stands for a profiler; what it saw has other names than are known."""

    said: ClassVar[list[str]] = []

    def __init__(self, activities: Any) -> None:
        self.said.clear()

    def start(self) -> None:
        self.said.append("start")

    def stop(self) -> None:
        self.said.append("stop")

    def export_chrome_trace(self, file: str) -> None:
        Path(file).write_text(json.dumps({"traceEvents": [event("gpu_memcpy", "Copy", 0, 1)]}))


def test_copies_are_timed_and_profiled_in_one_loop_with_every_interval_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDevice, "prepare", lambda self, transfers, inside=False: Pieces(transfers))
    simulate_gpu(monkeypatch, copies="first")
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    for name, answer in (("synchronize", None), ("reset_peak_memory_stats", None), ("memory_stats", Counter())):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.profiler, "profile", Watching)
    link = {
        f"{kind}, to host": {"median": rate} for kind, rate in (("pinned", 1e5), ("anonymous", 1e7), ("shared", 1e6))
    }
    monkeypatch.setattr(gpu_case, "bare_link", lambda device, size_bytes: link)
    job = gpu_loop.TrainingJob(gpu_loop.Case("digits", 2, settings={"width": 8}), torch.device("cpu"))
    job.iterate()
    plan = gpu_case.make_case_plan(job, find_device("cpu"), gpu_case.QUICK, {})
    job.device = cast(Any, SimpleNamespace(type="cuda"))
    rows: list[dict[str, Any]] = []
    gpu_case.crossing(job, plan, tmp_path, 5, 100, rows.append)
    assert [row["section"] for row in rows] == ["bare link", "copies", "profiled"]
    assert not [row for row in rows if "error" in row], rows
    copies = rows[1]
    size_bytes = sum(chunk.length_bytes for chunk in plan.chunks)
    assert (copies["captures"], copies["bytes"]) == (5, 5 * size_bytes)
    assert copies["copies_a_capture"] >= copies["calls_a_capture"] >= 1
    assert copies["ran"]["memory"] in gpu_figures.LOCKED
    assert copies["of_bare_link"] == copies["bytes_per_second"] / link[f"{copies['ran']['memory']}, to host"]["median"]
    assert copies["ran"] | {"memory": ""} == {"buffers": 4, "buffers_locked": False, "memory": ""}
    assert Watching.said == ["start", "stop"]
    assert rows[2]["seen"] == ["gpu_memcpy: Copy"]


def test_a_job_that_is_too_large_is_gone_before_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(gpu_loop.TrainingJob):
        def iterate(self) -> None:
            jobs.append(weakref.ref(self))
            if self.case.batch_size > 2:
                raise torch.OutOfMemoryError

    jobs: list[weakref.ref[Large]] = []
    gone: list[bool] = []
    monkeypatch.setattr(gpu_case, "TrainingJob", Large)
    monkeypatch.setattr(gpu_case, "empty_gpu", lambda: (gc.collect(), gone.append(jobs[-1]() is None)))
    job = gpu_case._build(gpu_loop.Case("digits", 8, settings={"width": 8}), torch.device("cpu"))
    assert (job.case.batch_size, gone) == (2, [True, True])


@pytest.mark.parametrize("recorded", [True, False])
def test_peaks_are_held_against_what_the_plan_knows_of(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training's 1,000 bytes, 100 of a workspace, 10 that were there before; snapshots of 40 where 30 were planned.

    The allocator gives out 7 more for what checkpoints add.
    """
    held = iter([600, 500])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(held))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    known = 110 if recorded else 0
    timeline: Any = SimpleNamespace(training_peak_bytes=1000 + known)
    plan: Any = SimpleNamespace(timeline=timeline, plan_peak_bytes=1030 + known)
    blocks = [
        gpu_loop.Block(
            kind, [], {"requested_bytes": asked, "allocated_bytes": asked + rounded, "reserved_bytes": 4096}, {}, 0.0, 0
        )
        for kind, asked, rounded in ((PLAIN, 1110, 0), (CHECKPOINTED, 1150, 7), (PLAIN, 1100, 0))
    ]
    traced = {"training_peak_bytes": 500}
    found = gpu_case.memory(blocks, plan, Before(10, 0), traced, recorded=recorded)
    assert (found["workspace_bytes"], found["planned_added_bytes"]) == (100, 30)
    assert found["added_bytes"] == {"requested_bytes": 40, "allocated_bytes": 47, "reserved_bytes": 0}
    assert (found["unplanned_bytes"], found["unplanned_allocated_bytes"]) == (10, 17)
    assert found["measured_over_predicted"] == pytest.approx(
        {"training": 1.0, "plan": (1047 + known) / (1030 + known), "trace": 2.0}
    )
    assert found["plan_error"] == pytest.approx(17 / (1030 + known))


# --- all of it


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would run")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "test-gpu", f"PYTHON={sys.executable}", f"RESULTS={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "there is no CUDA GPU here, and so nothing to test or measure on it\n"
    assert list(tmp_path.iterdir()) == []


def test_the_whole_flow_on_the_cpu(tmp_path: Path) -> None:
    # Each part has all the time that it needs: what a GPU does within minutes may last longer here.
    patient = (
        "from benchmarks.gpu import __main__ as gpu; gpu.allowed_seconds = lambda part, left: left; "
        "raise SystemExit(gpu.main())"
    )
    options = ["--device", "cpu", "--quick", "--budget", "36000", "--output", str(tmp_path)]
    command = [sys.executable, "-c", patient, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu-cpu.json").read_text())
    tasks = gpu.tasks("cpu", tmp_path, quick=True)
    assert gpu_figures.incomplete(result, [task.part for task in tasks]) == []
    for one in tasks:
        assert result["parts"][one.part.name]["status"] == ("done" if one.part.on_cpu else "skipped")
    assert (result["card"], result["environment"]["torch"]) == ("cpu", torch.__version__)
    (name,) = [name for name in result["parts"] if name.startswith("case ")]
    sections = {row["section"]: row for row in result["parts"][name]["rows"]}
    assert set(sections) == {
        "before", "case", "plan", "step_time", "memory", "following", "stays", "copies", "after",
    }  # fmt: skip
    assert not [row for row in sections.values() if "error" in row]
    assert sections["plan"]["made_by"] == gpu_case.RUNNING
    assert sections["plan"]["interval"] == 1
    times = sections["step_time"]
    assert set(times["phase_seconds"][CHECKPOINTED]) == set(gpu_loop.PHASES)
    assert times["captures"] == times["checkpointed_seconds"]["count"]
    assert times["captures_an_iteration"] == 1
    assert times["ran"] | {"memory": ""} == {"buffers": 4, "buffers_locked": False, "memory": ""}
    assert (times["failed"], times["breaches"]) == (0, 0)
    assert {row["anchor"] for row in sections["stays"]["anchors"]} >= {"boundary", "optimizer_pre optimizer"}
    assert sections["following"]["checkpoints"] == gpu_case.QUICK.singles
    (durable,) = result["parts"]["disk"]["rows"]
    assert durable["captures"] > 0
    assert abs(durable["committed"] - durable["captures"]) <= 2  # what was under way at either end
    for target in result["targets"]:
        assert (target["met"] is None) == (not target["cases"])
