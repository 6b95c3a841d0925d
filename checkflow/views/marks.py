"""What happens when, as marks in lanes; neighbours too short to be told apart become one mark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from checkflow.core.plan import Chunk, Plan
from checkflow.core.units import format_seconds, format_size
from checkflow.planner.schedule.words import step_words
from checkflow.views.page import label

PIXELS = 1000  # of a chart's width: what lies within one becomes a mark
LEAST_MERGED = 2500  # fewer marks are drawn as they are


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that takes time; ``count`` things in the order of time, if it was merged."""

    kind: str  # how it is drawn
    begin_seconds: float
    end_seconds: float
    first: str
    last: str
    details: str  # what only a single one has
    count: int = 1
    size_bytes: int = 0
    deadline_seconds: float = math.inf
    deadline: str = ""

    def words(self, what: str) -> str:
        """Lines for a chart's hover."""
        many = self.count > 1
        lines = [f"<b>{label(self.first)}</b>"]
        if many:
            lines = [f"<b>{self.count} {what}</b>", f"{label(self.first, 60)} … {label(self.last, 60)}"]
        begin, end = format_seconds(self.begin_seconds), format_seconds(self.end_seconds)
        lines.append(f"{begin} to {end} ({format_seconds(self.end_seconds - self.begin_seconds)})")
        if self.size_bytes:
            lines.append(f"{format_size(self.size_bytes)} ({self.size_bytes:,} bytes)")
        if self.details and not many:
            lines.append(self.details)
        if self.deadline:
            lines.append(f"{'first ' if many else ''}deadline: {self.deadline}")
        return "<br>".join(lines)


@dataclass(frozen=True, slots=True)
class Clock:
    """When each step of a plan's horizon begins, in seconds from the boundary; one more for the end."""

    begins_seconds: tuple[float, ...]

    def span(self, step: int) -> tuple[float, float]:
        return self.begins_seconds[step], self.begins_seconds[step + 1]

    @property
    def seconds(self) -> float:
        return self.begins_seconds[-1]


def clock_of(plan: Plan) -> Clock:
    begins, now = [0.0], 0.0
    for step in range(plan.horizon_steps):
        now += plan.timeline.steps[step % len(plan.timeline.steps)].duration_seconds
        now += plan.wait.seconds if plan.wait is not None and plan.wait.step == step else 0.0
        begins.append(now)
    return Clock(tuple(begins))


def copy_marks(plan: Plan, clock: Clock, capacities_bytes: Sequence[int]) -> Iterator[Mark]:
    """Yield each chunk's way over the link: one after the other, behind training's own traffic of the step."""
    own, step, gone = plan.timeline.queued_bytes(plan.bandwidth_bytes_per_second), -1, 0
    for chunk in plan.chunks:
        if chunk.offload_step != step:
            step, gone = chunk.offload_step, 0
        begin, end = clock.span(step)
        queued = min(own[step % len(own)] / plan.bandwidth_bytes_per_second, end - begin)
        rate = (end - begin - queued) / capacities_bytes[step] if capacities_bytes[step] else 0.0
        left = begin + queued + gone * rate
        gone += chunk.length_bytes
        yield _copy_mark(plan, clock, chunk, left, min(end, begin + queued + gone * rate))


def _copy_mark(plan: Plan, clock: Clock, chunk: Chunk, begin: float, end: float) -> Mark:
    whole = f"{chunk.offset_bytes:,} … {chunk.offset_bytes + chunk.length_bytes:,}"
    details = [f"bytes {whole} of the tensor", f"leaves in {label(step_words(plan, chunk.offload_step))}"]
    kind = "direct"
    if chunk.snapshot_step is not None:
        kind = "from snapshot"
        details.append(f"from the copy made at {label(step_words(plan, chunk.snapshot_step))}")
    due, deadline, seconds = plan.deadlines[chunk.tensor], "none: it is never written", math.inf
    if due is not None:
        _, seconds = clock.span(due)  # the last step that may use the link
        deadline = f"{label(step_words(plan, due))}, at {format_seconds(seconds)}"
        deadline += " (met by the snapshot)" if chunk.snapshot_step is not None else ""
    return Mark(
        kind, begin, end, chunk.tensor, chunk.tensor, "<br>".join(details), 1, chunk.length_bytes, seconds, deadline
    )


def traffic_marks(plan: Plan, clock: Clock) -> Iterator[Mark]:
    """Yield training's own traffic on the link, which goes first in each step."""
    link = plan.bandwidth_bytes_per_second
    own = plan.timeline.queued_bytes(link)
    for step in range(plan.horizon_steps):
        begin, end = clock.span(step)
        seconds = min(own[step % len(own)] / link, end - begin)
        if seconds > 0:
            label_ = plan.timeline.steps[step % len(own)].words
            yield Mark("traffic", begin, begin + seconds, label_, label_, "", 1, round(seconds * link))


def compute_marks(plan: Plan, clock: Clock) -> Iterator[Mark]:
    """Yield training's own steps, by phase as far as anchors tell it."""
    steps = plan.timeline.steps
    phases = phases_of(plan)
    for step in range(plan.horizon_steps):
        one, (begin, end) = steps[step % len(steps)], clock.span(step)
        if plan.wait is not None and plan.wait.step == step:
            yield Mark("wait", begin, end, "training waits for the link", "", f"at {label(one.words)}")
        elif end > begin:
            yield Mark(phases[step % len(steps)], begin, end, one.label, one.label, "")


def phases_of(plan: Plan) -> list[str]:
    """Return the phase of each step of an iteration: what the anchors around it say."""
    if plan.timeline.granularity == "operator":  # whose steps have no anchors
        return ["operators"] * len(plan.timeline.steps)
    kinds = [None if step.anchor is None else step.anchor.kind.value for step in plan.timeline.steps]
    following: list[str] = []
    after = "end"
    for kind in reversed(kinds):
        after = kind or after
        following.append(after)
    found, before = [], "forward"
    for kind, then in zip(kinds, reversed(following), strict=True):
        before = kind or before
        if before == "optimizer_pre":
            found.append("optimizer")
        elif before == "gradient":
            found.append("backward")
        elif before == "optimizer_post" and then != "forward":
            found.append("other")
        else:
            found.append("forward into backward" if then == "gradient" else "forward")
    return found


def snapshot_marks(plan: Plan, clock: Clock) -> Iterator[Mark]:
    """Yield how long copies within device memory are kept: one mark for all that are made at one anchor."""
    made: dict[int, list[Chunk]] = {}
    for chunk in plan.chunks:
        if chunk.snapshot_step is not None:
            made.setdefault(chunk.snapshot_step, []).append(chunk)
    for step, chunks in sorted(made.items()):
        last = max(chunks, key=lambda chunk: chunk.offload_step)
        size, names = sum(chunk.length_bytes for chunk in chunks), [chunk.tensor for chunk in chunks]
        end = clock.begins_seconds[last.offload_step + 1]
        details = f"copied at {label(step_words(plan, step))}<br>the last byte leaves in "
        details += label(step_words(plan, last.offload_step))
        yield Mark("kept", clock.begins_seconds[step], end, names[0], names[-1], details, len(chunks), size)


def merged(marks: Iterable[Mark], seconds: float, least: int = LEAST_MERGED) -> list[Mark]:
    """Join marks of one kind that begin and end within the same pixel of ``seconds``, if there are many marks."""
    coming = iter(marks)
    first = list(itertools.islice(coming, least + 1))
    if len(first) <= least or seconds <= 0:
        return [*first, *coming]
    found: list[Mark] = []
    pixel = seconds / PIXELS
    latest: dict[str, tuple[int, int]] = {}  # by kind: the pixel that the last mark lies within, and its place
    for mark in itertools.chain(first, coming):  # of many iterations there may be millions
        place = int(mark.begin_seconds / pixel)
        within = int(mark.end_seconds / pixel) == place
        last, index = latest.get(mark.kind, (-1, -1))
        if within and last == place:
            found[index] = _joined(found[index], mark)
        else:
            latest[mark.kind] = (place if within else -1, len(found))
            found.append(mark)
    return found


def _joined(one: Mark, other: Mark) -> Mark:
    first = min(one, other, key=lambda mark: mark.deadline_seconds)
    return replace(
        one,
        end_seconds=max(one.end_seconds, other.end_seconds),
        last=other.last,
        count=one.count + other.count,
        size_bytes=one.size_bytes + other.size_bytes,
        deadline_seconds=first.deadline_seconds,
        deadline=first.deadline,
    )
