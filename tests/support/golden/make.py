"""``python -m tests.support.golden.make tests/data/NAME`` writes a new set of golden files, by the code as it is.

NAME says which code: the version and the day. A set that is there is never written anew. It takes a minute, as it also
measures the machine and plans by it. Beside the files, ``expected.json`` has digests of what the jobs held.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import checkflow
from checkflow.cli.main import main as command
from checkflow.integrations.dcp import Writer
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.store import Store
from tests.support import shard_tools
from tests.support.dead_jobs import folder_of, kept_in, rarely
from tests.support.golden.jobs import BATCHES, Digests, Job, TensorsAnywhere, digest, run_rank
from tests.support.jobs import in_a_process
from tests.support.programs import mesh_jobs
from tests.support.ranks import dead
from tests.support.ranks.processes import run_ranks
from tests.support.waiting import wait_for

RANKS = 4
MEMORY_STORED, MEMORY_KEPT = 4, 6  # the newest steps on storage and in memory of a job that is killed


def main(target: Path) -> None:
    target.mkdir(parents=True)  # never over one that is there
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        expected = write(target, Path(scratch))
    expected["checkflow"], expected["torch"] = checkflow.__version__, torch.__version__
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def write(target: Path, scratch: Path) -> dict[str, Any]:
    expected = {
        "one": one_process(target / "one", scratch / "one"),
        "torch-loader": torch_loader(target / "torch-loader", scratch / "torch-loader"),
        "fsdp": ranks(target / "fsdp", scratch / "fsdp", "fsdp"),
        "ddp": ranks(target / "ddp", scratch / "ddp", "ddp"),
        "anywhere": tensors_anywhere(target / "anywhere", scratch / "anywhere"),
        "dcp": version_of_dcp(target / "dcp", scratch / "dcp"),
        "memory": memory(target / "memory", scratch / "memory", target / "one" / "plans"),
        "rank-memory": memory_of_ranks(target / "rank-memory", scratch / "rank-memory"),
    }
    for step in (1, 2):
        shard_tools.World(step).save(target / "shards", step, 3, run_id=f"run-{step}")
    assert command(["import", str(target / "one"), str(target / "imported")]) == 0
    assert command(["probe", "--quick", "--directory", str(scratch), "-o", str(target / "device.json")]) == 0
    plan = ["plan", "digits", "--device", str(target / "device.json"), "-o", str(target / "plan.json")]
    assert command(plan) == 0
    return expected


def steps_in(directory: Path) -> list[int]:
    return sorted(step for path in find(directory) if (step := parse_step(path.name)) is not None)


def one_process(target: Path, scratch: Path) -> dict[str, Any]:
    """A first run finds its plan and its frequency; a second one saves each step, and stops within an epoch."""
    scratch.mkdir()
    epochs = 500
    assert in_a_process(_find_plan_and_frequency, target, epochs) == 0
    assert in_a_process(_stop_within_an_epoch, scratch / "held.json", target, "checkflow", epochs, {"every": 1}) == 0
    return _finish("checkflow", target, scratch)


def torch_loader(target: Path, scratch: Path) -> dict[str, Any]:
    scratch.mkdir()
    options = {"every": 1, "keep_epochs": 1, "keep_best": 1}
    assert in_a_process(_stop_within_an_epoch, scratch / "held.json", target, "torch", 3, options) == 0
    return _finish("torch", target, scratch)


def tensors_anywhere(target: Path, scratch: Path) -> dict[str, Any]:
    """What a run held at its last boundary, and at the end of another that went on from there."""
    scratch.mkdir()
    assert in_a_process(_end_of, scratch / "held.json", target, 4) == 0
    shutil.copytree(target, scratch / "again")
    assert in_a_process(_end_of, scratch / "end.json", scratch / "again", None) == 0
    return {name: json.loads((scratch / f"{name}.json").read_text()) for name in ("held", "end")}


def _end_of(held: Path, directory: Path, end: int | None) -> None:
    job = TensorsAnywhere(directory, every=1, keep_latest=2)
    job.train(lambda step: step == end)
    held.write_text(json.dumps(job.digests()))


def _find_plan_and_frequency(directory: Path, epochs: int) -> None:
    job = Job(directory, "checkflow", epochs, keep_latest=2)

    def last(step: int) -> bool:
        found = job.checkpointer.report()["plan"] is not None and (directory / "profile.json").exists()
        return found and step % BATCHES == 3

    job.train(last)
    assert job.checkpointer.iteration % BATCHES == 3  # not at the end of all epochs


def _stop_within_an_epoch(held: Path, directory: Path, loader: str, epochs: int, options: dict[str, Any]) -> None:
    job = Job(directory, loader, epochs, keep_latest=3, **options)
    begun, digests = job.checkpointer.iteration, {}

    def last(step: int) -> bool:
        digests[step] = job.digests()
        return step >= begun + 8 and step % BATCHES == 5

    job.train(last)
    epoch = job.checkpointer.iteration // BATCHES
    held.write_text(json.dumps({"epochs": epoch + 2, "held": digests}))


def _finish(loader: str, target: Path, scratch: Path) -> dict[str, Any]:
    """What later code must find in the newest checkpoint, and use after it."""
    said = json.loads((scratch / "held.json").read_text())
    shutil.copytree(target, scratch / "again")
    assert in_a_process(_use, scratch / "used.json", scratch / "again", loader, said["epochs"]) == 0
    held = {str(step): said["held"].get(str(step)) for step in steps_in(target)}
    return {"epochs": said["epochs"], "held": held, "used": json.loads((scratch / "used.json").read_text())}


def _use(used: Path, directory: Path, loader: str, epochs: int) -> None:
    used.write_text(json.dumps(Job(directory, loader, epochs).train()))


def ranks(target: Path, scratch: Path, kind: str) -> dict[str, Any]:
    """Two runs, of which the second stops within an epoch."""
    for name in ("first", "second", "third"):
        (scratch / name).mkdir(parents=True)
    options: dict[str, Any] = {"every": 1, "keep_latest": 2}
    run_ranks(scratch / "first", RANKS, run_rank, kind, target, 3, options)
    second = run_ranks(scratch / "second", RANKS, run_rank, kind, target, 5, options)
    shutil.copytree(target, scratch / "again")
    third = run_ranks(scratch / "third", RANKS, run_rank, kind, scratch / "again", None, {})
    held = [{step: digests for step, digests in one[3].items() if step in steps_in(target)} for one in second]
    return {"ranks": RANKS, "held": held, "used": [one[2] for one in third]}


def version_of_dcp(target: Path, scratch: Path) -> dict[str, Any]:
    scratch.mkdir()
    return {"steps": run_ranks(scratch, 2, save_by_dcp, target)[0]}


def dcp_state(kind: str, ranks: int, rank: int, steps: int) -> dict[str, Any]:
    """The state of a job after some steps, as scripts give it to dcp.save."""
    model, optimizer = mesh_jobs.build(kind, ranks)
    mesh_jobs.train(model, optimizer, rank, steps)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=9)
    return {
        "model": of_model, "optim": of_optimizer, "schedule": schedule.state_dict(), "step": steps,
        "loader": {f"dp_rank_{rank}": b"any bytes"},
    }  # fmt: skip


def dcp_digests(state: dict[str, Any]) -> Digests:
    """Without the statistics that each rank has of its own: DCP saves those of any rank."""
    model = {name: value for name, value in state["model"].items() if ".running_" not in name}
    return {"model": digest(model), **{name: digest(state[name]) for name in ("optim", "schedule", "step")}}


def save_by_dcp(rank: int, ranks: int, directory: Path) -> dict[int, Digests]:
    held = {}
    for steps in (1, 2):
        state = dcp_state("fsdp", ranks, rank, steps)
        dcp.save(state, storage_writer=Writer(directory, step=steps))
        held[steps] = dcp_digests(state)
    return held


def memory(target: Path, scratch: Path, plans: Path) -> dict[str, Any]:
    """A job killed when memory is two steps ahead of storage: its directory, and its folder in shared memory.

    Only a job with a plan uses that.
    """
    directory = scratch / "checkpoints"
    shutil.copytree(plans, directory / "plans")
    assert in_a_process(_die, scratch / "held.json", directory) == -signal.SIGKILL
    _keep_memory(target, directory, [folder_of(directory)])
    held = json.loads((scratch / "held.json").read_text())
    return {"stored": steps_in(directory)[-1], "kept": MEMORY_KEPT, "held": held}


def _die(held: Path, directory: Path) -> None:
    rarely(MEMORY_STORED)
    job = Job(directory, "checkflow", 3, keep_latest=2)

    def last(step: int) -> bool:
        if step == MEMORY_KEPT:
            held.write_text(json.dumps(job.digests()))
        if step > MEMORY_KEPT:
            wait_for(lambda: MEMORY_KEPT in kept_in(directory) and MEMORY_STORED in steps_in(directory))
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    job.train(last)


def memory_of_ranks(target: Path, scratch: Path) -> dict[str, Any]:
    """The same of two ranks: arrays, without a job around them."""
    directory = scratch / "checkpoints"
    with Store(directory, run_id="dead") as store:
        dead.save_whole(store, MEMORY_STORED, "dead")
    steps = {MEMORY_STORED + 1, MEMORY_KEPT}
    run = dead.DeadRun(
        directory, "dead", "fsdp 2", (steps, steps), durable=MEMORY_STORED, by_plan=steps, audited={MEMORY_KEPT}
    )
    _keep_memory(target, directory, run.leave())
    return {"stored": MEMORY_STORED, "kept": MEMORY_KEPT, "ranks": 2}


def _keep_memory(target: Path, directory: Path, folders: list[Path]) -> None:
    shutil.copytree(directory, target / "checkpoints")
    for folder in folders:
        shutil.copytree(folder, target / "shm" / folder.name)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
