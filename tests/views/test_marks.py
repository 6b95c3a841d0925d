"""Marks: at the times that the plan gives them, and joined without loss."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.planner.schedule.replay import check_plan
from checkflow.views import marks
from checkflow.views.marks import PIXELS, Mark, merged
from tests.support.html.page_data import make_page_plan

LASTING = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.1, 0.4, 1.0, 7.0])), max_size=300)


@given(LASTING)
def test_joined_marks_keep_all_counts_bytes_and_the_first_deadline(lasting: list[tuple[str, float]]) -> None:
    now, every = 0.0, []
    for place, (kind, seconds) in enumerate(lasting):
        due = math.inf if place % 3 else float(1000 - place)
        every.append(Mark(kind, now, now + seconds, f"{place}", f"{place}", "", 1, place, due, f"at {due}"))
        now += seconds
    found = merged(every, PIXELS * 1.0, least=0)  # a pixel is a second
    assert sum(mark.count for mark in found) == len(every)
    assert sum(mark.size_bytes for mark in found) == sum(mark.size_bytes for mark in every)
    for kind in {mark.kind for mark in every}:
        of_kind, left = [mark for mark in found if mark.kind == kind], [mark for mark in every if mark.kind == kind]
        assert len(of_kind) <= 2 * (now + 1)
        for mark in of_kind:
            parts, left = left[: mark.count], left[mark.count :]
            assert (mark.first, mark.last) == (parts[0].first, parts[-1].last)
            assert (mark.begin_seconds, mark.end_seconds) == (parts[0].begin_seconds, parts[-1].end_seconds)
            assert mark.deadline_seconds == min(part.deadline_seconds for part in parts)
            assert mark.deadline == f"at {mark.deadline_seconds}"
            assert mark.count == 1 or int(mark.begin_seconds) == int(mark.end_seconds)
        assert not left


def test_few_marks_stay_as_they_are() -> None:
    every = [Mark("a", 0.0, 0.0, str(place), str(place), "") for place in range(9)]
    assert merged(every, 1.0) == every


@pytest.mark.parametrize("bandwidth", [0.5e9, 0.9e9, 1.6e9, 8e9])
def test_chunks_cross_the_link_one_after_the_other_in_their_steps(bandwidth: float) -> None:
    plan = make_page_plan(bandwidth, 0.5)
    replay, clock = check_plan(plan), marks.clock_of(plan)
    copies = list(marks.copy_marks(plan, clock, replay.capacity_bytes))
    own = list(marks.traffic_marks(plan, clock))
    assert len(copies) == len(plan.chunks)
    reached = 0.0
    for mark, chunk in zip(copies, plan.chunks, strict=True):
        begin, end = clock.span(chunk.offload_step)
        assert begin - 1e-12 <= mark.begin_seconds <= mark.end_seconds <= end + 1e-12
        assert mark.begin_seconds >= reached - 1e-12  # the one before has left
        reached = mark.end_seconds
        seconds = chunk.length_bytes / plan.bandwidth_bytes_per_second
        assert mark.end_seconds - mark.begin_seconds == pytest.approx(seconds, rel=0.01)
        due = plan.deadlines[chunk.tensor]
        assert mark.deadline_seconds == (math.inf if due is None else clock.begins_seconds[due + 1])
        if chunk.snapshot_step is None:
            assert mark.end_seconds <= mark.deadline_seconds + 1e-12
        for traffic in own:
            assert mark.end_seconds <= traffic.begin_seconds + 1e-9 or mark.begin_seconds >= traffic.end_seconds - 1e-9
    wait = 0.0 if plan.wait is None else plan.wait.seconds
    assert clock.seconds == pytest.approx(plan.interval * plan.timeline.iteration_seconds + wait)


def test_phases_follow_the_anchors() -> None:
    plan = make_page_plan(layers=2)
    named = [
        (step.label, phase)
        for step, phase in zip(plan.timeline.steps, marks.phases_of(plan), strict=True)
        if step.kind == "segment"
    ]
    assert named == [
        ("convolution", "forward"),
        ("addmm_0", "forward"),
        ("addmm_1", "forward into backward"),
        ("addmm_backward_1 … mm_1", "backward"),
        ("addmm_backward_0 … mm_0", "backward"),
        ("_foreach_add_", "optimizer"),
    ]
