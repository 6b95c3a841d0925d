"""Storages and their lifetimes, rule by rule; test_memory.py holds them against torch's own memory tracker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkflow.core.graph import GraphStorage, TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.lifetimes import StorageLedger
from checkflow.planner.trace.trace import trace
from tests.support.steps import training_steps as steps


def shipped(name: str) -> TrainingStep:
    step: TrainingStep = importlib.import_module(f"checkflow.models.{name}").build(batch_size=32)
    return step


# Figures that torch's tracker and the last use of each storage gave independently, in MB at batch 32 with SGD.
@pytest.mark.parametrize(("name", "peak_megabytes"), [("alexnet", 603.2), ("vgg11", 2631.3), ("resnet18", 782.5)])
def test_known_graph_peaks(name: str, peak_megabytes: float) -> None:
    with torch.device("meta"):
        graph = trace(shipped(name), name=name)
    during, _ = graph.live_bytes(eager=False)
    assert round(max(during) / 1e6, 1) == peak_megabytes


BUILDERS = [steps.batch_norm, steps.parallel, steps.tied, steps.transformer, steps.micro_batches, steps.adversarial]


@pytest.mark.parametrize("build", BUILDERS)
def test_storages_keep_the_rules(build: Callable[[], TrainingStep]) -> None:
    graph = trace(build(), name="n")
    n = len(graph.operators)
    for storage in graph.storages:
        assert -1 <= storage.created <= n
        assert storage.created <= storage.eager_end <= n
        assert storage.created <= storage.graph_end <= storage.eager_end  # eager frees nothing before its last use
    for index, operator in enumerate(graph.operators):
        for storage in (graph.storages[i] for i in (*operator.reads, *operator.writes)):
            assert storage.created <= index <= storage.graph_end
        made = [i for i in operator.writes if graph.storages[i].created == index]
        assert set(made).isdisjoint(operator.reads)
    for entry in graph.state:
        if entry.placement == "device":
            assert entry.storage is not None
            storage = graph.storages[entry.storage]
            assert (storage.kind, storage.created, storage.eager_end) == (entry.kind, -1, n)
            assert storage.size_bytes >= entry.size_bytes


@pytest.mark.parametrize("build", BUILDERS)
def test_an_iteration_ends_with_what_the_next_one_begins_with(build: Callable[[], TrainingStep]) -> None:
    _, at = trace(build(), name="n").live_bytes(eager=True)
    assert at[0] == at[-1]


def gradients(graph: TrainingGraph) -> list[GraphStorage]:
    return [storage for storage in graph.storages if storage.kind == "gradient"]


def step_that(order: str, **keywords: Any) -> TrainingGraph:
    """An iteration whose parts run in the given order: z(ero_grad), b(ackward), s(tep)."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        for part in order:
            if part == "z":
                optimizer.zero_grad(**keywords)
            elif part == "b":
                model(x).sum().backward()
            else:
                optimizer.step()

    batch = torch.randn(2, 4)
    return trace(TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=batch), name="n")


def test_gradients_live_from_backward_to_the_next_zero_grad() -> None:
    old, new = gradients(step_that("zbs"))
    assert (old.created, old.eager_end, old.graph_end) == (-1, -1, -1)  # gone before the first operator
    assert new.created > 0
    assert new.graph_end == new.eager_end - 1  # the optimizer is the last operator; kept for the next iteration
    assert new.name == "gradient of m/weight"


def test_gradients_dropped_after_the_step_do_not_live_at_the_boundary() -> None:
    graph = step_that("bsz")
    (only,) = gradients(graph)
    assert only.created > 0
    assert only.eager_end == len(graph.operators) - 1


def test_gradients_set_to_zero_keep_their_memory() -> None:
    graph = step_that("zbs", set_to_none=False)
    lasting = [storage for storage in gradients(graph) if storage.eager_end == len(graph.operators)]
    assert [(storage.created, storage.graph_end) for storage in lasting] == [(-1, len(graph.operators))]
    targets = [operator.target for operator in graph.operators]
    assert "aten.add_.Tensor" in targets  # accumulated in place


def test_old_gradients_dropped_in_the_middle_live_until_then() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = torch.randn(2, 4)
    graph = trace(TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=batch), name="n")
    old = gradients(graph)[0]
    targets = [operator.target for operator in graph.operators]
    assert (old.created, old.eager_end) == (-1, targets.index("aten.sum.default"))


def test_the_batch_lives_all_iteration_long_and_a_local_as_long_as_python_holds_it() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        optimizer.zero_grad()
        loss: torch.Tensor = logits.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(2, 4)
    graph = trace(TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=batch), name="n")
    n = len(graph.operators)
    by_name = {storage.name: storage for storage in graph.storages}
    assert (by_name["batch.0"].created, by_name["batch.0"].eager_end) == (-1, n)
    logits = next(s for s in graph.storages if s.created == 0)
    assert logits.eager_end == n - 1 > logits.graph_end  # the frame of the step holds it until it returns
    assert by_name["result.0"].created == -1  # the loop holds the last loss until the next one is there
    loss = next(s for s in graph.storages if s.created >= 0 and s.kind == "activation" and s.eager_end == n)
    assert loss.size_bytes == 4


def test_what_a_module_keeps_from_iteration_to_iteration_lives_at_the_boundary() -> None:
    model = nn.Linear(4, 4)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        model.kept = out.detach().clone()
        return out.sum()

    graph = trace(TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=torch.randn(2, 4)), name="n")
    kept = [storage for storage in graph.storages if storage.name == "kept"]
    assert [(storage.size_bytes, storage.created) for storage in kept] == [(32, -1)]
    assert 0 < kept[0].eager_end < len(graph.operators)
    assert not hasattr(model, "kept")


def test_inplace_operators_and_views_make_no_storage() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 3)), nn.Flatten())
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda m, x: m(x).sum(), batch=torch.randn(2, 4))
    graph = trace(step, name="n")
    forward = [operator for operator in graph.operators if operator.phase == "forward"]
    assert [operator.target for operator in forward] == [
        "aten.addmm.default",
        "aten.relu_.default",
        "aten.sum.default",
        "aten.ones_like.default",
    ]
    assert forward[1].writes == forward[0].writes


# The ledger by itself


def test_ledger_counts_views_as_one_and_notices_the_end() -> None:
    clock = [0]
    ledger = StorageLedger(lambda: clock[0])
    whole = torch.zeros(8)
    part = whole[2:4]
    index = ledger.enter(whole, "whole", "activation", 0)
    assert ledger.enter(part, "part", "activation", 0) == index == ledger.find(part)
    clock[0] = 3
    del whole
    ledger.use(index, 2, writes=True)
    assert ledger.storages()[0][0].eager_end == 3  # the view holds it
    clock[0] = 5
    del part
    (storage,), places = ledger.storages()
    assert (storage.name, storage.size_bytes, storage.graph_end, storage.eager_end) == ("whole", 32, 2, 4)
    assert places == {index: 0}
    assert ledger.first_write(index) == 2


def test_ledger_drops_what_never_lived_during_an_operator() -> None:
    clock = [4]
    ledger = StorageLedger(lambda: clock[0])
    for _ in range(3):  # allocated for operator 4, and freed before it ran
        ledger.enter(torch.zeros(1), "short", "activation", 4)
    lasting = torch.zeros(2)
    index = ledger.enter(lasting, "lasting", "activation", 4)
    storages, places = ledger.storages()
    assert [storage.name for storage in storages] == ["lasting"]
    assert places == {index: 0}


def test_ledger_is_deaf_once_closed() -> None:
    clock = [1]
    ledger = StorageLedger(lambda: clock[0])
    tensor = torch.zeros(1)
    ledger.enter(tensor, "kept", "activation", 0)
    ledger.close()
    del tensor
    clock[0] = 9
    assert ledger.storages()[0][0].eager_end == 9
