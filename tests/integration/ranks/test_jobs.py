"""Jobs of several ranks: killed, resumed on other ranks, refused together and ended together."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from checkflow.cli.main import FOUND, main
from checkflow.core.reports import run_report
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.support.programs.ranks_job import digest_of, make_model
from tests.support.ranks.jobs import numbered, rank_job, run_job

KINDS = {"ddp": 2, "fsdp": 2, "tp": 2, "hsdp": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_ends_as_if_it_had_never_been(tmp_path: Path, kind: str) -> None:
    """All ranks are killed; the next run resumes on all, and trains to the same bits."""
    ranks, folder = KINDS[kind], numbered(tmp_path)
    whole = run_job(folder(), ranks, tmp_path / "whole", kind, 3)
    with rank_job(folder(), ranks, tmp_path / "killed", kind, 3, pause=0.02) as job:
        job.reach(4)
        job.kill_all()
        durable = max(line["durable"] or 0 for line in job.said(0, "stepped"))
    resumed = run_job(folder(), ranks, tmp_path / "killed", kind, 3)
    assert resumed.last(0, "begins")["step"] >= durable
    for rank in range(ranks):
        assert resumed.last(rank, "begins") | {"pid": 0} == resumed.last(0, "begins") | {"pid": 0}
        expected, found = whole.last(rank, "ended"), resumed.last(rank, "ended")
        assert (found["step"], found["digest"]) == (expected["step"], expected["digest"])
        assert (found["durable"], found["failed"], found["audits"]) == (found["step"], 0, found["committed"])
    check_report(tmp_path / "killed", [resumed.last(rank, "ended") for rank in range(ranks)])
    check_export(tmp_path / "killed", kind, resumed.last(0, "ended")["digest"])


def check_export(directory: Path, kind: str, digest: str) -> None:
    """A script without checkflow loads the whole state into a model that nobody wraps; so does an import."""
    exported, imported = directory.with_name("exported.pt"), directory.with_name("imported")
    assert main(["export", str(directory), "-o", str(exported)]) == FOUND
    saved = torch.load(exported, weights_only=True)
    model = make_model(kind)
    if kind == "tp":
        model[2] = torch.nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert digest_of([model], optimizer) == digest
    assert main(["import", str(directory), str(imported)]) == FOUND
    with open_checkpoint(find(imported)[0]) as checkpoint:
        assert set(checkpoint.tensors) == {f"model/{name}" for name in saved["model"]}
        for name, tensor in saved["model"].items():
            found = bytearray(checkpoint.size_bytes(f"model/{name}"))
            checkpoint.read_into(f"model/{name}", memoryview(found))
            assert found == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_report(directory: Path, ends: list[dict[str, Any]]) -> None:
    """Rank 0's report adds up what the ranks' own reports say, and so does its file."""
    together = ends[0]["ranks"]
    assert all(end["ranks"] is None for end in ends[1:])
    assert (together["count"], together["heard"], together["silent"]) == (len(ends), len(ends), [])
    for ours, theirs in (("copied_bytes", "captured_bytes"), ("written_bytes", "persisted_bytes")):
        assert together[ours] == sum(end["moved"][theirs] for end in ends) > 0
        assert {one["rank"]: one[ours] for one in together["each"]} == {
            rank: end["moved"][theirs] for rank, end in enumerate(ends)
        }
    held = [one["held_seconds"] for one in together["each"]]
    assert held == sorted(held, reverse=True)
    assert min(held) > 0
    slowest = max(together["each"], key=lambda one: one["persist_seconds"])
    assert together["slowest_writer"] == slowest["rank"]
    in_file = run_report.load(directory / run_report.FILE)[-1].ranks
    assert in_file is not None
    assert json.loads(json.dumps(dataclasses.asdict(in_file))) == together


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "fsdp" else pytest.mark.slow) for kind in KINDS]
)
def test_each_rank_copies_its_share_by_a_plan_of_its_own(tmp_path: Path, kind: str) -> None:
    """It records an iteration and plans; all checkpoints are true, and a resumed run finds the plans again."""
    ranks, folder = KINDS[kind], numbered(tmp_path)
    whole = run_job(folder(), ranks, tmp_path / "whole", kind, 6)
    first = run_job(folder(), ranks, tmp_path / "all", kind, 5, planned=1)
    then = run_job(folder(), ranks, tmp_path / "all", kind, 6)
    shutil.copytree(tmp_path / "all" / "plans", tmp_path / "anew" / "plans")
    anew = run_job(folder(), ranks, tmp_path / "anew", kind, 2)
    ends = [[run.last(rank, "ended") for rank in range(ranks)] for run in (first, then, anew)]
    for of_run, source in zip(ends, ("recorded", "cache", "cache"), strict=True):
        assert {end["plan"]["source"] for end in of_run} == {source}
        assert all((end["failed"], end["audits"]) == (0, end["committed"]) for end in of_run)
        assert min(end["moved"]["direct_bytes"] + end["moved"]["snapshot_bytes"] for end in of_run) > 0
    assert [end["digest"] for end in ends[1]] == [whole.last(rank, "ended")["digest"] for rank in range(ranks)]
    with open_checkpoint(find(tmp_path / "all")[0]) as checkpoint:
        tensors = checkpoint.manifest.tensors.values()
        state_bytes = sum(math.prod(one.shape) * STORED_TYPES[one.dtype].element_bytes for one in tensors)
    assert sum(end["plan"]["state_bytes"] for end in ends[1]) == state_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(("fsdp", 2), ("fsdp", 3)), (("ddp", 2), ("fsdp", 2)), (("fsdp", 3), ("ddp", 2))]
)
def test_a_job_goes_on_with_other_ranks(tmp_path: Path, first: tuple[str, int], then: tuple[str, int]) -> None:
    """The state is the same on any mesh; so is the place in the data."""
    folder = numbered(tmp_path)
    before = run_job(folder(), first[1], tmp_path / "all", first[0], 1)
    after = run_job(folder(), then[1], tmp_path / "all", then[0], 1)
    for rank in range(then[1]):
        assert after.last(rank, "begins")["step"] == before.last(0, "ended")["step"]
        assert after.last(rank, "ended")["digest"] == before.last(0, "ended")["digest"]  # nothing is left to train
    longer = run_job(folder(), then[1], tmp_path / "all", then[0], 2)
    assert longer.last(0, "ended")["step"] == before.last(0, "ended")["step"] + 48 // (4 * then[1])
    new = [rank for rank in range(then[1]) if rank >= first[1]]
    said = [f"rank {rank} is new since step" in after.printed() for rank in new]
    assert all(said)
    assert after.printed().count("is new since step") == len(new)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_goes_on_from_several_ranks_and_back(tmp_path: Path, kind: str) -> None:
    folder = numbered(tmp_path)
    ends = [run_job(folder(), ranks, tmp_path / "all", kind, 1).last(0, "ended") for ranks in (2, 1, 2)]
    assert len({(end["step"], end["digest"]) for end in ends}) == 1


@pytest.mark.slow
def test_a_locked_directory_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with Store(tmp_path / "all", run_id="other"):
        job = run_job(tmp_path / "run", 3, tmp_path / "all", "ddp", 1)
    for rank in range(3):
        refusal = job.last(rank, "refuses")
        assert refusal["kind"] == "LockedError"
        assert refusal["seconds"] < 10


@pytest.mark.slow
def test_arguments_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    job = run_job(tmp_path / "run", 2, tmp_path / "all", "ddp", 1, rank1_every=3)
    for rank in range(2):
        assert "the argument every is 1 on rank 0, 3 on rank 1" in job.last(rank, "refuses")["message"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_more_parts_than_a_version_can_list_are_refused_before_any_is_written(tmp_path: Path, kind: str) -> None:
    job = run_job(tmp_path / "run", 2, tmp_path / "all", kind, 1, manifest=2000)
    for rank in range(2):
        raised = job.last(rank, "raised")
        assert (raised["kind"], raised["durable"], raised["failed"]) == ("UnsupportedError", None, 0)
        assert "a checkpoint of this job would have some " in raised["message"]
    assert not list((tmp_path / "all").glob("**/*.safetensors"))


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_at_one_boundary(tmp_path: Path) -> None:
    with rank_job(tmp_path / "run", 3, tmp_path / "all", "fsdp", 400, pause=0.02, every=1000) as job:
        job.reach(5)
        os.kill(job.pids()[1], signal.SIGTERM)
        job.launcher.wait()
    raised = [job.last(rank, "raised") for rank in range(3)]
    assert {(one["kind"], one["step"], one["durable"], one["failed"]) for one in raised} == {
        ("Preempted", raised[0]["step"], raised[0]["step"], 0)
    }
    with open_checkpoint(find(tmp_path / "all")[0]) as checkpoint:
        checkpoint.verify()
        assert checkpoint.step == raised[0]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_when_a_rank_is_killed(tmp_path: Path, victim: int) -> None:
    """By themselves, before the launcher would kill them; the newest version that any rank knows of is whole."""
    with rank_job(tmp_path / "run", 3, tmp_path / "all", "ddp", 400, pause=0.02, silent=3) as job:
        job.reach(5)
        os.kill(job.pids()[victim], signal.SIGKILL)
        job.launcher.wait()
        assert job.alive() == []
        assert [rank for rank in range(3) if job.said(rank, "raised")] == [rank for rank in range(3) if rank != victim]
        known = max(line.get("durable") or 0 for rank in range(3) for line in job.said(rank))
    if victim:
        (run,) = run_report.load(tmp_path / "all" / run_report.FILE)
        assert run.ranks is not None
        assert victim in run.ranks.silent
    with open_checkpoint(find(tmp_path / "all")[0]) as checkpoint:
        checkpoint.verify()
        assert checkpoint.step >= known
    resumed = run_job(tmp_path / "again", 3, tmp_path / "all", "ddp", 1)
    assert resumed.last(0, "begins")["step"] >= known


@pytest.mark.slow
@pytest.mark.parametrize("every", ["auto", "0.3s"])
def test_rank_0_decides_which_boundaries_all_ranks_save(tmp_path: Path, every: str) -> None:
    """Where no number says it, and no epoch ends."""
    job = run_job(tmp_path / "run", 2, tmp_path / "all", "ddp", 30, loop="steps", every=every, pause=0.01)
    ends = [job.last(rank, "ended") for rank in range(2)]
    assert [end["durable"] for end in ends] == [180] * 2
    assert ends[0]["committed"] > max(2, ends[0]["failed"])  # a rank that learns too late of a boundary voids it


@pytest.mark.slow
def test_all_ranks_save_the_best_states_and_no_others(tmp_path: Path) -> None:
    """Each judges by what all know: the best on storage at the start, and the metrics since."""
    directory, folder, losses = tmp_path / "all", numbered(tmp_path), "3,1,2,1.5,1.2,0.5"
    first = run_job(folder(), 2, directory, "ddp", 4, every=1000, losses=losses)
    assert [path.name for path in find(directory)] == [step_name(24), step_name(12)]
    second = run_job(folder(), 2, directory, "ddp", 6, every=1000, losses=losses)
    assert [path.name for path in find(directory)] == [step_name(36), step_name(24)]
    for job, captured in ((first, 3), (second, 1)):
        for rank in range(2):
            end = job.last(rank, "ended")
            assert (end["captures"], end["committed"], end["failed"]) == (captured, captured, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"planned": 1}, {"loop": "plain", "every": 1000, "planned": "first"}], ids=["loader", "plans-apart"]
)
def test_evaluation_leaves_whole_parameters_that_are_saved_in_parts(tmp_path: Path, options: dict[str, Any]) -> None:
    """FSDP2 keeps them after a forward pass that no backward pass has followed.

    All ranks must give them up at each boundary: if only a rank that gets its plan did, the ranks would hang.
    """
    job = run_job(tmp_path / "run", 2, tmp_path / "all", "fsdp", 2, evaluate=1, **options)
    end = job.last(0, "ended")
    assert (end["failed"], end["audits"], end["plan"]["source"]) == (0, end["committed"], "recorded")
    with open_checkpoint(find(tmp_path / "all")[0]) as checkpoint:
        own = {name for name in checkpoint.manifest.tensors if name.startswith("rank-own/1/")}
        assert own == {f"rank-own/1/model/2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_weights_put_back_after_the_last_step_are_not_saved_as_its_state(tmp_path: Path, kind: str) -> None:
    """They are written into DTensors, whose parts have no version counters that move."""
    job = run_job(tmp_path / "run", 2, tmp_path / "all", kind, 1, loop="marked", every=1000, surgery=1)
    assert "is not saved: the state was changed after it" in job.printed()
    assert job.last(0, "ended")["durable"] is None


@pytest.mark.slow
def test_intervals_of_plans_are_agreed(tmp_path: Path) -> None:
    """Rank 0 hears of all plans, and every boundary that it then asks for is saved by all."""
    job = run_job(tmp_path / "run", 2, tmp_path / "all", "ddp", 40, loop="steps", every="auto", planned=1, pause=0.01)
    ends = [job.last(rank, "ended") for rank in range(2)]
    assert {end["plan"]["source"] for end in ends} == {"recorded"}
    assert ends[0]["committed"] == ends[0]["audits"] > 1
    assert "did not begin to save" not in job.printed()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_damaged_ends_the_start_on_all_ranks(tmp_path: Path, rank: int) -> None:
    """Rank 0 sets the checkpoint aside, before the launcher ends it; the next start takes the one before."""
    directory, folder = tmp_path / "all", numbered(tmp_path)
    steps = [run_job(folder(), 2, directory, "fsdp", epochs).last(0, "ended")["step"] for epochs in (1, 2)]
    path = find(directory)[0] / f"model-0000{rank}-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused = run_job(folder(), 2, directory, "fsdp", 3, checks="slowly")
    assert "set aside as" in refused.printed()
    assert [refused.last(one, "refuses")["kind"] for one in range(2)] == ["CorruptCheckpointError"] * 2
    assert run_job(folder(), 2, directory, "fsdp", 3).last(1, "begins")["step"] == steps[1] - 1 >= steps[0]
