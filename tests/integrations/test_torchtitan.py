"""torchtitan's own trainer, over two ranks with FSDP2: killed, asked to end, and refused."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from checkflow.core.errors import MismatchError, Preempted, UnsupportedError
from checkflow.integrations.torchtitan import _REFUSED, _TAKEN, CheckpointManager, _Place
from tests.support.jobs import KILLS
from tests.support.ranks.jobs import RankJob, rank_job

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "torchtitan_job.py"


def run(folder: Path, directory: Path, manager: str, steps: int, **options: Any) -> AbstractContextManager[RankJob]:
    return rank_job(folder, 2, directory, manager, steps, program=PROGRAM, accumulate=2, **options)


def used(jobs: list[RankJob], rank: int) -> list[int]:
    """Numbers of samples by step, as the last life that made a step used them."""
    steps: dict[int, list[int]] = {}
    for job in jobs:
        for line in job.said(rank, "stepped"):
            steps = {step: numbers for step, numbers in steps.items() if step < line["step"]}
            steps[line["step"]] = line["used"]
    return [number for _, numbers in sorted(steps.items()) for number in numbers]


@pytest.mark.slow
def test_a_killed_job_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    steps, draw, jobs = 24 * KILLS, random.Random(7), []  # a slow machine kills late
    with run(tmp_path / "whole", tmp_path / "none", "none", steps) as whole:
        whole.launcher.wait()
    for number in range(KILLS):
        with run(tmp_path / f"life-{number}", tmp_path / "all", "checkflow", steps, pause=0.05) as job:
            jobs.append(job)
            job.reach(8 * number + draw.randint(1, 8))
            if number % 2:
                job.kill_all()
            else:
                os.kill(job.pids()[draw.randrange(2)], signal.SIGKILL)
                job.launcher.wait()
    with run(tmp_path / "last", tmp_path / "all", "checkflow", steps) as last:
        jobs.append(last)
        last.launcher.wait()
    for rank in (0, 1):
        assert last.last(rank, "ended") == {**whole.last(rank, "ended"), "pid": last.last(rank, "ended")["pid"]}
        assert used(jobs, rank) == list(range(rank, 8 * steps, 2))


@pytest.mark.slow
def test_a_signal_ends_all_ranks_and_no_step_is_done_again(tmp_path: Path) -> None:
    with run(tmp_path / "first", tmp_path / "all", "checkflow", 400, pause=0.05, every=1000) as job:
        job.reach(3)
        os.kill(job.pids()[1], signal.SIGTERM)
        job.launcher.wait()
        assert f"exitcode  : {Preempted.EXIT_CODE}" in job.printed()
    ended = [job.said(rank, "stepped")[-1]["step"] for rank in (0, 1)]
    assert ended[0] == ended[1]
    with run(tmp_path / "again", tmp_path / "all", "checkflow", ended[0] + 2) as again:
        again.launcher.wait()
    assert [line["step"] for line in again.said(0, "stepped")] == [ended[0] + 1, ended[0] + 2]


def manager(parts: int = 1, **settings: Any) -> CheckpointManager:
    config = CheckpointManager.Config(enable=True, **settings)
    return CheckpointManager(
        config, dataloader=None, model_parts=[nn.Linear(1, 1)] * parts, optimizers=[], lr_schedulers=None, states={}
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"initial_load_path": "/weights", "initial_load_model_only": False},
            "run checkflow import, or load its model",
        ),
        ({"initial_load_in_hf": True}, "and it has none: run checkflow import"),
        ({"export_dtype": "bfloat16"}, "export_dtype is not for checkflow: checkpoints keep"),
        ({"exclude_from_loading": ["train_state"]}, "a resume restores all"),
        ({"create_seed_checkpoint": True}, "of any number of ranks"),
        ({"enable_first_step_checkpoint": True}, "set checkpoint.interval"),
        ({"last_save_in_hf": True}, "run checkflow export"),
        ({"load_only": True}, "turn checkpoint.enable off"),
        ({"parts": 2}, "2 parts of the model on one rank"),
    ],
)
def test_what_checkflow_has_not_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        manager(**settings)


def test_every_setting_of_this_torchtitan_is_taken_or_refused() -> None:
    known = {one.name for one in dataclasses.fields(CheckpointManager.Config)}
    assert _TAKEN | _REFUSED.keys() == known
    assert not _TAKEN & _REFUSED.keys()


def test_a_setting_of_another_torchtitan_is_refused_where_it_is_set() -> None:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        replicas: list[int] = dataclasses.field(default_factory=list)

    def made(config: Any) -> None:
        CheckpointManager(
            config, dataloader=None, model_parts=[nn.Linear(1, 1)], optimizers=[], lr_schedulers=None, states={}
        )

    made(Config(enable=True))
    with pytest.raises(UnsupportedError, match=r"checkpoint\.replicas .* this version does not know"):
        made(Config(enable=True, replicas=[1]))


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_modes_of_torchtitan_s_copies_are_taken(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "checkflow"):
        manager(async_mode=mode)
    assert caplog.text.count(f"checkpoint.async_mode={mode!r}") == 1


class Adapter(StateDictAdapter):  # type: ignore[misc]
    """Hugging Face's names begin with ``model.``."""

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in state.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["assets", "path", "dcp"])
def test_a_job_begins_with_the_weights_that_its_settings_name_and_resumes_its_own(kind: str, tmp_path: Path) -> None:
    weights = {"weight": torch.full((1, 2), 7.0), "bias": torch.full((1,), 7.0)}
    if kind == "dcp":
        dcp.save(weights, checkpoint_id=tmp_path / "dcp")
        settings: dict[str, Any] = {"initial_load_path": str(tmp_path / "dcp")}
    else:
        (tmp_path / "hf").mkdir()
        save_file({f"model.{name}": value for name, value in weights.items()}, tmp_path / "hf" / "model.safetensors")
        settings = {"initial_load_in_hf": True, "initial_load_path": str(tmp_path / "hf") if kind == "path" else None}
    adapter = Adapter(None, str(tmp_path / "hf"))

    def live(steps: int) -> tuple[bool, torch.Tensor, torch.Tensor]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = CheckpointManager(
            CheckpointManager.Config(enable=True, interval=1, **settings), dataloader=None, model_parts=[model],
            optimizers=[optimizer], lr_schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1), states={},
            sd_adapter=adapter, base_folder=str(tmp_path),
        )  # fmt: skip
        loaded, begin = job.load(), model.weight.detach().clone()
        for step in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.save(step + 1, last_step=step + 1 == steps)
        job.close()
        return loaded, begin, model.weight.detach().clone()

    loaded, begin, end = live(2)
    assert loaded
    assert torch.equal(begin, weights["weight"])
    assert not torch.equal(end, begin)
    assert torch.equal(live(0)[1], end)


def test_a_torchtitan_without_a_module_is_named_with_the_module() -> None:
    lacks = "torchtitan.components.dataloader"
    code = f"import sys; sys.modules['{lacks}'] = None; import checkflow.integrations.torchtitan"
    made = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    says = made.stderr.splitlines()[-1]
    assert "does not know this version of torchtitan" in says
    assert lacks in says
    assert says.endswith("pip install 'checkflow[torchtitan]'")


def test_saving_before_loading_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="load"):
        manager().save(1)


def test_nothing_is_done_where_checkpoints_are_off(tmp_path: Path) -> None:
    config = CheckpointManager.Config(folder=str(tmp_path / "all"))
    off = CheckpointManager(config, dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={})
    assert not off.load()
    assert not off.save(1)
    off.close()
    assert not (tmp_path / "all").exists()


def test_data_of_other_ranks_are_refused() -> None:
    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {"place": 3}

    place = _Place(Loader())
    with pytest.raises(MismatchError, match="as many ranks as before"):
        place.load_state_dict({"share": "rank 0 of 2", "state": {}})
