"""The look at a job's state before each boundary: whatever changed in place is noticed, and saved as it is now."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from checkflow.runtime.state.collect import StateWalk
from tests.integration.test_unplanned import Job, _random_plans_have_no_link, check, open_job, train  # noqa: F401 - a fixture


class Model(nn.Module):
    """A buffer that has as many bytes in other shapes, one that is complex, two tied layers, and one of no interest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = nn.Parameter(self.first.weight.data)  # another tensor of the same memory
        self.register_buffer("grid", torch.arange(24.0).reshape(4, 6))
        self.register_buffer("phase", torch.ones(4, 4, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(4, 6), persistent=False)


CHANGES: dict[str, Callable[[Model], object]] = {
    "shape": lambda model: setattr(model.grid, "data", model.grid.data.view(6, 4)),
    "strides": lambda model: setattr(model.grid, "data", model.grid.data.t().contiguous().t()),
    "strides alone": lambda model: setattr(model.phase, "data", model.phase.data.t()),
    "both": lambda model: model.grid.t_(),
    "strides of a parameter": lambda model: setattr(model.first.bias, "data", torch.zeros(8)[::2]),
    "less": lambda model: model.grid.resize_(2, 6),
    "another dimension": lambda model: model.grid.unsqueeze_(0),
    "a part": lambda model: model.grid.set_(model.grid.untyped_storage(), 0, (3, 4), (4, 1)),
    "type": lambda model: setattr(model.grid, "data", model.grid.data.view(torch.int32)),
    "conjugated": lambda model: setattr(model.phase, "data", model.phase.data.conj()),
    "negated": lambda model: setattr(model.grid, "data", torch._neg_view(model.grid.data)),
    "address": lambda model: setattr(model.grid, "data", model.grid.data.clone()),
    "a tie's first": lambda model: setattr(model.first.weight, "data", model.first.weight.data.clone()),
    "a tie's second": lambda model: setattr(model.second.weight, "data", model.second.weight.data.clone()),
    "a tie turned": lambda model: setattr(model.second.weight, "data", model.second.weight.data.t()),
}


def walk_of(model: nn.Module) -> StateWalk:
    return StateWalk({"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_is_noticed(change: str) -> None:
    model = Model()
    walk = walk_of(model)
    before = walk.current()
    assert before.ties == (("model/second.weight", "model/first.weight"),)
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    CHANGES[change](model)
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == tensors
    try:
        noticed = walk.current() is not before
    except Exception as error:  # noqa: BLE001 - what no checkpoint can hold is refused, which is as good
        noticed = "gaps in memory" in str(error) or "overlap" in str(error)
    assert noticed


def test_what_is_not_saved_may_change() -> None:
    model = Model()
    walk = walk_of(model)
    before = walk.current()
    model.scratch.t_()
    model.grid.add_(1)
    model.first.weight.grad = torch.ones(4, 4)
    assert walk.current() is before


class Turning(Job):
    """Its model has a buffer and a tie that training changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("grid", torch.arange(24.0).reshape(4, 6))
        self.model.register_parameter("tied", nn.Parameter(self.model[0].weight.data, requires_grad=False))

    def change(self, n: int) -> None:
        if n == 2:
            self.model.grid.data = self.model.grid.data.view(6, 4)
        elif n == 3:
            self.model.grid.data = self.model.grid.data.t().contiguous().t()
        elif n == 4:
            self.model.tied.data = self.model.tied.data.clone()
        elif n == 5:
            self.model.grid.data = self.model.grid.data.view(torch.int32)


def test_every_checkpoint_has_state_as_it_was_then(tmp_path: Path) -> None:
    job = Turning()
    job.ema.module.register_buffer("grid", torch.zeros(1), persistent=False)  # an average of it makes no sense
    job.ema.module.register_parameter("tied", None)
    job.ema.update_parameters = lambda model: None  # type: ignore[method-assign]
    job.iterate()
    with open_job(job, tmp_path, job.plan(0)) as checkpointer:
        truths = train(job, checkpointer, 8, job.change)
    assert check(tmp_path, truths) == list(range(1, 9))


def test_a_quick_look_sees_new_memory_and_leaves_shapes_to_the_next_whole_one() -> None:
    model = nn.Linear(2, 2)
    walk = StateWalk({"model": model}, {})
    state = walk.current()
    assert walk.current(whole=False) is state
    model.weight.data = model.weight.detach().t()
    assert walk.current(whole=False) is state
    assert walk.current() is not state
    state = walk.current()
    model.bias.data = model.bias.detach().clone()
    assert walk.current(whole=False) is not state
    state = walk.current()
    model.bias = nn.Parameter(torch.zeros(2))
    assert walk.current(whole=False) is not state


def test_a_whole_look_sets_off_no_garbage_collection() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(400)))
    walk = StateWalk({"model": model}, {})
    walk.current()
    begun: list[str] = []
    gc.collect()
    gc.callbacks.append(lambda phase, _: begun.append(phase))
    try:
        walk.current()
    finally:
        gc.callbacks.pop()
    assert not begun
