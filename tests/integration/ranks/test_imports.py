"""What plain ``dcp.save`` wrote is imported, and goes on under checkflow on other ranks as with ``dcp.load``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import checkflow
from checkflow.cli.main import main
from checkflow.integrations.dcp import Reader, Writer
from tests.support.programs import mesh_jobs
from tests.support.ranks.processes import run_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::UserWarning")]
Job = tuple[nn.Module, torch.optim.Optimizer]
STEPS = 3


def states(job: Job, flat: bool) -> dict[str, Any]:
    model, optimizer = get_state_dict(*job, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model, "optimizer": optimizer}


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).detach().clone()
    return state


def everything(job: Job) -> dict[str, torch.Tensor]:
    found = whole(states(job, flat=True))
    optimizer = {name: value for name, value in found["optimizer"].items() if isinstance(value, torch.Tensor)}
    return {**found["model"], **optimizer}


def trained(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without buffers, which DistributedDataParallel broadcasts only before the next step."""
    return {name: value for name, value in found.items() if not name.startswith(("norm.running", "norm.num"))}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def save(rank: int, ranks: int, kind: str, folder: Path, flat: bool) -> None:
    job = mesh_jobs.build(kind, ranks)
    mesh_jobs.train(*job, rank, STEPS)
    dcp.save({**states(job, flat), "step": STEPS}, checkpoint_id=folder)


def go_on(rank: int, ranks: int, kind: str, folder: Path, flat: bool, directory: Path) -> tuple[bool, bool, int]:
    """Whether both go on alike, and began alike; and the step."""
    expected = mesh_jobs.build(kind, ranks)
    state = states(expected, flat)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        *expected, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=flat),
    )  # fmt: skip
    job = mesh_jobs.build(kind, ranks)
    with checkflow.Checkpointer(*job, directory=directory, resume="must") as checkpointer:
        began = equal(everything(job), everything(expected))
        for step in checkpointer.steps(STEPS + 3):
            mesh_jobs.train(*job, rank, 1, first=step)
        reached = checkpointer.iteration
    mesh_jobs.train(*expected, rank, 3, first=STEPS)
    went = equal(everything(job), everything(expected))
    again = mesh_jobs.build(kind, ranks)  # and once more, from what the job saved
    with checkflow.Checkpointer(*again, directory=directory, resume="must"):
        went = went and equal(trained(everything(again)), trained(everything(expected)))
    return began, went, reached


@pytest.mark.parametrize(
    ("first", "of_first", "then", "of_then", "flat"),
    [
        ("plain", 1, "plain", 1, False),
        pytest.param("fsdp", 2, "fsdp", 3, False, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, "plain", 1, True, marks=pytest.mark.slow),
        pytest.param("ddp", 2, "fsdp", 2, True, marks=pytest.mark.slow),
        pytest.param("fsdp", 3, "ddp", 2, False, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "tp", 2, False, marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_from_what_dcp_saved(
    tmp_path: Path, first: str, of_first: int, then: str, of_then: int, flat: bool
) -> None:
    for name in ("saving", "going on"):
        (tmp_path / name).mkdir()
    folder, directory = tmp_path / "dcp", tmp_path / "versions"
    run_ranks(tmp_path / "saving", of_first, save, first, folder, flat)
    assert main(["import", str(folder), str(directory), "--step", str(STEPS)]) == 0
    found = run_ranks(tmp_path / "going on", of_then, go_on, then, folder, flat, directory)
    assert found == [(True, True, STEPS + 3)] * of_then


def through_both(rank: int, ranks: int, folder: Path, directory: Path, again: Path) -> list[bool]:
    """dcp.load, dcp.save and dcp.load again: from torch's folder into checkflow's store, and back."""
    job = mesh_jobs.build("fsdp", ranks)
    expected = states(job, False)
    dcp.load(expected, checkpoint_id=folder)
    dcp.save(expected, storage_writer=Writer(directory, step=1))
    found = []
    for reading, writing in (({"storage_reader": Reader(directory)}, {"checkpoint_id": again}),
                             ({"checkpoint_id": again}, {"storage_writer": Writer(directory, step=2)})):  # fmt: skip
        mesh_jobs.train(*job, rank, 1)  # something else meanwhile
        state = states(job, False)
        dcp.load(state, **reading)
        found.append(repr(whole(state)) == repr(whole(expected)))
        dcp.save(state, **writing)
    return found


@pytest.mark.slow
def test_dcp_loads_through_checkflow_and_back(tmp_path: Path) -> None:
    for name in ("saving", "going on"):
        (tmp_path / name).mkdir()
    run_ranks(tmp_path / "saving", 2, save, "fsdp", tmp_path / "dcp", False)
    arguments = tmp_path / "dcp", tmp_path / "versions", tmp_path / "again"
    assert run_ranks(tmp_path / "going on", 3, through_both, *arguments) == [[True, True]] * 3
