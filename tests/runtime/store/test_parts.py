"""Versions that several ranks write: joined, refused, and read by ranks that cut the tensors otherwise."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow.core.boxes import Box, Held, part_name, whole
from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MismatchError, StorageError
from checkflow.runtime.format.manifest import BLOCK_BYTES, EXTRA, FileEntry, own_name, rank_extra_name
from checkflow.runtime.store import block_reader
from checkflow.runtime.store.discovery import find, open_verified
from checkflow.runtime.store.files import OpenFile, glance
from checkflow.runtime.store.parts import (
    Gathered,
    Part,
    Written,
    commit_ranks,
    folder_name,
    join,
    narrow_to,
)
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.support.ranks.tools import KINDS, Array, Ranks, arranged, load, part, save, write_rank
from tests.support.store_tools import read_all

SOURCE = np.random.default_rng(4)
#: Odd shapes; one tensor in several blocks, whose elements a block may cut among narrower ones.
ARRAYS: dict[str, Array] = {
    "model/large": SOURCE.standard_normal((1031, 2053)),
    "model/weight": SOURCE.standard_normal((7, 5)).astype(np.float32),
    "model/deep": SOURCE.integers(-9, 9, (3, 5, 4, 7), np.int16),
    "model/bias": SOURCE.standard_normal(5).astype(np.float32),
    "model/one_row": SOURCE.standard_normal((1, 9)),
    "model/scalar": np.array(3.5),
    "model/nothing": np.empty((0, 3), np.float32),
    "optimizer/weight.exp_avg": SOURCE.standard_normal((7, 5)),
    "optimizer/weight.step": np.array(12.0, np.float32),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "versions", run_id="r", keep_latest=20) as opened:
        yield opened


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with Store(tmp_path_factory.mktemp("all"), run_id="r", keep_latest=20) as opened:
        return {kind: save(opened, step, arranged(kind, ARRAYS), ARRAYS) for step, kind in enumerate(KINDS)}


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_any_ranks_read_what_any_others_saved(saved: dict[str, Path], first: str, then: str) -> None:
    for rank, held in enumerate(arranged(then, ARRAYS)):
        found = load(saved[first], {name: one.box for name, one in held.items()}, rank)
        for name, one in held.items():
            assert np.array_equal(found[name], part(ARRAYS[name], one.box)), name


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_reads_it_whole(saved: dict[str, Path], kind: str) -> None:
    """By each way of reading; and others read every part in the files."""
    with open_verified(saved[kind], None) as checkpoint:
        assert checkpoint.manifest.world_size == len(arranged(kind, ARRAYS))
        assert read_all(checkpoint) == {name: array.tobytes() for name, array in ARRAYS.items()}
        buffers = {name: bytearray(array.nbytes) for name, array in ARRAYS.items()}
        checkpoint.read_many_into([(name, memoryview(data)) for name, data in buffers.items()])
        assert buffers == {name: array.tobytes() for name, array in ARRAYS.items()}
        for name, entry in checkpoint.manifest.tensors.items():
            for piece in entry.pieces:
                values = safetensors.numpy.load_file(saved[kind] / piece.file)[piece.key]
                box = Box(entry.shape, piece.offsets, piece.lengths)
                assert np.array_equal(values, part(ARRAYS[name], box))
                assert f"{name.partition('/')[0]}/{piece.key}" == part_name(name, box)


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("first", ["one", "fsdp 3", "tp 2"])
def test_each_block_with_something_wanted_is_read_once(
    saved: dict[str, Path], first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []
    real = block_reader.read_block

    def counted(file: OpenFile, block: int, *arguments: Any) -> memoryview:
        read.append((file.path.name, block))
        return real(file, block, *arguments)

    monkeypatch.setattr(block_reader, "read_block", counted)
    for rank, held in enumerate(arranged(then, ARRAYS)):
        wanted = {name: one.box for name, one in held.items()}
        with open_checkpoint(saved[first], lambda whole, wanted=wanted, rank=rank: narrow_to(whole, wanted, rank)) as c:
            pieces = sum(len(entry.pieces) for entry in c.tensors.values())
            read.clear()
            c.read_boxes_into(
                [(name, box, memoryview(bytearray(box.volume * ARRAYS[name].itemsize))) for name, box in wanted.items()]
            )
            assert len(read) == len(set(read))
            if "tp" not in then:  # whole rows: what is wanted of a piece has no gap
                own_bytes = sum(box.volume * ARRAYS[name].itemsize for name, box in wanted.items())
                assert len(read) * BLOCK_BYTES <= own_bytes + 2 * BLOCK_BYTES * pieces


@settings(max_examples=60)
@given(st.data())
def test_random_cuts_and_random_wishes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(["uint8", "int16", "float32", "complex128"]))
    array = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[0]), max_size=3)))
    edges = [0, *cuts, shape[0]]
    ranks: Ranks = [
        {"model/x": Held("model/x", Box(shape, (a, *(0 for _ in shape[1:])), (b - a, *shape[1:])), 1, (rank,))}
        for rank, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    begins = [data.draw(st.integers(0, size)) for size in shape]
    lengths = [data.draw(st.integers(0, size - begin)) for size, begin in zip(shape, begins, strict=True)]
    box = Box(shape, tuple(begins), tuple(lengths))
    with Store(tmp_path_factory.mktemp("cut"), run_id="r") as store:
        path = save(store, 1, ranks, {"model/x": array})
    assert np.array_equal(load(path, {"model/x": box})["model/x"], part(array, box))


def test_a_damaged_part_is_refused_by_those_who_read_it(store: Store) -> None:
    arrays = {name: array for name, array in ARRAYS.items() if array.ndim}  # others may lie in any rank's file
    path = save(store, 1, arranged("fsdp 2", arrays), arrays)
    file = path / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    mine, theirs = ({name: one.box for name, one in held.items()} for held in arranged("fsdp 2", arrays))
    load(path, mine)
    with pytest.raises(CorruptCheckpointError, match="model-00001-of-00002"):
        load(path, theirs, 1)


def test_a_buffer_of_another_size_is_refused(saved: dict[str, Path]) -> None:
    with (
        open_checkpoint(saved["tp 2"]) as checkpoint,
        pytest.raises(ValueError, match=r"\[0:1,0:2\] of .* has 8 bytes"),
    ):
        checkpoint.read_boxes_into([("model/weight", Box((7, 5), (0, 0), (1, 2)), memoryview(bytearray(9)))])


def test_what_was_left_out_cannot_be_read(saved: dict[str, Path]) -> None:
    first = Box((7, 5), (0, 0), (4, 5))
    with open_checkpoint(saved["fsdp 2"], lambda whole: narrow_to(whole, {"model/weight": first})) as checkpoint:
        for box in (Box((7, 5), (3, 0), (2, 5)), whole((7, 5))):
            with pytest.raises(ValueError, match="lies in pieces that were left out"):
                checkpoint.read_boxes_into([("model/weight", box, memoryview(bytearray(20 * box.lengths[0])))])
        with pytest.raises(ValueError, match="lies in pieces that were left out"):
            checkpoint.read_into("model/weight", memoryview(bytearray(140)))
        with pytest.raises(ValueError, match="lies in pieces that were left out"):
            checkpoint.read_many_into(
                [("model/weight", memoryview(bytearray(140))), ("model/weight", memoryview(bytearray(140)))]
            )


# ----------------------------------------------------------------------------------------------- what is a rank's own


def test_each_rank_has_its_own(store: Store) -> None:
    """The lowest rank's has the plain name. Random numbers have files of their own, beside rank 0's extra state."""
    ranks = arranged("fsdp 3", ARRAYS)
    own = [{"model/mean": np.full(4, rank, np.float32)} if rank else {} for rank in range(3)]
    path = save(store, 1, ranks, ARRAYS, own=own)
    assert load(path, {"model/mean": whole((4,))})["model/mean"].tolist() == [1] * 4
    other = own_name("model/mean", 2)
    assert load(path, {other: whole((4,))}, 2)[other].tolist() == [2] * 4
    assert own_name("model/mean", 1) not in glance(path).tensors
    with open_verified(path, None) as checkpoint:
        assert checkpoint.extra_bytes == b"of rank 0"
        assert [checkpoint.rank_extra_bytes(rank) for rank in range(4)] == [None, b"of rank 1", b"of rank 2", None]
    for rank in range(3):
        with open_checkpoint(path, lambda described, rank=rank: narrow_to(described, {}, rank)) as checkpoint:
            assert set(checkpoint.manifest.files) == {EXTRA} | ({rank_extra_name(rank, 3)} if rank else set())
    (path / rank_extra_name(2, 3)).write_bytes(b"of rank X")
    with open_checkpoint(path) as checkpoint, pytest.raises(CorruptCheckpointError, match="state-00002-of-00003"):
        checkpoint.rank_extra_bytes(2)


# -------------------------------------------------------------------------------------------------- what is refused


def change_part(number: int, **changes: Any) -> Callable[[list[Written]], None]:
    def change(written: list[Written]) -> None:
        parts = list(written[1].parts)
        at = [i for i, one in enumerate(parts) if one.tensor == "model/weight"][number]
        parts[at] = replace(parts[at], **changes)
        written[1] = replace(written[1], parts=tuple(parts))

    return change


def change_rank(**changes: Any) -> Callable[[list[Written]], None]:
    def change(written: list[Written]) -> None:
        written[1] = replace(written[1], **changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda written: written.pop(), r"saved of model/.* is not covered by its pieces: \[.*\] is missing"),
        (change_part(0, offsets=(3, 0)), r"model/weight has pieces that overlap: \[3:4,0:5\] is there twice"),
        (change_part(0, offsets=(5, 0)), "model/weight has a piece beyond its shape"),
        (
            change_part(0, shape=(7, 6)),
            r"model/weight is float32\[7, 5\] on rank 0, and on rank 1 it is float32\[7, 6\]",
        ),
        (change_part(0, dtype="int32"), r"on rank 1 it is int32\[7, 5\]"),
        (change_part(0, file="other.safetensors"), "lies in other.safetensors, which is not listed"),
        (change_part(0, own=True), "model/weight is a rank's own on rank 1 alone"),
        (change_rank(extra_digest="other"), "rank 1 is at another iteration, epoch or place in its data than rank 0"),
        (change_rank(ties=(("model/tied", "model/none"),)), "model/tied and model/none are one tensor on some ranks"),
        (change_rank(ties=(("model/weight", "model/bias"),)), "model/weight and model/bias are one tensor on some"),
    ],
)
def test_ranks_that_contradict_each_other(store: Store, change: Callable[[list[Written]], None], message: str) -> None:
    ranks = arranged("fsdp 2", ARRAYS)

    def gather(root: int, folder: int) -> Gathered:
        written = [write_rank(folder, rank, ranks, ARRAYS, extra_digest="same") for rank in range(2)]
        change(written)
        return Gathered(written, b"")

    with pytest.raises(MismatchError, match=message):
        commit_ranks(store, 1, "a", gather, info={})
    assert [name for name in os.listdir(store.directory) if name != ".lock"] == []
    assert save(store, 1, ranks, ARRAYS).name == "step-00000001"


@pytest.mark.parametrize("kept", [None, 100])
def test_a_file_that_is_not_what_its_rank_says(store: Store, kept: int | None) -> None:
    ranks = arranged("fsdp 2", ARRAYS)

    def gather(root: int, folder: int) -> Gathered:
        written = [write_rank(folder, rank, ranks, ARRAYS) for rank in range(2)]
        file = Path(f"/proc/self/fd/{folder}/model-00001-of-00002.safetensors")
        file.unlink() if kept is None else os.truncate(file, kept)
        return Gathered(written, b"")

    says = "No such file" if kept is None else "has 100 bytes, and .* by its record: do all ranks see one directory"
    with pytest.raises(StorageError, match=says):
        commit_ranks(store, 1, "a", gather, info={})
    assert find(store.directory) == ()


def test_what_gather_raises_leaves_nothing(store: Store) -> None:
    def gather(root: int, folder: int) -> Gathered:
        write_rank(folder, 0, arranged("fsdp 2", ARRAYS), ARRAYS)
        raise CheckflowError("rank 1 is gone")

    with pytest.raises(CheckflowError, match="rank 1 is gone"):
        commit_ranks(store, 1, "a", gather, info={})
    assert [name for name in os.listdir(store.directory) if name != ".lock"] == []


def test_a_late_rank_cannot_write_into_a_later_attempt(store: Store) -> None:
    """And a rank that writes again where it has written is refused by the file system."""
    ranks = arranged("fsdp 2", ARRAYS)

    def gather(root: int, folder: int) -> Gathered:
        with pytest.raises(FileNotFoundError):
            fs.open_folder(folder_name(1, "r", "first"), dir_fd=root)
        own = fs.open_folder(folder_name(1, "r", "second"), dir_fd=root)
        written = [write_rank(own, rank, ranks, ARRAYS) for rank in range(2)]
        with pytest.raises(FileExistsError):
            write_rank(own, 1, ranks, ARRAYS)
        fs.close_quietly(own)
        return Gathered(written, b"")

    commit_ranks(store, 1, "second", gather, info={})
    assert load(find(store.directory)[0], {"model/weight": whole((7, 5))})["model/weight"].shape == (7, 5)


def test_names_of_a_version_are_durable_before_it_is_published(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then the manifest, then their names, then the version's own name."""
    calls: list[str] = []
    real_sync, real_rename = fs.fsync, fs.rename

    def fsync(fd: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_sync(fd)

    def rename(*names: str, **where: int) -> None:
        calls.append(f"rename to {names[1]}")
        real_rename(*names, **where)

    monkeypatch.setattr(fs, "fsync", fsync)
    monkeypatch.setattr(fs, "rename", rename)
    save(store, 1, arranged("fsdp 2", ARRAYS), ARRAYS)
    written = [f"{owner}-0000{rank}-of-00002.safetensors" for rank in (0, 1) for owner in ("model", "optimizer")]
    written.insert(4, rank_extra_name(1, 2))
    assert calls == [
        *written, EXTRA, "manifest.json", folder_name(1, "r", "a1"), "rename to step-00000001", store.directory.name
    ]  # fmt: skip


def test_state_that_a_boundary_lacks(store: Store) -> None:
    """Absent is what no rank has; memory order is kept where all parts have the same."""

    def of(rank: int, **more: Any) -> Written:
        parts = (Part("model/x", "f", f"x{rank}", "float32", (4, 2), (2 * rank, 0), (2, 2), (1, 0)),)
        return Written(rank, parts=parts, **more)

    ranks = [of(0, absent=("optimizer/a", "model/x")), of(1, absent=("optimizer/b",))]
    with pytest.raises(MismatchError, match="lies in f"):
        join(ranks, 1, "r", "", {})
    ranks[0] = replace(ranks[0], files={"f": FileEntry(0, ())})
    found = join(ranks, 1, "r", "", {})
    assert found.absent == ("optimizer/a", "optimizer/b")
    assert found.tensors["model/x"].permutation == (1, 0)
    ranks[1] = replace(ranks[1], parts=(replace(ranks[1].parts[0], permutation=None),))
    assert join(ranks, 1, "r", "", {}).tensors["model/x"].permutation is None
