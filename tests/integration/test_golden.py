"""What earlier code has written is read by this one: tests/data, whose README says what it is.

Git keeps neither owners nor modes, and the golden files know another machine: so each test copies what it needs, and
tells host memory where it lies now.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter

from checkflow.cli.main import FOUND, main
from checkflow.core.machine.device import read_device
from checkflow.core.reports import capture_times, run_report
from checkflow.integrations.dcp import Reader
from checkflow.runtime.interval.profile import NAME, KeptProfile, ProfileCache
from checkflow.runtime.memory_tier import orphans, records
from checkflow.runtime.memory_tier.records import MARK, OWNER, PREFIX
from checkflow.runtime.store.discovery import find
from tests.support.dead_jobs import give_back, needs_memory
from tests.support.golden.jobs import Job, TensorsAnywhere, digest, run_rank
from tests.support.golden.make import dcp_digests, dcp_state, steps_in
from tests.support.ranks.dead import holds, start_again
from tests.support.ranks.processes import run_ranks
from tests.support.shard_tools import World

DATA = Path(__file__).parents[1] / "data"
SETS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
DIRECTORIES = ("one", "torch-loader", "fsdp", "ddp", "imported", "dcp", "shards")
pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("name", SETS)]


def copy(source: Path, target: Path) -> Path:
    """A copy as the job's own user makes it; shared memory must not be open to others."""
    target.mkdir(mode=0o700)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
    return target


def expected_of(name: str, part: str) -> Any:
    return json.loads((DATA / name / "expected.json").read_text())[part]


def newest(held: dict[str, Any]) -> int:
    return max(int(step) for step in held)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*(str(argument) for argument in arguments), "--json"]) == FOUND
    return json.loads(capsys.readouterr().out)


LOADERS = {"one": "checkflow", "torch-loader": "torch"}


@pytest.mark.every_case
@pytest.mark.parametrize("part", LOADERS)
def test_each_step_is_restored_bit_for_bit(tmp_path: Path, name: str, part: str) -> None:
    expected = expected_of(name, part)
    assert steps_in(DATA / name / part) == sorted(int(step) for step in expected["held"])
    for step, held in expected["held"].items():
        directory = copy(DATA / name / part, tmp_path / step)
        job = Job(directory, LOADERS[part], expected["epochs"], resume=int(step))
        job.train(lambda step: True)
        assert (job.checkpointer.resumed_from, job.begun) == (int(step), held)


@pytest.mark.every_case
@pytest.mark.parametrize("part", LOADERS)
def test_a_job_goes_on_to_its_end(tmp_path: Path, name: str, part: str) -> None:
    expected = expected_of(name, part)
    directory = copy(DATA / name / part, tmp_path / part)
    runs = len(run_report.load(directory / run_report.FILE))
    job = Job(directory, LOADERS[part], expected["epochs"], resume="must")
    assert job.checkpointer.resumed_from == newest(expected["held"])
    assert job.train() == expected["used"]
    report = job.checkpointer.report()
    assert report["failed"] == 0
    assert job.checkpointer.durable_step == newest(expected["held"]) + len(expected["used"])
    assert len(run_report.load(directory / run_report.FILE)) == runs + 1
    if part == "one":
        assert report["plan"]["source"] == "cache"


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_go_on_to_their_end(tmp_path: Path, name: str, kind: str) -> None:
    expected = expected_of(name, kind)
    directory = copy(DATA / name / kind, tmp_path / kind)
    (tmp_path / "ranks").mkdir()
    found = run_ranks(tmp_path / "ranks", expected["ranks"], run_rank, kind, directory, None, {"resume": "must"})
    step = newest(expected["held"][0])
    for rank, (begun, held, used, _) in enumerate(found):
        assert (begun, held, used) == (step, expected["held"][rank][str(step)], expected["used"][rank]), f"rank {rank}"
    assert steps_in(directory)[-1] == step + len(expected["used"][0])
    assert not list(directory.glob(".council-*"))  # left by the runs before


def test_tensors_anywhere_come_back(tmp_path: Path, name: str) -> None:
    if not (DATA / name / "anywhere").exists():
        pytest.skip("it was written before they were state")
    expected = expected_of(name, "anywhere")
    job = TensorsAnywhere(copy(DATA / name / "anywhere", tmp_path / "anywhere"), resume="must")
    job.train()
    # The loader is asked for its first batch before the loop holds anything.
    assert {part: job.begun[part] for part in ("model", "optimizer", "others")} == {
        part: expected["held"][part] for part in ("model", "optimizer", "others")
    }
    assert job.digests() == expected["end"]


def test_what_was_imported_begins_a_job(tmp_path: Path, name: str) -> None:
    held = expected_of(name, "one")["held"]
    job = Job(copy(DATA / name / "imported", tmp_path / "imported"), "checkflow", 1, resume="must")
    assert job.digests()["model"] == held[str(newest(held))]["model"]
    job.checkpointer.close()


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    give_back(tmp_path)


def bring_back(source: Path, directory: Path) -> Path:
    """A dead job's directory and its shared memory, as if it had died here: only places and names are others."""
    copy(source / "checkpoints", directory)
    for folder in sorted((source / "shm").iterdir()):
        token, old = uuid.uuid4().hex, folder.name.removeprefix(PREFIX)
        mark = next(path for path in directory.glob(".memory*.json") if old in path.read_text())
        said = json.loads(mark.read_text()) | {"token": token, "boot": records.boot_id()}
        mark.unlink()
        (directory / mark.name.replace(old, token)).write_text(json.dumps(said))
        place = copy(folder, records.ROOT / f"{PREFIX}{token}")
        status = directory.stat()
        here = {"directory": str(directory), "device": status.st_dev, "inode": status.st_ino}
        (place / OWNER).write_text(json.dumps(json.loads((place / OWNER).read_text()) | here))
    return directory


@needs_memory
@pytest.mark.usefixtures("nothing_is_left")
def test_a_job_goes_on_from_host_memory(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = expected_of(name, "memory")
    directory = bring_back(DATA / name / "memory", tmp_path / "checkpoints")
    assert steps_in(directory)[-1] == expected["stored"]
    assert orphans.left_step(directory) == expected["kept"]
    (listed,) = [one for one in as_json(capsys, "memory")["folders"] if one["directory"] == str(directory)]
    assert (listed["step"], listed["stored_step"]) == (expected["kept"], expected["stored"])
    job = Job(directory, "checkflow", 2)
    job.train()
    assert (job.checkpointer.resumed_from, job.begun) == (expected["kept"], expected["held"])
    assert job.checkpointer.report()["failed"] == 0
    assert not (directory / MARK).exists()


@needs_memory
@pytest.mark.usefixtures("nothing_is_left")
def test_ranks_go_on_from_host_memory(tmp_path: Path, name: str) -> None:
    expected = expected_of(name, "rank-memory")
    directory = bring_back(DATA / name / "rank-memory", tmp_path / "checkpoints")
    steps = start_again(directory, expected["ranks"])[0]
    assert max(steps) == expected["kept"]
    for path in find(directory):
        assert holds(path, int(path.name[5:]))


# ----------------------------------------------------------------------------------------------------------- versions


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_versions_of_dcp_are_loaded(tmp_path: Path, name: str) -> None:
    directory = copy(DATA / name / "dcp", tmp_path / "dcp")
    for step, held in expected_of(name, "dcp")["steps"].items():
        state = dcp_state("plain", 1, 0, 0)
        dcp.load(state, storage_reader=Reader(directory, step=int(step)))
        assert dcp_digests(state) == held


@pytest.mark.parametrize("ranks", [1, 3, 2])
def test_shards_are_loaded(tmp_path: Path, name: str, ranks: int) -> None:
    directory = copy(DATA / name / "shards", tmp_path / "shards")
    for step in (1, 2):
        World(step).check(directory, ranks, step)
    World(3).save(directory, 3, ranks, "later")  # past the board of an earlier release
    World(3).check(directory, ranks, 3)


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.mark.every_case
@pytest.mark.parametrize("part", DIRECTORIES)
def test_checkpoints_are_listed_verified_and_compared(
    tmp_path: Path, name: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy(DATA / name / part, tmp_path / part)
    steps = steps_in(directory)
    listed = as_json(capsys, "ls", directory)["entries"]
    assert [(one["step"], one["kind"], one["valid"]) for one in listed] == [
        (step, "checkpoint", True) for step in reversed(steps)
    ]
    assert main(["verify", str(directory)]) == FOUND
    assert capsys.readouterr().out.count("whole, every checksum fits") == len(steps)
    if len(steps) > 1:
        first, last = f"{directory}@{steps[0]}", f"{directory}@{steps[-1]}"
        assert as_json(capsys, "diff", first, last)["tensors"]
        assert main(["diff", last, last, "--exit-code"]) == FOUND


@pytest.mark.every_case
@pytest.mark.parametrize("part", ["one", "fsdp", "ddp", "imported"])
def test_checkpoints_are_exported(tmp_path: Path, name: str, part: str) -> None:
    directory = copy(DATA / name / part, tmp_path / part)
    assert main(["export", str(directory), "-o", str(tmp_path / "all.pt")]) == FOUND
    arrays = [np.dtype, np.ndarray, (np.zeros(0).__reduce__()[0], "numpy._core.multiarray._reconstruct")]
    arrays += [type(np.dtype(kind)) for kind in ("float32", "float64", "int16", "int64", "uint8", "bool")]
    with torch.serialization.safe_globals(arrays):  # the job's variables have some
        exported = torch.load(tmp_path / "all.pt", weights_only=True)
    one = "one" if part == "imported" else part
    held = expected_of(name, one)["held"]
    of_rank_0 = held if one == "one" else held[0]
    assert digest(exported["model"]) == of_rank_0[str(newest(of_rank_0))]["model"]


def test_plans_devices_and_measurements_are_read(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = copy(DATA / name, tmp_path / name)
    assert main(["check", str(source / "plan.json")]) == FOUND
    assert "the plan holds" in capsys.readouterr().out
    assert as_json(capsys, "show", source / "plan.json")
    assert read_device(source / "device.json").disk_write_bytes_per_second
    identity = TypeAdapter(KeptProfile).validate_json((source / "one" / NAME).read_bytes()).identity
    assert ProfileCache(source / "one").find(identity) is not None
    assert capture_times.load(source / "one" / capture_times.FILE).captures
    for part, runs in {"one": 2, "torch-loader": 1, "fsdp": 2, "ddp": 2}.items():
        (report,) = as_json(capsys, "report", source / part)["reports"]
        assert report["runs"] == runs
        assert main(["report", str(source / part), "--html", str(tmp_path / "page.html")]) == FOUND
        capsys.readouterr()
