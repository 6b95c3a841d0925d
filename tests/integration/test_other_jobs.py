"""A checkpoint of another job is refused in words of the user's: which checkpoint, what differs, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

import checkflow
from checkflow.core.errors import MismatchError
from checkflow.runtime.state.collect import StateWalk, capture_extra, refuse_extra_mismatch

Optimizers = Any


class Counter(nn.Module):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def modules(extra: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), *([Counter()] if extra else []))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.01)


def swapped(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": model[1].parameters()}, {"params": model[0].parameters()}], lr=0.01)


def backwards(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.parameters())[::-1], lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.5)


def loader(size: int = 8, **options: Any) -> checkflow.DataLoader:
    return checkflow.DataLoader([torch.ones(2)] * size, 4, **options)


def run(directory: Path, optimize: Callable[[Any], torch.optim.Optimizer], feed: Any, extra: bool, state: Any) -> Any:
    model = modules(extra)
    optimizer = optimize(model)
    with checkflow.Checkpointer(model, optimizer, feed, directory=directory, state=state) as checkpointer:
        for _ in checkpointer.epochs(1):
            for batch in checkpointer.loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    return optimizer


USUAL: dict[str, Any] = {"optimize": adam, "feed": loader, "extra": False, "state": dict}


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ({}, {"optimize": sgd}, "optimizer 'optimizer' is Adam in the checkpoint, SGD in the job"),
        ({}, {"optimize": adamw}, "optimizer 'optimizer' is Adam in the checkpoint, AdamW in the job"),
        ({}, {"optimize": two_groups},
         "optimizer 'optimizer' has other parameter groups: 1 in the checkpoint, 2 in the job"),
        ({"optimize": two_groups}, {"optimize": swapped},
         "group 0 of optimizer 'optimizer' has the parameter 0.bias only in the checkpoint"),
        ({}, {"optimize": backwards}, "has its parameters in another order in the checkpoint than in the job"),
        ({}, {"state": lambda: {"s": checkflow.Variables({"a": 1}, "a")}}, "state['s'] is only in the job"),
        ({"state": lambda: {"s": checkflow.Variables({"a": 1}, "a")}}, {}, "state['s'] is only in the checkpoint"),
        ({"state": lambda: {"s": checkflow.Variables({"a": 1}, "a")}},
         {"state": lambda: {"s": checkflow.Variables({"b": 1}, "b")}}, "the variable 'a' is only in the checkpoint"),
        ({}, {"extra": True}, "the extra state of module 'model/2' is only in the job"),
        ({}, {"feed": lambda: loader(12)},
         "the checkpoint's loader has a data set of 8 samples, this one a data set of 12 samples"),
        ({}, {"feed": lambda: loader(shuffle=True)},
         "the checkpoint's loader has shuffle=False, this one shuffle=True"),
        ({}, {"feed": lambda: loader(seed=3)}, "the checkpoint's loader has seed=None, this one seed=3"),
        ({}, {"feed": lambda: loader(sampler=RandomSampler(range(8), replacement=True))},
         "the checkpoint's loader has no sampler, this one the sampler RandomSampler"),
        ({}, {"feed": lambda: checkflow.resumable([torch.ones(2)] * 2)},
         "is a checkflow.DataLoader of map-style data, this one is a loader whose batches are fetched again"),
        ({"feed": lambda: checkflow.resumable([torch.ones(2)] * 2)},
         {"feed": lambda: checkflow.resumable((torch.ones(2),) * 2)},
         "the checkpoint's loader has the type list, this one the type tuple"),
    ],
)  # fmt: skip
def test_it_says_which_what_and_what_to_do(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], says: str
) -> None:
    def job(given: dict[str, Any]) -> Any:
        asked = USUAL | given
        return run(tmp_path, asked["optimize"], asked["feed"](), asked["extra"], asked["state"]())

    job(first)
    with pytest.raises(MismatchError, match=re.escape(says)) as caught:
        job(then)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'step-00000002'}: ")
    assert text.endswith("; run the job as it was, or pass another directory")
    assert "\n" not in text
    assert text.count(str(tmp_path)) == 1


def captured(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    walk = StateWalk({"model": model}, {"optimizer": optimizer})
    walk.current()
    return capture_extra(walk, {"optimizer": optimizer}, {})["job"]


@pytest.mark.parametrize(("first", "then"), [(adam, sgd), (sgd, adam), (adamw, sgd), (sgd, adamw)])
def test_checkpoints_without_the_class_tell_it_by_their_options(first: Any, then: Any) -> None:
    model = modules()
    extra = captured(first(model), model)
    del extra["optimizers"]["optimizer"]["class"]
    with pytest.raises(MismatchError, match=r"is one with the options .* in the checkpoint, (SGD|AdamW?) in the job"):
        refuse_extra_mismatch(extra, {"model": model}, {"optimizer": then(model)})
    refuse_extra_mismatch(extra, {"model": model}, {"optimizer": first(model)})


@pytest.mark.parametrize("with_class", [True, False])
@pytest.mark.parametrize("change", ["added", "taken", "both", "scheduler"])
def test_options_of_another_release_are_no_other_optimizer(change: str, with_class: bool) -> None:
    """torch adds options with defaults from time to time, and schedulers keep values of theirs in the groups."""
    model = modules()
    optimizer = adam(model)
    extra = captured(optimizer, model)
    saved = extra["optimizers"]["optimizer"]
    if not with_class:
        del saved["class"]
    if change in ("added", "both"):  # the one that resumes knows one more
        del saved["groups"][0]["foreach"]
    if change == "taken":
        saved["groups"][0]["new_option"] = 1
    if change == "both":
        saved["groups"][0]["max_lr"] = 1.0
    if change == "scheduler":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
    refuse_extra_mismatch(extra, {"model": model}, {"optimizer": optimizer})
