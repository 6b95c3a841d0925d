"""The benchmark beside other checkpointers: three peers through the real program, and what its figures mean."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import block, kills, raw
from benchmarks.peers.block import Block, Failure, request_for, run_block
from benchmarks.peers.figures import by_name, figures_of, missed
from benchmarks.peers.job import Job
from benchmarks.peers.kills import MIXTURE, NEW, NOTHING, OLD
from benchmarks.peers.page import render
from benchmarks.peers.peers import IN_PLACE, OURS, PEERS, RAW

ROOT = Path(__file__).parents[2]
MB = 10**6
BLOCK = Block(
    state_bytes=100 * MB,
    plain_seconds=(1.0, 1.0, 1.0, 2.0),
    seconds=(1.5, 1.0, 1.0, 2.5),
    tail_seconds=0.25,
    held_seconds=0.8,
    asked=2,
    begun=2,
    durable_seconds=(0.4, 0.6),
    write_seconds=(0.10, 0.20, 0.10),
    raw_write_seconds=(0.08, 0.10, 0.09),
    restore_seconds=(0.05, 0.08, 0.05),
    raw_read_seconds=(0.04, 0.04, 0.03),
    memory_bytes=220 * MB,
    device_memory_bytes=None,
    note="",
)


def content(**ours: float) -> dict[str, Any]:
    """Figures of two rounds, and a peer that failed."""
    figures = by_name([{**figures_of(BLOCK), **ours}] * 2)
    environment = {
        "machine": "a processor, 2 threads",
        "memory_bytes": 16 * 10**9,
        "filesystem": "ext4",
        "versions": {"torch": "2.13.0", "torchsnapshot": "missing"},
        "every": 5,
    }
    kills = {OURS: {"count": 60, "lost": 0, "left": {OLD: 40, NEW: 20}}}
    return {
        "states": {
            "0.1": {
                "environment": environment,
                "state_bytes": 100 * MB,
                "note": "One row is of a later day.",
                "peers": {
                    "torch.save": by_name([figures_of(BLOCK)] * 2),
                    "torchsnapshot take": {"failed": "ModuleNotFoundError: No module named 'torchsnapshot'"},
                    OURS: figures,
                },
            }
        },
        "kills": {"environment": {**environment, "machine": "another one"}, "state": "0.1", "peers": kills},
    }


WITHIN = {"inflation_mean": 0.02, "durable_share": 0.9, "restore_share": 0.85}


def test_the_figures_of_a_block() -> None:
    found = figures_of(BLOCK)
    assert found["iteration_seconds"] == 1.0
    assert found["inflation_mean"] == pytest.approx((6.0 + 0.25) / 5.0 - 1)  # what comes after the end counts, too
    assert found["inflation_error"] == pytest.approx(math.sqrt((0.5 + 0.5) / 2) / 2.5)  # turns of 2, 3 and 2.5, 3.5 s
    assert found["inflation_median"] == pytest.approx(0.25)
    assert found["inflation_p99"] == pytest.approx(2.5 / 2.0 - 1)
    assert found["hold_seconds"] == pytest.approx(0.4)
    assert found["durable_seconds"] == pytest.approx(0.5)
    assert found["made_share"] == 1.0
    assert found["durable_share"] == pytest.approx(0.8)  # the median of 0.8, 0.5 and 0.9, each save beside its own raw
    assert found["restore_share"] == pytest.approx(0.6)  # the median of 0.8, 0.5 and 0.6
    assert found["memory_share"] == pytest.approx(2.2)
    assert found["raw_write_bytes_per_second"] == pytest.approx(100 * MB / 0.09)
    assert found["raw_read_bytes_per_second"] == pytest.approx(100 * MB / 0.04)
    assert figures_of(dataclasses.replace(BLOCK, durable_seconds=(0.4,)))["made_share"] == 0.5  # the other was dropped


def test_bars_that_are_missed_are_named_and_a_lost_state_too() -> None:
    assert missed(content(**WITHIN)) == []  # just reached
    for figure, value, line in (
        ("inflation_mean", 0.021, "inflation of the mean iteration is 2.1%"),
        ("durable_share", 0.89, "durable write, of raw is 89.0%"),
        ("restore_share", 0.84, "restore, of raw is 84.0%"),
        ("made_share", 0.9, "checkpoints made, of those asked for is 90.0%"),
    ):
        (found,) = missed(content(**{**WITHIN, figure: value}))
        assert line in found
    made = content(**WITHIN)
    made["kills"]["peers"][OURS] = {"count": 60, "lost": 2, "left": {NOTHING: 1, MIXTURE: 1}}
    assert missed(made) == ["kills: 2 lost the state"]


def test_the_page_has_all_figures_and_says_what_is_missing() -> None:
    page = render(content(**WITHIN))
    assert ". One row is of a later day.\n" in page
    assert "| torch.save | +25.0 % (+25.0 % to +25.0 %) |" in page
    assert "torchsnapshot take is missing: ModuleNotFoundError: No module named 'torchsnapshot'" in page
    assert "| torchsnapshot take |" not in page
    assert "| checkflow | 60 | 40 | 20 | 0 | 0 |" in page
    assert "It reaches all that are measured here." in page
    assert "a processor, 2 threads, 16.0 GB of memory, ext4; torch 2.13.0, torchsnapshot missing." in page
    assert "another one, 16.0 GB of memory" in page  # where the kills were made


@given(st.integers(1, 5 * raw.BLOCK_BYTES))
def test_raw_blocks_cover_every_byte_once_in_whole_pages(size_bytes: int) -> None:
    end = 0
    for offset, length in raw._blocks(size_bytes):
        assert offset == end
        assert 0 < length <= raw.BLOCK_BYTES
        assert length % raw.PAGE_BYTES == 0
        end += length
    assert size_bytes <= end < size_bytes + raw.PAGE_BYTES


def test_any_byte_of_the_state_changes_the_digest() -> None:
    job = Job("0.01")
    before = job.digest()
    job.optimizer.state[job.model.lm_head.weight]["exp_avg_sq"].view(torch.uint8).flatten()[-1] ^= 1
    assert job.digest() != before


def test_blocks_are_whole_cycles(tmp_path: Path) -> None:
    asked = [request_for(OURS, "0.01", every=5, iterations=n, threads=1, directory=tmp_path) for n in (1, 10, 11)]
    assert [one.iterations for one in asked] == [10, 10, 15]
    assert len({one.directory for one in asked}) == 3


def test_a_restore_that_brings_back_less_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("0.01")
    request = request_for("torch.save", "0.01", every=5, iterations=10, threads=1, directory=tmp_path)
    block._at_rest(job, request)
    assert len(block._restored(job, request)["restore_seconds"]) == block.AT_REST
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", lambda *_: None)
    with pytest.raises(SystemExit, match="differs from the saved one"):
        block._restored(job, request)


# Each in processes of its own


@pytest.mark.slow
def test_a_peer_that_fails_is_a_row_that_says_why(tmp_path: Path) -> None:
    found = run_block(request_for("torch.save", "0.01", every=5, iterations=10, threads=-1, directory=tmp_path))
    assert isinstance(found, Failure)
    assert found.reason == "RuntimeError: set_num_threads expects a positive integer (exit code 1)"


@pytest.mark.slow
def test_what_a_kill_left_is_told_by_its_bytes(tmp_path: Path) -> None:
    job = Job("0.01")
    made = PEERS["torch.save"].again(job, 1, tmp_path / "checkpoints")
    made.save()
    digest = job.digest()
    made.close()
    context: Any = multiprocessing.get_context("fork")
    for states, expected in (((digest, "?"), OLD), (("?", digest), NEW), (("?", "!"), MIXTURE)):
        assert kills._left(context, "torch.save", "0.01", tmp_path, states) == expected
    (version,) = (tmp_path / "checkpoints").iterdir()
    version.write_bytes(version.read_bytes()[:-1000])
    assert kills._left(context, "torch.save", "0.01", tmp_path, (digest, "?")) == NOTHING


def run_the_program(tmp_path: Path, *peers: str, **asked: int) -> tuple[dict[str, Any], str]:
    """What it wrote, and said, with the smallest state."""
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--states", "0.01", "--only", ",".join(peers)]
    command += ["--directory", str(tmp_path), "--output", str(output)]
    command += [f"--{name}={count}" for name, count in asked.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # whether checkflow reaches its bars is a question of the machine
    assert "Traceback" not in done.stderr, done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
    return json.loads(output.read_text()), done.stdout


@pytest.mark.slow
def test_the_program_measures_checkflow_torch_and_the_bare_disk(tmp_path: Path) -> None:
    peers = (OURS, "dcp.async_save thread", RAW)
    found, said = run_the_program(tmp_path, *peers, rounds=1, iterations=10, threads=1, kills=0)
    found = found["states"]["0.01"]
    for peer in peers:
        assert f"round 1, {peer}: iteration" in said
        figures = found["peers"][peer]
        assert figures["made_share"] == [1.0], figures
        assert figures["restore_share"][0] > 0
        assert figures["memory_share"][0] > -(2**20) / found["state_bytes"]  # none is needed in training's own thread


@pytest.mark.slow
def test_kills_catch_a_peer_that_overwrites_in_place(tmp_path: Path) -> None:
    before = content(**WITHIN)
    (tmp_path / "figures.json").write_text(json.dumps(before))
    found, _ = run_the_program(tmp_path, IN_PLACE, "torch.save", rounds=0, kills=6, seed=1)
    assert found["states"] == before["states"]  # what is not measured anew stays
    kills = found["kills"]["peers"]
    assert [kills[peer]["count"] for peer in (IN_PLACE, "torch.save")] == [6, 6]
    assert kills[IN_PLACE]["lost"] > 0
    assert kills["torch.save"]["lost"] == 0
