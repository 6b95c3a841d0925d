"""What one iteration hands to the next besides batch and state is seen, and what only looks like it is not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from checkflow.core.planner_api import Carried
from checkflow.planner.record.recorder import IterationRecorder


class Kept:
    """A model with a plain attribute, and values that a script might keep; ``iterate`` uses them as it is told."""

    def __init__(self, use: Callable[[Kept, torch.Tensor], torch.Tensor]) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.model.count = torch.zeros(2)  # type: ignore[assignment]  # an attribute, and no buffer
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.value, self.x = torch.ones(4, 3), torch.ones(4, 3)
        self.numpy, self.python, self.torch = numpy.random.default_rng(0), random.Random(0), torch.Generator()
        self.use = use

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        self.use(self, self.model(self.x)).sum().backward()
        self.optimizer.step()


def carried(use: Callable[[Kept, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Carried, ...]:
    """What the second iteration carries; the values are attributes of the script's variable ``kept``."""
    kept = Kept(use)
    monkeypatch.setattr(sys.modules["__main__"], "kept", kept, raising=False)
    kept.iterate()
    recorder = IterationRecorder({"model": kept.model}, {"optimizer": kept.optimizer}, name="kept")
    recorder.begin([kept.x])
    kept.iterate()
    return recorder.end(batch=[kept.x]).carried


def hidden(kept: Kept, y: torch.Tensor) -> torch.Tensor:
    kept.value = torch.tanh(y + kept.value.detach())
    return kept.value


def averaged(kept: Kept, y: torch.Tensor) -> torch.Tensor:
    kept.value.mul_(0.9).add_(y.detach())
    return y


def counted(kept: Kept, y: torch.Tensor) -> torch.Tensor:
    kept.model.count += 1
    return y


VARS = 'pass Checkpointer(…, state={{"{0}": checkflow.Variables(vars(kept), "{0}")}})'


@pytest.mark.parametrize(
    ("use", "what", "advice"),
    [
        (hidden, "a tensor float32[4, 3]", VARS.format("value")),
        (averaged, "a tensor float32[4, 3]", VARS.format("value")),
        (counted, "a tensor float32[2]", 'make it a buffer: self.register_buffer("count", …) in Sequential'),
    ],
)
def test_tensors_that_are_handed_on_are_seen(
    use: Callable[..., Any], what: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = carried(use, monkeypatch)
    assert (one.what, one.advice) == (what, advice)
    assert "test_carried.py:" in one.place


def test_a_variable_of_the_script_and_one_of_a_function_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.hidden = torch.ones(4, 3)
    of_function = [torch.ones(4, 3)]

    def use(kept: Kept, y: torch.Tensor) -> torch.Tensor:
        main.hidden = y + main.hidden.detach()
        of_function[0] = y * of_function[0].detach()
        return main.hidden + of_function[0]

    script, function = carried(use, monkeypatch)
    assert script.advice == 'pass Checkpointer(…, state={"hidden": checkflow.Variables(globals(), "hidden")})'
    assert "kept = checkflow.Variables(hidden=…)" in function.advice


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda kept: kept.numpy.random(), "numpy"),
        (lambda kept: kept.python.random(), "python"),
        (lambda kept: torch.rand(1, generator=kept.torch), "torch"),
    ],
)
def test_a_generator_that_draws_is_seen(
    draw: Callable[[Kept], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(kept: Kept, y: torch.Tensor) -> torch.Tensor:
        draw(kept)
        return y

    (one,) = carried(use, monkeypatch)
    assert one.what.startswith("a random generator of ")
    assert one.advice == VARS.format(name)


def overwritten(kept: Kept, y: torch.Tensor) -> torch.Tensor:
    return y + kept.value.zero_().add_(1)


def read_as_number(kept: Kept, y: torch.Tensor) -> torch.Tensor:
    number = kept.value.sum().item() if kept.value.numel() > 12 else kept.value[0, 0].item()
    kept.value = y.detach()
    return y * min(number, 1)


def drawn_from_the_process(kept: Kept, y: torch.Tensor) -> torch.Tensor:
    return y * random.random() * numpy.random.random() * torch.rand(1)


@pytest.mark.parametrize(
    "use",
    [
        lambda kept, y: y,
        lambda kept, y: y * kept.value,  # a constant
        lambda kept, y: y + kept.x,  # the batch
        overwritten,
        read_as_number,  # a loss that is logged
        drawn_from_the_process,
        lambda kept, y: y + torch.rand(4, 3, generator=torch.Generator()),
    ],
)
def test_what_is_not_handed_on_is_not_told(use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert carried(use, monkeypatch) == ()
