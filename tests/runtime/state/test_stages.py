"""Extra state of pipeline stages: joined, cut to one stage, and what each stage must leave to another."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from checkflow.core.errors import MismatchError
from checkflow.core.state import held_tensors
from checkflow.runtime.ranks.records import Card, Start, StartReport
from checkflow.runtime.ranks.starting import go_on
from checkflow.runtime.state import stages

DEVICE = "tensor on the device"


def job_of(numbers: list[int], groups: int = 1) -> dict[str, Any]:
    """Extra state of a stage with these layers; two values of each odd layer lie on the device."""
    apart, begin, values = [], 0, {}
    for number in numbers:
        values[f"{number}.weight"] = {"a": number, "b": [DEVICE, DEVICE] if number % 2 else []}
        apart += [begin + 1, begin + 2] if number % 2 else []
        begin += 3 if number % 2 else 1
    params = [f"{number}.weight" for number in numbers]
    saved = {"groups": [{"params": params, "lr": 0.1}] * groups, "values": values, "values_apart": apart,
             "others": {}, "others_apart": []}  # fmt: skip
    return {"modules": {}, "optimizers": {"optimizer": saved}, "objects": {}}


def make(numbers: list[int]) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    model = nn.ModuleDict({str(number): nn.Linear(2, 2, bias=False) for number in numbers})
    return {"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@given(st.lists(st.integers(0, 9), min_size=1, unique=True), st.lists(st.integers(0, 9), max_size=4), st.data())
def test_stages_are_joined_and_cut_as_one_job_has_it(layers: list[int], cuts: list[int], data: Any) -> None:
    bounds = sorted({0, len(layers), *(cut for cut in cuts if cut < len(layers))})
    jobs = [job_of(layers[a:b]) for a, b in itertools.pairwise(bounds)]
    joined = stages._joined(jobs)
    assert joined == job_of(layers)
    here = data.draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
    models, optimizers = make(here)
    found = stages.narrowed(joined, models, optimizers, pipelined=True)["optimizers"]["optimizer"]
    expected = job_of(here)["optimizers"]["optimizer"]
    assert found["groups"] == expected["groups"]
    assert stages._values(found) == stages._values(expected)
    whole = stages.narrowed(joined, *make(layers[::-1]), pipelined=False)["optimizers"]["optimizer"]
    assert whole["groups"] == job_of(layers[::-1])["optimizers"]["optimizer"]["groups"]


def test_what_one_process_lacks_stays_to_be_refused() -> None:
    found = stages.narrowed(job_of([0, 1]), *make([1]), pipelined=False)["optimizers"]["optimizer"]
    assert found["groups"][0]["params"] == ["1.weight", "0.weight"]


def test_other_numbers_of_groups_are_refused() -> None:
    with pytest.raises(MismatchError, match="not the same number of parameter groups on all stages"):
        stages._joined([job_of([0]), job_of([1], groups=2)])


def test_keys_that_a_class_adds_go_on_with_as_many_stages_alone() -> None:
    """They may number a stage's parameters."""
    saved: Any = types.SimpleNamespace(manifest=types.SimpleNamespace(world_size=2))
    job = job_of([0])
    stages.refuse_own_keys(saved, job, 3)
    job["optimizers"]["optimizer"]["own"] = {"keys": {"turn": 1}, "without": []}
    stages.refuse_own_keys(saved, job, 2)
    with pytest.raises(MismatchError, match=r"'turn' in its state_dict.*as many ranks as saved it: 2, not 3"):
        stages.refuse_own_keys(saved, job, 3)


@pytest.mark.parametrize("prefix", ["", "a."])
def test_names_of_other_stages(prefix: str) -> None:
    """A name that begins as another one is not that one's; the optimizer's names have the model's if there are two."""
    models, optimizers = make([1])
    if prefix:
        models = {"a": models["model"], "b": nn.Linear(1, 1)}
    model = "a" if prefix else "model"
    held = {item.name for item in held_tensors(models, optimizers)}
    named = [
        *held, f"{model}/11.weight", f"optimizer/{prefix}11.weight.exp_avg", f"optimizer/{prefix}1.weight.exp_avg",
        "optimizer/of.none",
    ]  # fmt: skip
    assert stages.held_elsewhere(named, held, models, optimizers) == (
        {f"{model}/11.weight", f"optimizer/{prefix}11.weight.exp_avg"},
        (f"{model}/11.weight",),
    )


@pytest.mark.parametrize(("lacks", "nowhere"), [((("b",), ("a",)), None), ((("b", "c"), ("a", "c")), "c")])
def test_what_no_stage_holds_is_refused_on_all_ranks(lacks: tuple[tuple[str, ...], ...], nowhere: str | None) -> None:
    cards = {
        rank: Card(rank, "g", 1, start=StartReport({"job": "one"}, restored=True, lacks=names))
        for rank, names in enumerate(lacks)
    }
    start, refusal = go_on(Start("restore", 3, "run", True), cards, 2, ())
    assert start.stage == "train"
    assert (refusal and refusal.message) == (nowhere and f"the checkpoint's {nowhere} is in the job of no rank")
