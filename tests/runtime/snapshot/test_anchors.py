"""A watched model is pickled and copied as the plain model that the user made."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow import Checkpointer

LOAD = """
import sys
sys.modules["checkflow"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert not model._forward_pre_hooks and not model._forward_hooks
model(torch.ones(2, 3)).sum().backward()
"""


def double(_module: nn.Module, arguments: Any) -> Any:
    """The user's own hook, which stays."""
    return (2 * arguments[0],)


class Counting(nn.Linear):
    """A module with rules of its own for pickling."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "pickled": True}


def hooks(model: nn.Module) -> int:
    return sum(
        len(getattr(module, name)) for module in model.modules() for name in vars(module) if "forward" in name
    )  # fmt: skip


def test_a_watched_model_is_copied_as_a_plain_one(tmp_path: Path) -> None:
    """In each iteration, recorded ones too; the job's own hooks go on."""
    model = nn.Sequential(nn.BatchNorm1d(3), Counting(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[3].register_forward_pre_hook(double)
    plain = hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    with Checkpointer(model, optimizer, directory=tmp_path / "checkpoints", every=1) as checkpointer:
        for _ in checkpointer.steps(8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model, io.BytesIO())
            copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
            watched = hooks(model)
            assert watched > plain
            for one in copies:
                assert hooks(one) == plain
                assert one[1].pickled
                assert one[3]._forward_pre_hooks.popitem()[1] is double
                assert all(map(torch.equal, one.state_dict().values(), model.state_dict().values()))
        report = checkpointer.report()
    assert (report["failed"], report["breaches"]) == (0, 0)
    assert hooks(model) == plain


def train_a_copy(_rank: int, model: nn.Module, out: str) -> None:
    model(torch.ones(4, 3)).sum().backward()
    Path(out).write_text(str(hooks(model)))


@pytest.mark.slow
def test_a_watched_model_goes_to_other_processes(tmp_path: Path) -> None:
    """To one that is spawned, and to one without checkflow."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, directory=tmp_path / "checkpoints", every=1) as checkpointer:
        for _ in checkpointer.steps(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        assert model._forward_pre_hooks
        torch.multiprocessing.spawn(train_a_copy, (model, str(tmp_path / "out")), nprocs=1)
        torch.save(model, tmp_path / "model.pt")
    assert (tmp_path / "out").read_text() == "0"
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "model.pt"], check=True)
