"""The council on a simulated network that delays, reorders, loses and cuts, with ranks that die and stop."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.runtime.ranks.breaks import BREAKS
from tests.runtime.ranks.simulation import BrokenError, Tally, simulate

SCHEDULES = 500
# The seed from which on a break is looked for: these show in few schedules.
LATE = {"no_generation": 400, "no_deadline_for_receipts": 400, "no_deadline_for_the_end": 100}


def test_what_must_hold_holds_in_every_schedule() -> None:
    tally = Tally()
    for seed in range(SCHEDULES):
        tally.add(simulate(seed))
    # Each outcome occurs, or the schedules would show nothing.
    assert min(vars(tally).values()) > 20, tally


def test_a_job_without_faults_commits_and_ends_by_agreement() -> None:
    committed = 0
    for seed in range(50):
        tally = simulate(seed, faults=False)
        assert (tally.given_up, tally.refused) == (0, 0), seed
        committed += tally.committed
    assert committed > 50


@pytest.mark.every_case
@pytest.mark.parametrize("name", BREAKS)
def test_the_simulation_sees_what_is_broken(name: str) -> None:
    patch, says = BREAKS[name]
    with mock.patch.object(*patch), pytest.raises(BrokenError, match=says):
        for seed in range(LATE.get(name, 0), 3000):
            simulate(seed)
