"""The benchmark of several ranks runs, and counts what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ranks

SMALL = ranks.Size(width=256, layers=2, iterations=24, every=4)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    found = ranks.measure(2, tmp_path, SMALL)
    parameters = 2 * (256 * 256 + 256)
    assert found["state_bytes"] == 3 * 4 * parameters + 4 * 4  # Adam's moments, and its step of each parameter
    assert (found["versions"], found["failed"], found["collectives"]) == (6, 0, 0)
    assert found["collectives_of_training"] >= SMALL.iterations
    assert found["copied_to_state"] == pytest.approx(1)
    assert 1 < found["written_to_state"] < 1.1  # with the headers of files
    assert sum(one["own_bytes"] for one in found["reshard"]) == pytest.approx(found["state_bytes"], rel=0.01)
    assert all(one["read_bytes"] >= one["own_bytes"] for one in found["reshard"])


def test_what_is_over_its_bar_is_said() -> None:
    beside = dict.fromkeys(
        (
            "boundary_median_seconds", "boundary_p99_seconds", "boundary_median_cpu_seconds",
            "boundary_p99_cpu_seconds", "commit_on_all_median_seconds",
            "raw_commit_seconds", "copied_to_state", "written_to_state", "load_before",
        ),
        1.0,
    )  # fmt: skip
    lines = ranks.table({**ranks.BARS, **beside, "collectives": 1}).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("over")] == ["collectives"]
