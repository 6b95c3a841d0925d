"""The torn-checkpoint oracle over the whole way: trace, timeline, plan, 30 iterations with a checkpoint each.

Models and optimizers are chosen for what tears checkpoints: batch norm (written in forward), tied weights,
channels_last memory, optimizers that update all tensors at once. The link is planned all but full, so that snapshots
are needed too.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow.api import Checkpointer
from checkflow.core.errors import ConsistencyError, MismatchError, PlanError
from checkflow.core.machine.device import find_device
from checkflow.core.plan import Plan
from checkflow.core.training_step import TrainingStep
from checkflow.planner.schedule.replay import check_plan
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from checkflow.runtime.job.compatibility import Guards
from checkflow.runtime.store.discovery import find
from tests.support.oracle import assert_checkpoint_is, run_oracle

ITERATIONS = 30


class TiedNet(nn.Module):
    """A small language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.mix = nn.GRU(32, 32, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mix(self.embedding(tokens))[0]))


def digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    step = importlib.import_module("checkflow.models.digits").build(batch_size=8, width=16)
    return step.models["model"], *step.batch


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    build = importlib.import_module("checkflow.models.resnet18").build
    step = build(batch_size=2, image_size=32, classes=10, width=8)
    images, labels = step.batch
    return step.models["model"].to(memory_format=torch.channels_last), images, labels


def tied() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return TiedNet(), torch.randint(50, (4, 12)), torch.randint(50, (4, 12))


def mnasnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    step = importlib.import_module("checkflow.models.mnasnet").build(batch_size=2, image_size=32, classes=10)
    return step.models["model"], *step.batch


MODELS = {"digits": digits, "resnet18 channels_last": resnet, "tied": tied, "mnasnet": mnasnet}
OPTIMIZERS = {
    "adam for-loop": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def make_step(model: str, optimizer: str) -> TrainingStep:
    torch.manual_seed(0)
    module, inputs, labels = MODELS[model]()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        return F.cross_entropy(output.flatten(0, -2), y.flatten())

    return TrainingStep(module, OPTIMIZERS[optimizer](module.parameters()), loss=loss, batch=(inputs, labels))


def plan_step(step: TrainingStep, *, link_use: float = 0.98, chunk_bytes: int = 64 * 1024) -> Plan:
    """The plan for this job on this kind of device, on a link that is used to this share."""
    device = find_device("cpu")
    graph = trace(step, name="job", target="cpu")
    timeline = make_timeline(graph, durations_seconds(graph, device), "segment")
    request = PlanRequest(
        bandwidth_bytes_per_second=timeline.state_bytes / timeline.iteration_seconds / link_use,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        chunk_bytes=chunk_bytes,
    )
    outcome = make_plan(timeline, fingerprint_of(graph, device), request, graph_peak_bytes=0)
    assert outcome.plan is not None
    assert outcome.status == "optimal"
    return outcome.plan


def checkpointer_for(step: TrainingStep, directory: Path, plan: Plan) -> Checkpointer:
    return Checkpointer(
        step.models, step.optimizers, directory=directory, plan=plan,
        every=1, audit=1, keep_latest=ITERATIONS, on_error="raise",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _plans_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkflow.api.check_plan", check_plan)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
def test_every_checkpoint_is_the_truth_of_its_boundary(model: str, optimizer: str, tmp_path: Path) -> None:
    step = make_step(model, optimizer)
    plan = plan_step(step)
    assert plan.snapshot_bytes > 0 or model == "tied"  # whose two tensors may just fit before the optimizer
    with checkpointer_for(step, tmp_path, plan) as checkpointer:
        truths = run_oracle(
            checkpointer, lambda _: step.run(step.batch), step.models, step.optimizers, iterations=ITERATIONS
        )
    report = checkpointer.report()
    assert report["committed"] == report["audited"] == ITERATIONS
    assert report["breaches"] == report["failed"] == 0
    paths = find(tmp_path)
    assert len(paths) == ITERATIONS
    for path in paths:
        assert_checkpoint_is(path, truths[int(path.name[5:])])


@pytest.mark.parametrize("model", list(MODELS))
def test_the_plan_is_what_runs(model: str, tmp_path: Path) -> None:
    """The log of executed copies equals the plan, and only host state moves at the boundary itself."""
    step = make_step(model, "adam for-loop")
    plan = plan_step(step)
    with checkpointer_for(step, tmp_path, plan) as checkpointer:
        for _ in checkpointer.steps(4):
            step.run(step.batch)
    report = checkpointer.last_capture
    assert report is not None
    anchors = [None if entry.anchor is None else str(entry.anchor) for entry in plan.timeline.steps]
    expected = set()
    for index, chunk in enumerate(plan.chunks):
        released = max(chunk.offload_step, chunk.snapshot_step or 0)
        while anchors[released] is None:
            released -= 1
        if chunk.snapshot_step is not None:
            expected.add((index, "snapshot", anchors[chunk.snapshot_step], chunk.length_bytes))
            released = max(released, chunk.snapshot_step)
        expected.add((index, "offload", anchors[released], chunk.length_bytes))
    assert {(r.chunk, r.kind, r.anchor, r.length_bytes) for r in report.log} == expected
    assert len(report.log) == len(expected)
    sizes = {spec.name: spec.size_bytes for spec in plan.fingerprint.state}
    assert report.boundary_bytes == sum(sizes[name] for name in plan.host_tensors)
    assert report.statistics.snapshot_peak_bytes <= plan.snapshot_bytes
    # What is ordered at the boundary is what the plan gives its first segment, no more.
    first = sum(r.length_bytes for r in report.log if r.kind == "offload" and r.anchor == "boundary")
    assert first == sum(c.length_bytes for c in plan.chunks if c.offload_step in (0, 1))
    assert first < sum(sizes.values()) / 2


def test_an_event_moved_after_its_write_is_refused_and_if_forced_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the plan says that batch norm's statistics may be copied as late as the optimizer's step."""
    step = make_step("digits", "adam for-loop")
    plan = plan_step(step)
    last = len(plan.timeline.steps) - 1
    moved = tuple(
        dataclasses.replace(chunk, offload_step=last, snapshot_step=None) if "running_mean" in chunk.tensor else chunk
        for chunk in plan.chunks
    )
    late = dataclasses.replace(plan, chunks=moved).sealed()
    with pytest.raises(PlanError, match="after its deadline"):
        checkpointer_for(step, tmp_path / "refused", late)

    groups = tuple(
        dataclasses.replace(group, members=tuple(m for m in group.members if "running_mean" not in m[0]))
        for group in plan.timeline.groups
    )
    loose = tuple(
        (name, size) for group in plan.timeline.groups for name, size in group.members if "running_mean" in name
    )
    undated = dataclasses.replace(groups[-1], first_write=None, members=tuple(sorted(loose)))
    timeline = dataclasses.replace(plan.timeline, groups=(*groups, undated))
    forced = dataclasses.replace(plan, timeline=timeline, chunks=moved).sealed()
    monkeypatch.setattr("checkflow.api.check_plan", lambda plan: None)
    # The guards beyond the plan would save it: without them, the audit must tell.
    monkeypatch.setattr(
        "checkflow.runtime.job.compatibility.make_guards", lambda *_: Guards({"optimizer": ()}, {"optimizer": ()}, {})
    )
    with (
        pytest.raises(ConsistencyError, match="running_mean"),
        checkpointer_for(step, tmp_path / "forced", forced) as checkpointer,
    ):
        for _ in checkpointer.steps(3):
            step.run(step.batch)
    # A later one may have been copied at its boundary, once the plan was found to be wrong.
    assert tmp_path / "forced" / "step-00000001" not in find(tmp_path / "forced")


def test_the_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = plan_step(make_step("digits", "adam for-loop"))
    for model, optimizer in (("resnet18 channels_last", "adam for-loop"), ("digits", "adam foreach")):
        step = make_step(model, optimizer)
        with pytest.raises(MismatchError, match="another job"):
            checkpointer_for(step, tmp_path, plan)
