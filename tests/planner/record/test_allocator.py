"""What operators take for a moment: found by an allocator's counts, here a fake's, and in the plan's peaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from checkflow.core.graph import TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.record import allocator as counting
from checkflow.planner.record.allocator import Allocated, Transients, allocated
from checkflow.planner.record.recorder import IterationRecorder
from checkflow.planner.timeline.steps import make_timeline
from tests.support.recording import record_step

MIB = 2**20
HELD = 1000 * MIB  # before anything is measured
STEPS: dict[str, list[int]] = {}  # what the operator of this name allocates and frees, in order


class Allocator:
    """Counts as torch's does for a GPU."""

    def __init__(self) -> None:
        self.now = self.most = HELD
        self.freed = 0

    def move(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.most = max(self.most, self.now)
        self.freed += max(0, -size_bytes)

    def read(self, device: torch.device) -> Allocated:
        return Allocated(self.now, self.most, self.freed)


FAKE = Allocator()


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    monkeypatch.setattr(counting, "allocated", lambda device: FAKE.read(device))
    FAKE.__init__()  # type: ignore[misc]
    STEPS.clear()
    yield FAKE
    torch._dynamo.reset()


@torch.library.custom_op("checkflow_tests::takes", mutates_args=())
def takes(x: torch.Tensor, steps: str) -> torch.Tensor:
    """A copy; on the way, the allocator does what is asked for."""
    for size_bytes in STEPS.get(steps, []):
        FAKE.move(size_bytes)
        time.sleep(0)  # other threads may run
    return x.clone()


takes.register_fake(lambda x, steps: torch.empty_like(x))
takes.register_autograd(
    lambda ctx, gradient: (takes(gradient, ctx.steps + ", backward"), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "steps", inputs[1]),
)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken: torch.Tensor = takes(self.first(x), "op")
        out: torch.Tensor = self.second(taken)
        return out


def step_of(model: Any) -> TrainingStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingStep(model, optimizer, loss=lambda m, x: m(x).square().mean(), batch=torch.ones(4, 8))


def recorded(**steps: list[int]) -> TrainingGraph:
    """An iteration in which these are taken; none of them in the one before."""
    step = step_of(Taking())
    step.run(step.batch)
    recorder = IterationRecorder(step.models, step.optimizers, name="job")
    recorder.begin(step.batch)
    STEPS.update({name.replace("_", ", "): moves for name, moves in steps.items()})
    step.run(step.batch)
    STEPS.clear()
    return recorder.end(batch=step.batch).graph


def takers(graph: TrainingGraph) -> list[int]:
    """The operators of that kind: forward's and backward's."""
    return [i for i, operator in enumerate(graph.operators) if "checkflow_tests" in operator.target]


def mib(*sizes: int) -> list[int]:
    return [size * MIB for size in sizes]


CASES: dict[str, tuple[list[int], int]] = {
    "nothing": ([], 0),
    "one": (mib(50, -50), 50),
    "two at once": (mib(50, 20, -20, -50), 70),
    "one after another": (mib(50, -50, 20, -20), 50),  # no more than lies below the peak
    "what stays": (mib(50), 0),
    "besides what stays": (mib(30, 50, -50), 50),
    "frees what lived": (mib(-40), 40),  # it lives no more during the operator, says the ledger, but did at its begin
    "takes, and frees what lived": (mib(50, -50, -40), 90),
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_operator_takes_for_a_moment_lives_during_it(name: str) -> None:
    moves, expected = CASES[name]
    plain, graph = recorded(), recorded(op=moves)
    place = takers(graph)[0]
    for eager in (True, False):
        (during, at), (before, at_before) = graph.live_bytes(eager=eager), plain.live_bytes(eager=eager)
        assert at == at_before
        assert [live - was for live, was in zip(during, before, strict=True)] == [
            expected * MIB if i == place else 0 for i in range(len(during))
        ]


def test_the_training_peak_of_a_plan_moves_by_it() -> None:
    plain, graph = recorded(), recorded(op=mib(50, -50))
    seconds = [1e-3] * len(graph.operators)
    for granularity in ("segment", "operator"):
        timeline, before = (make_timeline(one, seconds, granularity) for one in (graph, plain))  # type: ignore[arg-type]
        assert timeline.training_peak_bytes == plain.live_bytes(eager=True)[0][takers(plain)[0]] + 50 * MIB
        changed = [one.label for one, was in zip(timeline.steps, before.steps, strict=True) if one != was]
        assert len(changed) == 1
        assert "takes" in changed[0] or granularity == "segment"


def test_backward_too_and_each_operator_its_own() -> None:
    graph = recorded(op=mib(50, -50), op_backward=mib(30, -30))
    assert [graph.operators[i].phase for i in takers(graph)] == ["forward", "backward"]
    assert [operator.transient_bytes for operator in graph.operators if operator.transient_bytes] == mib(50, 30)


def test_an_older_peak_lets_all_count_that_was_freed() -> None:
    FAKE.move(500 * MIB)  # before training
    FAKE.move(-500 * MIB)
    graph = recorded(op=mib(50, -50, 20, -20))
    assert graph.operators[takers(graph)[0]].transient_bytes == 70 * MIB


def test_what_is_freed_between_operators_is_none_of_theirs() -> None:
    step = step_of(Taking())
    loss = step.loss
    assert loss is not None

    def freeing(model: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = loss(model, x)
        FAKE.move(10 * MIB)
        FAKE.move(-10 * MIB)
        return out

    loop = TrainingStep(step.models["model"], step.optimizers["optimizer"], loss=freeing, batch=step.batch)
    assert not any(operator.transient_bytes for operator in record_step(loop, name="job").graph.operators)


def test_operators_of_several_threads_at_once() -> None:
    """As autograd's, one a device, each of which has the mode of the thread that called it."""
    sizes = range(101, 141)  # elements of their results, and MiB
    STEPS.update({str(size): mib(size, -size) for size in sizes})
    FAKE.move(500 * MIB)  # so that nothing but what was freed limits it
    FAKE.move(-500 * MIB)
    step = step_of(Taking())
    step.run(step.batch)
    recorder = IterationRecorder(step.models, step.optimizers, name="job")
    recorder.begin(step.batch)

    def run(names: range) -> None:
        _push_mode(recorder._mode)
        try:
            for name in names:
                takes(torch.ones(name), str(name))
        finally:
            _pop_mode()

    threads = [threading.Thread(target=run, args=(sizes[begin::4],)) for begin in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step.run(step.batch)
    graph = recorder.end(batch=step.batch).graph
    found = {graph.operators[i].written_bytes // 4: graph.operators[i].transient_bytes for i in takers(graph)}
    assert {size: found[size] for size in sizes} == {size: size * MIB for size in sizes}


# Compiled regions


def hiding(module: Any, examples: Any) -> Any:
    """A backend whose operators no dispatch mode sees."""

    def compile_graph(graph: Any, _examples: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with _disable_current_modes():
                return graph(*arguments)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compile_graph)(module, examples)


@pytest.mark.parametrize("backend", [hiding, "aot_eager"], ids=["unseen", "seen"])
def test_a_region_takes_what_no_operator_within_it_took(backend: Any) -> None:
    STEPS.update({"op": mib(50, -50), "op, backward": mib(30, -30)})
    model = torch.compile(Taking(), backend=backend, fullgraph=True)
    graph = record_step(step_of(model), name="job").graph
    took = {(o.phase, o.target == "compiled region"): o.transient_bytes for o in graph.operators if o.transient_bytes}
    unseen = backend is hiding
    assert took == {("forward", unseen): 50 * MIB, ("backward", unseen): 30 * MIB}


def test_stretches_within_others() -> None:
    FAKE.move(500 * MIB)
    FAKE.move(-500 * MIB)
    transients = Transients(torch.device("cpu"))
    outer = transients.begin()
    found = []
    for size in mib(3, 0, 4):
        FAKE.move(100 * MIB)
        FAKE.move(-100 * MIB)
        inner = transients.begin()
        innermost = transients.begin()
        FAKE.move(size)
        FAKE.move(-size)
        found.append(transients.end(innermost))
        FAKE.move(10 * MIB)
        FAKE.move(-10 * MIB)
        found.append(transients.end(inner))
    assert found == mib(3, 10, 0, 10, 4, 10)
    assert transients.end(outer) == 300 * MIB
    assert transients.end(transients.begin()) == 0


def test_counts_that_the_user_resets_are_never_negative() -> None:
    transients = Transients(torch.device("cpu"))
    FAKE.move(50 * MIB)
    FAKE.move(-50 * MIB)
    mark = transients.begin()
    FAKE.freed, FAKE.most = 0, FAKE.now  # torch.cuda.reset_accumulated_memory_stats, reset_peak_memory_stats
    assert transients.end(mark) == 0
    mark = transients.begin()
    FAKE.move(20 * MIB)
    FAKE.move(-20 * MIB)
    assert transients.end(mark) == 20 * MIB


def test_torchs_own_counts_are_read_and_none_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """``allocated`` itself, which the fixture's fake hides elsewhere."""
    assert allocated(torch.device("cpu")) == Allocated(0, 0, 0)
    asked: list[torch.device] = []

    def counts(device: torch.device) -> dict[str, Any]:
        asked.append(device)
        other = {"current": 9, "peak": 9, "allocated": 9, "freed": 9}
        return {
            "allocated_bytes": {"all": {"current": 5, "peak": 8, "allocated": 12, "freed": 7}, "small_pool": other},
            "reserved_bytes": {"all": other},
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counts)
    assert allocated(torch.device("cuda", 1)) == Allocated(now_bytes=5, most_bytes=8, freed_bytes=7)
    assert asked == [torch.device("cuda", 1)]


@pytest.mark.cuda
def test_on_a_gpu_workspaces_are_in_the_peak_and_the_statistics_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "allocated", allocated)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.LazyLinear(10))
        batch = torch.randn(32, 64, 56, 56)
        model(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainingStep(model, optimizer, loss=lambda m, x: m(x).square().mean(), batch=batch)
    for _ in range(3):
        step.run(step.batch)
    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")  # a peak of the user's own, before
    del large
    peak = torch.cuda.max_memory_allocated()
    record_step(step, name="job")
    assert torch.cuda.max_memory_allocated() == peak
    torch.cuda.reset_peak_memory_stats()
    graph = record_step(step, name="job").graph
    assert max(graph.live_bytes(eager=True)[0]) == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05)
