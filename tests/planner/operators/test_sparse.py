"""Sparse gradients in a trace: as large as in real training, kept as long, and written by the optimizer alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from checkflow.core.errors import UnsupportedError
from checkflow.core.graph import AnchorKind, GraphStorage, TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from tests.support.steps import training_steps as steps

ROWS, WIDTH, LOOKUPS = 1000, 8, 64
ROW_BYTES = WIDTH * 4


class Net(nn.Module):
    """Indices 16,4 to numbers 16,1: a table with sparse gradients (in ``bag`` or not), and a linear layer."""

    def __init__(self, bag: bool, **options: Any) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(ROWS, WIDTH, sparse=True, **options)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        rows = self.table(indices)
        out: torch.Tensor = self.head(rows if rows.dim() == 2 else rows.sum(1))
        return out


def build(
    bag: bool = True,
    optimizer: steps.MakeOptimizer = steps.sgd,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> TrainingStep:
    def loss(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(indices).square().sum()
        return out

    model = Net(bag, **options).to(dtype)
    indices = torch.arange(LOOKUPS).remainder(50).reshape(16, 4)  # some rows are looked up twice
    return TrainingStep(model, optimizer(model.parameters()), loss=loss, batch=(indices,), micro_batches=micro_batches)


def gradients(graph: TrainingGraph) -> list[GraphStorage]:
    return [storage for storage in graph.storages if storage.name == "gradient of model/table.weight"]


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{"mode": "sum"}, {"mode": "mean"}, {"mode": "sum", "dtype": torch.float64}, {"bag": False}],
    ids=["sum", "mean", "float64", "embedding"],
)
def test_gradients_are_as_large_as_in_real_training(options: dict[str, Any], micro_batches: int, target: Any) -> None:
    real = build(micro_batches=micro_batches, **options)
    real.run(real.batch)
    gradient = real.models["model"].table.weight.grad
    kept = gradient._values().untyped_storage().nbytes()
    assert kept == micro_batches * LOOKUPS * WIDTH * gradient.element_size()
    graph = trace(build(micro_batches=micro_batches, **options), name="n", target=target)
    ends = [storage.size_bytes for storage in gradients(graph) if storage.eager_end == len(graph.operators)]
    # Beside the values only the indices, which the gradient of one batch shares with the batch.
    indices = LOOKUPS * 8 * micro_batches
    assert sorted(ends) == ([kept] if micro_batches == 1 else [indices, kept])


def test_rows_of_padding_are_counted_as_far_as_nobody_can_tell() -> None:
    real = build(padding_idx=0)
    real.run(real.batch)
    rows = real.models["model"].table.weight.grad._values().shape[0]
    assert rows == LOOKUPS - 2  # index 0 occurs twice in the batch
    (kept,) = [storage for storage in gradients(trace(build(padding_idx=0), name="n")) if storage.created >= 0]
    assert kept.size_bytes == LOOKUPS * ROW_BYTES


def test_an_accumulated_gradient_replaces_the_one_before() -> None:
    graph = trace(build(micro_batches=3), name="n")
    values = [s for s in gradients(graph) if s.created >= 0 and s.size_bytes % ROW_BYTES == 0]
    values = [
        s for s in values if graph.operators[s.created].phase == "backward" and s.size_bytes >= LOOKUPS * ROW_BYTES
    ]
    first, second, third = values
    assert [s.size_bytes for s in values] == [count * LOOKUPS * ROW_BYTES for count in (1, 2, 3)]
    # Both live while the rows are put together, and then the shorter one is gone.
    assert first.created < first.eager_end == second.created
    assert second.eager_end == third.created < third.eager_end == len(graph.operators)


def test_what_lives_at_the_boundary_has_its_own_name() -> None:
    graph = trace(build(), name="n")
    at_boundary = {
        storage.name: (storage.kind, storage.size_bytes) for storage in graph.storages if storage.created < 0
    }
    assert at_boundary["batch.0"] == ("input", LOOKUPS * 8)  # a gradient's indices too, but it is the batch
    assert at_boundary["gradient of model/table.weight"] == ("gradient", LOOKUPS * ROW_BYTES)


def test_the_last_iterations_gradient_is_freed_by_zero_grad() -> None:
    for optimizer in (steps.sgd, torch.optim.Adagrad, torch.optim.Adafactor):
        bag = optimizer is not torch.optim.Adafactor
        step = build(optimizer=optimizer) if bag else steps.parallel(optimizer)
        before = [s for s in trace(step, name="n").storages if s.kind == "gradient" and s.created == -1]
        assert before
        assert {storage.eager_end for storage in before} == {-1}, optimizer


def test_a_step_touches_the_rows_that_were_looked_up() -> None:
    graph = trace(build(), name="n")
    by_target = {operator.target: operator for operator in graph.operators}
    values, indices = LOOKUPS * ROW_BYTES, LOOKUPS * 8
    lookup = by_target["aten._embedding_bag.default"]
    assert lookup.read_bytes == values + indices + 16 * 8  # rows, indices, and where each of 16 bags begins
    backward = by_target["aten._embedding_bag_backward.default"]
    assert backward.written_bytes == values
    entry = next(entry for entry in graph.state if entry.name == "model/table.weight")
    assert entry.first_write is not None
    update = graph.operators[entry.first_write]
    assert (update.target, update.phase) == ("aten.add_.Tensor", "optimizer")
    assert (update.read_bytes, update.written_bytes) == (2 * values + indices, values)


@pytest.mark.parametrize(
    ("make", "states"), [(torch.optim.SparseAdam, 2), (torch.optim.Adagrad, 1)], ids=["SparseAdam", "Adagrad"]
)
def test_a_step_that_only_data_can_tell_is_one_operator(make: Any, states: int) -> None:
    step = build()
    model = step.models["model"]
    both = {"tables": make(model.table.parameters()), "head": steps.sgd(model.head.parameters())}

    def iteration(batch: Any) -> torch.Tensor:
        for optimizer in both.values():
            optimizer.zero_grad()
        loss: torch.Tensor = model(*batch).sum()
        loss.backward()
        for optimizer in both.values():
            optimizer.step()
        return loss

    graph = trace(TrainingStep(step=iteration, models=step.models, optimizers=both, batch=step.batch), name="n")
    written = [entry for entry in graph.state if "table" in entry.name and entry.placement == "device"]
    assert len(written) == 1 + states
    (index,) = {entry.first_write for entry in written}
    assert index is not None
    operator = graph.operators[index]
    assert (operator.target, operator.phase) == (f"{make.__name__}.step", "optimizer")
    values, indices = LOOKUPS * ROW_BYTES, LOOKUPS * 8
    assert operator.written_bytes == (1 + states) * values
    assert operator.read_bytes == (2 + states) * values + indices
    positions = {(a.key.kind, a.key.name): a.position for a in graph.anchors}
    assert positions[AnchorKind.OPTIMIZER_PRE, "tables"] == index < positions[AnchorKind.OPTIMIZER_POST, "tables"]


def test_sparse_state_that_grows_is_refused_by_name() -> None:
    """Momentum of a sparse gradient has a row for every index that was ever looked up."""
    step = build(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    with pytest.raises(UnsupportedError, match=r"table\.weight\.momentum_buffer is sparse and grows"):
        trace(step, name="n")
