"""A script's own variables: saved with each checkpoint, set by a resume."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import checkflow
from checkflow import Variables
from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.runtime.format import codec

module_level: Any = 0


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.floats(allow_nan=False)), min_size=1)
)
def test_values_come_back(values: dict[str, Any]) -> None:
    saved = Variables(dict(values), *values).state_dict()
    other: dict[str, Any] = {**dict.fromkeys(values), "\x00other": 1}
    Variables(other, *values).load_state_dict(saved)
    assert other == {**values, "\x00other": 1}


def test_attributes_and_globals_are_variables() -> None:
    global module_level
    trainer = SimpleNamespace(best=3.5, name="x")
    mine = Variables(vars(trainer), "best")
    script = Variables(globals(), "module_level")
    module_level = 4
    assert mine.state_dict() == {"best": 3.5}
    assert script.state_dict() == {"module_level": 4}
    mine.load_state_dict({"best": 7})
    script.load_state_dict({"module_level": 8})
    assert (trainer.best, trainer.name, module_level) == (7, "x", 8)


def test_a_tensor_comes_back_on_the_device_of_the_one_before() -> None:
    namespace = {"x": torch.empty(3, device="meta"), "y": None, "z": torch.ones(1)}
    Variables(namespace, *namespace).load_state_dict({"x": torch.ones(3), "y": torch.ones(2), "z": 4})
    assert namespace["x"].device.type == "meta"
    assert namespace["y"].device.type == "cpu"
    assert namespace["z"] == 4


def test_missing_and_other_variables_are_told() -> None:
    with pytest.raises(ValueError, match="no variable 'best'"):
        Variables({}, "best")
    namespace = {"a": 1, "b": 2}
    for state, says in (({"a": 3}, "'b' is only in the job"), ({"a": 3, "b": 4, "c": 5}, "'c' is only in the check")):
        with pytest.raises(MismatchError, match=says):
            Variables(namespace, "a", "b").load_state_dict(state)
    assert namespace == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (("best",), TypeError, r"globals\(\), vars\(trainer\) or a dictionary, .* not 'best', of type str"),
        ((5, "best"), TypeError, "not 5, of type int"),
        ((SimpleNamespace(best=1), "best"), TypeError, "of type SimpleNamespace"),
        ((), TypeError, "Variables takes first where"),
        (({"best": 1},), ValueError, "no name was given"),
        ((None, "best"), TypeError, "not None"),
        (({"best": 1}, ["best"]), TypeError, r"names, such as \"best\", not \['best'\], of type list"),
    ],
)
def test_what_names_no_variables_is_refused(arguments: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        Variables(*arguments)


def test_variables_of_its_own_are_attributes() -> None:
    kept = Variables(hidden=None, best=3.5)
    kept.hidden = [1]
    kept.other = 2  # not named: the job's own business
    assert kept.state_dict() == {"hidden": [1], "best": 3.5}
    kept.load_state_dict({"hidden": [2], "best": 1.0})
    assert (kept.hidden, kept.best, kept.other) == ([2], 1.0, 2)
    with pytest.raises(ValueError, match="a method 'state_dict' already"):
        Variables(state_dict=1)
    with pytest.raises(TypeError, match="not both"):
        Variables({"a": 1}, "a", b=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(1),
        lambda: numpy.random.default_rng(1),
        lambda: numpy.random.Generator(numpy.random.MT19937(1)),
        lambda: numpy.random.RandomState(1),
        lambda: torch.Generator().manual_seed(1),
    ],
)
def test_a_generator_goes_on_where_it_was(make: Any) -> None:
    def draw(rng: Any) -> list[float]:
        if isinstance(rng, torch.Generator):
            return torch.randn(3, generator=rng).tolist()
        return [getattr(rng, "standard_normal", rng.random)() for _ in range(3)]

    kept = Variables(rng=make())
    draw(kept.rng)  # of NumPy's old generator, one more normal number is in stock now
    saved = codec.decode(codec.encode(kept.state_dict()))
    ahead = draw(kept.rng)
    other = Variables(rng=make())
    theirs = other.rng
    other.load_state_dict(saved)
    assert other.rng is theirs
    assert draw(other.rng) == ahead


def test_a_function_s_locals_are_refused_and_other_namespaces_taken() -> None:
    def save_mine(best: int) -> Variables:
        return Variables(locals(), "best")

    def save_given(given: dict[str, Any]) -> Variables:
        return Variables(given, "best")

    with pytest.raises(ValueError, match=r"cannot use locals\(\)"):
        save_mine(3)
    assert save_given({"best": 3}).state_dict() == {"best": 3}

    class Body:
        best = 4
        saved = Variables(locals(), "best").state_dict()

    assert Body.saved == {"best": 4}


@pytest.mark.slow
def test_a_batch_fetched_ahead_is_there_again(tmp_path: Path) -> None:
    """In a real job: what the next iteration uses was drawn before the boundary."""

    def train(directory: Path, count: int) -> list[float]:
        torch.manual_seed(0 if not list(directory.glob("step-*")) else 1)
        model, optimizer = make()
        own = SimpleNamespace(batch=torch.rand(2), best=9.0)
        used = []
        with checkflow.Checkpointer(
            model, optimizer, directory=directory, every=1, state={"own": Variables(vars(own), "batch", "best")}
        ) as checkpointer:
            for _ in checkpointer.steps(count):
                own.best = min(own.best, own.batch.sum().item())
                used += [own.best, *own.batch.tolist()]
                own.batch = torch.rand(2)
                iterate(model, optimizer)
        return used

    truth = train(tmp_path / "truth", 6)
    assert train(tmp_path / "parts", 2) + train(tmp_path / "parts", 3) + train(tmp_path / "parts", 6) == truth


def test_what_cannot_be_saved_is_told_by_its_name(tmp_path: Path) -> None:
    model, optimizer = make()
    own = {"function": iterate}
    with (
        pytest.raises(UnsupportedError, match=r"own.*function"),
        checkflow.Checkpointer(
            model, optimizer, directory=tmp_path, every=1, state={"own": Variables(own, "function")}
        ) as checkpointer,
    ):
        for _ in checkpointer.steps(2):
            iterate(model, optimizer)
