"""A training job that is killed again and again loses nothing; and what would be lost is seen."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkflow.runtime.store.discovery import find
from tests.faults.kills import checks as kill_checks
from tests.faults.kills.checks import Record, make_record
from tests.faults.kills.job import BATCH, BATCHES, EPOCHS, KEEP, SAMPLES, VARIANTS
from tests.faults.kills.notes import Whereabouts

ROOT = Path(__file__).parents[3]
JOB = VARIANTS[1]  # an iteration for each batch
Notes = list[dict[str, Any]]


@pytest.mark.shortened
def test_killed_jobs_lose_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The long form is ``make kills``."""
    kills = 1 if request.config.getoption("--quick") else 12
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.faults.kills.run", "--kills", str(kills), "--variants", "2",
            "--seed", "1",
            "--hang-seconds", "300", "--output", tmp_path / "result",
        ],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    result = json.loads((tmp_path / "result").read_text())
    assert result["problems"] == []
    assert result["kills"] == kills
    assert result["checkpoints_acknowledged"] > kills
    assert sum(result["killed"].values()) == kills
    for hits in result["hits"].values():
        assert sum(hits.values()) == result["killed"]["training"]
    assert list(result["replayed_iterations"]) == list(result["storage_behind_iterations"]) == ["every=1"]


# What is noted of a job that nothing happens to


def state(step: int) -> dict[str, str]:
    return {part: f"{part} {step}" for part in ("tensors", "extra", "generators")}


def good() -> Notes:
    """One life, all of which is acknowledged."""
    notes: Notes = [{"life": 0, "event": "boundary", "step": 0, "place": [0, 0], **state(0)}]
    for step in range(EPOCHS * BATCHES):
        epoch, batch = divmod(step, BATCHES)
        indices = list(range(batch * BATCH, min((batch + 1) * BATCH, SAMPLES)))
        place = [epoch, (batch + 1) * BATCH] if batch + 1 < BATCHES else [epoch + 1, 0]
        common = {"life": 0, "step": step}
        notes.append(
            {**common, "event": "batch", "epoch": epoch, "indices": indices, "bytes": f"{step}", "interval": 1}
        )
        for kind in ("boundary", "durable", "committed"):
            notes.append({**common, "event": kind, "step": step + 1, "place": place, **state(step + 1)})
    last = EPOCHS * BATCHES
    return [*notes, {"life": 0, "event": "end", "step": last, "failed": 0, "breaches": 0, **state(last)}]


def killed(at: int, back_to: int) -> Notes:
    """The same job, killed in one iteration and begun anew with another."""
    notes = good()
    before = [note for note in notes if note["event"] == "batch" and note["step"] <= at]
    before += [note for note in notes if note["event"] == "boundary" and note["step"] <= at]
    after = [{**note, "life": 1} for note in notes if note["event"] != "batch" or note["step"] >= back_to]
    return before + after


def test_a_job_that_was_killed_and_lost_nothing_passes() -> None:
    expected = make_record(good())
    for notes in (good(), killed(7, 5), killed(7, 7), killed(BATCHES, BATCHES - 1)):
        assert kill_checks.check_end(make_record(notes), expected, JOB) == []


def change(where: Callable[[dict[str, Any]], bool], **content: Any) -> Callable[[Notes], Notes]:
    return lambda notes: [{**note, **content} if where(note) else note for note in notes]


def drop(where: Callable[[dict[str, Any]], bool]) -> Callable[[Notes], Notes]:
    return lambda notes: [note for note in notes if not where(note)]


def is_batch(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda note: note["event"] == "batch" and note["step"] == step


def is_end(note: dict[str, Any]) -> bool:
    return bool(note["event"] == "end")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(drop(is_end), "L4 the job did not come to its end", id="no end"),
        pytest.param(change(is_end, tensors="others"), "L4 the job does not end as it does uninterrupted: t", id="end"),
        pytest.param(change(is_end, generators="others"), "uninterrupted: generators", id="generators at the end"),
        pytest.param(change(is_end, step=3), "uninterrupted: another step", id="another step at the end"),
        pytest.param(change(is_end, breaches=1), "L5 0 checkpoints failed, 1 were torn", id="a breach"),
        pytest.param(change(is_batch(9), bytes="others"), "L4 the samples, their order or their bytes", id="bytes"),
        pytest.param(drop(is_batch(9)), "L4 epoch 0 does not have every sample once", id="a batch is left out"),
        pytest.param(lambda notes: [*notes, notes[1]], "L4 the samples, their order", id="a batch is used twice"),
        pytest.param(change(lambda note: note["event"] == "boundary" and note["step"] == 7, extra="others"),
                     "L4 1 boundaries are not what they are uninterrupted, step 7 first", id="a boundary"),
    ],
)  # fmt: skip
def test_l4_an_end_that_is_another_is_seen(make: Callable[[Notes], Notes], said: str) -> None:
    problems = kill_checks.check_end(make_record(make(good())), make_record(good()), JOB)
    assert any(said in problem for problem in problems), problems


def test_l4_a_replay_that_comes_out_differently_is_seen() -> None:
    notes = killed(7, 5)
    other = next(note for note in notes if note["life"] == 1 and note["event"] == "boundary" and note["step"] == 6)
    other["tensors"] = "others"
    assert kill_checks.check_end(make_record(notes), make_record(good()), JOB) == [
        "L4 1 boundaries are not what they are uninterrupted, step 6 first"
    ]


def restored(step: int | None, place: list[int], **content: str) -> dict[str, Any]:
    return {"step": step, "place": place, **state(step or 0), **content}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (restored(7, [0, 28]), None),
        (restored(8, [0, 32]), None),
        (restored(6, [0, 24]), "L1 step 7 was acknowledged, and 6 is the newest"),
        (restored(None, [0, 0]), "L1 step 7 was acknowledged, and None is the newest"),
        (restored(7, [0, 24]), "L2 what is restored of step 7 is no state of that boundary: place"),
        (restored(7, [0, 28], generators="generators 6"), "no state of that boundary: generators"),
        (restored(7, [0, 28], tensors="tensors 6", extra="extra 6"), "no state of that boundary: tensors, extra"),
        (restored(9, [0, 36]), "L2 what is restored of step 9 is no state"),
        (None, "L5 a fresh process cannot go on"),
    ],
)
def test_l1_l2_what_is_restored(found: dict[str, Any] | None, said: str | None) -> None:
    """Seven iterations are acknowledged, eight are finished."""
    notes = [note for note in good() if note["step"] <= (8 if note["event"] == "boundary" else 7)]
    problems = kill_checks.check_restored(found, make_record(notes))
    assert problems == [] if said is None else [said in problem for problem in problems] == [True]


def test_l2_parts_of_two_states_of_one_boundary_are_no_state_of_it() -> None:
    one, other = restored(7, [0, 28]), restored(7, [0, 28], tensors="others", generators="others")
    record = make_record([{"life": 0, "event": "boundary", **note} for note in (one, other)])
    assert kill_checks.check_restored(one, record) == kill_checks.check_restored(other, record) == []
    mixed = {**one, "tensors": "others"}
    assert kill_checks.check_restored(mixed, record) == [
        "L2 what is restored of step 7 is no state of that boundary: a mixture"
    ]


def test_l1_before_anything_was_acknowledged_a_job_may_begin_anew() -> None:
    begun = make_record(good()[:1])
    assert kill_checks.check_restored(restored(None, [0, 0]), begun) == []
    assert kill_checks.check_restored(restored(None, [0, 0]), make_record([])) == []
    assert "L2" in kill_checks.check_restored(restored(None, [0, 0], generators="others"), begun)[0]


def test_l1_host_memory_has_something_newer_or_nothing() -> None:
    notes = good()
    record = make_record(notes[: 1 + 4 * 4])  # four iterations, all acknowledged
    for step, stored, said in ((4, 4, ""), (4, 3, ""), (4, 5, "L1 storage has step 5"), (3, 3, "L1 step 4 was ack")):
        problems = kill_checks.check_reclaimed(restored(step, [0, step * BATCH]), record, stored)
        assert [problem[: len(said)] for problem in problems] == ([said] if said else [])
    torn = restored(4, [0, 4 * BATCH], tensors="others")
    assert "L2" in kill_checks.check_reclaimed(torn, record, 4)[0]


@pytest.mark.parametrize(
    ("begun", "every", "interval", "fine"),
    [(10, 1, 1, True), (11, 1, 1, False), (12, 2, 1, True), (13, 2, 1, False), (16, 2, 4, True), (16, 1, 4, True),
     (17, 1, 4, False), (99, None, 1, True)],
)  # fmt: skip
def test_l6_what_may_be_replayed(begun: int, every: int | None, interval: int, fine: bool) -> None:
    problems = kill_checks.check_replayed(begun, 7, interval, every)
    assert [problem[:2] for problem in problems] == ([] if fine else ["L6"])


def test_l5_what_a_directory_may_hold(tmp_path: Path) -> None:
    most = (KEEP + 1) * 5000 + 2**20
    assert kill_checks.check_disk(most, 5000) == []
    assert kill_checks.check_disk(most + 1, 5000)[0].startswith("L5 the directory has")
    for name in (f"step-{JOB.steps:08d}", "plans", ".lock"):
        (tmp_path / name).mkdir()
    assert kill_checks.check_left(JOB, tmp_path) == []
    (tmp_path / ".tmp-00000003-run").mkdir()
    (tmp_path / "plans" / ".half.tmp").touch()
    (tmp_path / f"step-{JOB.steps:08d}").rename(tmp_path / "step-00000001")
    assert [problem[:20] for problem in kill_checks.check_left(JOB, tmp_path)] == [
        "L5 left over in the ", "L5 left over among t", "L5 the last boundary",
    ]  # fmt: skip


# A real directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Three iterations of a job that has no plan yet."""
    folder = tmp_path_factory.mktemp("trained")
    _, record = kill_checks.restore_somewhere(JOB, folder / "directory", None, folder, iterations=3)
    return folder / "directory", record


def test_l2_l3_every_file_is_read_and_held_against_the_notes(trained: tuple[Path, Record], tmp_path: Path) -> None:
    directory, record = trained
    assert [path.name for path in find(directory)] == ["step-00000003", "step-00000002"]
    assert kill_checks.check_files(directory, record) == []
    torn = dataclasses.replace(record, boundaries={**record.boundaries, 3: record.boundaries[2]})
    assert [problem[:50] for problem in kill_checks.check_files(directory, torn)] == [
        "L2 the tensors of step-00000003 (ours) are no stat", "L2 the tensors of step-00000003 (safetensors) are ",
    ]  # fmt: skip
    kill_checks.link_copy(directory, tmp_path / "copy")
    kill_checks.damage(find(tmp_path / "copy")[1], 1)
    (problem,) = kill_checks.check_files(tmp_path / "copy", record)
    assert problem.startswith("L3 step-00000002 is damaged: ")
    assert kill_checks.check_files(directory, record) == []  # what was linked is as it was


@pytest.mark.parametrize("seed", range(4))  # a cut, a missing file, two flipped bits
def test_a_fresh_process_examines_a_directory_and_leaves_it(
    trained: tuple[Path, Record], tmp_path: Path, seed: int
) -> None:
    directory, record = trained
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    answer = kill_checks.examine(JOB, directory, None, record, tmp_path, seed)
    assert answer == {"problems": [], "restored": 3, "damaged": True}
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_a_job_dies_in_the_phase_that_was_chosen() -> None:
    where = Whereabouts()
    where.clear(("storage", "rename", 2))
    pid = os.fork()
    if not pid:
        for phase in ("write", "rename", "rename", "idle", "rename", "directory fsync"):
            where.at("training thread", "forward")
            where.at("storage", phase)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert where.read() == {"training thread": "forward", "storage": "rename", "planning": "none"}
