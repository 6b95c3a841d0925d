"""``make test-gpu`` without a GPU: the whole flow on the CPU, parts that fail or are skipped, and what figures mean."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
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
from benchmarks.gpu import loop as gpu_loop
from benchmarks.gpu import packages as gpu_packages
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.figures import CHECKPOINTED, PLAIN, Part
from benchmarks.gpu.worker import Worker
from benchmarks.memory import Before
from checkflow.core.machine.device import find_device
from checkflow.runtime.memory_tier import records
from checkflow.runtime.memory_tier.records import RunLife
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.transfer.cudart import Copies
from checkflow.runtime.transfer.engine import Transfer
from tests.support.dead_jobs import folders_below, give_back, needs_memory
from tests.support.gpu.fake_device import FakeDevice, simulate_gpu
from tests.support.gpu.locked_memory import skip_where_unable
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# --- figures


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


def test_what_was_not_captured_every_iteration_is_no_figure_of_that() -> None:
    cases = {"whole": case_rows(1, 0.02, 60e9), "some": case_rows(1, 0.001, 60e9, (24, 23))}
    rows = gpu_figures.judge(cases)
    added, _, _, held = rows[:4]
    assert (added["cases"], added["met"]) == ({"whole": 0.02}, False)
    assert added["left_out"] == {"some": "24, 23 captures a block, not 24"}
    assert set(held["cases"]) == {"whole", "some"}
    alone = gpu_figures.judge({"some": cases["some"]})
    assert [row["met"] for row in alone[:2]] == [None, None]
    lines = list(gpu.lines_of(alone))
    assert "not measured" in lines[0]
    assert lines[1].split() == ["without", "some:", *alone[0]["left_out"]["some"].split()]


def test_what_was_hampered_is_no_figure() -> None:
    """The copies' own rows say so, or else, for every section, those of the iterations."""
    reasons = {
        (True, True): None,
        (False, None): None,  # no GPU: nothing is to be locked
        (False, True): "its buffers were not locked in place",
        (False, False): "its buffers were not locked in place, and its copies were made one by one",
    }
    for ((locked, batches), reason), place in itertools.product(reasons.items(), (1, 2)):
        rows = case_rows(1, 0.02, 49e9)
        rows[place]["ran"] = {"buffers_locked": locked} | ({} if batches is None else {"batches": batches})
        judged = dict(
            zip(((t.section, t.key) for t in gpu_figures.TARGETS), gpu_figures.judge({"a": rows}), strict=True)
        )
        for figure, counts in (("copies", "bytes_per_second"), True), (("step_time", "median_overhead"), place == 1):
            hampered = counts and reason is not None
            assert judged[figure]["met"] is (None if hampered else False)
            assert judged[figure].get("left_out") == ({"a": reason} if hampered else None)


TAKEN = {"single": True, "batched": True, "batches": True}


def test_what_a_machine_is_unable_to() -> None:
    shared = "CUDA does not take shared memory: why"
    both = {"shared": {"refused": "why"}, "anonymous": {"refused": "that"}, "unlocked": {"single": True}}
    for kinds, unable in (
        ({}, {}),  # nothing is known
        ({"shared": TAKEN, "anonymous": TAKEN, "unlocked": {"single": True}}, {}),
        ({"shared": {"refused": "why"}, "allocated": TAKEN}, {gpu_figures.SHARED_LOCKED: shared}),
        (both, {
            gpu_figures.SHARED_LOCKED: shared,
            gpu_figures.LOCKED_MEMORY: f"{shared}; CUDA does not take anonymous memory: that",
        }),
        ({"shared": TAKEN | {"batches": False}}, {gpu_figures.BATCHES: "many copies in a call are not to be had here"}),
        ({"shared": TAKEN | {"batched": False}, "unlocked": {"single": False}}, {
            gpu_figures.RIGHT_COPIES: (
                "what arrives is not what left: batched to shared memory, single to unlocked memory"
            ),
        }),
    ):  # fmt: skip
        assert gpu_figures.unable(kinds) == unable


def test_what_is_missing_in_a_result_is_told() -> None:
    parts = [Part(name, "", 1.0, 1.0) for name in "abcd"]
    done = {"status": "done", "reason": "", "rows": [{}]}
    result = {"parts": {"a": done, "b": {**done, "rows": []}, "c": {"status": "skipped", "reason": "", "rows": []}}}
    assert gpu_figures.incomplete(result, parts) == [
        "b: done, and no rows", "c: skipped, no reason given", "d: missing",
    ]  # fmt: skip


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


def test_a_call_of_ten_minutes_has_time_for_all_of_its_parts() -> None:
    every = [task.part for task in gpu.tasks("a-card", Path("out"), quick=False)]
    assert max(Counter(part.name for part in every).values()) == 1  # by which the result has them
    for call in gpu.CALLS:
        parts = [part for part in every if part.call == call]
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


def test_tests_that_spoil_their_process_run_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def main(arguments: list[str], plugins: list[Any]) -> int:
        asked.extend(arguments[:2])
        with pytest.raises(pytest.skip.Exception, match="CUDA does not take shared memory: why"):
            skip_where_unable(gpu_figures.LOCKED_MEMORY)
        skip_where_unable(gpu_figures.BATCHES)
        return 0

    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.chdir(ROOT)
    rows: list[dict[str, Any]] = []
    for alone in (False, True):
        gpu_parts.tests({"alone": alone, "host_memory": {"shared": {"refused": "why"}}}, rows.append)
        assert ("test_engine.py" in rows[-1]["files"]) != alone
        assert "test_cuda.py" in rows[-1]["files"]
    monkeypatch.undo()
    assert asked == ["-m", "cuda and not alone", "-m", "cuda and alone"]
    assert gpu_figures.UNABLE not in os.environ


def test_tests_that_spoil_their_process_come_last() -> None:
    files = ["tests/gpu/test_cuda.py", "tests/runtime/transfer/test_engine.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "cuda", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = re.findall(r"::(test_\w+)", done.stdout)
    assert len(names) > 20, done.stdout + done.stderr
    assert [i for i, name in enumerate(names) if "cannot_be_locked" in name] == [len(names) - 2, len(names) - 1]


# --- compute-sanitizer


def test_what_compute_sanitizer_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_parts, "CUDA_PROGRAMS", tmp_path)
    rows: list[dict[str, Any]] = []
    gpu_parts.sanitized({"tool": "memcheck"}, rows.append)
    assert rows.pop()["skipped"] == f"compute-sanitizer is neither on PATH nor in {tmp_path}"
    none, errors = "========= ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 2 errors"
    hazards = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    program = tmp_path / "compute-sanitizer"
    for tool, code, said, well in (
        ("memcheck", 0, (gpu_parts.WENT_WELL, none), True),
        ("memcheck", 86, (gpu_parts.WENT_WELL, errors), False),
        ("memcheck", 0, (gpu_parts.WENT_WELL,), False),  # it never began to watch
        ("memcheck", 1, (none,), False),
        ("racecheck", 86, (gpu_parts.WENT_WELL, hazards), True),
        ("racecheck", 86, (hazards,), False),
    ):
        program.write_text(
            "\n".join(["#!/bin/sh", 'echo "given: $*"', *(f"echo '{line}'" for line in said), f"exit {code}"])
        )
        program.chmod(0o755)
        with contextlib.nullcontext() if well else pytest.raises(RuntimeError, match="compute-sanitizer ended with"):
            gpu_parts.sanitized({"tool": tool}, rows.append)
        row = rows.pop()
        assert (row["tool"], row["exit"], row["went_well"]) == (tool, code, gpu_parts.WENT_WELL in said)
        assert row["errors"] == next((int(line.split()[3]) for line in said if "SUMMARY" in line), None)
        assert ("--report-api-errors no" in row["said"]) == (tool == "memcheck")


# --- packages


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


def test_peaks_are_held_against_what_the_plan_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training's 1,000 bytes, 100 of a workspace, 10 that were there before; snapshots of 40 where 30 were planned.

    The allocator gives out 7 more for what checkpoints add.
    """
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    blocks = [
        gpu_loop.Block(
            kind, [], {"requested_bytes": asked, "allocated_bytes": asked + rounded, "reserved_bytes": 4096}, {}, 0.0, 0
        )
        for kind, asked, rounded in ((PLAIN, 1110, 0), (CHECKPOINTED, 1150, 7), (PLAIN, 1100, 0))
    ]
    for recorded, known in ((True, 110), (False, 0)):
        held = iter([600, 500])
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda held=held: next(held))
        timeline: Any = SimpleNamespace(training_peak_bytes=1000 + known)
        plan: Any = SimpleNamespace(timeline=timeline, plan_peak_bytes=1030 + known)
        found = gpu_case.memory(blocks, plan, Before(10, 0), {"training_peak_bytes": 500}, recorded=recorded)
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
