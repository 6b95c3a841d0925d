"""Arguments of a Checkpointer that mean nothing are refused in one line, before anything is opened or made."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkflow
from checkflow.core.errors import ModelError, StorageError, UnsupportedError
from checkflow.core.training_step import TrainingStep


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Holder:
    """An object with a state of any kind."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


MODEL, OPTIMIZER = make()
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
BAD: list[Any] = [
    # models and optimizers
    ({"model": None}, TypeError, "model 'model' is a NoneType, not an nn.Module: pass the model itself"),
    ({"model": OPTIMIZER, "optimizer": MODEL}, TypeError, r"is a SGD, not an nn.Module: .*\(model, optimizer, loader"),
    ({"model": [MODEL]}, TypeError, "model 'model' is a list"),
    ({"model": MODEL.state_dict()}, TypeError, "model 'weight' is a Tensor"),
    ({"model": MODEL.parameters()}, TypeError, "model 'model' is a generator"),
    ({"model": {"a": None}}, TypeError, "model 'a' is a NoneType"),
    ({"model": {}}, ValueError, "there is no model"),
    ({"model": {"a": MODEL, "b": MODEL}}, ValueError, "models 'a' and 'b' are one and the same"),
    ({"model": {"a": MODEL, "b": nn.DataParallel(MODEL)}}, ValueError, "models 'a' and 'b' are one and the same"),
    *(({"model": {name: MODEL}}, ValueError, "a name is 1 to 100") for name in ("a b", "", "ü", "..", "a/b", 5)),
    ({"optimizer": MODEL}, TypeError, "optimizer 'optimizer' is a Linear, not a torch.optim.Optimizer"),
    ({"optimizer": SCHEDULER}, TypeError, r"is a StepLR.*pass its optimizer, and the scheduler as state="),
    ({"optimizer": [OPTIMIZER]}, TypeError, "optimizer 'optimizer' is a list"),
    ({"optimizer": OPTIMIZER.state_dict()}, TypeError, "optimizer 'state' is a dict"),
    ({"optimizer": {"a": None}}, TypeError, "optimizer 'a' is a NoneType"),
    ({"optimizer": {"a": OPTIMIZER, "b": OPTIMIZER}}, ValueError, "optimizers 'a' and 'b' are one and the same"),
    ({"optimizer": {"ö": OPTIMIZER}}, ValueError, "optimizer 'ö': a name is 1 to 100"),
    # consents
    ({"accept": "ranks"}, TypeError, r'accept must be a tuple of names, such as \("name",\), not \'ranks\''),
    ({"accept": (1,)}, TypeError, "accept must be a tuple of names"),
    ({"accept": ("rank",)}, ValueError, "accept has 'rank': it may have 'ranks', 'loader', 'length'"),
    ({"fresh": "scheduler"}, TypeError, "fresh must be a tuple of names"),
    # whose files
    *(
        ({"trust": bad}, ValueError, 'trust must be "anyone", the name of a group of this machine')
        for bad in ("no such group", "", "a\0b", True, 0)
    ),
    # further objects
    ({"state": "x"}, TypeError, "state is a str: pass a dict of objects by name"),
    ({"state": ""}, TypeError, "state is a str"),
    ({"state": []}, TypeError, "state is a list"),
    ({"state": nn.Linear(1, 1)}, TypeError, "state is a Linear"),
    ({"state": SCHEDULER}, TypeError, "state is a StepLR"),
    ({"state": {5: SCHEDULER}}, TypeError, "state has the name 5"),
    ({"state": {"s": Holder({"v": object()})}}, UnsupportedError, r"state\['s'\]\['v'\]: an object of type object"),
    ({"state": {"s": Holder([lambda: 1])}}, UnsupportedError, r"state\['s'\]\[0\]: the function"),
    # where, and by which plan
    *(({"directory": value}, TypeError, "directory must be a path") for value in (None, 5, b"x")),
    *(({"directory": value}, ValueError, "directory must name") for value in ("", "a\0b")),
    *(({"plan": value}, TypeError, 'plan must be "auto"') for value in (True, 5, {}, b"auto")),
    *(({"plan": value}, ValueError, 'write plan="auto"') for value in ("Auto", "AUTO", " auto")),
    *(({"plan": value}, ValueError, 'plan must be "auto"') for value in ("", "a\0b")),
    # numbers
    *(({"keep_latest": value}, ValueError, "keep_latest") for value in (1, 0, -1, True, 2.5, "2", None)),
    *(({"keep_epochs": value}, ValueError, "keep_epochs must be") for value in ("no", -1, 1.0, None)),
    *(({"host_buffers": value}, ValueError, "host_buffers must be") for value in (0, 1001, 1_000_000, True, "3")),
]


@pytest.mark.parametrize(("arguments", "kind", "says"), BAD)
def test_it_is_refused_and_nothing_is_made(
    arguments: dict[str, Any], kind: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = {"model": MODEL, "optimizer": OPTIMIZER, "directory": tmp_path / "checkpoints", **arguments}
    with pytest.raises(kind, match=says) as caught:
        checkflow.Checkpointer(**whole)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([MODEL], OPTIMIZER), "model 'model' is a list, not an nn.Module"),
        ((OPTIMIZER, MODEL), "model 'model' is a SGD, not an nn.Module"),
        ((MODEL, SCHEDULER), "optimizer 'optimizer' is a StepLR, not a torch.optim.Optimizer"),
        ((MODEL, [OPTIMIZER]), "optimizer 'optimizer' is a list, not a torch.optim.Optimizer"),
    ],
)
def test_a_training_step_says_it_in_the_same_words(arguments: tuple[Any, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        TrainingStep(*arguments, loss=lambda model, x: model(x).sum(), batch=torch.ones(1, 2))


@pytest.mark.parametrize(
    "value",
    [
        Holder({"best": 3.0}),
        Holder(RuntimeError("not before the first step")),
        nn.LazyLinear(2),
    ],
    ids=["ready", "raises", "lazy"],
)
def test_state_that_is_or_may_become_ready_is_taken(value: Any, tmp_path: Path) -> None:
    model, optimizer = make()
    checkflow.Checkpointer(model, optimizer, directory=tmp_path, state={"s": value}).close()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("file", "{0}/file is a file, not a directory"),
        ("file/checkpoints", "{0}/file is a file, not a directory"),
        ("dangling", "{0}/dangling is a symbolic link to nowhere, which is not there"),
        ("dangling/checkpoints", "{0}/dangling is a symbolic link to nowhere, which is not there"),
    ],
)
def test_what_stands_where_the_directory_is_to_be_is_told(place: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(StorageError) as caught:
        checkflow.Checkpointer(*make(), directory=tmp_path / place)
    assert str(caught.value) == f"cannot use the checkpoint directory {tmp_path / place}: {says.format(tmp_path)}"


def test_edges_are_taken(tmp_path: Path) -> None:
    model, optimizer = make()
    for options in ({"keep_latest": 2}, {"keep_epochs": False}, {"host_buffers": 1}, {"state": {}}, {"state": None}):
        checkflow.Checkpointer(model, optimizer, directory=tmp_path, **options).close()  # type: ignore[arg-type]
    checkflow.Checkpointer({"a": model}, {"b.0-_": optimizer}, directory=tmp_path / "other").close()


def test_an_optimizer_of_another_model_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    caplog.set_level(logging.WARNING, "checkflow")
    checkflow.Checkpointer(model, optimizer, directory=tmp_path / "mine").close()
    assert "updates no parameter" not in caplog.text
    checkflow.Checkpointer(make()[0], optimizer, directory=tmp_path / "another").close()
    assert "optimizer optimizer updates no parameter of the models given" in caplog.text
