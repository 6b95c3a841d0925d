"""Scripts as people write them, killed again and again, end as if nobody had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import jobs
from tests.support.scripts import SCRIPTS, Life, run

KILLS = (7, 8, 9)  # iterations of a life: from the first ones on, something is on its way to storage


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_three_times_it_ends_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    assert jobs.in_a_process(run, name, Life(tmp_path / "whole")) == 0
    for iterations in KILLS:
        assert jobs.in_a_process(run, name, Life(tmp_path / "killed", iterations)) == -9
    assert jobs.in_a_process(run, name, Life(tmp_path / "killed")) == 0
    killed, whole = (torch.load(tmp_path / life / "result.pt", weights_only=True) for life in ("killed", "whole"))
    torch.testing.assert_close(killed, whole, rtol=0, atol=0)
