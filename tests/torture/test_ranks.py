"""``checkflow torture -- torchrun …``: kills meet the launcher and all ranks, or one rank alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from checkflow.cli.main import FOUND
from checkflow.cli.main import main as checkflow
from checkflow.torture.processes import JobProcess, below, members, nothing_left, ranks_of, tail
from tests.support.ranks.jobs import PROGRAM, ROOT
from tests.support.waiting import wait_for

ALL_THEN_ASKED_THEN_ONE = 103  # the seed of such kills


@pytest.mark.slow
def test_several_ranks_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shares = ["--terms", "0.3", "--children", "0.4", "--seed", str(ALL_THEN_ASKED_THEN_ONE)]
    job = [str(PROGRAM), "checkpoints", "fsdp", "500", "pause=0.02", "every=3"]
    code = checkflow(["torture", "--kills", "3", *shares, "--log", "said", "--json", "--", *torchrun, *job])
    data = json.loads(capsys.readouterr().out)
    assert (code, data["verdict"], data["problems"], data["remarks"]) == (FOUND, "nothing lost", [], []), data
    assert [(kill["signal"], kill["victim"]) for kill in data["kills"]] == [
        ("SIGKILL", "rank 0"), ("SIGTERM", "rank 1"), ("SIGKILL", "rank 1"),
    ]  # fmt: skip
    assert data["kills"][1]["replayed"] == 0  # all ended at the last boundary
    assert data["kills"][-1]["told"], data
    assert all(kill["resumed_from"] >= kill["restorable"] for kill in data["kills"] if kill["told"]), data
    started = [json.loads(line) for rank in range(2) for line in Path(f"log-{rank}").read_text().splitlines()]
    pids = {line["pid"] for line in started}
    assert len(pids) == 2 * data["lives"]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_is_known_from_its_own_workers() -> None:
    strangers = below()
    with nothing_left(strangers):
        for rank in (0, 1):
            subprocess.Popen(["sh", "-c", "sleep 600 & wait"], env={**os.environ, "RANK": str(rank)})
        subprocess.Popen(["sleep", "600"])
        wait_for(lambda: len(members(strangers)) == 5)
        found = ranks_of(members(strangers))
        assert sorted(found) == [0, 1]
        assert [[child.name() for child in one.children()] for one in found.values()] == [["sleep"], ["sleep"]]


def test_the_rank_that_failed_first_is_heard(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[rank1]: ValueError: a mistake\n[rank0]: RuntimeError: Connection closed by peer\n"
        "E1125 12:46 3241 torch/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 5) of binary: python\n"
        "Root Cause (first observed failure):\n====\n"
    )
    with subprocess.Popen(["true"]) as process:
        job = JobProcess(process, log, 0, frozenset())
        assert tail(job) == "ValueError: a mistake"
        log.write_text(log.read_text().replace("[rank1]: ", ""))  # it failed before there was a group
        assert tail(job) == "ValueError: a mistake / [rank0]: RuntimeError: Connection closed by peer"
