"""Random plans over several iterations, made from a job's real timeline, and every rule of a plan kept."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.nn.functional as F
from torch import nn

from checkflow.core.machine.device import find_device
from checkflow.core.plan import Certificate, Chunk, Fingerprint, Plan, Wait
from checkflow.core.timeline import Timeline
from checkflow.core.training_step import TrainingStep
from checkflow.planner.schedule.replay import check_plan, simulate
from checkflow.planner.schedule.scheduler import fingerprint_of
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace

MEMORY_BANDWIDTH = 1e10
SPARE = 1.25  # of the link


class FrozenNet(nn.Module):
    """Weights that are trained behind weights that are not, and a batch norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.body(x))))


def make_step() -> TrainingStep:
    torch.manual_seed(0)
    model = FrozenNet()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], foreach=False)
    return TrainingStep(
        model, optimizer,
        loss=lambda model, x, y: F.cross_entropy(model(x), y), batch=(torch.randn(8, 16), torch.randint(5, (8,))),
    )  # fmt: skip


def trace_job(step: TrainingStep | None = None) -> tuple[Timeline, Fingerprint]:
    device = find_device("cpu")
    graph = trace(step or make_step(), name="job", target="cpu")
    return make_timeline(graph, durations_seconds(graph, device), "segment"), fingerprint_of(graph, device)


def spread_plan(timeline: Timeline, fingerprint: Fingerprint, interval: int, seed: int, *, waits: bool = False) -> Plan:
    """A plan that moves the state over so many iterations, by chance within the rules.

    The link is taken to be as slow as the horizon allows, but for a spare that is left idle here and there.
    """
    rng = random.Random(seed)
    length = len(timeline.steps)
    horizon = range(interval * length)
    anchors = {step for step in horizon if timeline.steps[step % length].anchor is not None}
    seconds = interval * timeline.iteration_seconds
    wait = None
    if waits:
        wait = Wait(rng.choice(sorted(anchors)), rng.uniform(0.1, 0.5) * seconds)
        seconds += wait.seconds
    bandwidth = SPARE * timeline.state_bytes / seconds
    capacities = timeline.capacities_bytes(bandwidth, 1, interval, None if wait is None else (wait.step, wait.seconds))
    deadlines = {
        name: None if group.first_write is None else group.first_write - 1
        for group in timeline.groups
        for name, _ in group.members
    }
    # What has not left: (tensor, offset, length, the step that made its snapshot).
    left = [(name, 0, size, None) for group in timeline.groups for name, size in group.members if size]
    chunks, copied = [], []
    for step in horizon:
        idle = sum(capacities[step:]) - sum(piece[2] for piece in (*left, *copied))
        room = capacities[step] - (rng.randint(0, min(capacities[step], idle)) if rng.random() < 0.3 else 0)
        while room and (left or copied):
            source = rng.choice([pieces for pieces in (left, copied) if pieces])
            name, offset, size, made = source.pop(rng.randrange(len(source)))
            taken = min(size, room, rng.randint(1, 4096))
            chunks.append(Chunk(name, offset, taken, step, made))
            room -= taken
            if taken < size:
                source.append((name, offset + taken, size - taken, made))
        if step in anchors:
            due = [piece for piece in left if deadlines[piece[0]] == step or rng.random() < 0.03]
            left = [piece for piece in left if piece not in due]
            copied += [(name, offset, size, step) for name, offset, size, _ in due]
    assert not left
    assert not copied
    last = len(horizon)
    chunks.sort(
        key=lambda chunk: (
            chunk.offload_step, last if (due := deadlines[chunk.tensor]) is None else due,
            chunk.tensor, chunk.offset_bytes,
        )
    )  # fmt: skip
    certificate = Certificate("feasible", "random", "none", "", 0, 0)
    plan = Plan(
        fingerprint, "direct", bandwidth, 1, timeline, tuple(chunks), 0, 0, 0.0, interval, certificate,
        memory_bandwidth_bytes_per_second=MEMORY_BANDWIDTH, wait=wait,
    )  # fmt: skip
    replay = simulate(plan)
    plan = dataclasses.replace(
        plan, plan_peak_bytes=replay.peak_bytes, stall_seconds=replay.stall_seconds,
        certificate=dataclasses.replace(certificate, objective_bytes=replay.peak_bytes),
    ).sealed()  # fmt: skip
    check_plan(plan)
    return plan
