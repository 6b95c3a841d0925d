"""Hooks at anchors: which are called when, and a watched model is pickled and copied as the one that the user made."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow import Checkpointer, TrainingStep
from checkflow.anchors.stream import AnchorStream, Subscriber
from checkflow.core.errors import MismatchError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.runtime.snapshot.executor import Execution
from tests.support.gpu.fake_device import simulate_gpu
from tests.support.planned_jobs import plan_by_trace

LOAD = """
import sys
sys.modules["checkflow"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert not model._forward_pre_hooks and not model._forward_hooks
model(torch.ones(2, 3)).sum().backward()
"""


def double(_module: nn.Module, arguments: Any) -> Any:
    """The user's own hook, which stays."""
    return (2 * arguments[0],)


class Counting(nn.Linear):
    """A module with rules of its own for pickling."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "pickled": True}


def hooks(model: nn.Module) -> int:
    return sum(
        len(getattr(module, name)) for module in model.modules() for name in vars(module) if "forward" in name
    )  # fmt: skip


def test_a_watched_model_is_copied_as_a_plain_one(tmp_path: Path) -> None:
    """In each iteration, recorded ones too; the job's own hooks go on."""
    model = nn.Sequential(nn.BatchNorm1d(3), Counting(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[3].register_forward_pre_hook(double)
    plain = hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    with Checkpointer(model, optimizer, directory=tmp_path / "checkpoints", every=1) as checkpointer:
        for _ in checkpointer.steps(8):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model, io.BytesIO())
            copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
            watched = hooks(model)
            assert watched > plain
            for one in copies:
                assert hooks(one) == plain
                assert one[1].pickled
                assert one[3]._forward_pre_hooks.popitem()[1] is double
                assert all(map(torch.equal, one.state_dict().values(), model.state_dict().values()))
        report = checkpointer.report()
    assert (report["failed"], report["breaches"]) == (0, 0)
    assert hooks(model) == plain


def test_gradients_that_nobody_waits_for_pass_until_a_step_or_a_boundary() -> None:
    """And each counts from 0 again after a boundary, however many of it were skipped before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = [AnchorKey(AnchorKind.GRADIENT, f"model/{name}") for name, _ in model.named_parameters()]
    before, after = (AnchorKey(kind, "sgd") for kind in (AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST))
    fired: list[AnchorKey] = []
    waits = False

    def fire(key: AnchorKey) -> None:
        fired.append(key)
        if key.kind is AnchorKind.GRADIENT and not waits:
            stream.skip_gradients()

    def iteration() -> list[AnchorKey]:
        fired.clear()
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        model(torch.ones(2, 3)).sum().backward()
        stream.boundary()
        return fired

    stream = AnchorStream({"model": model}, {"sgd": optimizer})
    places = frozenset((key.kind, key.name) for key in gradients)
    stream.subscribe("plan", Subscriber(places=places, gradient=fire, step_begins=fire, step_ends=fire))
    try:
        first, *steps, again = iteration()
        assert steps == [before, after]
        assert {first.kind, again.kind} == {AnchorKind.GRADIENT}
        waits = True
        every = [AnchorKey(key.kind, key.name, number) for number in range(3) for key in gradients]
        found = iteration()
        assert sorted(found, key=str) == sorted([*every, before, after], key=str)
    finally:
        stream.remove()


def test_each_gradient_is_an_anchor_while_a_capture_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in other iterations the first one alone."""
    simulate_gpu(monkeypatch)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = TrainingStep(model, optimizer, loss=lambda m, x: m(x).square().mean(), batch=torch.randn(8, 64))
    step.run(step.batch)
    plan = plan_by_trace(step, chunk_bytes=8192)
    reached: list[str] = []
    original = Execution.reached

    def note(owner: Execution, key: AnchorKey) -> None:
        if key.kind is AnchorKind.GRADIENT:
            reached.append(key.name)
        original(owner, key)

    monkeypatch.setattr(Execution, "reached", note)
    found = []
    with Checkpointer(model, optimizer, directory=tmp_path, plan=plan, every=2, on_error="raise") as checkpointer:
        for _ in checkpointer.steps(6):
            reached.clear()
            step.run(step.batch)
            found.append(sorted(reached))
    first, whole = ["model/5.weight"], [f"model/{n}.weight" for n in range(1, 6)]
    assert found == [first, first, whole, first, whole, first]


def test_subscribers_are_told_in_order_and_a_role_has_one() -> None:
    """One that the job cannot serve changes nothing, hooks included; nor does one without places hang any."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = AnchorStream({"model": model}, {"sgd": optimizer})
    told: list[str] = []

    def subscriber(name: str, *places: str) -> Subscriber:
        wanted = frozenset((AnchorKind.FORWARD, place) for place in places)
        return Subscriber(places=wanted, forward=lambda key: told.append(f"{name} {key}"))

    def forward() -> list[str]:
        told.clear()
        stream.boundary()
        model(torch.ones(2, 3))
        return told

    plain = hooks(model)
    stream.add("clock", subscriber("clock"))
    assert hooks(model) == plain
    stream.subscribe("plan", subscriber("first", "model/0"))
    hung = hooks(model)
    stream.add("end", subscriber("end"))
    try:
        assert (forward(), hooks(model)) == ([f"{name} forward model/0" for name in ("clock", "first", "end")], hung)
        with pytest.raises(MismatchError, match="module model/2, which the job does not have"):
            stream.subscribe("plan", subscriber("second", "model/0", "model/2"))
        assert (forward(), hooks(model)) == ([f"{name} forward model/0" for name in ("clock", "first", "end")], hung)
        stream.subscribe("plan", subscriber("third", "model/1"))
        assert (forward(), hooks(model)) == ([f"{name} forward model/1" for name in ("clock", "third", "end")], hung)
    finally:
        stream.remove()
    assert (forward(), hooks(model)) == ([], plain)


class Evaluating(torch.optim.SGD):
    """Runs its closure so many times in a step."""

    def __init__(self, times: int) -> None:
        super().__init__([nn.Parameter(torch.ones(1))], lr=0.1)
        self.times = times

    def step(self, closure: Any) -> None:  # type: ignore[override]
        for _ in range(self.times):
            closure()


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (0, ["stepped", "unevaluated", "step_ends"]),
        (1, ["closure", "step_begins", "stepping", "stepped", "step_ends"]),
        (2, ["closure", "step_begins", "stepping", "repeated", "closure", "stepped", "step_ends"]),
    ],
)
def test_each_step_is_told_and_those_of_the_job_are_anchors(times: int, expected: list[str]) -> None:
    """Other optimizers' state is not saved: they may run their closures as they like."""
    own, foreign = Evaluating(times), Evaluating(times)
    told: list[str] = []

    def tell(event: str) -> Any:
        return lambda _what: told.append(event)

    def steps(optimizer: Evaluating) -> list[str]:
        told.clear()
        optimizer.step(lambda: told.append("closure"))
        return told

    events = ("step_begins", "step_ends", "stepping", "stepped", "repeated", "unevaluated")
    stream = AnchorStream({}, {"own": own})
    stream.subscribe("plan", Subscriber(**{event: tell(event) for event in events}))
    try:
        assert steps(own) == expected
        assert steps(foreign) == [event for event in expected if event in ("closure", "stepping", "stepped")]
    finally:
        stream.remove()


def test_a_stream_keeps_no_module_or_parameter_that_the_job_drops() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    places = frozenset(((AnchorKind.FORWARD, "model/0"), (AnchorKind.GRADIENT, "model/0.weight")))
    stream = AnchorStream({"model": model}, {})
    subscriber = Subscriber(places=places, leaving=lambda *_: None)
    stream.subscribe("plan", subscriber)
    try:
        assert not stream.outdated(subscriber, replaced=True)
        dropped = weakref.ref(model[0]), weakref.ref(model[0].weight)
        model[0] = nn.Linear(3, 4)
        gc.collect()
        assert [one() for one in dropped] == [None, None]
        assert stream.outdated(subscriber, replaced=True)
    finally:
        stream.remove()


def test_whoever_was_interrupted_must_subscribe_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal whose handler raises while hooks are hung, or when another plan has just taken the place."""
    model = nn.Linear(3, 4)
    stream = AnchorStream({"model": model}, {})
    reached: list[AnchorKey] = []
    first, second = (
        Subscriber(places=frozenset([(AnchorKind.FORWARD, "model/")]), forward=one) for one in (reached.append, print)
    )

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    stream.subscribe("execution", first)
    try:
        assert not stream.outdated(first, replaced=False)
        stream.subscribe("execution", second)
        assert stream.outdated(first, replaced=False)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("checkflow.anchors.hooks.around_steps", interrupted)
            stream.subscribe("execution", first)
        assert stream.outdated(first, replaced=False)
        stream.subscribe("execution", first)
        assert not stream.outdated(first, replaced=False)
        model(torch.ones(2, 3))
        assert reached == [AnchorKey(AnchorKind.FORWARD, "model/")]
    finally:
        stream.remove()


def train_a_copy(_rank: int, model: nn.Module, out: str) -> None:
    model(torch.ones(4, 3)).sum().backward()
    Path(out).write_text(str(hooks(model)))


@pytest.mark.slow
def test_a_watched_model_goes_to_other_processes(tmp_path: Path) -> None:
    """To one that is spawned, and to one without checkflow."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, directory=tmp_path / "checkpoints", every=1) as checkpointer:
        for _ in checkpointer.steps(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        assert model._forward_pre_hooks
        torch.multiprocessing.spawn(train_a_copy, (model, str(tmp_path / "out")), nprocs=1)
        torch.save(model, tmp_path / "model.pt")
    assert (tmp_path / "out").read_text() == "0"
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "model.pt"], check=True)
