"""Shards: what N processes saved, M go on from, each with exactly what it owns of M."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow import shards
from checkflow.cli.main import main
from checkflow.core.errors import (
    CheckflowError,
    CorruptCheckpointError,
    LockedError,
    MismatchError,
    StorageError,
    UnsupportedError,
)
from checkflow.runtime.shards.ownership import may_hold
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.runtime.store.trust import ForeignError
from tests.support.shard_tools import World, together

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="checkflow-test-") as folder:
        yield Path(folder) / "versions"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_user_s_version_is_refused(directory: Path) -> None:
    together(1, lambda rank: shards.save_shard(directory, 1, rank, 1, run_id="run"))
    os.chown(directory / "step-00000001" / "manifest.json", 65534, 65534)
    reads: list[Callable[..., Any]] = [
        lambda **named: shards.newest_step(directory, **named),
        lambda **named: shards.load_shard(directory, 0, 1, **named).step,
        lambda **named: shards.load_slices(directory, {}, **named) == {},
    ]
    for read in reads:
        with pytest.raises(ForeignError, match=r"manifest\.json belongs to"):
            read()
        assert read(trust="anyone") == 1


# --------------------------------------------------------------------------------------------------------- placement


def test_the_placement_is_the_same_everywhere() -> None:
    """Written down: another hash would tear every saved job apart."""
    assert [shards.shard_of_name(name, 7) for name in ("bottom.0.weight", "top.4.bias", "", "größe")] == [4, 6, 4, 6]
    assert [shards.shard_of_row(i, 5) for i in (0, 4, 5, 2**63 - 1, -1)] == [0, 4, 0, 2, 4]
    names = [f"layer{i}" for i in range(500)]
    parts = [shards.owned_names(names, rank, 5) for rank in range(5)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert min(map(len, parts)) > 60


def test_a_part_is_left_out_exactly_where_it_holds_nothing() -> None:
    for sources in range(1, 9):
        for ranks in range(1, 9):
            for source in range(sources):
                for rank in range(ranks):
                    exists = any(i % sources == source and i % ranks == rank for i in range(sources * ranks))
                    assert may_hold(source, sources, rank, ranks) == exists


# ----------------------------------------------------------------------------------------------------------- N onto M


@pytest.mark.parametrize("saved", [1, 2, 3, 4, 5])
def test_any_number_goes_on_from_any_number(directory: Path, saved: int) -> None:
    world = World(saved)
    world.save(directory, 5, saved)
    for restored in range(1, 6):
        world.check(directory, restored, 5)


def test_there_and_back_is_the_same(directory: Path) -> None:
    world = World()
    world.save(directory, 1, 3)
    for step, (before, after) in enumerate([(3, 5), (5, 2), (2, 3)], 2):
        loaded = [shards.load_shard(directory, rank, after) for rank in range(after)]
        together(
            after,
            lambda rank, step=step, after=after, loaded=loaded: shards.save_shard(  # type: ignore[misc]
                directory, step, rank, after, run_id="run", dense=loaded[rank].dense, tables=loaded[rank].tables,
                state=loaded[rank].state if rank == 0 else None,
            ),
        )  # fmt: skip
        assert before != after
        world.check(directory, after, step)


def test_nothing_at_all(directory: Path) -> None:
    world = World(rows=0)
    world.save(directory, 0, 3)
    world.check(directory, 2)
    together(2, lambda rank: shards.save_shard(directory, 1, rank, 2, run_id="run"))
    shard = shards.load_shard(directory, 0, 3)
    assert (shard.step, dict(shard.dense), dict(shard.tables), shard.state) == (1, {}, {}, None)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30), st.integers(1, 4), st.integers(1, 4),
    st.integers(0, 3),
)  # fmt: skip
def test_any_ids(ids: list[int], saved: int, restored: int, dimension: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="checkflow-test-") as folder:
        rows = {i: np.full(dimension, n, np.uint8) for n, i in enumerate(ids)}

        def save(rank: int) -> Path:
            own = [i for i in ids if i % saved == rank]
            values = np.array([rows[i] for i in own], np.uint8).reshape(len(own), dimension)
            return shards.save_shard(folder, 1, rank, saved, run_id="r", tables={"t": shards.Table(own, values)})

        assert together(saved, save) == [Path(folder) / "step-00000001"] * saved
        found: dict[int, bytes] = {}
        for rank in range(restored):
            table = shards.load_shard(folder, rank, restored).tables["t"]
            assert table.rows.shape == (len(table.ids), dimension)
            found |= {i: row.tobytes() for i, row in zip(table.ids.tolist(), table.rows, strict=True)}
        assert found == {i: row.tobytes() for i, row in rows.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float64", "complex64", "bool"])
def test_tensors_of_every_type(directory: Path, dtype: str) -> None:
    torch.manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    rows, turned = torch.randn(7, 4).to(kind), torch.randn(5, 3, dtype=torch.float32).to(kind).t()
    parts = [shards.Table(torch.arange(rank, 7, 2), rows[rank::2]) for rank in range(2)]
    owner = shards.shard_of_name("turned", 2)
    together(
        2,
        lambda rank: shards.save_shard(
            directory,
            1,
            rank,
            2,
            run_id="r",
            tables={"t": parts[rank]},
            dense={"turned": turned} if rank == owner else {},
        ),
    )
    for rank in range(3):
        shard = shards.load_shard(directory, rank, 3, arrays="torch")
        assert shard.tables["t"].ids.tolist() == list(range(rank, 7, 3))
        assert shard.tables["t"].rows.dtype == kind
        assert torch.equal(shard.tables["t"].rows.view(torch.uint8), rows[rank::3].contiguous().view(torch.uint8))
        if "turned" in shard.dense:
            assert torch.equal(shard.dense["turned"].view(torch.uint8), turned.contiguous().view(torch.uint8))
    if dtype in ("bfloat16", "float8_e4m3fn"):
        with pytest.raises(UnsupportedError, match='arrays="torch"'):
            shards.load_shard(directory, 0, 3)


def test_arrays_in_any_memory_order(directory: Path) -> None:
    swapped = np.arange(12, dtype=">i4").reshape(3, 4)
    given_ = {"turned": np.arange(12.0).reshape(3, 4).T, "swapped": swapped, "every second": np.arange(9)[::2]}
    shards.save_shard(directory, 1, 0, 1, run_id="r", dense=given_)
    found = shards.load_shard(directory, 0, 1).dense
    for name, array in given_.items():
        assert np.array_equal(found[name], array)


def test_any_reader_of_safetensors_reads_the_files(directory: Path) -> None:
    world = World()
    world.save(directory, 2, 3)
    users: dict[int, bytes] = {}
    for path in (directory / "step-00000002").glob("tables-*-of-00003.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            ids, rows = file.get_tensor("users.ids"), file.get_tensor("users.rows")
        users |= {i: row.tobytes() for i, row in zip(ids.tolist(), rows, strict=True)}
    assert users == {i: row.tobytes() for i, row in world.users.items()}
    assert sorted(path.name for path in (directory / "step-00000002").iterdir())[:2] == [
        "dense-00000-of-00003.safetensors", "dense-00001-of-00003.safetensors",
    ]  # fmt: skip
    assert not [path.name for path in (directory / "step-00000002").iterdir() if path.name.startswith(".")]


def test_the_command_line_lists_and_verifies_it(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    World().save(directory, 2, 3)
    World(1).save(directory, 3, 2)
    assert main(["ls", str(directory)]) == main(["verify", str(directory)]) == 0
    output = capsys.readouterr().out
    assert {"2", "3"} <= set(output.split())
    assert main(["diff", f"{directory}@2", f"{directory}@2"]) == 0
    assert main(["export", str(directory), "-o", str(tmp_path / "x.pt")]) == 1
    assert "checkflow.shards" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()
    path = next((directory / "step-00000003").glob("tables-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(directory)]) == 1
    assert path.name in "".join(capsys.readouterr())
    assert shards.newest_step(directory) == 2
    version = shards.describe_version(directory, 2)
    assert (version.shards, version.rows["users"], version.tables["items"].dimension) == (3, 42, 2)


def test_a_shard_reads_only_what_may_be_its_own(directory: Path) -> None:
    """Damage in another's file is not its business; in its own it is named."""
    world = World()
    world.save(directory, 2, 4)
    path = directory / "step-00000002" / "tables-00001-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for rank in (0, 2, 3):
        shards.load_shard(directory, rank, 4)
    shards.load_shard(directory, 0, 2)
    for rank, ranks in ((1, 4), (1, 2), (0, 1), (0, 3)):
        with pytest.raises(CorruptCheckpointError, match="tables-00001-of-00004"):
            shards.load_shard(directory, rank, ranks)


def test_rows_in_another_shards_file_are_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out where only their own shard is asked, they would be lost without a word."""
    monkeypatch.setattr("checkflow.runtime.shards.writer.checked_ids", lambda name, table, rank, world_size: table.ids)
    wrong = shards.Table(np.array([1, 2]), np.zeros((2, 3)))
    outcomes = together(
        2, lambda rank: shards.save_shard(directory, 1, rank, 2, run_id="r", tables={"t": wrong} if rank else {})
    )
    assert outcomes == [directory / "step-00000001"] * 2
    with pytest.raises(CorruptCheckpointError, match="holds rows of other shards"):
        shards.load_shard(directory, 1, 2)


# --------------------------------------------------------------------------------------------------------------- slices


def test_any_rows_of_tensors_cut_in_any_way(directory: Path) -> None:
    weight, flat = np.arange(70, dtype=np.float32).reshape(10, 7), np.arange(23, dtype=np.int64)
    rows, elements = [0, 4, 4, 10], [0, 9, 23, 23]  # rank 1 has no rows, rank 2 no elements

    def save(rank: int) -> Path:
        own = {
            "weight": shards.Slice(weight[rows[rank] : rows[rank + 1]], (10, 7), (rows[rank], 0)),
            "flat": shards.Slice(flat[elements[rank] : elements[rank + 1]], (23,), (elements[rank],)),
            "boxes": shards.Slice(weight[:, 2 * rank : 2 * rank + (3 if rank == 2 else 2)], (10, 7), (0, 2 * rank)),
            "nothing": shards.Slice(np.empty((0, 5)), (0, 5)),
        }
        return shards.save_shard(directory, 1, rank, 3, run_id="r", slices=own)

    assert together(3, save) == [directory / "step-00000001"] * 3
    for begin in range(11):
        for end in range(begin, 11):
            found = shards.load_slices(
                directory, {"weight": (begin, end), "boxes": (begin, end), "flat": (2 * begin, 2 * end)}
            )
            assert np.array_equal(found["weight"], weight[begin:end])
            assert np.array_equal(found["boxes"], weight[begin:end])
            assert np.array_equal(found["flat"], flat[2 * begin : 2 * end])
    assert shards.load_slices(directory, {"nothing": (0, 0)})["nothing"].shape == (0, 5)
    assert shards.describe_version(directory).slices["weight"] == ("float32", (10, 7))
    for name, wanted in (("weight", (0, 11)), ("weight", (3, 2)), ("other", (0, 1))):
        with pytest.raises(MismatchError, match=name):
            shards.load_slices(directory, {name: wanted})


@pytest.mark.parametrize(
    ("of_rank_1", "message"),
    [
        (shards.Slice(np.zeros(4), (10,), (5,)), "not covered"),
        (shards.Slice(np.zeros(5), (10,), (4,)), "overlap"),
        (shards.Slice(np.zeros(5, np.float32), (10,), (5,)), "on rank 1 it is float32"),
        (shards.Slice(np.zeros(5), (11,), (5,)), "on rank 1 it is float64\\[11\\]"),
        (shards.Slice(np.zeros(5), (10,), (6,)), "does not lie in"),
    ],
)
def test_slices_that_do_not_make_a_whole(directory: Path, of_rank_1: shards.Slice, message: str) -> None:
    own = [shards.Slice(np.zeros(5), (10,)), of_rank_1]
    outcomes = together(2, lambda rank: shards.save_shard(directory, 1, rank, 2, run_id="r", slices={"x": own[rank]}))
    for outcome in outcomes:
        with pytest.raises(CheckflowError, match=message):
            raise outcome
    assert find(directory) == ()


# ----------------------------------------------------------------------------------------------------- what is refused


def table(ids: Any, dimension: int = 2, dtype: Any = np.float32, initializer: str = "") -> shards.Table:
    return shards.Table(ids, np.zeros((len(ids), dimension), dtype), initializer)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"tables": {"t": table([1, 2])}}, "row 2 is not for shard 1 of 2 to save, but for 0"),
        ({"tables": {"t": table([3, 1, 3])}}, "row 3 is there twice"),
        ({"tables": {"t": table([1.0])}}, "integers"),
        ({"tables": {"t": table(np.array([2**63 + 1], np.uint64))}}, "does not fit"),
        ({"tables": {"t": shards.Table([1], np.zeros((2, 2)))}}, "1 ids need rows"),
        ({"tables": {"t": shards.Table([1], np.array([["x"]]))}}, "no safetensors file can hold"),
        ({"tables": {"t": table([1], 3)}}, "is float32\\[2\\] by '' on rank 0, and float32\\[3\\]"),
        ({"tables": {"t": table([1], dtype=np.float64)}}, "float64"),
        ({"tables": {"t": table([1], initializer="ones")}}, "'ones' on rank 1"),
        ({"dense": {"a": np.zeros(1), "b": np.zeros(1), "c": np.zeros(1), "d": np.zeros(1)}}, "not for shard 1"),
        ({"dense": {"a": [1.0]}}, "is a list|not for shard"),
    ],
)
def test_what_ranks_must_not_save(directory: Path, part: dict[str, Any], message: str) -> None:
    """Each rank hears it, the others by the board, and nobody waits for the time to be over."""
    parts = [{"tables": {"t": table([0])}}, part]
    outcomes = together(2, lambda rank: shards.save_shard(directory, 1, rank, 2, run_id="r", **parts[rank]))
    for outcome in outcomes:
        with pytest.raises(CheckflowError, match=message):
            raise outcome
    assert find(directory) == ()
    assert {path.name for path in directory.iterdir()} == {".lock", ".shards.json"}
    together(2, lambda rank: shards.save_shard(directory, 1, rank, 2, run_id="r"))
    assert shards.newest_step(directory) == 1


def test_impossible_arguments(directory: Path) -> None:
    for arguments, message in (((1, 2, 2), "rank 2 of 2"), ((-1, 0, 1), "a step is")):
        with pytest.raises(ValueError, match=message):
            shards.save_shard(directory, *arguments, run_id="r")
    with pytest.raises(ValueError, match="run id"):
        shards.save_shard(directory, 1, 0, 1, run_id="a/b")
    with pytest.raises(ValueError, match="rank -1"):
        shards.load_shard(directory, -1, 1)
    with pytest.raises(StorageError, match="cannot read"):
        shards.load_shard(directory, 0, 1)
    with Store(directory, run_id="other"), pytest.raises(LockedError):
        shards.save_shard(directory, 1, 0, 1, run_id="r", wait_seconds=0)


def test_checkpoints_of_a_job_are_not_taken_for_shards(directory: Path) -> None:
    from tests.support.store_tools import fill, small_layout

    with Store(directory, run_id="r") as store:
        store.commit(1, small_layout(), fill(small_layout(), 0)[0], b"", {})
    with pytest.raises(MismatchError, match="not saved by shards"):
        shards.load_shard(directory, 0, 1)
    with pytest.raises(StorageError, match="no version of step 2"):
        shards.load_shard(directory, 0, 1, 2)


# ----------------------------------------------------------------------------------------------------------- memory


MEMORY = """
import sys, tracemalloc
from checkflow import shards
tracemalloc.start()
shard = shards.load_shard(sys.argv[1], 3, 16)
table, peak = shard.tables["t"], tracemalloc.get_traced_memory()[1]
print(table.ids.size, table.rows.nbytes, peak, "torch" in sys.modules)
assert (table.rows[:, 5] == table.ids).all()
"""


def test_memory_is_that_of_one_shard(directory: Path) -> None:
    """A table of 128 MB that two shards wrote; one of sixteen has 8 MB of it, and never sees the rest at once."""
    count, width = 256 * 1024, 128

    def save(rank: int) -> Path:
        ids = np.arange(rank, count, 2)[::-1]
        rows = np.zeros((len(ids), width), np.float32)
        rows[:] = ids[:, None]
        return shards.save_shard(directory, 1, rank, 2, run_id="r", tables={"t": shards.Table(ids, rows)})

    tracemalloc.start()
    together(2, save)
    saved_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert saved_peak < count * width * 4 + count * 8 * 4 + 2**24  # the rows that the job holds, and no copy of them
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(directory)], capture_output=True, text=True, check=False, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (7 * 2**25, 7 * 2**25)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ids, rows, peak, torch_imported = done.stdout.split()
    assert (int(ids), int(rows)) == (count // 16, count * width * 4 // 16)
    # its rows, four blocks that the reader keeps and four in the making, a few copies of its ids
    assert int(peak) < int(rows) + 8 * 8 * 2**20 + 8 * 8 * int(ids) < 0.6 * count * width * 4
    assert torch_imported == "False"
