"""The whole runtime over the engine for GPUs, on a simulated device that copies as late as it may (or as early)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Plan
from checkflow.core.state import TrainingState
from checkflow.runtime.format import digest
from checkflow.runtime.memory_tier.staging import StagingBuffers
from checkflow.runtime.snapshot import capturer as capturer_module
from checkflow.runtime.snapshot.capturer import Capturer
from checkflow.runtime.snapshot.executor import Execution
from checkflow.runtime.state.collect import capture_generators, restore_generators
from checkflow.runtime.store.discovery import find
from checkflow.runtime.transfer.cuda import CudaCopyEngine
from tests.support.gpu.fake_device import FakeDevice, simulate_gpu
from tests.support.oracle import Truth, assert_checkpoint_is, clone_state, random_plan, run_oracle
from tests.support.waiting import blocked, wait_for


@pytest.fixture(autouse=True)
def _random_plans_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "check_plan", plans.validate)


class Net(nn.Module):
    """Batch norm, and weights that are never written."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
        self.frozen = nn.Parameter(torch.randn(900), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.relu(self.norm(self.one(x)))) * self.frozen[:4]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, foreach=True)
        self.models, self.optimizers = {"model": self.model}, {"optimizer": self.optimizer}

    def iterate(self, _: int) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(torch.randn(5, 6)), torch.randint(0, 4, (5,))).backward()
        self.optimizer.step()

    def train(self, directory: Path, plan: Plan, iterations: int = 9, **options: Any) -> tuple[Checkpointer, Any]:
        options = {"every": plan.interval, "audit": 1, "keep_latest": 99, "on_error": "raise"} | options
        with Checkpointer(self.model, self.optimizer, directory=directory, plan=plan, **options) as checkpointer:
            truths = run_oracle(checkpointer, self.iterate, self.models, self.optimizers, iterations=iterations)
        return checkpointer, truths


class WholeStep:
    """Writes all that a step writes as a replay does: no hook is called, no version counter moves."""

    def __init__(self, job: Job) -> None:
        moments = (state["exp_avg"] for state in job.optimizer.state.values())
        self._written = [job.model.one.weight, *job.model.buffers(), *moments]

    def run(self) -> None:
        for tensor in self._written:
            array = tensor.detach().numpy()
            array += np.ones((), array.dtype)


class Graph:
    """Writes the statistics of batch norm as a replay does: no operator is dispatched, no version counter moves."""

    def __init__(self, model: Net) -> None:
        self.model, self.batch = model, torch.empty(0)

    @torch.no_grad()
    def run(self) -> None:
        norm, h = self.model.norm, self.model.one(self.batch)
        norm.running_mean.numpy()[:] += h.mean(0).numpy()  # type: ignore[union-attr]
        norm.running_var.numpy()[:] += h.var(0).numpy()  # type: ignore[union-attr]
        norm.num_batches_tracked.numpy()[...] += 1  # type: ignore[union-attr]


def plan_of(seed: int, interval: int = 1) -> Plan:
    job = Job()
    job.iterate(0)
    return random_plan(job.models, job.optimizers, seed, chunk_bytes=600, interval=interval)


def assert_true(directory: Path, truths: dict[int, Truth], steps: Sequence[int]) -> None:
    assert [int(path.name[5:]) for path in sorted(find(directory))] == list(steps)
    for path in find(directory):
        assert_checkpoint_is(path, truths[int(path.name[5:])])


@pytest.mark.parametrize("copies", ["last", "first", ""])
@pytest.mark.parametrize("interval", [1, 3])
def test_every_checkpoint_is_one_boundary(
    copies: str, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several iterations too, in which what is never written leaves late. Audited as on a GPU."""
    monkeypatch.setattr(digest, "in_host_memory", lambda _: False)
    device = simulate_gpu(monkeypatch, copies=copies)
    checkpointer, truths = Job().train(tmp_path, plan_of(3, interval))
    assert_true(tmp_path, truths, range(interval, 10, interval))
    report = checkpointer.report()
    assert report["breaches"] == report["failed"] == 0
    assert report["audited"] == 9 // interval
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("first", [0, 4])
def test_a_module_inside_of_a_cuda_graph_is_copied_at_the_boundary(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward is a replay, which no inner hook sees: from the beginning, or from an iteration on."""
    simulate_gpu(monkeypatch, copies="last")
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graph.run())
    job = Job()
    model, norm, plan, graph = job.model, job.model.norm, plan_of(3), Graph(job.model)

    def replay(x: torch.Tensor) -> torch.Tensor:
        graph.batch = x
        torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
        return model.two(F.relu(F.batch_norm(model.one(x), None, None, norm.weight, norm.bias, training=True)))

    def iterate(n: int) -> None:
        if n == first:
            model.forward = replay  # type: ignore[method-assign]
        Job.iterate(job, n)

    monkeypatch.setattr(job, "iterate", iterate)
    checkpointer, truths = job.train(tmp_path, plan)
    assert_true(tmp_path, truths, range(1, 10))
    report = checkpointer.report()
    assert (report["breaches"], report["failed"]) == (0, 0)


@pytest.mark.parametrize("eager", [0, 3])
def test_a_step_that_is_one_cuda_graph_is_copied_where_the_job_marks_its_end(
    eager: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = simulate_gpu(monkeypatch, copies="last")
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graph.run())
    job, truths = Job(), {}
    job.iterate(0)
    graph: Any = WholeStep(job)
    options: Any = {"every": 1, "audit": 0, "keep_latest": 99, "on_error": "raise"}
    with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan_of(3), **options) as checkpointer:
        for n in range(1, 8):
            if n <= eager:
                job.iterate(n)
            else:
                torch.cuda.CUDAGraph.replay(graph)
            checkpointer.step()
            truths[n] = clone_state(job.models, job.optimizers)
    assert_true(tmp_path, truths, range(1, 8))
    assert caplog.text.count("inside of compiled code or of a CUDA graph, where no hook sees it") == 1
    assert device.allocated_bytes == 0


def test_of_two_optimizers_one_may_step_inside_of_a_cuda_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a GAN: the other one's step shows where the iteration ends."""
    device = simulate_gpu(monkeypatch, copies="last")
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graph.run())
    job, truths = Job(), {}
    critic = torch.optim.SGD(job.model.two.parameters(), lr=0.1)
    job.optimizer = torch.optim.Adam([*job.model.one.parameters(), *job.model.norm.parameters()])
    job.optimizers = {"optimizer": job.optimizer, "critic": critic}
    job.iterate(0)
    plan = random_plan(job.models, job.optimizers, 3, chunk_bytes=600)
    graph: Any = WholeStep(job)
    options: Any = {"every": 1, "audit": 0, "keep_latest": 99, "on_error": "raise"}
    with Checkpointer(job.model, job.optimizers, directory=tmp_path, plan=plan, **options) as checkpointer:
        for n in range(1, 9):
            critic.zero_grad()
            F.cross_entropy(job.model(torch.randn(5, 6)), torch.randint(0, 4, (5,))).backward()
            if n <= 3:
                job.optimizer.step()
            else:
                torch.cuda.CUDAGraph.replay(graph)
            critic.step()
            checkpointer.step()
            truths[n] = clone_state(job.models, job.optimizers)
    assert_true(tmp_path, truths, range(1, 9))
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("apart", ["all", "forward"])
def test_a_boundary_comes_behind_the_streams_that_training_used(
    apart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is gathered any more when they are used, and before digests are reckoned."""
    device, job, told = simulate_gpu(monkeypatch, copies="first"), Job(), []
    record, wait, digests = device.record, device.wait, capturer_module.Digests
    streams: dict[Any, str] = {}

    class Scale:
        """Extra state on the device: it is read there."""

        def state_dict(self) -> dict[str, float]:
            told.append("extra")
            return {"scale": 1.0}

        def load_state_dict(self, state: Any) -> None: ...

    def iterate_elsewhere(n: int) -> None:
        told.append(f"iteration {n}")
        device.on_stream(f"own {n}")
        job.optimizer.zero_grad()
        F.cross_entropy(job.model(torch.randn(5, 6)), torch.randint(0, 4, (5,))).backward()
        if apart == "forward":
            device.on_stream("main")
        job.optimizer.step()
        device.on_stream("main")

    def recorded(stream: str, **options: Any) -> Any:
        event = record(stream, **options)
        streams[event] = stream
        return event

    def waited(stream: str, event: Any) -> None:
        told.append(f"{stream} waits for {streams[event]}")
        wait(stream, event)

    monkeypatch.setattr(device, "record", recorded)
    monkeypatch.setattr(device, "wait", waited)
    monkeypatch.setattr(capturer_module, "Digests", lambda tensors: (told.append("digests"), digests(tensors))[1])
    job.iterate = iterate_elsewhere  # type: ignore[method-assign]
    options: dict[str, Any] = {"state": {"scale": Scale()}}
    _, truths = job.train(tmp_path, plan_of(3), 4, **options)
    told.append("iteration 4")
    assert_true(tmp_path, truths, range(1, 5))
    del told[: told.index("iteration 0")]
    assert [line for line in told if line in ("digests", "extra") or line.startswith("main waits for own")][:3] == [
        "main waits for own 0", "extra", "digests",
    ]  # fmt: skip
    for n in range(4):
        after = told[told.index(f"main waits for own {n}") + 1 :]
        assert after.index("extra") < after.index("digests") < after.index(f"own {n} waits for main")
        assert after.index(f"own {n} waits for main") < after.index(f"iteration {n + 1}")


@pytest.mark.parametrize(("interval", "every"), [(1, 1), (3, 3), (2, 4)])
def test_the_host_waits_at_no_regular_boundary(
    interval: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No capture is delivered before the last boundary: whoever waited for one before would wait in vain."""
    monkeypatch.setattr(digest, "in_host_memory", lambda _: False)
    device, job = simulate_gpu(monkeypatch), Job()
    iterate = job.iterate
    device.host_waits.clear()

    def look(n: int) -> None:
        assert checkpointer.report()["newest_capture"] is None
        assert checkpointer._saving.writer.outstanding == 0
        assert device.synchronized == device.starved == 0
        iterate(n)
        if n == 11:
            device.host_waits.set()

    with Checkpointer(
        job.model, job.optimizer, directory=tmp_path, plan=plan_of(3, interval), every=every, audit=1,
        keep_latest=99, on_error="raise", host_buffers=12,
    ) as checkpointer:  # fmt: skip
        truths = run_oracle(checkpointer, look, job.models, job.optimizers, iterations=12)
    assert not device.starved
    assert_true(tmp_path, truths, range(every, 13, every))
    report = checkpointer.report()
    assert report["captures"] == report["committed"] == report["audited"] == 12 // every
    assert report["newest_capture"]["step"] == 12
    assert report["bytes"]["captured_bytes"] == 12 // every * report["bytes"]["state_bytes"]


def test_where_buffers_run_out_the_oldest_capture_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, job = simulate_gpu(monkeypatch), Job()
    iterate = job.iterate

    def look(n: int) -> None:
        capturer = checkpointer._loop.execution.capturer
        if n == 0:
            assert capturer.make_room()
            device.host_waits.clear()
        if n == 2:  # of the two buffers one is on its way, one is being filled
            assert capturer.last_report is None
            device.host_waits.set()
            capturer.make_room()
            assert capturer.last_report is not None
            assert capturer.last_report.step == 1
        iterate(n)

    plan = plan_of(3)
    with Checkpointer(
        job.model, job.optimizer, directory=tmp_path, plan=plan, every=1, keep_latest=99, host_buffers=2
    ) as checkpointer:
        truths = run_oracle(checkpointer, look, job.models, job.optimizers, iterations=6)
    assert not device.starved
    assert_true(tmp_path, truths, range(1, 7))


def test_what_a_capture_did_is_known_at_the_first_boundary_after_it_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be that one captured or not."""
    device, job = simulate_gpu(monkeypatch), Job()
    iterate, reports = job.iterate, []
    device.host_waits.clear()

    def look(n: int) -> None:
        capturer = checkpointer._loop.execution.capturer
        reports.append(capturer.last_report and capturer.last_report.step)
        if n == 6:
            device.host_waits.set()
            (leaving,) = capturer._leaving
            leaving.concluded.wait()
        iterate(n)

    with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan_of(3, 2), every=4) as checkpointer:
        run_oracle(checkpointer, look, job.models, job.optimizers, iterations=8)
    assert reports == [None] * 7 + [4]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_copy_that_fails_behind_its_boundary_costs_that_checkpoint_alone(
    on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, job = simulate_gpu(monkeypatch), Job()
    iterate, wait_for = job.iterate, CudaCopyEngine._wait_for

    def fail_the_second(engine: CudaCopyEngine, capture: Any) -> CheckflowError | None:
        error = wait_for(engine, capture)
        waited.append(error)
        return CheckflowError("CUDA: unspecified launch failure") if len(waited) == 2 else error

    def look(n: int) -> None:
        if n == 4:  # three were concluded, and the fourth is in flight
            device.host_waits.set()
        iterate(n)

    def close(buffers: StagingBuffers, **options: bool) -> None:
        free.append(buffers.free)
        close_buffers(buffers, **options)

    waited: list[CheckflowError | None] = []
    free: list[int] = []
    close_buffers = StagingBuffers.close
    monkeypatch.setattr(StagingBuffers, "close", close)
    monkeypatch.setattr(CudaCopyEngine, "_wait_for", fail_the_second)
    device.host_waits.clear()
    job.iterate = look
    with (
        caplog.at_level(logging.WARNING, "checkflow"),
        contextlib.nullcontext() if on_error == "warn" else pytest.raises(CheckflowError, match="unspecified launch"),
    ):
        checkpointer, truths = job.train(tmp_path, plan_of(2), on_error=on_error, host_buffers=6)
    assert not device.starved
    assert free[-1] == 6  # none is lost
    steps = [int(path.name[5:]) for path in sorted(find(tmp_path))]
    assert 2 not in steps
    assert {1, 3, 4} <= set(steps)
    assert device.allocated_bytes == 0
    if on_error == "warn":
        assert steps == [1, 3, 4, 5, 6, 7, 8, 9]
        assert_true(tmp_path, truths, steps)
        report = checkpointer.report()
        assert report["failed"] == 1
        assert report["last_failure"] == "CheckflowError: CUDA: unspecified launch failure"
        assert "the checkpoint of step 2 is given up: CheckflowError: CUDA: unspecified launch failure" in caplog.text


def test_a_layout_is_given_up_when_what_was_concluded_has_read_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the memory of tensors that were replaced, which may belong to a stream that waits for nothing."""
    device, job = simulate_gpu(monkeypatch), Job()
    iterate, map_chunks, finish = job.iterate, Capturer._map_chunks, CudaCopyEngine.finish
    arranged: list[int | None] = []

    def look(self: Capturer, state: TrainingState) -> None:
        assert not self._leaving
        arranged.append(None if self.last_report is None else self.last_report.step)
        map_chunks(self, state)

    def replace(n: int) -> None:
        iterate(n)
        if n == 2:
            device.host_waits.clear()
        elif n == 4:
            job.model.two.weight.data = job.model.two.weight.data.clone()

    def wait(engine: CudaCopyEngine) -> None:
        device.host_waits.set()
        finish(engine)

    monkeypatch.setattr(CudaCopyEngine, "finish", wait)
    monkeypatch.setattr(Capturer, "_map_chunks", look)
    # The look alone: what follows it would have waited, too.
    monkeypatch.setattr(Execution, "follow", lambda self, idle=False: self._walk.current())
    job.iterate = replace
    _, truths = job.train(tmp_path, plan_of(3), iterations=7, host_buffers=6)
    assert arranged == [None, 4]
    assert not device.starved
    assert_true(tmp_path, truths, range(1, 8))


def test_where_training_does_not_wait_the_audit_tells_and_all_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: no stream waits for a copy. What is torn is void; then everything leaves at the boundary."""
    monkeypatch.setattr(digest, "in_host_memory", lambda _: False)
    simulate_gpu(monkeypatch)
    monkeypatch.setattr(CudaCopyEngine, "_hold", lambda self, stream, part: None)
    job = Job()
    checkpointer, truths = job.train(tmp_path, plan_of(5), on_error="warn")
    report = checkpointer.report()
    assert report["breaches"] >= 1
    state_bytes = sum(tensor.nbytes for tensor in clone_state(job.models, job.optimizers).values())
    assert report["newest_capture"]["boundary_bytes"] == state_bytes
    steps = [int(path.name[5:]) for path in sorted(find(tmp_path))]
    assert len(steps) >= 4
    assert_true(tmp_path, truths, steps)


def test_tensors_that_are_not_in_the_plan_leave_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch)
    plan, job = plan_of(1), Job()
    iterate = job.iterate

    def grow(n: int) -> None:
        if n == 3:
            job.model.register_buffer("late", torch.arange(50.0))
        if n > 3:
            job.model.late.mul_(1.5)
        iterate(n)

    job.iterate = grow
    _, truths = job.train(tmp_path, plan)
    assert_true(tmp_path, truths, range(1, 10))
    assert "model/late" in truths[9]


@pytest.mark.parametrize("fails_at", [0, 7, 20])
def test_a_copy_that_the_device_refuses_costs_one_checkpoint(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, job = simulate_gpu(monkeypatch), Job()
    iterate = job.iterate

    def fail_once(n: int) -> None:
        if n == 4:
            device.fails_at = fails_at
        iterate(n)

    job.iterate = fail_once
    with caplog.at_level(logging.WARNING, "checkflow"):
        checkpointer, truths = job.train(tmp_path, plan_of(2), on_error="warn")
    assert checkpointer.report()["failed"] == 1
    assert "is given up: CheckflowError: CUDA: invalid argument" in caplog.text
    steps = [int(path.name[5:]) for path in sorted(find(tmp_path))]
    assert len(steps) == 8
    assert_true(tmp_path, truths, steps)


def test_a_device_that_fails_is_raised_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, job = simulate_gpu(monkeypatch), Job()
    iterate = job.iterate

    def fail(n: int) -> None:
        iterate(n)
        device.failure = "CUDA: an illegal memory access was encountered" if n == 2 else ""

    job.iterate = fail
    with pytest.raises(CheckflowError, match="illegal memory access"):
        job.train(tmp_path, plan_of(2))


def test_a_device_that_fails_for_a_while_costs_the_checkpoints_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were on their way, and those that began meanwhile; training never hears of it."""
    device, job = simulate_gpu(monkeypatch), Job()
    iterate = job.iterate

    def fail(n: int) -> None:
        if n == 2:
            device.host_waits.clear()
        iterate(n)
        device.failure = "CUDA: an illegal memory access was encountered" if n in (4, 5) else ""
        if n == 4:
            device.host_waits.set()

    job.iterate = fail
    checkpointer, truths = job.train(tmp_path, plan_of(2), on_error="warn", host_buffers=6)
    steps = [int(path.name[5:]) for path in sorted(find(tmp_path))]
    assert {1, 8, 9} <= set(steps)
    assert not {4, 5} & set(steps)
    assert_true(tmp_path, truths, steps)
    report = checkpointer.report()
    assert report["committed"] + report["failed"] == 9
    assert not device.starved


def test_a_break_out_of_the_loop_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device: FakeDevice = simulate_gpu(monkeypatch)
    plan, job = plan_of(4), Job()
    for n in range(9):
        job.iterate(n)
    truth = clone_state(job.models, job.optimizers)
    for upto in (4, 9):
        job = Job()
        with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan, every=1) as checkpointer:
            for n in checkpointer.steps(9):
                job.iterate(n)
                if n + 1 == upto:
                    break
    assert device.allocated_bytes == 0
    state = clone_state(job.models, job.optimizers)
    assert state.keys() == truth.keys()
    assert all(torch.equal(state[name], truth[name]) for name in truth)


def test_hooks_on_two_threads_come_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of what lies on a GPU and of what lies in host memory fires hooks on two threads at once."""
    simulate_gpu(monkeypatch)
    job = Job()
    with Checkpointer(job.model, job.optimizer, directory=tmp_path, plan=plan_of(0), every=1) as checkpointer:
        execution = checkpointer._loop.execution
        inside, overlapped, left = threading.Event(), threading.Event(), threading.Event()
        other = threading.Thread(target=execution.reached, args=(AnchorKey(AnchorKind.FORWARD, "model/one"),))

        def work(key: AnchorKey) -> None:
            if key == BOUNDARY:
                inside.set()
                other.start()
                wait_for(blocked(other))  # it cannot come in here
                left.set()
            elif not left.is_set():
                overlapped.set()

        monkeypatch.setattr(Capturer, "gathering", True)
        monkeypatch.setattr(execution.capturer, "reached", work)
        execution.reached(BOUNDARY)
        other.join(60)
        assert inside.is_set()
        assert not overlapped.is_set()


def test_generators_of_gpus_that_are_no_longer_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: restored.append((state, index)))
    restore_generators({**capture_generators(), "cuda": ["a", "b", "c"]})
    assert restored == [("a", 0), ("b", 1)]
    restore_generators({**capture_generators(), "cuda": ["a"]})
    assert restored[2:] == [("a", 0)]
