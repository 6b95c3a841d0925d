"""Real ranks under torchrun, stopped within an epoch and gone on by others: 4, then 2, then 3, then 4 again.

What each rank does is in tests/support/programs/elastic_worker.py. Here it is held against one process that is never
stopped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs.elastic_worker import BATCH_SIZE, SCENARIOS, STOPPED, Scenario
from tests.support.ranks.torchrun import Torchrun

# Thirteen processes import torch before the first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
STARTS = [(4, 1), (2, 1), (3, 1), (4, 0)]  # ranks, and how many steps they take; 0: to the end, and another epoch
Seen = list[list[dict[str, Any]]]  # by start, and by rank


def start(before: Path, after: Path, ranks: int, steps: int) -> list[dict[str, Any]]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    after.mkdir()
    arguments = [
        "--standalone", f"--nproc-per-node={ranks}", "-m", "tests.support.programs.elastic_worker", str(before),
        str(after), str(steps),
    ]  # fmt: skip
    code = Torchrun(after, "output", arguments, environment).wait()
    assert code == 0, (after / "output").read_text()[-4000:]
    return [json.loads((after / f"rank {rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("elastic")
    return [
        start(folder / str(number), folder / str(number + 1), ranks, steps)
        for number, (ranks, steps) in enumerate(STARTS)
    ]


def in_order(ranks: list[list[Any]]) -> list[Any]:
    """What all ranks took of an epoch together: step by step, rank by rank."""
    return [tuple(sample) for step in zip(*ranks, strict=True) for batch in step for sample in batch]


def of_one_process(scenario: Scenario) -> list[list[Any]]:
    """Two epochs of one process that is never stopped."""
    torch.manual_seed(100)  # rank 0's
    loader = Scenario(scenario.size, "even", scenario.seed, scenario.order).loader(rank=0, world_size=1)
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nothing_is_missed_and_nothing_repeated(scenario: Scenario, seen: Seen) -> None:
    of_starts = [[rank[scenario.name] for rank in ranks] for ranks in seen]
    stopped = [in_order([rank["epochs"][0] for rank in ranks]) for ranks in of_starts]
    taken = [sample for part in stopped for sample in part]
    again = in_order([rank["epochs"][1] for rank in of_starts[-1]])
    whole, next_whole = of_one_process(scenario)
    for ranks in of_starts:  # all ranks are at one place, and say the same of it
        assert len({rank["state"] for rank in ranks}) == len({rank["batches"] for rank in ranks}) == 1
        assert len({str(rank["left"]) for rank in ranks}) == 1
    left = of_starts[-1][0]["left"]
    if scenario.tail == "pad" and not stopped[-1]:  # told by who took the last step, and only if its loop goes on
        left[0][1] = len(taken) - scenario.size
    for used, expected, (dropped, repeated) in ((taken, whole, left[0]), (again, next_whole, left[1])):
        # In the order of one process, each with its augmentation: first all that there is, and then what is repeated.
        assert used[: scenario.size] == expected[: len(used)]
        assert len(used) + dropped - repeated == scenario.size
        assert used[scenario.size :] == [expected[turn % scenario.size] for turn in range(repeated)]
        assert scenario.tail == "pad" or repeated == 0
        assert scenario.tail != "pad" or dropped == 0
    assert len(again) == expected_of_four(scenario)
    if scenario.size >= STOPPED:
        assert [len(part) for part in stopped[:3]] == [8, 4, 6]


def expected_of_four(scenario: Scenario) -> int:
    """Samples that four ranks take of a whole epoch."""
    whole, left = divmod(scenario.size, 4 * BATCH_SIZE)
    if scenario.order == "ready batches":  # 14 of them, the last two with three samples in all
        return {"even": 24, "drop": 24, "pad": 27 + 4}[scenario.tail]
    if scenario.tail == "even":
        return scenario.size if scenario.size >= 4 else 0
    return 4 * BATCH_SIZE * (whole + (scenario.tail == "pad" and left > 0))


@pytest.mark.parametrize("size", [size for size in {scenario.size for scenario in SCENARIOS} if size >= STOPPED])
def test_even_tails_leave_out_fewer_samples_than_ranks(size: int, seen: Seen) -> None:
    """And only where a run was stopped before so few that a rank would have none."""
    dropped, _ = seen[-1][0][Scenario(size).name]["left"][0]
    assert dropped == (size - STOPPED if size - STOPPED < 4 else 0)
