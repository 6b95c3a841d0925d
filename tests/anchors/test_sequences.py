"""The anchors of a step as planning numbers them, in a trace or a record, are those that execution numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow.anchors.stream import AnchorStream, Subscriber
from checkflow.core.errors import TraceError
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind, TrainingGraph
from checkflow.core.state import module_names, parameter_paths
from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.trace import trace
from tests.integration.test_closures import Job, lbfgs
from tests.integration.test_modules import STEPS
from tests.planner.iteration.test_optimizers import stepping_in_backward
from tests.planner.record.test_compiled_regions import WAYS, prepared_batches
from tests.support.recording import record_step
from tests.support.steps.training_steps import BUILDERS, sgd

Build = Callable[[], TrainingStep]
Sequence = list[AnchorKey]


def evaluated_between_micro_batches() -> TrainingStep:
    """Forward passes of an evaluation are anchors of the iteration that they lie in."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    optimizer = sgd(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part in x.chunk(2):
            model.train()(part).square().mean().backward()
            with torch.no_grad():
                model.eval()(part)
        optimizer.step()

    return TrainingStep(model, optimizer, step=step, batch=torch.randn(8, 6))


def called_twice_with_one_weight() -> TrainingStep:
    """One module under two names, and another whose weight is its own."""
    shared, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = shared.weight
    model = nn.Sequential(shared, nn.Tanh(), shared, other)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x).square().mean()
        return out

    return TrainingStep(model, sgd(model.parameters()), loss=loss, batch=torch.randn(4, 6))


def frozen_in_part() -> TrainingStep:
    model = nn.Sequential(nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 5))
    trained = sgd(model[1].parameters())
    batch = (torch.randn(4, 6), torch.randint(5, (4,)))
    return TrainingStep(model, trained, loss=lambda m, x, y: F.cross_entropy(m(x), y), batch=batch)


EAGER: Mapping[str, Build] = {
    **dict(list(STEPS.items())[::8]),  # both go by one stream, so that some modules stand for all
    **BUILDERS,
    "evaluation between micro-batches": evaluated_between_micro_batches,
    "called twice": called_twice_with_one_weight,
    "frozen in part": frozen_in_part,
    "steps in backward": functools.partial(stepping_in_backward, False),
    "closure": lambda: Job(torch.optim.Adam).step(),
}


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """torch warns of much that these steps do on purpose."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    recwarn.clear()


def build(make: Build) -> TrainingStep:
    torch.manual_seed(0)
    return make()


class Executed:
    """The hooks of a plan that has work at each module and each gradient, in a job that trains."""

    def __init__(self, step: TrainingStep) -> None:
        self._step, self._fired = step, Sequence()
        self.repeated: list[str] = []
        gradients = {id(tensor): name for name, tensor in reversed(parameter_paths(step.models).items())}
        places = [
            *((AnchorKind.FORWARD, name) for name, _ in module_names(step.models)),
            *((AnchorKind.GRADIENT, name) for name in gradients.values()),
        ]
        reached = self._fired.append
        self._stream = AnchorStream(step.models, step.optimizers)
        self._stream.subscribe(
            "execution",
            Subscriber(
                places=frozenset(places), forward=reached, gradient=reached, step_begins=reached, step_ends=reached,
                repeated=self.repeated.append,
            ),
        )  # fmt: skip

    def iterate(self) -> Sequence:
        """The anchors of one iteration, from its boundary on."""
        self._stream.boundary()
        self._fired.clear()
        self._step.run(self._step.batch)
        return list(self._fired)

    def remove(self) -> None:
        self._stream.remove()


def executed(make: Build) -> Sequence:
    """The anchors of a step's second iteration, as in the ones that a plan is made of."""
    step = build(make)
    step.run(step.batch)
    job = Executed(step)
    try:
        return job.iterate()
    finally:
        job.remove()


def planned(graph: TrainingGraph) -> Sequence:
    first, *others = (anchor.key for anchor in graph.anchors)
    assert first == BOUNDARY
    assert len({*others}) == len(others)
    return others


@pytest.mark.parametrize("name", EAGER)
def test_a_record_numbers_anchors_as_execution_does(name: str) -> None:
    assert planned(record_step(build(EAGER[name]), name=name).graph) == executed(EAGER[name])


@pytest.mark.parametrize("name", [name for name in EAGER if name not in STEPS])
def test_a_trace_numbers_anchors_as_execution_does(name: str) -> None:
    """Of other steps, test_modules.py compares the trace with the record."""
    assert planned(trace(build(EAGER[name]), name=name, target="cpu")) == executed(EAGER[name])


@pytest.mark.parametrize("way", [way for way, _ in WAYS], ids=lambda way: way.__name__)
def test_the_anchors_of_compiled_steps_are_the_same(way: Callable[[TrainingStep], TrainingStep]) -> None:
    """A plan takes the gradients of a compiled region together; the others are in order."""

    def make() -> TrainingStep:
        return way(prepared_batches())

    found = executed(make)
    torch._dynamo.reset()
    recorded = planned(record_step(build(make), name="job").graph)
    torch._dynamo.reset()
    traced = planned(trace(build(make), name="job", target="cpu"))
    for keys in (recorded, traced):
        assert sorted(keys, key=str) == sorted(found, key=str)
        assert without_gradients(keys) == without_gradients(found)


def without_gradients(keys: Sequence) -> Sequence:
    return [key for key in keys if key.kind is not AnchorKind.GRADIENT]


def test_each_iteration_is_numbered_anew() -> None:
    """After an evaluation between boundaries, an iteration that was recorded, a module that was exchanged."""
    step = build(BUILDERS["batch_norm"])
    step.run(step.batch)
    job = Executed(step)
    model = step.models["model"]
    try:
        first = job.iterate()
        model.eval()(step.batch[0])
        model.train()
        assert job.iterate() == first == planned(record_step(step, name="job").graph)
    finally:
        job.remove()
    model.head = nn.Linear(4, 5)
    step = TrainingStep(model, sgd(model.parameters()), loss=step.loss, batch=step.batch)
    recorded = planned(record_step(step, name="job").graph)
    job = Executed(step)
    try:
        assert job.iterate() == recorded == first
    finally:
        job.remove()


def test_a_closure_that_runs_more_than_once_has_no_sequence_and_both_say_so() -> None:
    job = Executed(step := build(lambda: Job(lbfgs).step()))
    try:
        job.iterate()
    finally:
        job.remove()
    assert {*job.repeated} == {"optimizer"}
    with pytest.raises(TraceError, match="runs its closure more than once"):
        record_step(step, name="job")
