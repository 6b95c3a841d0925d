"""Traces for ui.perfetto.dev and chrome://tracing: a plan's copies, and those that a run has made, on tracks.

The format is Chrome's "Trace Event Format", in JSON. Each plan, and each measured capture, is a process; its tracks are
threads. Times are counted in whole nanoseconds, so that slices of one track nest exactly.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkflow.core.errors import CheckflowError, PlanError
from checkflow.core.graph import AnchorKind
from checkflow.core.plan import Chunk, Plan
from checkflow.core.reports.capture_times import CaptureFile, CaptureTimes
from checkflow.core.timeline import Step
from checkflow.planner.schedule.replay import snapshot_stall_seconds

MOST_EVENTS = 1_000_000  # what the viewer still opens
TRAINING, ANCHORS, COLLECTIVES, OWN_LINK, LINK, SNAPSHOTS, HELD, STORAGE, LANES = 1, 2, 3, 4, 5, 6, 7, 8, 9
_COLLECTIVES = (
    "all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce", "all_to_all", "alltoall", "broadcast",
    "c10d",
)  # fmt: skip
_TRAINING = ("iteration", "data", "forward_backward", "update", "other")  # the rest holds training
_ROUNDING_NS = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that lasts, on one track of one process."""

    track: int
    name: str
    begin_ns: int
    end_ns: int
    details: Mapping[str, Any] = field(default_factory=dict)


def plan_trace(plan: Plan, *, pid: int = 1, begin_ns: int = 0, title: str = "") -> list[dict[str, Any]]:
    """Return the events of a plan, from its checkpoint's boundary to the end of the iteration in which it ends.

    Args:
        pid, title: of the process that shows it.
        begin_ns: when its boundary is.

    Raises:
        PlanError: there are more events than a viewer opens.
    """
    steps = plan.timeline.steps
    last = max((chunk.offload_step for chunk in plan.chunks), default=0)
    shown = min(plan.interval, last // len(steps) + 1)
    if len(steps) * shown * 3 + len(plan.chunks) * 2 > MOST_EVENTS:
        raise PlanError(
            f"a trace of {len(plan.chunks)} chunks and {shown} iterations of {len(steps)} steps is too long for a "
            "viewer: plan with a larger --chunk-size"
        )
    pauses = _pauses_ns(plan, len(steps) * shown)
    begins = [begin_ns]  # of each step, what training waits for there first
    for index, (wait, copy) in enumerate(pauses):
        begins.append(begins[-1] + wait + copy + _ns(steps[index % len(steps)].duration_seconds))
    slices = [*_training(plan, begins, pauses), *_own_traffic(plan, begins, pauses), *_copies(plan, begins, pauses)]
    title = title or f"planned: {plan.fingerprint.model} on {plan.fingerprint.device}"
    names = {
        TRAINING: "training, as planned",
        ANCHORS: "anchors",
        COLLECTIVES: "segments with a collective",
        OWN_LINK: "link: training's own copies",
        LINK: "link: the checkpoint",
        SNAPSHOTS: "snapshots in device memory",
    }
    events = _process(pid, title, names, slices)
    for index, begin in enumerate(begins[:-1]):
        if (key := steps[index % len(steps)].anchor) is not None:
            events.append(_instant(pid, ANCHORS, key.words, begin))
    events += _memory(plan, begins, pid)
    return events


def run_trace(file: CaptureFile, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """Return the events of a run's last captures; beside each, of its plan if ``plans`` has it, by its digest."""
    if not file.captures:
        raise CheckflowError("the run has made no capture yet: there is nothing to trace")
    start = min(one.begun_unix_seconds for one in file.captures)
    events: list[dict[str, Any]] = []
    for number, capture in enumerate(file.captures):
        begin_ns, pid = _ns(capture.begun_unix_seconds - start), 2 * number + 1
        if (plan := plans.get(capture.plan_digest)) is not None:
            events += plan_trace(plan, pid=pid, begin_ns=begin_ns, title=f"step {capture.step}, planned")
        events += _measured(file, capture, pid + 1, begin_ns)
    if len(events) > MOST_EVENTS:
        raise PlanError("a trace of these plans is too long for a viewer: trace one with checkflow show --perfetto")
    earliest_ns = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] -= min(0, earliest_ns)
    return events


def write_trace(events: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a trace.

    Raises:
        CheckflowError: the file cannot be written.
    """
    shown = [
        {**event, **{name: event[name] / 1000 for name in ("ts", "dur") if name in event}}  # microseconds
        for event in events
    ]
    text = json.dumps({"traceEvents": shown, "displayTimeUnit": "ms"}, allow_nan=False, separators=(",", ":"))
    try:
        path.write_text(text)
    except OSError as error:
        raise CheckflowError(f"cannot write {path}: {error.strerror or error}") from error


# A plan


def _pauses_ns(plan: Plan, count: int) -> list[tuple[int, int]]:
    """What training waits for in each step: the link, and snapshots that are made."""
    made_bytes = [0] * count
    for chunk in plan.chunks:
        if chunk.snapshot_step is not None:
            made_bytes[chunk.snapshot_step] += chunk.length_bytes
    waits = [0.0] * count
    if plan.wait is not None and plan.wait.step < count:
        waits[plan.wait.step] = plan.wait.seconds
    return [
        (_ns(wait), _ns(snapshot_stall_seconds(made, plan.memory_bandwidth_bytes_per_second)) if made else 0)
        for wait, made in zip(waits, made_bytes, strict=True)
    ]


def phase_of(before: AnchorKind | None, after: AnchorKind | None) -> str:
    """Return the phase of what runs between two anchors, as far as these say."""
    forward, gradient = AnchorKind.FORWARD, AnchorKind.GRADIENT
    if before is AnchorKind.OPTIMIZER_PRE:
        return "optimizer"
    if before is AnchorKind.OPTIMIZER_POST and after not in (forward, gradient):
        return "after the optimizer"
    if before is gradient:
        return "backward" if after is not forward else "backward, then forward"
    if after is gradient or (before is forward and after is AnchorKind.OPTIMIZER_PRE):
        return "forward, then backward"
    return "forward" if after is forward or before is forward else "before the forward"


def _training(plan: Plan, begins: Sequence[int], pauses: Sequence[tuple[int, int]]) -> Iterator[Slice]:
    """Iterations, phases and segments, one within the other; what training waits for; collectives."""
    steps = plan.timeline.steps
    count, shown = len(steps), len(begins) - 1
    phases = _phases(steps)
    for begin in range(0, shown, count):
        yield Slice(TRAINING, f"iteration {begin // count + 1}", begins[begin], begins[begin + count])
    for index in range(shown):
        wait, copy = pauses[index]
        begin = begins[index]
        if wait:
            yield Slice(TRAINING, "waits for the link", begin, begin + wait)
        if copy:
            yield Slice(TRAINING, "makes snapshots", begin + wait, begin + wait + copy)
        step = steps[index % count]
        if step.kind != "anchor":
            yield Slice(TRAINING, step.label, begin + wait + copy, begins[index + 1], {"live_bytes": step.live_bytes})
            if any(part in step.label for part in _COLLECTIVES):
                yield Slice(COLLECTIVES, step.label, begin + wait + copy, begins[index + 1])
    if phases is None:
        return
    indices = range(shown)
    for (_, phase), same in itertools.groupby(indices, key=lambda index: (index // count, phases[index % count])):
        run = list(same)
        yield Slice(TRAINING, phase, begins[run[0]], begins[run[-1] + 1])


def _phases(steps: Sequence[Step]) -> list[str] | None:
    """Return each step's phase; None: no anchor says which. An anchor belongs to what follows it."""
    kinds = [None if step.anchor is None else step.anchor.kind for step in steps]
    if AnchorKind.GRADIENT not in kinds and AnchorKind.OPTIMIZER_PRE not in kinds:
        return None
    found: list[str] = []
    after: list[AnchorKind | None] = [None] * len(steps)
    for index in range(len(steps) - 2, -1, -1):
        after[index] = kinds[index + 1] or after[index + 1]
    before: AnchorKind | None = None
    for index, kind in enumerate(kinds):
        before = kind or before
        found.append(phase_of(before, after[index]))
    return found


def _own_traffic(plan: Plan, begins: Sequence[int], pauses: Sequence[tuple[int, int]]) -> Iterator[Slice]:
    """When training's own copies keep the link busy: they go first."""
    for index, busy in enumerate(_own_ns(plan, begins, pauses)):
        if busy:
            begin = begins[index]
            yield Slice(OWN_LINK, plan.timeline.steps[index % len(plan.timeline.steps)].label, begin, begin + busy)


def _own_ns(plan: Plan, begins: Sequence[int], pauses: Sequence[tuple[int, int]]) -> list[int]:
    queued = plan.timeline.queued_bytes(plan.bandwidth_bytes_per_second)
    found = []
    for index in range(len(begins) - 1):
        waiting = queued[index % len(queued)]
        whole = begins[index + 1] - begins[index] - pauses[index][1]
        found.append(whole if math.isinf(waiting) else min(whole, _ns(waiting / plan.bandwidth_bytes_per_second)))
    return found


def _copies(plan: Plan, begins: Sequence[int], pauses: Sequence[tuple[int, int]]) -> Iterator[Slice]:
    """What the checkpoint sends over the link, one after the other, and the copies inside the device."""
    own, free = _own_ns(plan, begins, pauses), begins[0]
    labels = [step.label for step in plan.timeline.steps]
    snapshot_free = begins[0]
    made = sorted((one for one in _joined(plan.chunks) if one.snapshot_step is not None), key=_snapshot_step)
    for chunk in made:
        step = _snapshot_step(chunk)
        snapshot_free = max(snapshot_free, begins[step] + pauses[step][0])
        end = snapshot_free + _ns(snapshot_stall_seconds(chunk.length_bytes, plan.memory_bandwidth_bytes_per_second))
        yield Slice(SNAPSHOTS, chunk.tensor, snapshot_free, end, {"bytes": chunk.length_bytes})
        snapshot_free = end
    for chunk in _joined(plan.chunks):
        step = chunk.offload_step
        free = max(free, begins[step] + own[step])
        end = free + max(1, _ns(chunk.length_bytes / plan.bandwidth_bytes_per_second))
        deadline = plan.deadlines[chunk.tensor]
        details = {
            "bytes": chunk.length_bytes,
            "offset_bytes": chunk.offset_bytes,
            "from": "the live tensor" if chunk.snapshot_step is None else "a snapshot",
            "step": labels[step % len(labels)],
            "deadline": "none" if deadline is None else labels[deadline],
        }
        yield Slice(LINK, chunk.tensor, free, end, details)
        free = end


def _snapshot_step(chunk: Chunk) -> int:
    assert chunk.snapshot_step is not None
    return chunk.snapshot_step


def _joined(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield neighbours in one tensor, that leave one after the other in the same step, as one."""
    last: Chunk | None = None
    for chunk in chunks:
        if (
            last is not None
            and (chunk.tensor, chunk.offload_step, chunk.snapshot_step)
            == (last.tensor, last.offload_step, last.snapshot_step)
            and chunk.offset_bytes == last.offset_bytes + last.length_bytes
        ):
            last = replace(last, length_bytes=last.length_bytes + chunk.length_bytes)
            continue
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield last


def _memory(plan: Plan, begins: Sequence[int], pid: int) -> Iterator[dict[str, Any]]:
    """Yield the device's memory: training's own, and snapshots."""
    steps, change = plan.timeline.steps, [0] * (plan.horizon_steps + 1)
    for chunk in plan.chunks:
        if chunk.snapshot_step is not None:
            change[chunk.snapshot_step] += chunk.length_bytes
            change[chunk.offload_step + 1] -= chunk.length_bytes
    shown = range(len(begins) - 1)
    for index, held in zip(shown, itertools.accumulate(change), strict=False):
        live = steps[index % len(steps)].live_bytes
        values = {"training": live, "snapshots": held}
        yield {"ph": "C", "name": "device memory, bytes", "pid": pid, "tid": 0, "ts": begins[index], "args": values}


# A run


def _measured(file: CaptureFile, capture: CaptureTimes, pid: int, begin_ns: int) -> list[dict[str, Any]]:
    def at(seconds: float) -> int:
        return begin_ns + _ns(seconds)

    slices: list[Slice] = []
    for spell in capture.training:
        track = TRAINING if spell.what in _TRAINING else HELD
        begin, end = at(spell.begun_seconds), at(spell.begun_seconds + spell.seconds)
        slices.append(Slice(track, spell.what.replace("_", " "), begin, end))
    names = {TRAINING: "training, measured", HELD: "held by checkpoints", STORAGE: "storage"}
    ordered = []
    copied: dict[str, list[Slice]] = {"snapshot": [], "link": []}
    for one in capture.copies:
        name = one.tensor or "at the boundary"
        details = {"bytes": one.size_bytes, "chunks": one.chunks}
        track, kind = (SNAPSHOTS, "snapshot") if one.kind == "snapshot" else (LINK, "link")
        if one.seconds is None:
            ordered.append(_instant(pid, track, name, at(one.begun_seconds), details))
            names[track] = f"{kind}: copies ordered"
            continue
        end = at(one.begun_seconds + one.seconds)
        copied[kind].append(Slice(track, name, at(one.begun_seconds), end, details))
    free_track = LANES
    for kind, some in copied.items():
        for lane, parts in enumerate(_lanes(some)):
            track = parts[0].track if not lane else free_track
            free_track += bool(lane)
            names[track] = f"{kind}: copies" + (f", thread {lane + 1}" if lane else "")
            slices += [replace(part, track=track) for part in parts]
    if capture.arrived_seconds > 0:
        slices.append(Slice(STORAGE, "captured", begin_ns, at(capture.arrived_seconds)))
    slices += _stored(capture, at)
    return [*_process(pid, f"step {capture.step}, measured on {file.device}", names, slices), *ordered]


def _stored(capture: CaptureTimes, at: Callable[[float], int]) -> Iterator[Slice]:
    storage = capture.storage
    if storage is None:
        return
    if storage.begun_seconds > capture.arrived_seconds > 0:
        yield Slice(STORAGE, "waits for storage", at(capture.arrived_seconds), at(storage.begun_seconds))
    yield Slice(STORAGE, f"persists step {capture.step}", at(storage.begun_seconds), at(storage.ended_seconds))
    since = storage.begun_seconds
    for name, until in (
        ("audit", storage.audited_seconds),
        ("write and fsync", storage.written_seconds),
        ("commit", storage.published_seconds),
        ("delete older ones", storage.ended_seconds),
    ):
        if until is None:
            return
        yield Slice(STORAGE, name, at(since), at(until))
        since = until


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Spread slices that overlap over as many tracks as needed: training copies, too, while the copy thread does."""
    lanes: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: (one.begin_ns, one.end_ns)):
        for lane in lanes:
            if lane[-1].end_ns <= one.begin_ns:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


# Events


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _process(pid: int, title: str, names: Mapping[int, str], slices: Iterable[Slice]) -> list[dict[str, Any]]:
    """Return a process with its tracks, those that have something on them."""
    by_track: dict[int, list[Slice]] = {}
    for one in slices:
        by_track.setdefault(one.track, []).append(one)
    events = [
        _metadata(pid, 0, "process_name", name=title),
        _metadata(pid, 0, "process_sort_index", sort_index=pid),
    ]
    for track, name in names.items():
        events.append(_metadata(pid, track, "thread_name", name=name))
        events.append(_metadata(pid, track, "thread_sort_index", sort_index=track))
    for track, some in sorted(by_track.items()):
        for one in nested(some):
            events.append(
                {
                    "ph": "X", "cat": names[track], "name": one.name, "pid": pid, "tid": track, "ts": one.begin_ns,
                    "dur": one.end_ns - one.begin_ns, "args": dict(one.details),
                }
            )  # fmt: skip
    return events


def nested(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Yield slices of one track, each within the one before or behind it; what rounding has moved is moved back."""
    open_ends: list[int] = []
    reached = -(2**62)
    for one in sorted(slices, key=lambda one: (one.begin_ns, -one.end_ns)):
        while open_ends and open_ends[-1] <= one.begin_ns + _ROUNDING_NS:
            reached = max(reached, open_ends.pop())
        begin = max(one.begin_ns, reached)
        end = min([one.end_ns, *open_ends[-1:]])
        if end > begin:
            open_ends.append(end)
            yield replace(one, begin_ns=begin, end_ns=end)


def _metadata(pid: int, tid: int, what: str, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values}


def _instant(pid: int, tid: int, name: str, at_ns: int, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": at_ns, "args": dict(details or {})}
