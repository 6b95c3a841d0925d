"""One training step with and without checkpoints: what it is planned to cost, and what it costs.

Each section of the measurement is sent as a row as soon as it is there; one that fails is a row that says why, and does
not cost the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import checkflow
from benchmarks.gpu import figures as gpu_figures
from benchmarks.gpu.figures import CHECKPOINTED, PLAIN, Row
from benchmarks.gpu.link import bare_link, usual_to_host
from benchmarks.gpu.loop import (
    AUDITED,
    Block,
    Case,
    Phases,
    SideCopies,
    Stays,
    TrainingJob,
    block,
    checkpointing,
    phase_medians,
    slowest,
    train,
    warm_up_iterations,
    what_ran,
)
from benchmarks.gpu.worker import scratch
from benchmarks.memory import Before, empty_gpu
from checkflow.core.errors import PlanError
from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import ComputeCapability, Device, DeviceKind, usable_bytes
from checkflow.planner.measure.timing import clock_of
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.measured import measure_step
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace
from checkflow.runtime.loop.training_loop import TrainingLoop
from checkflow.runtime.snapshot.executor import Execution

Send = Callable[[Row], None]
MOST_ERROR = 4000  # characters of a traceback that are kept
RUNNING, TRACING = "running it", "a trace"  # how a plan was made
QUIET_ITERATIONS = 10  # or more, between one single checkpoint and the next
OVERHEAD = 0.01  # of training's time: what the plans that are measured may cost


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of each block, between these numbers of iterations, and rounds of blocks."""

    block_seconds: float = 1.2
    least: int = 24
    most: int = 300
    rounds: int = 2
    recorded: int = 3  # iterations, for the plan
    singles: int = 3  # checkpoints whose following iterations are looked at


QUICK = Effort(block_seconds=0.02, least=4, most=8, rounds=1, recorded=1, singles=1)


@contextlib.contextmanager
def section(send: Send, name: str) -> Iterator[Row]:
    """A row to be filled; what goes wrong is its content then."""
    row: Row = {"section": name}
    try:
        yield row
    except Exception as error:  # noqa: BLE001 - whatever it is, it is kept
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        row |= {"error": said, "traceback": traceback.format_exc()[-MOST_ERROR:]}
    send(row)


def file_system(folder: Path) -> str:
    """The kind of the file system that holds a folder, "tmpfs" or "ext4"; "unknown" where nothing tells."""
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return "unknown"
    rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    above = [(place, kind) for place, kind in rows if folder.resolve().is_relative_to(place)]
    return max(above, key=lambda row: len(row[0]), default=("", "unknown"))[1]


def choose_storage(needed_bytes: int) -> Path:
    """Where checkpoints go while step times are measured: memory where it has room, so that no disk is the limit."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > needed_bytes:
        return shared
    return Path(tempfile.gettempdir())


def _request(device: Device) -> PlanRequest:
    return PlanRequest(
        bandwidth_bytes_per_second=device.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        copy_seconds=device.copy_seconds,
        memory_limit_bytes=usable_bytes(device.memory_bytes),
        overhead=OVERHEAD,
        time_limit_seconds=10.0,
    )


def traced_graph(case: Case, target: str, compute_capability: ComputeCapability | None) -> TrainingGraph:
    """What ``checkflow plan`` knows of a case without running it."""
    settings = {key: str(value) for key, value in case.settings.items()}
    name, step = load_training_step(case.model, batch_size=case.batch_size, settings=settings, optimizer=case.optimizer)
    kind: DeviceKind = "cuda" if target == "cuda" else "cpu"
    return trace(step, name=name, target=kind, compute_capability=compute_capability)


def make_case_plan(job: TrainingJob, device: Device, effort: Effort, row: Row) -> checkflow.Plan:
    """A plan by what the step takes here; where that cannot be measured, by a trace, and the row says why.

    Raises:
        PlanError: there is no plan.
    """
    try:
        measured = measure_step(job.step, name=job.case.model, runs=effort.recorded)
        graph, durations = measured.graph, measured.durations_seconds
        row |= {"made_by": RUNNING, "iteration_seconds": dataclasses.asdict(measured.times.step)}
        row["recorded_seconds"] = dataclasses.asdict(measured.times.recorded)
    except Exception as error:  # noqa: BLE001 - likewise
        row |= {"made_by": TRACING, "not_run": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        row["not_run_traceback"] = traceback.format_exc()[-MOST_ERROR:]
        graph = traced_graph(job.case, job.device.type, device.compute_capability)
        durations = tuple(durations_seconds(graph, device))
    timeline = make_timeline(graph, durations, "segment")
    graph_peak = max(max(part, default=0) for part in graph.live_bytes(eager=False))
    outcome = make_plan(timeline, fingerprint_of(graph, device), _request(device), graph_peak_bytes=graph_peak)
    plan = outcome.plan
    row |= {
        "status": outcome.status,
        "explanation": outcome.explanation,
        "operators": len(graph.operators),
        "state_bytes": graph.state_bytes,
        "planned_for": device.name,
        "planned_iteration_seconds": timeline.iteration_seconds,
        "link_bytes_per_second": device.link_bandwidth_bytes_per_second,
        "training_peak_bytes": timeline.training_peak_bytes,
    }
    if plan is None:
        raise PlanError(f"no plan: {outcome.explanation}")
    row |= {
        "interval": plan.interval,
        "chunks": len(plan.chunks),
        "snapshot_bytes": plan.snapshot_bytes,
        "plan_peak_bytes": plan.plan_peak_bytes,
        "stall_seconds": plan.stall_seconds,
        "granted_overhead": OVERHEAD,
    }
    return plan


def measure_case(
    case: Case, device: torch.device, numbers: Device, effort: Effort, traced: Row | None, send: Send
) -> None:
    """All sections of one case, the main ones first.

    Args:
        numbers: of the device, to plan for.
        traced: what is known of the case by its trace, if it is.
    """
    before = empty_gpu() if device.type == "cuda" else None
    ready = _prepare(case, device, numbers, effort, send)
    if ready is None:
        return
    job, plan, recorded = ready
    state_bytes = sum(spec.size_bytes for spec in plan.fingerprint.state)
    storage = choose_storage(6 * state_bytes)
    iterations = _iterations(job, plan, effort)
    blocks: list[Block] = []
    with section(send, "step_time") as row:
        row |= {"interval": plan.interval, "storage": file_system(storage), "iterations_a_block": iterations}
        for kind in gpu_figures.interleaved(effort.rounds if case.thorough else 1):
            blocks.append(block(job, kind, plan, storage, iterations))
        row |= step_time(blocks)
    with section(send, "memory") as row:
        row |= memory(blocks, plan, before, traced if job.case == case else None, recorded=recorded)
    if not case.thorough:
        return
    with section(send, "following") as row:
        row |= following(job, plan, storage, effort)
    with section(send, "stays") as row:
        row |= stays(job, plan, storage, min(iterations, 10 * plan.interval))
    # Last: once a profiler has watched, every call of CUDA in this process takes longer.
    crossing(job, plan, storage, min(iterations, 5 * plan.interval), state_bytes, send)


def measure_copies(case: Case, device: torch.device, numbers: Device, effort: Effort, send: Send) -> None:
    """What crosses the link by the plan of one case, and nothing else of it."""
    ready = _prepare(case, device, numbers, effort, send)
    if ready is not None:
        job, plan, _ = ready
        state_bytes = sum(spec.size_bytes for spec in plan.fingerprint.state)
        iterations = min(_iterations(job, plan, effort), 5 * plan.interval)
        crossing(job, plan, choose_storage(6 * state_bytes), iterations, state_bytes, send)


def _prepare(
    case: Case, device: torch.device, numbers: Device, effort: Effort, send: Send
) -> tuple[TrainingJob, checkflow.Plan, bool] | None:
    """The job, its plan, and whether that was recorded; None: there is no plan, and the row that is sent says why."""
    job = _build(case, device)
    send({"section": "case", **dataclasses.asdict(job.case)})
    plan: checkflow.Plan | None = None
    with section(send, "plan") as row:
        begun = time.perf_counter()
        plan = make_case_plan(job, numbers, effort, row)
        row["seconds"] = time.perf_counter() - begun
    return None if plan is None else (job, plan, row["made_by"] == RUNNING)


def _build(case: Case, device: torch.device) -> TrainingJob:
    """The job, at half the batch size as often as memory does not suffice for an iteration."""
    job: TrainingJob | None
    while True:
        try:
            job = TrainingJob(case, device)
            job.iterate()
            return job
        except torch.OutOfMemoryError:
            if case.batch_size == 1:
                raise
            case = dataclasses.replace(case, batch_size=case.batch_size // 2)
        job = None  # or what it holds would not be given back
        empty_gpu()


def _iterations(job: TrainingJob, plan: checkflow.Plan, effort: Effort) -> int:
    """How many make a block: a multiple of the plan's interval."""
    seconds = statistics.median(clock_of(job.device).laps(job.iterate, 5)[1:])
    least = min(effort.least, max(4, int(3 * effort.block_seconds / seconds)))  # fewer on a card that takes too long
    wanted = min(max(int(effort.block_seconds / seconds), least), effort.most)
    return -(-wanted // plan.interval) * plan.interval


def step_time(blocks: Sequence[Block]) -> Row:
    """What checkpoints cost an iteration, and where; what became of them."""
    figures = gpu_figures.overhead([(one.kind, one.seconds) for one in blocks])
    checkpointed = [one for one in blocks if one.kind == CHECKPOINTED]
    iterations = sum(len(one.phases) for one in checkpointed)
    held = {
        phase: sum(one.report["held_seconds"][phase] for one in checkpointed) / iterations
        for phase in checkpointed[0].report["held_seconds"]
    }
    seconds = sum(one.loop_seconds for one in checkpointed)
    size_bytes = checkpointed[-1].report["checkpoint_bytes"] or 0
    return {
        **figures,
        "slowest": {kind: slowest(blocks, kind) for kind in (PLAIN, CHECKPOINTED)},
        "phase_seconds": {kind: phase_medians(blocks, kind) for kind in (PLAIN, CHECKPOINTED)},
        "held_seconds": sum(held.values()) - held["buffers"],
        "held_seconds_by_phase": held,
        "persist_wait_seconds": held["buffers"],
        "captures": sum(one.report["captures"] for one in checkpointed),
        "captures_a_block": [one.report["captures"] for one in checkpointed],
        "captures_an_iteration": sum(one.report["captures"] for one in checkpointed) / iterations,
        "committed": sum(one.report["committed"] for one in checkpointed),
        "superseded": sum(one.report["superseded"] for one in checkpointed),
        "failed": sum(one.report["failed"] for one in checkpointed),
        "breaches": sum(one.report["breaches"] for one in checkpointed),
        "checkpoint_bytes": size_bytes,
        "stored_bytes_per_second": sum(one.stored for one in checkpointed) * size_bytes / seconds,
        "ran": checkpointed[-1].report["ran"],
    }


def memory(
    blocks: Sequence[Block], plan: checkflow.Plan, before: Before | None, traced: Row | None, *, recorded: bool
) -> Row:
    """The allocator's peaks of both kinds of blocks, beside what the plan says, and what a trace does.

    Args:
        recorded: whether the plan was made from what ran, and knows what was allocated before: cuBLAS's workspace, and
            what other jobs of this process left. A trace knows its own tensors alone.
    """
    if before is None:
        return {"skipped": "torch counts the memory of CUDA devices alone"}
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspace_bytes = held - torch.cuda.memory_allocated()
    peaks: dict[str, Row] = {}
    for kind in (PLAIN, CHECKPOINTED):
        found = [one.peaks for one in blocks if one.kind == kind and one.peaks]
        peaks[kind] = {name: max(one[name] for one in found) for name in found[0]}
    added = {name: peaks[CHECKPOINTED][name] - peaks[PLAIN][name] for name in peaks[PLAIN]}
    planned_bytes = plan.plan_peak_bytes - plan.timeline.training_peak_bytes
    own_bytes = workspace_bytes + before.allocated_bytes
    unknown_bytes = 0 if recorded else own_bytes
    predictions = {
        "training": (PLAIN, plan.timeline.training_peak_bytes, unknown_bytes),
        "plan": (CHECKPOINTED, plan.plan_peak_bytes, unknown_bytes),
        **({} if traced is None else {"trace": (PLAIN, traced["training_peak_bytes"], own_bytes)}),
    }
    ratios = {
        name: (peaks[kind]["allocated_bytes"] - unknown) / predicted
        for name, (kind, predicted, unknown) in predictions.items()
    }
    return {
        "peaks": peaks,
        "workspace_bytes": workspace_bytes,
        "before_bytes": before.allocated_bytes,
        "predicted_bytes": {name: predicted for name, (_, predicted, _) in predictions.items()},
        "measured_over_predicted": ratios,
        "plan_error": abs(ratios["plan"] - 1),
        "added_bytes": added,
        "planned_added_bytes": planned_bytes,
        # Of what was asked for: the allocator rounds up, and a plan cannot know to what.
        "unplanned_bytes": max(0, added["requested_bytes"] - planned_bytes),
        "unplanned_allocated_bytes": max(0, added["allocated_bytes"] - planned_bytes),
    }


def following(job: TrainingJob, plan: checkflow.Plan, storage: Path, effort: Effort) -> Row:
    """What a single checkpoint costs at its boundary and in the ten iterations after it."""
    settled = max(gpu_figures.FOLLOWED, plan.interval)  # by then its copies have to be over
    gap = -(-(1 + settled + QUIET_ITERATIONS) // plan.interval) * plan.interval
    warm_up = (AUDITED + 1) * gap - 1  # the first iteration that counts ends with the first capture that is not audited
    with Phases(job) as phases, checkpointing(job, plan, storage, every=gap) as checkpointer:
        found = train(job, checkpointer, warm_up=warm_up, iterations=effort.singles * gap, phases=phases)
    return {
        **gpu_figures.following_cost(found.seconds, gap, settled),
        "steps": gpu_figures.FOLLOWED,
        "checkpoints": found.report["captures"],
        "every": gap,
        "ran": found.report["ran"],
    }


def stays(job: TrainingJob, plan: checkflow.Plan, storage: Path, iterations: int) -> Row:
    """Where training waits: how long the hooks last at each anchor, on the training stream and on the host."""
    found = Stays(job.marks)
    warm_up = warm_up_iterations(plan.interval)
    with (
        found.watch(Execution, "reached", lambda given: str(given[0])),
        found.watch(TrainingLoop, "end_turn", lambda given: "boundary"),
        Phases(job) as phases,
        checkpointing(job, plan, storage) as checkpointer,
    ):
        train(
            job, checkpointer, warm_up=warm_up, iterations=iterations, phases=phases,
            at={warm_up: found.found.clear, warm_up + iterations: found.stop},
        )  # fmt: skip
        last = checkpointer.last_capture
    rows = found.rows(iterations)
    return {
        "iterations": iterations,
        "engine": None if last is None else dataclasses.asdict(last.statistics),  # of one capture, by its own events
        "stream_seconds": sum(row["stream_seconds"] for row in rows),
        "host_seconds": sum(row["host_seconds"] for row in rows),
        "anchors": rows[:12],
    }


def crossing(
    job: TrainingJob, plan: checkflow.Plan, storage: Path, iterations: int, state_bytes: int, send: Send
) -> None:
    """What crosses the link, and how fast: by events on the copy engine's stream, then by a profiler.

    Beside them the bare link on as many bytes, right before. What events tell is sent before the profiler begins.
    """
    if job.device.type != "cuda":
        send({"section": "copies", "skipped": "without a GPU there is no link"})
        return
    bare: Row = {}
    with section(send, "bare link") as row:
        bare |= bare_link(job.device, min(state_bytes, 256 * 2**20))
        row |= bare
    first = warm_up_iterations(plan.interval)
    after = first + iterations
    watching = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def stop() -> None:
        torch.cuda.synchronize()
        watching.stop()

    with section(send, "profiled") as row:
        with Phases(job) as phases, checkpointing(job, plan, storage) as checkpointer:
            timed = Timed(SideCopies(checkpointer), checkpointer, bare, send)
            at = {
                first: timed.start, after: timed.stop,
                after + plan.interval: watching.start, after + plan.interval + iterations: stop,
            }  # fmt: skip
            train(
                job, checkpointer, warm_up=first, iterations=2 * iterations + plan.interval, phases=phases, at=at,
            )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix=scratch()) as folder:
            file = Path(folder) / "trace.json"
            watching.export_chrome_trace(str(file))
            row |= gpu_figures.copies(json.loads(file.read_text()), iterations)


@dataclasses.dataclass
class Timed:
    """Times the copies of some iterations, and sends what came of it as the section "copies"."""

    copies: SideCopies
    checkpointer: checkflow.Checkpointer
    bare: Row  # link, if it is known
    send: Send
    captures: int = 0  # before them

    def start(self) -> None:
        self.captures = self.checkpointer.report()["captures"]
        self.copies.start()

    def stop(self) -> None:
        with section(self.send, "copies") as row:
            self.copies.stop()
            row |= self.copies.row()
            captures = self.checkpointer.report()["captures"] - self.captures
            row |= {"captures": captures, "ran": what_ran(self.checkpointer)}
            if captures:
                row |= {"copies_a_capture": row["copies"] / captures, "calls_a_capture": row["calls"] / captures}
            if self.bare:
                bare = usual_to_host(self.bare, row["ran"]["memory"])
                row["of_bare_link"] = row["bytes_per_second"] / bare
                if row["large_bytes_per_second"] is not None:
                    row["large_of_bare_link"] = row["large_bytes_per_second"] / bare
