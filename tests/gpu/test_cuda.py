"""Training on a GPU: every checkpoint is one boundary's state, nothing of ours blocks the host, memory is as planned.

Runs on an NVIDIA GPU alone. What can be known without one is in ``runtime/transfer/test_cuda.py`` and
``test_cuda_capture.py`` beside it.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.figures import BATCHES, LOCKED_MEMORY
from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError
from checkflow.core.machine.device import find_device
from checkflow.core.plan import Plan
from checkflow.core.training_step import TrainingStep
from checkflow.planner.schedule.replay import check_plan
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from checkflow.runtime.persist.saver import FIRST_AUDITS, make_engine
from checkflow.runtime.store.discovery import find
from checkflow.runtime.transfer.cuda_device import CudaDevice
from checkflow.runtime.transfer.cudart import load_runtime
from checkflow.runtime.transfer.engine import Transfer
from tests.support import oracle
from tests.support.gpu.locked_memory import LockedMemory, skip_where_unable
from tests.support.oracle import assert_checkpoint_is, clone_state, random_plan, run_oracle, same_bits

pytestmark = pytest.mark.cuda

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam for-loop": lambda p: torch.optim.Adam(p, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adam capturable": lambda p: torch.optim.Adam(p, capturable=True),
}


class Net(nn.Module):
    """Batch norm (written in forward), channels_last weights, a tie, a frozen tensor and one in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.wide = nn.Linear(64, 2048)
        self.back = nn.Linear(2048, 64)
        self.head, self.tail = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.tail.weight = self.head.weight
        self.frozen = nn.Parameter(torch.randn(64), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.tail(self.head(self.back(F.relu(self.wide(x))))) * self.frozen


class Job:
    """One training job on the GPU, deterministic, with its batches there already."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = Net().to("cuda", memory_format=torch.channels_last)
        self.model.seen = self.model.seen.cpu()
        self.optimizer = OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])
        self.models, self.optimizers = {"model": self.model}, {"optimizer": self.optimizer}
        self.batches = [
            (torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(0, 64, (8,), device="cuda")) for _ in range(4)
        ]

    def iterate(self, n: int) -> None:
        x, y = self.batches[n % len(self.batches)]
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.model.seen += 1

    def plan(self, seed: int, **options: Any) -> Plan:
        """A random one for the job after an iteration, which this makes."""
        self.iterate(0)
        return random_plan(self.models, self.optimizers, seed, chunk_bytes=100_000, **options)

    def train(self, directory: Path, plan: Plan, iterations: int = 8, **options: Any) -> Checkpointer:
        """Train with a checkpoint at each boundary that the plan knows, and hold each against a clone."""
        options = {"every": plan.interval, "audit": 1, "keep_latest": 99, "on_error": "raise"} | options
        with Checkpointer(self.model, self.optimizer, directory=directory, plan=plan, **options) as checkpointer:
            truths = run_oracle(checkpointer, self.iterate, self.models, self.optimizers, iterations=iterations)
        steps = [int(path.name[5:]) for path in sorted(find(directory))]
        assert steps == [*range(plan.interval, iterations, plan.interval), iterations]  # the end is one, too
        for path in find(directory):
            assert_checkpoint_is(path, truths[int(path.name[5:])])
        report = checkpointer.report()
        assert report["breaches"] == report["failed"] == 0
        return checkpointer


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(api, "check_plan", plans.validate)  # random plans obey deadlines, and no link
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    torch.cuda.synchronize()


def planned(optimizer: str, seed: int, **options: Any) -> Plan:
    return Job(optimizer).plan(seed, **options)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("seed", range(3))
def test_every_checkpoint_is_one_boundary(optimizer: str, seed: int, tmp_path: Path) -> None:
    checkpointer = Job(optimizer).train(tmp_path, planned(optimizer, seed))
    assert checkpointer.report()["audited"] == 8
    assert checkpointer._saving.buffers.size_bytes == 0


@pytest.mark.parametrize("interval", [2, 3])
def test_checkpoints_over_several_iterations(interval: int, tmp_path: Path) -> None:
    Job("adam foreach").train(tmp_path, planned("adam foreach", 5, interval=interval), 9)


def test_training_on_streams_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations take turns on two streams, and nothing but checkflow orders the loop's own stream behind them."""
    job, streams = Job("adam foreach"), [torch.cuda.Stream(), torch.cuda.Stream()]
    iterate, clone = job.iterate, oracle.clone_state

    def on_streams(n: int) -> None:
        here = streams[n % 2]
        here.wait_stream(streams[1 - n % 2])
        here.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(here):
            torch.cuda._sleep(20_000_000)  # some 10 ms: what does not wait comes too early
            iterate(n)

    def clone_all(*state: Any) -> Any:
        torch.cuda.synchronize()
        return clone(*state)

    plan = planned("adam foreach", 2)
    job.iterate = on_streams  # type: ignore[method-assign]
    monkeypatch.setattr(oracle, "clone_state", clone_all)
    job.train(tmp_path, plan)


def test_a_loop_that_lives_on_another_stream(tmp_path: Path) -> None:
    plan = planned("momentum foreach", 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        Job("momentum foreach").train(tmp_path, plan)


def test_what_one_stream_waited_for_holds_another_that_is_in_no_order_to_it() -> None:
    """The copy lasts some milliseconds; the write on the other stream would be over at once."""
    engine, _ = make_engine(torch.device("cuda:0"))
    size_bytes = 256 * 2**20
    source = torch.full((size_bytes,), 7, dtype=torch.uint8, device="cuda")
    target = LockedMemory(engine, size_bytes)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(one):
            engine.begin([Transfer(source.data_ptr(), target.address, size_bytes)], lambda: None)
            engine.offload([0], "a")
            engine.wait([0])
        with torch.cuda.stream(other):
            assert engine.live([0]) == []
            source.fill_(9)
        engine.finish()
        assert target.raw.count(7) == size_bytes
    finally:
        engine.close()
        torch.cuda.synchronize()
        target.unlock()


def test_chunks_side_by_side_in_two_of_cudas_allocations() -> None:
    """Each block is one: CUDA refuses a single copy that reaches from one into the next."""
    blocks = [torch.full((32 * 2**20,), 7, dtype=torch.uint8, device="cuda") for _ in range(16)]
    blocks.sort(key=torch.Tensor.data_ptr)
    near = [pair for pair in itertools.pairwise(blocks) if pair[0].data_ptr() + pair[0].nbytes == pair[1].data_ptr()]
    if not near:
        pytest.skip("no two of them lie side by side")
    engine, _ = make_engine(torch.device("cuda:0"))
    target = LockedMemory(engine, 8192)
    begin = near[0][1].data_ptr() - 4096
    try:
        engine.begin([Transfer(begin + at, target.address + at, 4096) for at in (0, 4096)], lambda: None)
        engine.offload([0, 1], "a")
        engine.finish()
        assert target.raw.count(7) == 8192
    finally:
        engine.close()
        target.unlock()


def test_staging_memory_is_locked_and_the_plan_is_what_runs(tmp_path: Path) -> None:
    skip_where_unable(LOCKED_MEMORY)
    plan, job = planned("momentum foreach", 4), Job("momentum foreach")
    with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan, every=1) as checkpointer:
        for n in checkpointer.steps(4):
            job.iterate(n)
            assert checkpointer._saving.buffers.locked
    report = checkpointer.last_capture
    assert report is not None
    anchors = [step.anchor for step in plan.timeline.steps]
    done = {(record.chunk, record.kind): (record.anchor, record.length_bytes) for record in report.log}
    assert len(done) == len(report.log)
    for index, chunk in enumerate(plan.chunks):
        if chunk.tensor == "model/seen":  # lies in host memory, which the random plan does not know
            continue
        step = chunk.offload_step
        while anchors[step] is None:
            step -= 1
        released = max(step, chunk.snapshot_step or 0)
        assert done[index, "offload"] == (str(anchors[released]), chunk.length_bytes)
        if chunk.snapshot_step is not None:
            assert done[index, "snapshot"] == (str(anchors[chunk.snapshot_step]), chunk.length_bytes)
    assert report.statistics.snapshot_peak_bytes <= plan.snapshot_bytes
    assert report.boundary_bytes == 12


def test_nothing_waits_for_the_gpu_inside_an_iteration(tmp_path: Path) -> None:
    """Torch reports each of its calls that blocks the host; ours, ``finish`` apart, make none."""
    plan, job = planned("momentum foreach", 3), Job("momentum foreach")
    try:
        with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan, every=1, audit=1) as checkpointer:
            for n in checkpointer.steps(10):
                torch.cuda.set_sync_debug_mode("error" if n >= 3 else "default")
                job.iterate(n)
            torch.cuda.set_sync_debug_mode("default")
        assert checkpointer.report()["committed"] == 10
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_that_is_captured_meanwhile(tmp_path: Path) -> None:
    """The engine's thread waits for events while training captures; neither disturbs the other."""
    job = Job("adam foreach")
    iterate, x = job.iterate, torch.ones(1000, device="cuda")

    def capture(n: int) -> None:
        iterate(n)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        graph.replay()
        assert float(y.sum()) == 2000

    plan = planned("adam foreach", 6)
    job.iterate = capture  # type: ignore[method-assign]
    job.train(tmp_path, plan)


@pytest.mark.parametrize("optimizer", ["momentum foreach", "adam foreach", "adam fused", "adam capturable"])
def test_a_resumed_job_equals_the_uninterrupted_one(optimizer: str, tmp_path: Path) -> None:
    plan, job = planned(optimizer, 1), Job(optimizer)
    for n in range(9):
        job.iterate(n)
    drawn = torch.randn(5, device="cuda")
    truth = clone_state(job.models, job.optimizers)
    for upto in (4, 9):
        job = Job(optimizer)
        with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan, every=1) as checkpointer:
            assert checkpointer.resumed_from == (4 if upto == 9 else None)
            for n in checkpointer.steps(upto):
                job.iterate(n)
    assert torch.equal(torch.randn(5, device="cuda"), drawn)
    state = clone_state(job.models, job.optimizers)
    assert state.keys() == truth.keys()
    for name, tensor in truth.items():
        assert state[name].device == tensor.device, name
        assert same_bits(state[name], tensor), name


# The planner's own plans


def traced(name: str, optimizer: str, policy: Any, link_use: float) -> tuple[TrainingStep, Plan]:
    """A shipped model on the GPU, and its plan on a link that is used to this share."""
    torch.manual_seed(0)
    options = {"digits": {"batch_size": 64}, "resnet18": {"batch_size": 4, "image_size": 64, "classes": 10}}
    step = importlib.import_module(f"checkflow.models.{name}").build(**options[name])
    model = step.models["model"].cuda()
    batch = tuple(tensor.cuda() for tensor in step.batch)
    step = TrainingStep(
        model, OPTIMIZERS[optimizer](model.parameters()), batch=batch,
        loss=lambda model, x, y: F.cross_entropy(model(x), y),
    )  # fmt: skip
    device = find_device("A100 80GB")
    graph = trace(step, name="job", target="cuda")
    timeline = make_timeline(graph, durations_seconds(graph, device), "segment")
    request = PlanRequest(
        bandwidth_bytes_per_second=timeline.state_bytes / timeline.iteration_seconds / link_use,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        chunk_bytes=2**18,
        policy=policy,
    )
    plan = make_plan(timeline, fingerprint_of(graph, device), request, graph_peak_bytes=0).plan
    assert plan is not None
    check_plan(plan)
    return step, plan


@pytest.mark.parametrize("policy", ["direct", "snapshot"])
@pytest.mark.parametrize("optimizer", ["momentum foreach", "adam foreach", "adam fused"])
@pytest.mark.parametrize("model", ["digits", "resnet18"])
def test_a_plan_by_trace_for_another_card_of_the_kind(model: str, optimizer: str, policy: str, tmp_path: Path) -> None:
    step, plan = traced(model, optimizer, policy, 0.9)
    with Checkpointer(
        step.models, step.optimizers, directory=tmp_path, plan=plan,
        every=plan.interval, audit=1, keep_latest=99, on_error="raise",
    ) as checkpointer:  # fmt: skip
        truths = run_oracle(
            checkpointer, lambda _: step.run(step.batch), step.models, step.optimizers, iterations=3 * plan.interval
        )
    assert len(find(tmp_path)) == 3
    for path in find(tmp_path):
        assert_checkpoint_is(path, truths[int(path.name[5:])])
    sizes = {spec.name: spec.size_bytes for spec in plan.fingerprint.state}
    assert checkpointer.report()["newest_capture"]["boundary_bytes"] == sum(sizes[name] for name in plan.host_tensors)


def peak_bytes(step: TrainingStep, iterations: Iterator[int]) -> int:
    """Of what was asked for: the blocks that the allocator gives for it differ with what it has at hand."""
    peaks = []
    for _ in iterations:
        torch.cuda.reset_peak_memory_stats()
        step.run(step.batch)
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return max(peaks)


def test_a_plan_without_snapshots_adds_nothing_to_the_peak(tmp_path: Path) -> None:
    step, plan = traced("resnet18", "momentum foreach", "direct", 0.2)
    assert plan.snapshot_bytes == 0
    for _ in range(3):
        step.run(step.batch)
    before = peak_bytes(step, iter(range(3)))
    with Checkpointer(step.models, step.optimizers, directory=tmp_path, plan=plan, every=1, audit=0) as checkpointer:
        iterations = checkpointer.steps(FIRST_AUDITS + 6)
        for _ in itertools.islice(iterations, FIRST_AUDITS + 1):  # audits take memory for their digests
            step.run(step.batch)
        after = peak_bytes(step, iterations)
    report = checkpointer.report()
    assert (report["captures"], report["audited"]) == (FIRST_AUDITS + 6, FIRST_AUDITS)
    assert after <= before  # cuDNN may choose a way that takes less memory later on


def test_a_job_that_makes_its_own_plan(tmp_path: Path) -> None:
    job = Job("adam foreach")
    with Checkpointer(job.model, job.optimizer, directory=tmp_path, every=1, on_error="raise") as checkpointer:
        planning = checkpointer._loop.place.planning
        for n in checkpointer.steps(40):
            job.iterate(n)
            if planning._making is not None:
                planning._making._process.wait()
            if checkpointer.report()["plan"] and n > 12:
                break
    assert checkpointer.report()["plan"]["source"] == "recorded"
    assert checkpointer.report()["breaches"] == 0


def test_copies_are_still_made_many_at_once_after_all_of_that(tmp_path: Path) -> None:
    """Whatever the runtime refuses once, it is not asked for again in this process: nothing above was refused."""
    runtime, driver = load_runtime(), ctypes.c_int()
    runtime._library.cudaDriverGetVersion(ctypes.byref(driver))
    if min(runtime.version, driver.value) < 12_080:
        pytest.skip("this runtime, or its driver, has no such call")
    skip_where_unable(BATCHES)
    Job("adam foreach").train(tmp_path, planned("adam foreach", 0))
    assert runtime.batches


@pytest.mark.alone  # a batch of copies into such memory would end them for the process, or CUDA in it
@pytest.mark.parametrize("calls", [("register",), ("register", "allocate_host")])
def test_memory_that_cannot_be_locked(
    calls: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared memory, which CUDA's own takes the place of; and that neither."""

    def refuse(*_: object) -> None:
        raise CheckflowError("CUDA: operation not permitted (error 800)")

    for call in calls:
        monkeypatch.setattr(CudaDevice, call, refuse)
    with caplog.at_level(logging.WARNING, "checkflow"):
        Job("adam foreach").train(tmp_path, planned("adam foreach", 0))
    said = [record.message for record in caplog.records if "cannot be locked in place" in record.message]
    assert len(said) == 1
    assert said[0].startswith("staging memory" if len(calls) == 2 else "captures in host memory end with the process")
