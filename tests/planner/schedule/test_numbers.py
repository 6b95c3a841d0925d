"""Numbers that make no sense, or more of them than arithmetic holds: refused in one line, or answered exactly."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings, strategies
from pydantic import AfterValidator, TypeAdapter, ValidationError

from checkflow.core.errors import CheckflowError, PlanError, first_fault
from checkflow.core.machine.device import CATALOGUE, Device, read_device
from checkflow.core.timeline import StateGroup, Timeline
from checkflow.core.units import format_size, parse_size, round_up
from checkflow.planner.schedule.certify import Formulation
from checkflow.planner.schedule.scheduler import Outcome, PlanRequest, make_plan
from tests.support.timelines import make_fingerprint, make_timeline, timelines

ODD = [math.nan, math.inf, -math.inf, -1, 1e18, -1e18]


def plain() -> Timeline:
    return make_timeline([(0, 5), (2, 9), (1, 7)], [(2, [2, 1])])


def plan(timeline: Timeline, **asked: Any) -> Outcome:
    request = PlanRequest(**{"bandwidth_bytes_per_second": 1.0, "memory_bandwidth_bytes_per_second": 100.0} | asked)
    return make_plan(timeline, make_fingerprint(plain()), request, graph_peak_bytes=0)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("field", ["duration_seconds", "live_bytes", "link_bytes"])
def test_steps(field: str, value: float) -> None:
    first, second, *others = plain().steps
    odd = dataclasses.replace(second, **{field: value})
    with pytest.raises(PlanError, match=r"^(step 'op1'|an iteration) (lasts|has) [^\n]*$"):
        plan(dataclasses.replace(plain(), steps=(first, odd, *others)))


@pytest.mark.parametrize("value", ODD)
def test_sizes_of_state(value: Any) -> None:
    group = StateGroup(2, (("model/t2.0", value), ("model/t2.1", 1)))
    with pytest.raises(PlanError, match=r"^state tensor model/t2\.0 has a size of [^\n]*$"):
        plan(dataclasses.replace(plain(), groups=(group,)))


@pytest.mark.parametrize(("live", "size"), [(2**63 - 1, 1), (1, 2**63 - 1), (2**62, 2**62)])
def test_more_bytes_than_memory_counts(live: int, size: int) -> None:
    timeline = make_timeline([(0, 0), (1, live)], [(1, [size])])
    with pytest.raises(PlanError, match="more bytes than any memory has"):
        plan(timeline)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 0])
@pytest.mark.parametrize(
    "field", ["bandwidth_bytes_per_second", "memory_bandwidth_bytes_per_second", "chunk_bytes", "unit_bytes"]
)
def test_requests(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"^{field} must be [^\n]*$"):
        plan(plain(), **{field: value})


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1])
@pytest.mark.parametrize("field", ["memory_limit_bytes", "extra_memory_bytes", "overhead", "copy_seconds"])
def test_limits(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"^{field} must (not be negative|be a whole number of bytes)[^\n]*$"):
        plan(plain(), **{field: value})


@pytest.mark.parametrize("field", ["bandwidth_bytes_per_second", "memory_bandwidth_bytes_per_second"])
def test_links_beyond_any(field: str) -> None:
    with pytest.raises(PlanError, match=rf"^{field} must be [^\n]*$"):
        plan(plain(), **{field: 1e19})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, 1e18])
@pytest.mark.parametrize(
    "field",
    ["memory_bytes", "memory_bandwidth_bytes_per_second", "link_bandwidth_bytes_per_second", "launch_seconds"],
)
def test_device_files(field: str, value: float, tmp_path: Path) -> None:
    data = TypeAdapter(Device).dump_python(CATALOGUE["RTX 3090"], mode="json")
    written = value if field != "memory_bytes" or not math.isfinite(value) else int(value)
    (tmp_path / "d.json").write_text(json.dumps({**data, field: written}))
    with pytest.raises(CheckflowError, match=rf"d\.json: (not a )?device[^\n]*{field}[^\n]*$"):
        read_device(tmp_path / "d.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, 1e18])
def test_a_piece_that_costs_no_number(value: float, tmp_path: Path) -> None:
    data = TypeAdapter(Device).dump_python(CATALOGUE["RTX 3090"], mode="json")
    (tmp_path / "d.json").write_text(json.dumps({**data, "copy_seconds": value}))
    with pytest.raises(CheckflowError, match=r"d\.json: (not a )?device[^\n]*copy_seconds[^\n]*$"):
        read_device(tmp_path / "d.json")


@pytest.mark.every_case
@pytest.mark.parametrize("formulation", ["greedy", "flow"])
@settings(max_examples=25, deadline=None)
@given(timeline=timelines)
def test_huge_memory_is_counted_to_the_byte(formulation: Formulation, timeline: Timeline) -> None:
    """The same training beside 2**61 + 1 bytes that it always holds (no float tells one of them from the next)."""
    more = 2**61 + 1
    steps = tuple(dataclasses.replace(step, live_bytes=step.live_bytes + more) for step in timeline.steps)
    made_for = make_fingerprint(timeline)
    request = PlanRequest(
        1.0, 100.0, formulation=formulation, unit_bytes=1, solver="highs" if formulation == "flow" else "auto"
    )
    small = make_plan(timeline, made_for, request, graph_peak_bytes=0)
    huge = make_plan(dataclasses.replace(timeline, steps=steps), made_for, request, graph_peak_bytes=0)
    assert (huge.status, huge.chunks, huge.interval) == (small.status, small.chunks, small.interval)
    if small.plan is not None:
        assert huge.plan is not None
        assert huge.plan.chunks == small.plan.chunks
        assert huge.plan.plan_peak_bytes == small.plan.plan_peak_bytes + more
        assert huge.plan.certificate.bound_bytes == small.plan.certificate.bound_bytes + more


def test_huge_state_is_planned_exactly() -> None:
    """Two tensors of 2**60 bytes and some: every byte leaves once."""
    sizes = [2**60 + 3, 2**60 + 5]
    timeline = make_timeline([(0, 7), (4, 7), (4, 7)], [(2, sizes)])
    request = PlanRequest(2.0**60, 2.0**62, chunk_bytes=2**59)
    plan = make_plan(timeline, make_fingerprint(timeline), request, graph_peak_bytes=0).plan
    assert plan is not None
    for size, name in zip(sizes, ["model/t2.0", "model/t2.1"], strict=True):
        assert sum(chunk.length_bytes for chunk in plan.chunks if chunk.tensor == name) == size


@given(number=strategies.integers(0, 2**62))
def test_what_is_rounded_up_is_enough_as_it_is_printed(number: int) -> None:
    shown = round_up(number)
    assert shown >= number
    assert shown <= number * 1.01 + 1
    assert parse_size(format_size(shown)) >= number


def test_reasons_are_without_the_checker_s_own_words(tmp_path: Path) -> None:
    def refuse(value: int) -> int:
        raise ValueError("no number\nof mine")

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, Annotated[int, AfterValidator(refuse)]]).validate_python({"size": 3})
    assert "Value error" in str(caught.value)
    assert first_fault(caught.value) == "size: no number of mine"
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_json("{")
    assert first_fault(caught.value).startswith("file: Invalid JSON")
