"""Explains why a checkpoint does not fit an interval and what would make it fit, instead of a bare "infeasible"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from checkflow.core.timeline import Timeline
from checkflow.core.units import MOST_BYTES, format_seconds, format_size, round_up
from checkflow.planner.exact import greedy
from checkflow.planner.exact.interval import Question
from checkflow.planner.exact.problem import Problem

_RATE_DIGITS = 1e-9


@dataclass(frozen=True)
class TightInterval:
    """From the boundary to ``end`` at least ``leave_bytes`` must cross the link."""

    end: str
    leave_bytes: int
    seconds: float
    bytes_per_second: float  # least link that takes them in time, besides training's own traffic
    short_bytes: int  # the part of ``leave_bytes`` that the link cannot take by then

    @property
    def own_bytes(self) -> float:
        """What training itself moves over such a link before them."""
        return max(0.0, self.bytes_per_second * self.seconds - self.leave_bytes) if self.seconds else 0.0


def least_bandwidth(question: Question, interval: int = 1) -> int | None:
    """Return, by bisection, the least whole bytes per second that keep an interval's limits; None if none do."""
    timeline = question.timeline
    if not timeline.state_bytes or not timeline.iteration_seconds:
        return 0 if replace(question, bandwidth_bytes_per_second=1.0).fits(interval) else None
    low, high = 0, _fastest(question, interval)
    if not replace(question, bandwidth_bytes_per_second=high).fits(interval):
        return None
    given = math.ceil(question.bandwidth_bytes_per_second)
    if given < high and replace(question, bandwidth_bytes_per_second=given).fits(interval):
        high = given
    while high - low > 1:
        middle = (low + high) // 2
        if replace(question, bandwidth_bytes_per_second=middle).fits(interval):
            high = middle
        else:
            low = middle
    return high


def _fastest(question: Question, interval: int) -> int:
    """Return the bytes per second at which every step of any length, and any wait, carries everything.

    No link gives 2**63 bytes per second; steps too short for that carry nothing.
    """
    timeline, budget = question.timeline, question.budget(interval)
    lasting = [step.duration_seconds for step in timeline.steps if step.duration_seconds > 0]
    if budget.may_wait and budget.seconds > 0:
        lasting.append(budget.seconds)
    most = timeline.state_bytes + question.unit_bytes + sum(step.link_bytes for step in timeline.steps)
    return max(1, min(math.ceil(2 * most / min(lasting, default=math.inf)), MOST_BYTES - 1))


def tight_interval(question: Question, interval: int = 1) -> TightInterval | None:
    """Return the interval, among those whose bytes the link cannot carry, that needs the fastest link.

    Assumes no waiting for the link and as many snapshots as the budget allows. None: memory idles the link (snapshot
    policy), or several limits bind together.
    """
    timeline, problem = question.timeline, question.problem(interval)
    count = len(timeline.steps)
    ends = question.shrunk(interval).ends
    elapsed = list(accumulate(step.duration_seconds for step in timeline.steps))
    tight: TightInterval | None = None
    for end, need, reached in zip(ends, _must_leave(question, problem, interval), problem.reached, strict=True):
        if need <= reached:
            continue
        iteration, step = divmod(end, count)
        leave_bytes = min(need * problem.unit_bytes, timeline.state_bytes)
        seconds = iteration * elapsed[-1] + elapsed[step]
        rate = _needed_rate(timeline, end, leave_bytes, seconds, 0.0 if tight is None else tight.bytes_per_second)
        if rate is not None:
            short_bytes = min((need - reached) * problem.unit_bytes, timeline.state_bytes)
            tight = TightInterval(_moment(timeline, end, interval), leave_bytes, seconds, rate, short_bytes)
    return tight


def _needed_rate(timeline: Timeline, end: int, leave_bytes: int, seconds: float, more_than: float) -> float | None:
    """Return the least bytes per second that leave ``leave_bytes`` by a step's end; None if ``more_than`` does."""
    if math.isinf(more_than):
        return None
    iteration, step = divmod(end, len(timeline.steps))

    def left_over(rate: float) -> float:
        available = timeline.available_bytes(rate)
        return iteration * available[-1] + available[step]

    low = leave_bytes / seconds if seconds else math.inf
    if not any(step.link_bytes for step in timeline.steps) or math.isinf(low):
        return low if low > more_than else None
    if more_than and left_over(more_than) >= leave_bytes:
        return None
    low, high = max(low, more_than), 2 * max(low, more_than)
    while left_over(high) < leave_bytes:
        low, high = high, 2 * high
    while high - low > _RATE_DIGITS * high:
        middle = (low + high) / 2
        low, high = (middle, high) if left_over(middle) < leave_bytes else (low, middle)
    return high


def explain(question: Question, interval: int = 1) -> str:
    """Say in one line why no checkpoint fits every ``interval`` iterations, and what would make one fit."""
    problem = question.problem(interval)
    limit = question.peak_limit_bytes
    if limit is not None and limit < problem.training_peak_bytes:
        return (
            f"training alone needs {_exactly(problem.training_peak_bytes, limit)} of device memory;"
            f" the limit is {_exactly(limit, problem.training_peak_bytes)}: it takes a smaller batch, another device,"
            " or --relax-memory"
        )
    least = least_bandwidth(question, interval)
    seen = question
    if least is None:  # the link is not the reason: assume a fast one
        seen = replace(question, bandwidth_bytes_per_second=_fastest(question, interval))
    rescues = [f"it takes {_rate(round_up(least))}" if least is not None else "no link is fast enough"]
    if more := _more_memory(seen, interval):
        rescues.append(f"or {more} more device memory" if least is not None else f"it takes {more} more device memory")
    if price := _price(question, problem, interval):
        rescues.append(f"or {price}")
    return f"{_reason(question, seen, interval)}; {', '.join(rescues)}"


def _reason(question: Question, seen: Question, interval: int) -> str:
    timeline, budget = seen.timeline, question.budget(interval)
    tight = tight_interval(seen, interval)
    limits = seen
    for alone in (replace(seen, overhead=None), replace(seen, peak_limit_bytes=None)):
        if tight is not None and tight_interval(alone, interval) == tight:
            limits = alone  # the other limit does not matter here
    if tight is not None and not timeline.iteration_seconds:
        return f"{format_size(timeline.state_bytes)} must leave in an iteration that takes no time"
    if tight is not None and tight.seconds > 0:
        needed, given = _rate(tight.bytes_per_second), _rate(question.bandwidth_bytes_per_second)
        if needed == given:
            needed = f"{math.ceil(tight.bytes_per_second)} B/s"
            given = f"{question.bandwidth_bytes_per_second:.0f} B/s"
        uses = f", of which training itself uses {format_size(tight.own_bytes)}" if tight.own_bytes else ""
        held = "" if tight.end == _last(interval) else f", and {_scarce(limits)} no room for more snapshots"
        waits = _waits(question, interval)
        return (
            f"from the boundary to {tight.end} {format_size(tight.leave_bytes)} must leave in"
            f" {format_seconds(tight.seconds)}: {needed}; the link gives {given}{uses}{held}{waits}"
        )
    if tight is not None:
        return (
            f"{format_size(tight.leave_bytes)} would have to leave before {tight.end}, in no time:"
            f" {_scarce(limits)} too little room for snapshots"
        )
    copied = timeline.state_bytes * 2 / question.memory_bandwidth_bytes_per_second
    if question.policy == "snapshot" and not budget.admits(copied):
        return (
            f"the snapshot policy copies all {format_size(timeline.state_bytes)} inside device memory, which stalls"
            f" training for {format_seconds(copied)}, where the overhead allows {format_seconds(budget.seconds)}"
        )
    return f"{_scarce(limits)} too little room for snapshots to keep the link busy"


def _waits(question: Question, interval: int) -> str:
    """Say why training does not simply wait for what the link cannot take in time."""
    budget = question.budget(interval)
    terms = question.least_stall(interval, question.peak_limit(question.problem(interval)))
    if not budget.may_wait or not budget.seconds or terms is None or not terms.wait_units:
        return ""
    prices = question.prices
    text = f", and to wait for the rest takes {format_seconds(prices.waiting_seconds(terms.wait_units))}"
    if terms.snapshots:
        text += f" and {format_seconds(terms.snapshots * prices.snapshot_seconds)} for snapshots"
    return f"{text}, where the overhead allows {format_seconds(budget.seconds)}"


def _more_memory(question: Question, interval: int) -> str:
    """Say how much the memory limit is short of for this link; "" if memory alone cannot help."""
    best = None if question.peak_limit_bytes is None else question.least_peak_bytes(interval)
    if question.peak_limit_bytes is None or best is None or best <= question.peak_limit_bytes:
        return ""
    more = best - question.peak_limit_bytes
    return f"{format_size(more)} ({more} bytes)" if more >= 1000 else format_size(more)


def _price(question: Question, problem: Problem, interval: int) -> str:
    """Say how long training would have to stall, if the budget is too small; "" if more of it cannot help."""
    seconds = interval * question.timeline.iteration_seconds
    waiting = replace(question, overhead=0.0 if question.overhead is None else question.overhead)
    terms = waiting.least_stall(interval, question.peak_limit(problem))
    if terms is None or not seconds:
        return ""
    stall = question.prices.stall_seconds(terms)
    return f"--overhead {_share_up(stall / seconds)} ({format_seconds(stall)} a checkpoint)"


def _must_leave(question: Question, problem: Problem, interval: int) -> list[int]:
    """:func:`checkflow.planner.exact.greedy.must_leave`, with no more snapshots than the budget has seconds for."""
    budget, last = question.budget(interval), problem.steps - 1
    needs = greedy.must_leave(problem, question.policy, question.peak_limit(problem))
    most = budget.most(question.prices.snapshot_seconds)
    if question.policy == "direct" and most < problem.total:
        needs = [max(need, due - int(most)) for need, due in zip(needs, problem.due, strict=True)]
        needs[last] = problem.total
    return needs


def _last(interval: int) -> str:
    return "the next boundary" if interval == 1 else f"the boundary {interval} iterations later"


def _moment(timeline: Timeline, end: int, interval: int) -> str:
    """The end of a step of the horizon, in words."""
    steps = timeline.steps
    iteration, step = divmod(end, len(steps))
    if end == interval * len(steps) - 1:
        return _last(interval)
    later = f" of iteration {iteration + 1}" if iteration else ""
    if step == 0:
        return f"the end of the boundary{later}"
    if steps[step].duration_seconds == 0:
        return steps[step].words + later
    if step + 1 < len(steps) and steps[step + 1].duration_seconds == 0:
        return steps[step + 1].words + later
    return f"the end of {steps[step].label}{later}"


def _scarce(question: Question) -> str:
    names = []
    if question.peak_limit_bytes is not None:
        names.append(f"the memory limit of {format_size(question.peak_limit_bytes)}")
    if question.overhead is not None:
        names.append("the overhead allowed")
    return f"{' and '.join(names) or 'device memory'} {'leave' if len(names) > 1 else 'leaves'}"


def _rate(bytes_per_second: float) -> str:
    return f"{format_size(bytes_per_second)}/s"


def _share_up(share: float) -> str:
    """A share rounded up to three digits, so that the printed value is enough."""
    digits = 2 - math.floor(math.log10(share)) if share > 0 else 0
    return f"{math.ceil(share * 10.0**digits - 1e-9) / 10.0**digits:.{max(0, digits)}f}"


def _exactly(size_bytes: int, other_bytes: int) -> str:
    """A size for people, in bytes where rounding would hide the difference."""
    text = format_size(size_bytes)
    return text if text != format_size(other_bytes) else f"{size_bytes} bytes"
