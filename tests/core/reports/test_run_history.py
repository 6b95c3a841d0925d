"""The history of a run: bounded, whatever comes, and true in what it sums up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkflow.core.reports.run_history import MOST_POINTS, HistoryPoint, extended


def point(number: int, checkpoints: int, lag: int) -> HistoryPoint:
    return HistoryPoint(checkpoints, float(number), number, number - lag, 1, 2, 0, lag, lag / 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=400))
def test_a_history_is_bounded_and_loses_no_checkpoint_and_no_lag(ends: list[tuple[int, int]]) -> None:
    came = [point(number, checkpoints, lag) for number, (checkpoints, lag) in enumerate([(0, 0), *ends])]
    history: tuple[HistoryPoint, ...] = ()
    for one in came:
        history = extended(history, one)
    assert len(history) <= MOST_POINTS
    assert (history[0], history[-1].iteration) == (came[0], came[-1].iteration)
    assert sum(one.checkpoints for one in history) == sum(one.checkpoints for one in came)
    assert [one.iteration for one in history] == sorted({one.iteration for one in history})
    since = 0
    for one in history:  # each point has the longest lag, in both units, of those that it stands for
        within = [other.lag_iterations for other in came[since : one.iteration + 1]]
        assert (one.lag_iterations, one.lag_seconds) == (max(within), max(within) / 2)
        since = one.iteration + 1


def test_points_stand_for_equally_many_checkpoints() -> None:
    history: tuple[HistoryPoint, ...] = ()
    for number in range(10 * MOST_POINTS):
        history = extended(history, point(number, int(number > 0), 1))
        assert len(history) <= MOST_POINTS
        assert len({one.checkpoints for one in history[1:-1]}) <= 2  # two while they are joined
    assert len(history) > MOST_POINTS / 2 - 1
