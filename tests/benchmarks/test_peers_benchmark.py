"""The benchmark beside other checkpointers: what it makes of its measurements, and every peer through the real code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import __main__ as command
from benchmarks.peers import block, kills, raw
from benchmarks.peers.block import Block, Failure, Request, measure, request_for, run_block
from benchmarks.peers.figures import by_name, figures_of, missed, percentile
from benchmarks.peers.job import Job
from benchmarks.peers.kills import MIXTURE, NEW, NOTHING, OLD, Kills, kill_saves
from benchmarks.peers.page import plot, render
from benchmarks.peers.peers import IN_PLACE, OURS, PEERS, RAW

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


def content(**ours: float) -> dict[str, object]:
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


def test_a_checkpoint_that_was_dropped_shows() -> None:
    assert figures_of(dataclasses.replace(BLOCK, durable_seconds=(0.4,)))["made_share"] == 0.5


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.99, 3.0), ([1.0, 2.0], 0.5, 1.0), ([1.0, 2.0], 0.51, 2.0), (list(range(100, 0, -1)), 0.99, 99)],
)
def test_percentiles(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_bars_that_are_just_reached() -> None:
    assert missed(content(**WITHIN)) == []


@pytest.mark.parametrize(
    ("figure", "value", "line"),
    [
        ("inflation_mean", 0.021, "inflation of the mean iteration is 2.1%"),
        ("durable_share", 0.89, "durable write, of raw is 89.0%"),
        ("restore_share", 0.84, "restore, of raw is 84.0%"),
        ("made_share", 0.9, "checkpoints made, of those asked for is 90.0%"),
    ],
)
def test_a_bar_that_is_missed_is_named(figure: str, value: float, line: str) -> None:
    (found,) = missed(content(**{**WITHIN, figure: value}))
    assert line in found


def test_a_bar_that_is_missed_has_raw_beside_it() -> None:
    made = content(**{**WITHIN, "inflation_mean": 0.021})
    made["states"]["0.1"]["peers"][RAW] = by_name([figures_of(BLOCK)] * 2)  # type: ignore[index]
    (found,) = missed(made)
    assert found.endswith("that of raw copy and write is 25.0%")


def test_a_lost_state_is_named() -> None:
    made = content(**WITHIN)
    made["kills"]["peers"][OURS] = {"count": 60, "lost": 2, "left": {NOTHING: 1, MIXTURE: 1}}  # type: ignore[index]
    assert missed(made) == ["kills: 2 lost the state"]


def test_one_round_has_its_standard_error() -> None:
    made = content(**WITHIN)
    made["states"]["0.1"]["peers"]["torch.save"] = by_name([figures_of(BLOCK)])  # type: ignore[index]
    assert "| torch.save | +25.0 % ± 28.3 % | +25.0 % |" in render(made)


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


def test_a_plot_has_a_bar_for_each_peer_and_figure() -> None:
    made = content(**{**WITHIN, "inflation_mean": -0.01})  # faster by chance: a bar of no length
    root = ET.fromstring(plot(made["states"]["0.1"]["peers"]))  # type: ignore[index]
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("height") == "16"]
    assert len(bars) == 2 * 4
    assert all(float(one.get("width", "-1")) >= 0 for one in bars)
    assert any("torch.save" in (one.text or "") for one in root.iter("{http://www.w3.org/2000/svg}text"))


@given(st.integers(1, 5 * raw.BLOCK_BYTES))
def test_raw_blocks_cover_every_byte_once_in_whole_pages(size_bytes: int) -> None:
    end = 0
    for offset, length in raw._blocks(size_bytes):
        assert offset == end
        assert 0 < length <= raw.BLOCK_BYTES
        assert length % raw.PAGE_BYTES == 0
        end += length
    assert size_bytes <= end < size_bytes + raw.PAGE_BYTES


def test_raw_leaves_nothing_behind(tmp_path: Path) -> None:
    assert raw.write_seconds(tmp_path, 3 * MB) > 0
    assert raw.read_seconds(tmp_path, 3 * MB) > 0
    assert list(tmp_path.iterdir()) == []


def test_any_byte_of_the_state_changes_the_digest() -> None:
    job = Job("0.01")
    before = job.digest()
    job.optimizer.state[job.model.lm_head.weight]["exp_avg_sq"].view(torch.uint8).flatten()[-1] ^= 1
    assert job.digest() != before


@pytest.mark.parametrize(
    "arguments",
    [["--states", "0.2"], ["--only", "torch.save,dcp"], ["--rounds", "-1"], ["--every", "0"], ["--threads", "0"]],
)
def test_the_command_refuses_with_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_blocks_are_whole_cycles(tmp_path: Path) -> None:
    asked = [request_for(OURS, "0.01", every=5, iterations=n, threads=1, directory=tmp_path) for n in (1, 10, 11)]
    assert [one.iterations for one in asked] == [10, 10, 15]
    assert len({one.directory for one in asked}) == 3


@contextlib.contextmanager
def _unwatched() -> Iterator[list[int]]:
    yield [1000, 1500, 1200]


def test_a_restore_that_brings_back_less_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same peer a whole block first, in this process."""
    threads = torch.get_num_threads()
    request = Request("torch.save", "0.01", 5, 10, threads, tmp_path / "whole")
    request.directory.mkdir()
    found = measure(request, _unwatched)
    assert (len(found.plain_seconds), len(found.seconds), found.asked, found.begun) == (10, 10, 2, 2)
    assert {
        len(one)
        for one in (found.write_seconds, found.raw_write_seconds, found.restore_seconds, found.raw_read_seconds)
    } == {block.AT_REST}
    assert found.memory_bytes == 500
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", lambda *_: None)
    request = dataclasses.replace(request, directory=tmp_path / "less")
    request.directory.mkdir()
    with pytest.raises(SystemExit, match="differs from the saved one"):
        measure(request, _unwatched)


# Each in processes of its own


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_is_measured(peer: str, tmp_path: Path) -> None:
    found = run_block(request_for(peer, "0.01", every=5, iterations=10, threads=1, directory=tmp_path))
    assert isinstance(found, Block), found
    assert found.begun == found.asked == 2
    assert len(found.durable_seconds) == 2
    figures = figures_of(found)
    assert figures["made_share"] == 1.0
    assert figures["restore_share"] > 0
    assert found.memory_bytes > -(2**20)  # one that writes in training's own thread needs none
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_peer_that_fails_is_a_row_that_says_why(tmp_path: Path) -> None:
    found = run_block(request_for("torch.save", "0.01", every=5, iterations=10, threads=-1, directory=tmp_path))
    assert isinstance(found, Failure)
    assert found.reason == "RuntimeError: set_num_threads expects a positive integer (exit code 1)"


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "loses"), [(IN_PLACE, True), ("torch.save", False), (OURS, False)])
def test_kills_catch_a_peer_that_overwrites_in_place(peer: str, loses: bool, tmp_path: Path) -> None:
    found = kill_saves(peer, "0.01", 6, directory=tmp_path, seed=1)
    assert isinstance(found, Kills), found
    assert found.count == 6
    assert (found.lost > 0) is loses, found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_a_kill_left_is_told_by_its_bytes(tmp_path: Path) -> None:
    job = Job("0.01")
    made = PEERS["torch.save"].again(job, 1, tmp_path / "checkpoints")
    made.save()
    digest = job.digest()
    made.close()
    context = multiprocessing.get_context("forkserver")
    for states, expected in (((digest, "?"), OLD), (("?", digest), NEW), (("?", "!"), MIXTURE)):
        assert kills._left(context, "torch.save", "0.01", tmp_path, states) == expected
    (version,) = (tmp_path / "checkpoints").iterdir()
    version.write_bytes(version.read_bytes()[:-1000])
    assert kills._left(context, "torch.save", "0.01", tmp_path, (digest, "?")) == NOTHING


@pytest.mark.slow
def test_the_command_runs_a_subset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    asked = ["--states", "0.01", "--only", "torch.save", "--rounds", "2", "--iterations", "10", "--kills", "1"]
    assert command.main([*asked, "--threads", "1", "--directory", str(tmp_path), "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert {len(values) for values in found["states"]["0.01"]["peers"]["torch.save"].values()} == {2}
    assert found["kills"]["peers"]["torch.save"]["count"] == 1
    assert "round 2, torch.save: iteration" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
    assert "torch.save" in render(found)
    again = ["--states", "0.01", "--only", "torch.save", "--rounds", "0", "--threads", "1", "--output", str(output)]
    assert command.main([*again, "--kills", "2"]) == 0
    more = json.loads(output.read_text())
    assert (more["states"], more["kills"]["peers"]["torch.save"]["count"]) == (found["states"], 2)
