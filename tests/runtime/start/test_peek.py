"""What a script can know before it builds its job: what a start would go on from, without torch and without a trace."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn

import checkflow
from checkflow.cli.main import main
from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.integrations.dcp import Writer
from checkflow.planner.live.planner import LivePlanner
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.start.peek import Peeked
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from tests.support import jobs
from tests.support.dead_jobs import (
    folder_of,
    give_back,
    killed,
    needs_memory,
    newest_on_storage,
    random_plans_and_nothing_left,
    resume,
)
from tests.support.own_plans import Never
from tests.support.programs import stage_jobs
from tests.support.ranks.dead import SHAPES, DeadRun, save_whole
from tests.support.ranks.processes import run_ranks
from tests.support.shard_tools import World
from tests.support.store_tools import tree

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_plan_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these jobs is about plans."""
    monkeypatch.setattr(LivePlanner, "start", lambda self, recorded, **asked: Never())


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    give_back(tmp_path)


def train(directory: Path, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4, bias=False))
    model[2].weight = nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": torch.tensor(0.25), "name": "first"},
            {"params": [*model[1].parameters(), *model[2].parameters()], "weight_decay": 0.1},
        ],
        betas=(0.8, 0.9),
    )
    kept = checkflow.Variables(size=torch.Size((2, 3)), of=torch.ones(2))
    state = {"scaler": torch.amp.GradScaler("cpu"), "kept": kept}
    with checkflow.Checkpointer(model, optimizer, directory=directory, every=1, state=state, **options) as checkpointer:
        for _ in checkpointer.steps(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return model, optimizer


def seen(directory: Path, **options: Any) -> Peeked:
    found = checkflow.peek(directory, **options)
    assert found is not None
    return pickle.loads(pickle.dumps(found))


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    model, optimizer = train(tmp_path, 3)
    before = tree(tmp_path)
    found = seen(tmp_path)
    assert tree(tmp_path) == before
    expected = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    names = dict(model.named_parameters())
    expected |= {
        f"optimizer/{name}.{key}": value
        for name, parameter in names.items()
        for key, value in optimizer.state[parameter].items()
    }
    expected["job-state/kept.of"] = torch.ones(2)
    assert found.names == tuple(sorted(expected))
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert found.dtypes == {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in expected.items()}
    assert (found.step, found.epoch, found.ranks) == (3, 0, 1)
    first, second = found.groups["optimizer"]
    assert first["params"] == ("0.weight", "0.bias")
    assert second["params"] == ("1.weight", "1.bias", "2.weight")
    assert (first["lr"], first["name"], first["betas"]) == (0.25, "first", (0.8, 0.9))
    assert (second["lr"], second["weight_decay"], second["foreach"]) == (0.001, 0.1, None)
    assert seen(tmp_path, step=2).step == 2


def test_ties_and_several_models(tmp_path: Path) -> None:
    models = {name: nn.Linear(3, 3) for name in ("a", "b")}
    models["b"].weight = models["a"].weight
    optimizers = {"one": torch.optim.SGD(models["a"].parameters()), "two": torch.optim.SGD([models["b"].bias])}
    with checkflow.Checkpointer(models, optimizers, directory=tmp_path, every=1) as checkpointer:
        for _ in checkpointer.steps(1):
            for optimizer in optimizers.values():
                models["b"](models["a"](torch.ones(3))).sum().backward()
                optimizer.step()
    found = seen(tmp_path)
    assert found.names == ("a/bias", "a/weight", "b/bias", "b/weight")
    assert [found.groups[name][0]["params"] for name in ("one", "two")] == [("a.weight", "a.bias"), ("b.bias",)]


WITHOUT_TORCH = """
import sys, checkflow
found = checkflow.peek(sys.argv[1])
assert "torch" not in sys.modules, "torch is imported"
print("None" if found is None else f"{found.step} {found.groups['optimizer'][0]['lr']}")
"""


def without_torch(directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, directory], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """Nor for values of torch's in extra state."""
    assert without_torch(tmp_path / "none") == "None"
    assert not (tmp_path / "none").exists()
    train(tmp_path, 2)
    assert without_torch(tmp_path) == "2 0.25"


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    assert checkflow.peek(tmp_path) is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / "file").write_text("")
    assert checkflow.peek(tmp_path) is None
    with pytest.raises(StorageError, match="cannot read the checkpoint directory"):
        checkflow.peek(tmp_path / "file")
    with pytest.raises(StorageError, match="holds no checkpoint of step 3: checkflow ls"):
        checkflow.peek(tmp_path, step=3)
    for odd in ("3", 3.0, True, -1):
        with pytest.raises(ValueError, match="step must be a number of iterations, not"):
            checkflow.peek(tmp_path, step=odd)  # type: ignore[arg-type]
    train(tmp_path / "job", 1)
    with pytest.raises(StorageError, match="is a checkpoint: pass the directory that holds it, and its step as step="):
        checkflow.peek(find(tmp_path / "job")[0])


def damage(path: Path) -> None:
    """One bit, where only a check of all bytes finds it."""
    file = path / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_one_is_passed_over_and_left_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A start takes the next older one, too. If none is whole, that is an error: nothing may begin anew in silence."""
    train(tmp_path, 3)
    newest, older = find(tmp_path)
    damage(newest)
    before = tree(tmp_path)
    assert seen(tmp_path).step == 2
    assert "passing over step-00000003" in caplog.text
    with pytest.raises(CorruptCheckpointError, match="step-00000003"):
        checkflow.peek(tmp_path, step=3)
    damage(older)
    with pytest.raises(CorruptCheckpointError, match="step-00000003"):
        checkflow.peek(tmp_path)
    damage(older)
    assert tree(tmp_path) == before
    assert train(tmp_path, 4)[0] is not None
    assert [path.name for path in tmp_path.glob(".broken-*")] != []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_may_have_written_is_not_read(tmp_path: Path) -> None:
    train(tmp_path, 2)
    os.chown(find(tmp_path)[0] / MANIFEST, 12345, -1)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        checkflow.peek(tmp_path)
    assert seen(tmp_path, trust="anyone").step == 2


def test_a_later_format_is_said(tmp_path: Path) -> None:
    train(tmp_path, 2)
    for path in find(tmp_path):
        text = (path / MANIFEST).read_bytes()
        body = re.sub(rb'"version":[0-9]+', b'"version":3', text[: text.rindex(b',"digest"')])
        (path / MANIFEST).write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')
    with pytest.raises(MismatchError, match="has format version 3"):
        checkflow.peek(tmp_path)


def test_while_a_job_runs_there(tmp_path: Path) -> None:
    """It is not disturbed, and what it has in memory alone is no start's to take."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=2) as checkpointer:
        for step in checkpointer.steps(6):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step == 4:
                checkpointer._saving.writer.settle()
                assert seen(tmp_path).step == 4
    assert checkpointer.report()["failed"] == 0
    assert seen(tmp_path).step == 6


@needs_memory
def test_what_a_killed_job_left_in_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start would put it on storage, and resume from it."""
    monkeypatch.undo()
    with random_plans_and_nothing_left(tmp_path):
        directory = killed(tmp_path)
        kept = sorted(path.name for path in folder_of(directory).iterdir())
        found = seen(directory)
        assert without_torch(directory) == f"{found.step} 0.005"
        stored = newest_on_storage(directory)
        assert stored is None or stored < found.step
        assert sorted(path.name for path in folder_of(directory).iterdir()) == kept
        checkpointer = resume(directory)
        assert checkpointer.resumed_from == found.step == 7
        checkpointer.close()
        on_storage = seen(directory, step=7)
        assert on_storage == found
        assert found.groups["optimizer"][0]["params"] == tuple(dict(jobs.Net().named_parameters()))


@needs_memory
@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (({5, 6}, {5, 6}), {}, 6),
        (({5, 6}, {5}), {}, 5),
        (([5, 6], [5, 6]), {"audited": {5, 6}, "torn": {6}}, 5),
        (({5}, {6}), {}, 4),
        (({5, 6}, {5, 6}), {"durable": 5}, 4),
    ],
    ids=["whole", "a part is missing", "torn", "no whole one", "storage has less than it knew"],
)
def test_what_dead_ranks_left_in_memory_counts(tmp_path: Path, steps: Any, options: Any, expected: int) -> None:
    with Store(tmp_path, run_id="before") as store:
        save_whole(store, 4)
    DeadRun(tmp_path, "dead", "fsdp 2", steps, **{"base": (4, "before"), **options}).leave()
    found = seen(tmp_path)
    assert found.step == expected
    assert found.shapes == SHAPES
    if expected > 4:
        assert (found.ranks, found.epoch) == (2, expected)


def of_stage(rank: int, ranks: int, directory: Path) -> None:
    job = stage_jobs.Job(ranks, ranks)
    with checkflow.Checkpointer(job.model, job.optimizer, directory=directory, every=1) as checkpointer:
        for step in checkpointer.steps(2):
            job.train(step)


@pytest.mark.timeout(300)
def test_stages_of_a_pipeline_are_joined(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    run_ranks(tmp_path / "ranks", 2, of_stage, tmp_path / "checkpoints")
    found = seen(tmp_path / "checkpoints")
    model = stage_jobs.Layers(range(stage_jobs.LAYERS))
    assert found.ranks == 2
    of_model = {name.removeprefix("model/") for name in found.names if name.startswith("model/")}
    assert of_model == model.state_dict().keys()
    params = [name for group in found.groups["optimizer"] for name in group["params"]]
    assert sorted(params) == sorted(name for name, _ in model.named_parameters())


def test_imports_and_versions_of_other_writers(tmp_path: Path) -> None:
    """They are given as far as they go."""
    train(tmp_path, 2)
    assert main(["import", str(tmp_path), str(tmp_path / "imported")]) == 0
    found = seen(tmp_path / "imported")
    assert {name.partition("/")[0] for name in found.names} == {"model"}
    assert found.groups == {}
    dcp.save({"a": torch.ones(2, 3), "n": 3}, storage_writer=Writer(tmp_path / "dcp", step=5))
    found = seen(tmp_path / "dcp")
    assert (found.step, found.epoch, found.shapes, found.groups) == (5, None, {"dcp/a": (2, 3)}, {})
    World().save(tmp_path / "shards", 3, 2)
    found = seen(tmp_path / "shards")
    assert (found.step, found.epoch, found.ranks, found.groups) == (3, None, 2, {})
    assert found.shapes


def test_values_of_torch_without_torch() -> None:
    half = torch.tensor(1.5, dtype=torch.bfloat16)
    value = {"a": torch.ones(3), "n": torch.tensor(2.5), "b": half, "d": torch.float16}
    decoded = codec.decode(codec.encode(value), without_torch=True)
    assert [type(one) for one in decoded.values()] == [codec.OfTorch] * 4
    assert decoded["n"].number() == 2.5
    assert all(decoded[key].number() is decoded[key] for key in "abd")
    json.dumps({"n": decoded["n"].number()})
