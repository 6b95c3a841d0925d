"""Text charts: time is cut fairly, nothing is lost, and whatever is there can be seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.cli.tables.chart import TimelineProfile, bars, columns

steps = st.tuples(
    st.one_of(st.just(0.0), st.floats(0.001, 10)),  # seconds
    st.integers(0, 1000),  # live
    st.integers(0, 1000),  # snapshots
)


def profile(rows: list[tuple[float, int, int]], sent_share: float = 0.5) -> TimelineProfile:
    capacities = [round(seconds * 1000) for seconds, _, _ in rows]
    return TimelineProfile(
        [seconds for seconds, _, _ in rows],
        capacities,
        [int(capacity * sent_share) for capacity in capacities],
        [live for _, live, _ in rows],
        [kept for _, _, kept in rows],
    )


@given(st.lists(steps, min_size=1, max_size=30), st.integers(1, 50))
def test_the_highest_memory_is_in_the_chart(rows: list[tuple[float, int, int]], width: int) -> None:
    given_profile = profile(rows)
    found = columns(given_profile, width)
    assert len(found) == width
    peak = given_profile.peak_step
    assert max(column.total_bytes for column in found) == rows[peak][1] + rows[peak][2]
    assert all(0 <= column.link_share <= 1 for column in found)
    assert all(column.live_bytes <= column.total_bytes for column in found)


def test_a_step_fills_its_share_of_the_time() -> None:
    found = columns(TimelineProfile([1.0, 3.0], [10, 30], [10, 0], [5, 7], [0, 1]), 4)
    assert [column.link_share for column in found] == [1.0, 0.0, 0.0, 0.0]
    assert [column.live_bytes for column in found] == [5, 7, 7, 7]
    assert [column.total_bytes for column in found] == [5, 8, 8, 8]


def test_a_step_without_duration_counts_where_it_falls() -> None:
    found = columns(TimelineProfile([1.0, 0.0, 1.0], [10, 0, 10], [0, 0, 0], [1, 9, 2], [0, 0, 0]), 2)
    assert [column.total_bytes for column in found] == [1, 9]


@pytest.mark.parametrize(
    ("share", "rows"),
    [(0.0, ["  ", "  "]), (0.001, ["  ", "▁▁"]), (0.5, ["  ", "██"]), (0.75, ["▄▄", "██"]), (1.0, ["██", "██"])],
)
def test_bars(share: float, rows: list[str]) -> None:
    assert bars([share, share], 2) == rows
