"""``checkflow export``: what it writes is read by scripts that know nothing of checkflow."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import checkflow
from checkflow.core.errors import MismatchError, StorageError
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.weights.exporter import export, format_of, state_dicts
from tests.runtime.test_inspect import damage, run


class Tied(nn.Module):
    """Tied weights, a module's extra state, a frozen parameter, names that begin with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.w = nn.Parameter(torch.ones(4))
        self.extra = {"count": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.extra)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extra["count"] += 1
        return self.b(self.norm(self.a(x))) * self.w


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.AdamW([
        {"params": [named["w"]], "lr": 0.1}, {"params": [value for name, value in named.items() if name != "w"]},
    ])  # fmt: skip


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    F.mse_loss(model(x), x).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, torch.optim.Optimizer, Any]:
    """A checkpoint after 4 iterations, and the job as it was there."""
    directory = tmp_path_factory.mktemp("trained") / "ckpt"
    torch.manual_seed(0)
    model = Tied()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with checkflow.Checkpointer(model, optimizer, directory=directory, state={"scheduler": scheduler}) as checkpointer:
        for number in checkpointer.steps(4):
            iterate(model, optimizer, number)
            scheduler.step()
    return find(directory)[0], model, optimizer, scheduler


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_the_state_dicts_are_those_of_the_job(trained: Any) -> None:
    path, model, optimizer, scheduler = trained
    with open_checkpoint(path) as checkpoint:
        found = state_dicts(checkpoint)
    assert same(found["model"], dict(model.state_dict()))
    assert same(found["optimizer"], optimizer.state_dict())
    assert same(found["state"], {"scheduler": scheduler.state_dict()})
    assert found["iteration"] == 4
    assert found["model"]["a.weight"] is found["model"]["b.weight"]


@pytest.mark.slow
def test_a_script_without_checkflow_trains_on(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model, *_ = trained
    out, end = tmp_path / "all.pt", tmp_path / "end.pt"
    assert run(capsys, "export", path, "-o", out)[0] == 0
    script = f"""
import sys, torch
from torch import nn
saved = torch.load({str(out)!r}, weights_only=True)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm, self.extra = nn.BatchNorm1d(4), None
        self.frozen, self.w = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(4))
    def get_extra_state(self): return self.extra
    def set_extra_state(self, state): self.extra = state
    def forward(self, x): return self.b(self.norm(self.a(x))) * self.w
model = Tied()
named = dict(model.named_parameters())
optimizer = torch.optim.AdamW([
    {{"params": [named["w"]]}}, {{"params": [value for name, value in named.items() if name != "w"]}}])
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(99))
optimizer.zero_grad()
torch.nn.functional.mse_loss(model(x), x).backward()
optimizer.step()
assert model.extra == {{"count": 4}}
assert "checkflow" not in sys.modules
torch.save({{key: value for key, value in model.state_dict().items() if key != "_extra_state"}}, {str(end)!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    _, model, optimizer, _ = trained
    before = {key: value.clone() for key, value in model.state_dict().items() if key != "_extra_state"}
    resumed = Tied()
    optimizer_2 = optimizer_of(resumed)
    resumed.load_state_dict(model.state_dict())
    optimizer_2.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share the tensors
    iterate(resumed, optimizer_2, 99)
    expected = {key: value for key, value in resumed.state_dict().items() if key != "_extra_state"}
    ended = torch.load(end, weights_only=True)
    torch.testing.assert_close(ended, expected)  # sums of gradients depend on where in memory tensors lie
    assert not same(before, expected)


def test_one_safetensors_file_for_serving(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model, *_ = trained
    out = tmp_path / "model.safetensors"
    assert run(capsys, "export", f"{path.parent}@4", "-o", out)[0] == 0
    served = Tied()
    served.load_state_dict({**safetensors.torch.load_file(out), "_extra_state": {"count": 0}})
    x = torch.randn(3, 4)
    assert torch.equal(served.eval()(x), model.eval()(x))


def test_a_folder_for_distributed_checkpoints(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model, optimizer, _ = trained
    out = tmp_path / "dcp"
    assert run(capsys, "export", path, "-o", out)[0] == 0
    dcp_to_torch_save(out, tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert same(back["model"]["a.weight"], model.state_dict()["a.weight"])
    state = {int(number): values for number, values in back["optimizer"]["state"].items()}
    assert same(state, optimizer.state_dict()["state"])


def test_what_is_there_is_replaced_only_if_asked(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.pt", "folder"):
        out = tmp_path / name
        assert run(capsys, "export", trained[0], "-o", out)[0] == 0
        before = sorted(tmp_path.iterdir())
        code, text = run(capsys, "export", trained[0], "-o", out)
        assert code == 1
        assert "exists already: pass --force" in text
        assert run(capsys, "export", trained[0], "-o", out, "--force")[0] == 0
        assert sorted(tmp_path.iterdir()) == before


def test_names_that_do_not_say_what_to_write(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert format_of(tmp_path / "x.txt") is None
    code, text = run(capsys, "export", trained[0], "-o", tmp_path / "x.txt")
    assert code == 2
    assert "pass --format" in text
    assert run(capsys, "export", trained[0], "-o", tmp_path / "x.txt", "--format", "safetensors")[0] == 0
    assert safetensors.torch.load_file(tmp_path / "x.txt")


def test_damage_and_folders_that_are_not_there(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "export", trained[0], "-o", tmp_path / "missing" / "x.pt")
    assert code == 1
    assert "cannot write" in text
    damaged = Path(shutil.copytree(trained[0], tmp_path / trained[0].name))
    damage(damaged / "model-00000-of-00001.safetensors")
    code, text = run(capsys, "export", damaged, "-o", tmp_path / "x.pt")
    assert code == 1
    assert "is damaged" in text
    assert not (tmp_path / "x.pt").exists()


def test_several_models(tmp_path: Path) -> None:
    models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
    optimizers = {f"{name}_adam": torch.optim.Adam(model.parameters()) for name, model in models.items()}
    with checkflow.Checkpointer(models, optimizers, directory=tmp_path / "ckpt") as checkpointer:
        for _ in checkpointer.steps(1):
            models["d"](models["g"](torch.randn(3, 2))).sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
    with open_checkpoint(find(tmp_path / "ckpt")[0]) as checkpoint:
        found = state_dicts(checkpoint)
        assert same(found["g"], dict(models["g"].state_dict()))
        assert same(found["d_adam"], optimizers["d_adam"].state_dict())
        with pytest.raises(MismatchError, match="the models d, g: pass --model"):
            export(checkpoint, tmp_path / "x.safetensors", "safetensors")
        with pytest.raises(MismatchError, match="no model 'e', but d, g"):
            export(checkpoint, tmp_path / "x.safetensors", "safetensors", model="e")
        export(checkpoint, tmp_path / "d.safetensors", "safetensors", model="d")
        with pytest.raises(StorageError, match="exists already"):
            export(checkpoint, tmp_path / "d.safetensors", "safetensors", model="d")
    assert same(safetensors.torch.load_file(tmp_path / "d.safetensors"), dict(models["d"].state_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "d.safetensors"]


def test_flat_names_are_those_of_torchtitan(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job loads them into what torch's own functions, which torchtitan calls, make of its model and optimizer."""
    path, model, optimizer, _ = trained
    assert run(capsys, "export", path, "-o", tmp_path / "flat", "--flat")[0] == 0
    code, text = run(capsys, "export", path, "-o", tmp_path / "flat.pt", "--flat")
    assert code == 2
    assert "--flat is for a folder of DCP" in text
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    expected = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=flattened)}
    found = copy.deepcopy(expected)
    for value in (*found.values(), *found["optimizer"].values()):
        if isinstance(value, torch.Tensor):
            value.zero_()
    found["optimizer"] = {name: v if isinstance(v, torch.Tensor) else None for name, v in found["optimizer"].items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(found, checkpoint_id=tmp_path / "flat")
    assert found.pop("_extra_state") == {"count": 4}  # other tests have run the model
    del expected["_extra_state"]
    assert same(found, expected)


def test_flat_names_of_two_models_that_are_alike_are_refused(tmp_path: Path) -> None:
    models = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    optimizer = torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)
    with checkflow.Checkpointer(models, optimizer, directory=tmp_path / "ckpt") as checkpointer:
        for _ in checkpointer.steps(1):
            optimizer.zero_grad()
            sum(model(torch.ones(1, 2)).sum() for model in models.values()).backward()
            optimizer.step()
    with (
        open_checkpoint(find(tmp_path / "ckpt")[0]) as checkpoint,
        pytest.raises(MismatchError, match="'bias' would be there twice without the prefix 'two'"),
    ):
        export(checkpoint, tmp_path / "flat", "dcp", flat=True)
