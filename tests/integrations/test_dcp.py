"""dcp.save, dcp.async_save and dcp.load through checkflow's store, in one process and among real ranks over gloo."""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import io
import json
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.integrations.dcp import Reader, Writer
from checkflow.runtime.inspect import compare, list_directory, verify
from checkflow.runtime.store.cleanup import is_leftover
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.weights.exporter import export, state_dicts
from tests.support.faults import CUTS, Disk, Faults
from tests.support.programs import mesh_jobs
from tests.support.ranks.processes import run_ranks
from tests.support.store_tools import fill, small_layout

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
State = dict[str, Any]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if is_leftover(path.name)]


def job() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model, optimizer = mesh_jobs.build("plain", 1)
    mesh_jobs.train(model, optimizer, 0, 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=9)
    return model, optimizer, schedule


def all_state() -> State:
    """What scripts save, in both forms that torch has of an optimizer's state."""
    model, optimizer, schedule = job()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {
        "model": of_model,
        "optim": of_optimizer,
        "plain": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "loader": {"dp_rank_0": b"any bytes", "seen": collections.deque([1, 2])},
        "when": datetime.datetime(2026, 1, 2, 3, 4),
        "complex": torch.randn(3, dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }


def zeroed(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {name: zeroed(value) for name, value in state.items()}
    return [zeroed(one) for one in state] if isinstance(state, list) else None


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name, value in expected.items():
            assert_equal(found[name], value, f"{path}.{name}")
    elif isinstance(expected, list | tuple):
        assert (type(found), len(found)) == (type(expected), len(expected)), path
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{path}.{number}")
    else:
        assert (type(found), found) == (type(expected), expected), path


def refused(says: str) -> Any:
    return pytest.raises(CheckpointException, match=says)


# -------------------------------------------------------------------------------------------------------- one process


def test_everything_that_scripts_save_comes_back(tmp_path: Path) -> None:
    state = all_state()
    dcp.save(state, storage_writer=Writer(tmp_path, step=10))
    found = zeroed(state)
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert_equal(found, state)
    assert [(one.step, one.fault, one.tensors is not None) for one in list_directory(tmp_path)] == [(10, None, True)]
    (path,) = find(tmp_path)
    assert verify(path).fault is None
    assert not any(
        b"torch" in file.read_bytes() and b"\x80\x02" in file.read_bytes() for file in path.glob("*.msgpack")
    )


def test_a_version_is_like_any_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep_latest=2)
    for step in range(3):
        state = {"x": torch.full((4,), float(step)), "note": f"of {step}"}
        dcp.save(state, storage_writer=writer, checkpoint_id=f"step-{step}")
    newest, older = find(tmp_path)
    assert (newest.name, older.name) == ("step-00000002", "step-00000001")
    differences = compare(older, newest)
    assert [(one.name, one.largest) for one in differences.tensors] == [("dcp/x", 1.0)]
    assert [path for path, _, _ in differences.extra] == ["dcp.values.note"]


def test_a_version_is_exported(tmp_path: Path) -> None:
    state = all_state()
    dcp.save(state, storage_writer=Writer(tmp_path, step=10))
    with open_checkpoint(tmp_path / "step-00000010") as checkpoint:
        assert_equal(
            state_dicts(checkpoint),
            {
                **state,
                "plain": {
                    **state["plain"],
                    "state": {
                        str(number): value
                        for number, value in state["plain"]["state"].items()  # as DCP has keys
                    },
                },
            },
        )
        export(checkpoint, tmp_path / "model.safetensors", "safetensors")
        export(checkpoint, tmp_path / "again", "dcp")
    assert_equal(load_file(tmp_path / "model.safetensors"), dict(state["model"]))
    found = zeroed({"model": state["model"]})
    dcp.load(found, checkpoint_id=tmp_path / "again")
    assert_equal(found["model"], state["model"])
    dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path, step=11))
    with (
        open_checkpoint(tmp_path / "step-00000011") as checkpoint,
        pytest.raises(MismatchError, match="holds no model under a name of its own"),
    ):
        export(checkpoint, tmp_path / "none.safetensors", "safetensors")


@pytest.mark.parametrize("of", ["10", "step-10", "{}/step-10", "{}/10"])
def test_a_checkpoint_id_names_the_step(tmp_path: Path, of: str) -> None:
    dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path), checkpoint_id=of.format(tmp_path))
    found = {"x": torch.zeros(2)}
    dcp.load(found, storage_reader=Reader(tmp_path, 3), checkpoint_id=of.format(tmp_path))
    assert found["x"].tolist() == [1, 1]
    assert find(tmp_path) == (tmp_path / "step-00000010",)


@pytest.mark.parametrize("of", ["ten", "step-", "other/step-10", "step--1", "1" * 30])
def test_any_other_checkpoint_id_is_refused(tmp_path: Path, of: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_id|a step is a number"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path), checkpoint_id=of)


def test_arguments_out_of_their_range(tmp_path: Path) -> None:
    for make in (
        lambda: Writer(tmp_path, -1),
        lambda: Writer(tmp_path, 1, keep_latest=1),
        lambda: Reader(tmp_path, -1),
    ):
        with pytest.raises(ValueError, match=r"step|keep_latest"):
            make()
    with refused("the version has no step"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path))
    with pytest.raises(UnsupportedError, match="leave it out"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path, 1), use_collectives=False)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with refused("state.thing: an object of type object cannot be saved"):
        dcp.save({"state": {"thing": object(), "x": torch.ones(2)}}, storage_writer=Writer(tmp_path, 1))
    with refused("odd is a tensor of layout torch.sparse_coo: make it dense"):
        dcp.save({"odd": torch.eye(2).to_sparse()}, storage_writer=Writer(tmp_path, 1))
    with refused("odd is quint8, which no safetensors file can hold"):
        dcp.save(
            {"odd": torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.quint8)}, storage_writer=Writer(tmp_path, 1)
        )
    with refused("holds no whole version"):
        dcp.load({"x": torch.ones(2)}, storage_reader=Reader(tmp_path))


def test_a_rank_that_loads_more_precisely(tmp_path: Path) -> None:
    """As DCP's own reader, into another dtype."""
    values = torch.randn(5, 3)
    dcp.save({"x": values}, storage_writer=Writer(tmp_path, 1))
    found = {"x": torch.zeros(5, 3, dtype=torch.float64)}
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert torch.equal(found["x"], values.double())


class Pickles(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return io.BytesIO(found.getvalue()) if isinstance(found, io.BytesIO) else found * 2


class Forgets(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        largest = max(plan.items, key=lambda item: math.prod(item.tensor_data.chunk.sizes) if item.tensor_data else 0)
        return SavePlan([item for item in plan.items if item is not largest], plan.storage_data, plan.planner_data)


class Halves(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item).half()


class Fewer(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)[:1]


def test_planners_of_ones_own(tmp_path: Path) -> None:
    state = {"x": torch.ones(3), "y": torch.ones(3), "n": {"a": [1, 2.5, "b"]}}
    dcp.save(state, storage_writer=Writer(tmp_path, 1), planner=Pickles())
    found = zeroed(state)
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert_equal(found, {**state, "x": torch.full((3,), 2.0), "y": torch.full((3,), 2.0)})
    with refused("date comes from Pickles as a pickle"):
        dcp.save({"date": datetime.date(2026, 1, 1)}, storage_writer=Writer(tmp_path, 2), planner=Pickles())
    with refused("no rank has written"):
        dcp.save(state, storage_writer=Writer(tmp_path, 2), planner=Forgets())
    with refused(r"x is float16\[3\], and was planned as float32\[3\]"):
        dcp.save({"x": torch.ones(3)}, storage_writer=Writer(tmp_path, 2), planner=Halves())
    with refused(r"takes \[1\], not \[3\]"):
        dcp.load({"x": torch.ones(3)}, storage_reader=Reader(tmp_path), planner=Fewer())
    assert find(tmp_path) == (tmp_path / "step-00000001",)


def damage(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_version_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"x": torch.full((3,), float(step)), "n": step}, storage_writer=Writer(tmp_path, step))
    damage(tmp_path / "step-00000002")
    found = {"x": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert (found["x"].tolist(), found["n"]) == ([1, 1, 1], 1)
    with refused("step-00000002/dcp-00000-of-00001.safetensors is damaged"):
        dcp.load(found, storage_reader=Reader(tmp_path, 2))
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(b"{}")
    dcp.load(found, storage_reader=Reader(tmp_path))
    damage(tmp_path / "step-00000001")
    with refused("holds no whole version"):
        dcp.load(found, storage_reader=Reader(tmp_path))


def test_an_older_version_of_other_state_is_not_taken_in_place_of_a_damaged_one(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"x": torch.ones(step)}, storage_writer=Writer(tmp_path, step))
    damage(tmp_path / "step-00000002")
    with refused("the newest whole version of .* is of step 1, and holds other state"):
        dcp.load({"x": torch.zeros(2)}, storage_reader=Reader(tmp_path))


@pytest.mark.slow
def test_versions_of_others_are_refused(tmp_path: Path) -> None:
    layout = small_layout()
    with Store(tmp_path, run_id="r") as store:
        store.commit(1, layout, fill(layout, 1)[0], b"\x80", {})
        with refused("is being written by process"):
            dcp.save({"x": torch.ones(2)}, storage_writer=Writer(tmp_path, 2))
    with refused("was not saved by checkflow.integrations.dcp"):
        dcp.load({"x": torch.zeros(2)}, storage_reader=Reader(tmp_path))


def test_a_second_job_cannot_mix_with_the_first(tmp_path: Path) -> None:
    class Disturbed(Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            dcp.save({"x": torch.zeros(2)}, storage_writer=Writer(tmp_path, 1))
            super().finish(metadata, results)

    with refused("what rank 0 wrote is gone: another job saves to this directory"):
        dcp.save({"x": torch.ones(2)}, storage_writer=Disturbed(tmp_path, 1))
    found = {"x": torch.ones(2)}
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert found["x"].tolist() == [0, 0]
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("error", [errno.EIO, None], ids=["error", "killed"])
def test_each_call_that_fails_leaves_whole_versions(tmp_path: Path, error: int | None) -> None:
    """Of all system calls of a save, each fails once, or is the process's last."""

    def save(step: int) -> None:
        dcp.save({"x": torch.full((3,), float(step)), "n": step}, storage_writer=Writer(tmp_path, step))

    save(0)
    at = met = 0
    while at == met:
        at += 1
        before, faults = find(tmp_path), Faults(at, error)
        try:
            with faults():
                save(at)
            acknowledged = True
        except CheckpointException:
            acknowledged = False
        met += faults.met
        found = find(tmp_path)
        assert [verify(path).fault for path in found] == [None] * len(found)
        assert found[0].name == f"step-{at:08d}" if acknowledged else set(found) & set(before)
        if not acknowledged:
            save(at)
            assert not leftovers(tmp_path)
    assert met > 40


@pytest.mark.parametrize("names", CUTS)
def test_a_power_cut_at_any_call_loses_nothing_acknowledged(tmp_path: Path, names: str) -> None:
    at = 0
    while True:
        at += 1
        directory, left = tmp_path / f"versions-{at}", tmp_path / f"left-{at}"
        directory.mkdir()
        disk, faults, done = Disk(directory), Faults(at, after=True), 0
        with disk():
            for step in (1, 2):
                with faults() if step == 2 else contextlib.nullcontext(), contextlib.suppress(CheckpointException):
                    dcp.save({"x": torch.full((3,), float(step))}, storage_writer=Writer(directory, step))
                    done = step
            disk.after_power_cut(left, names)
        found = {"x": torch.zeros(3)}
        dcp.load(found, storage_reader=Reader(left))
        assert found["x"].tolist() in ([[2.0] * 3] if done == 2 else [[1.0] * 3, [2.0] * 3])
        assert [verify(path).fault for path in find(left)] == [None] * len(find(left))
        if not faults.met:
            break
    assert at > 40


# --------------------------------------------------------------------------------------------------------------- ranks


def whole(state: Any) -> Any:
    """The state with whole tensors in place of a rank's parts."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    return {name: whole(value) for name, value in state.items()} if isinstance(state, dict) else state


def of_job(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    # DCP keeps one rank's of what is each rank's own.
    parameters = {name: value for name, value in of_model.items() if "running" not in name}
    return {"model": parameters, "optim": of_optimizer}


def save_job(rank: int, ranks: int, kind: str, directory: Path) -> State:
    model, optimizer = mesh_jobs.build(kind, ranks)
    mesh_jobs.train(model, optimizer, 0 if "tp" in kind else rank, 2)
    state = of_job(model, optimizer)
    dcp.save({**state, "loader": {f"dp_rank_{rank}": rank}}, storage_writer=Writer(directory, step=2))
    return dict(whole(state))


def load_job(rank: int, ranks: int, kind: str, directory: Path, of_before: int) -> tuple[State, Any]:
    model, optimizer = mesh_jobs.build(kind, ranks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    state: State = of_job(model, optimizer)
    state["loader"] = {f"dp_rank_{one}": None for one in range(of_before)}
    dcp.load(state, storage_reader=Reader(directory))
    of_model, _ = get_state_dict(model, optimizer)
    set_state_dict(
        model, optimizer, model_state_dict={**of_model, **state["model"]}, optim_state_dict=state["optim"]
    )  # fmt: skip
    found = whole(of_job(model, optimizer))
    mesh_jobs.train(model, optimizer, 0 if "tp" in kind else rank, 1, first=2)
    return found, state["loader"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "of_first", "then", "of_then"), [("fsdp", 2, "fsdp", 3), ("hsdp", 4, "fsdp-tp", 4), ("tp", 2, "ddp", 1)]
)
def test_another_mesh_loads_what_ranks_saved(
    tmp_path: Path, first: str, of_first: int, then: str, of_then: int
) -> None:
    for name in ("saving", "loading"):
        (tmp_path / name).mkdir()
    directory = tmp_path / "versions"
    expected = run_ranks(tmp_path / "saving", of_first, save_job, first, directory)[0]
    (path,) = find(directory)
    assert verify(path).fault is None
    assert len(list(path.glob("*.safetensors"))) == of_first
    for found, loader in run_ranks(tmp_path / "loading", of_then, load_job, then, directory, of_first):
        assert_equal(found, expected)
        assert loader == {f"dp_rank_{rank}": rank for rank in range(of_first)}


def fail_and_go_on(rank: int, ranks: int, directory: Path) -> list[Any]:
    """One job: a save that fails on rank 1, then good ones, as DCP has them."""
    model, optimizer = mesh_jobs.build("fsdp", ranks)
    state = of_job(model, optimizer)
    said: list[Any] = []
    try:
        dcp.save({**state, **({"bad": object()} if rank else {})}, storage_writer=Writer(directory, step=1))
    except CheckpointException as error:
        said.append(str(error))
    try:
        planner = Forgets() if rank else DefaultSavePlanner()  # a part of a tensor that rank 0 writes its own part of
        dcp.save(state, storage_writer=Writer(directory, step=1), planner=planner)
    except CheckpointException as error:
        said.append(str(error))
    torch.distributed.barrier()
    said.append((find(directory), leftovers(directory)))
    torch.distributed.barrier()
    for step in (2, 3):
        mesh_jobs.train(model, optimizer, rank, 1, first=step)
        state = of_job(model, optimizer)
        # Ranks keep the first one's plans: nothing in them may be of that save alone.
        dcp.save(
            state, storage_writer=Writer(directory, step=step), planner=DefaultSavePlanner(enable_plan_caching=True)
        )
    said.append(leftovers(directory))
    mesh_jobs.train(model, optimizer, rank, 1, first=4)
    state = of_job(model, optimizer)
    group = torch.distributed.new_group()  # training uses the other one meanwhile
    future = dcp.async_save(state, storage_writer=Writer(directory, step=4), process_group=group)
    expected = whole(state)
    mesh_jobs.train(model, optimizer, rank, 1, first=5)  # goes on meanwhile
    future.result()  # type: ignore[union-attr]
    found = of_job(model, optimizer)
    dcp.load(found, storage_reader=Reader(directory))
    assert_equal(whole(found), expected)
    torch.distributed.barrier()
    said.append([path.name for path in find(directory)])
    return said


@pytest.mark.slow
def test_a_rank_that_fails_leaves_no_version_and_later_saves_go_on(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    directory = tmp_path / "versions"
    for error, uncovered, (versions, left), later, newest in run_ranks(
        tmp_path / "ranks", 2, fail_and_go_on, directory
    ):
        assert "bad: an object of type object cannot be saved" in error
        assert "is not covered by its pieces: [" in uncovered
        assert versions == ()
        assert left == []  # what the first one left, the second has removed, and the commit what both wrote
        assert later == []
        assert newest == ["step-00000004", "step-00000003"]


@pytest.mark.slow
def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_dcp", str(tmp_path), "5", "1"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["problems"]) == (5, [])
    assert found["versions"] > 0
