"""The baselines, counted by hand."""

from __future__ import annotations

import pytest

from checkflow.planner.schedule.baselines import Baselines, baselines
from checkflow.planner.schedule.compare import make_comparison
from tests.support.timelines import make_fingerprint, make_timeline


@pytest.mark.parametrize(
    ("steps", "groups", "bandwidth", "expected"),
    [
        # The snapshot of 6 bytes shrinks to 4 before step 2 and to 1 before step 4: 2+6, 9+6, 7+4, 3+4, 8+1.
        (
            [(0, 2), (2, 9), (0, 7), (3, 3), (4, 8)],
            [(3, [2, 2]), (None, [2])],
            1.0,
            Baselines(6.0, 9 + 6, 15, 0.0, 2.0),  # by step 2 two of four bytes have left
        ),
        # Twice the link: 4 bytes leave in step 1.
        (
            [(0, 2), (2, 9), (0, 7), (3, 3), (4, 8)],
            [(3, [2, 2]), (None, [2])],
            2.0,
            Baselines(3.0, 15, 15, 0.0, 0.0),
        ),
        # The peak comes late: by then the released snapshot is gone, the kept one is not.
        ([(0, 1), (5, 1), (5, 20)], [(2, [5])], 1.0, Baselines(5.0, 25, 20, 0.0, 0.0)),
        # Never written, and the iteration too short: one byte is left at its end.
        ([(0, 1), (3, 1)], [(None, [4])], 1.0, Baselines(4.0, 5, 5, 1.0, 1.0)),
        # Due at the boundary.
        ([(0, 1), (9, 1)], [(1, [4])], 2.0, Baselines(2.0, 5, 5, 0.0, 2.0)),
        ([(0, 7)], [], 1.0, Baselines(0.0, 7, 7, 0.0, 0.0)),
    ],
)
def test_baselines(steps, groups, bandwidth: float, expected: Baselines) -> None:
    assert baselines(make_timeline(steps, groups), bandwidth) == expected


@pytest.mark.parametrize(("bandwidth", "stall"), [(4.0, 2 * 12 / 8), (1.5, 2 * 12 / 8 + 2), (1.0, 2 * 12 / 8 + 6)])
def test_checkfreq_s_snapshots_wait_for_the_link_too(bandwidth: float, stall: float) -> None:
    """Twelve bytes in six seconds: the copy on the device, and state / bandwidth less the iteration."""
    timeline = make_timeline([(0, 20), (4, 20), (2, 20)], [(1, [4]), (2, [5]), (None, [3])])
    row = make_comparison(
        "m", make_fingerprint(timeline), timeline, bandwidth_bytes_per_second=bandwidth, link_share=None,
        memory_bandwidth_bytes_per_second=8.0, policy="direct", status="infeasible", peak_bytes=None,
        stall_seconds=None,
        interval=None, explanation="",
    )  # fmt: skip
    assert row.checkfreq_gpu_stall_seconds == stall
