"""A short form of ``make ranks-kills``, and that its check can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks.run import LostError, check, rounds
from tests.support.rank_jobs import run_job


@pytest.mark.slow
@pytest.mark.every_case
def test_kills_of_ranks_lose_nothing(tmp_path: Path) -> None:
    assert sum(rounds(4, 3, tmp_path).values()) == 4


@pytest.mark.slow
def test_what_is_lost_is_found(tmp_path: Path) -> None:
    run_job(tmp_path / "run", 2, tmp_path / "all", "ddp", 1)
    assert check(tmp_path / "all", 6) == 6
    with pytest.raises(LostError, match="step 7 was acknowledged, and step 6 is the newest"):
        check(tmp_path / "all", 7)
    with pytest.raises(LostError, match="there is no checkpoint"):
        check(tmp_path / "run", 1)
