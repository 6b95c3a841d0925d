"""The reader: damage of every kind is refused with a typed error that names the file, and never handed out."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from pydantic import TypeAdapter

from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.runtime.format import manifest
from checkflow.runtime.format.layout import Layout, file_image, make_layout
from checkflow.runtime.store import block_reader
from checkflow.runtime.store import files as store_files
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.support.faults import Faults
from tests.support.store_tools import fill, read_all, record, recover, small_layout, tree

LAYOUT = small_layout()
MODEL, OPTIMIZER = (file.name for file in LAYOUT.files)


def write(directory: Path, *seeds: int) -> list[Path]:
    """Checkpoints of steps 1, 2, …"""
    with Store(directory, run_id="run", keep_latest=10) as store:
        return [
            store.commit(step, LAYOUT, fill(LAYOUT, seed)[0], f"extra {seed}".encode() * 10, {"seed": seed})
            for step, seed in enumerate(seeds, 1)
        ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints; to be copied, not changed."""
    directory = tmp_path_factory.mktemp("good") / "checkpoints"
    write(directory, 1, 2)
    return directory


@pytest.fixture
def directory(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoints"))


def read_everything(path: Path, *, ahead: bool = False) -> tuple[int, dict[str, bytes], bytes]:
    with open_checkpoint(path, ahead=ahead) as checkpoint:
        checkpoint.verify()
        return checkpoint.step, read_all(checkpoint), checkpoint.extra_bytes


def assert_refused(path: Path, message: str | None = None, error: type[StorageError] = CorruptCheckpointError) -> None:
    for ahead in (False, True):
        with pytest.raises(StorageError, match=message) as caught:
            read_everything(path, ahead=ahead)
        assert type(caught.value) is error
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def reseal(path: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> None:
    """Change a manifest as an attacker would: with checksums and a digest that fit."""
    content = json.loads((path / "manifest.json").read_bytes())
    content.pop("digest")
    for name, entry in content["files"].items():
        if re.fullmatch(r"[\w.-]+", name) and (path / name).is_file():
            data = (path / name).read_bytes()
            entry["size_bytes"] = len(data)
            entry["blocks"] = [
                xxhash.xxh3_64_hexdigest(data[i : i + manifest.BLOCK_BYTES])
                for i in range(0, len(data), manifest.BLOCK_BYTES)
            ]
    change(content)
    body = json.dumps(content, separators=(",", ":")).encode()[:-1]
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    (path / "manifest.json").write_bytes(body + b',"digest":"' + digest + b'"}\n')


# --------------------------------------------------------------------------------------------------------- good ones


@pytest.mark.parametrize("ahead", [False, True])
def test_reading_gives_what_was_written(good: Path, ahead: bool) -> None:
    assert read_everything(good / "step-00000002", ahead=ahead) == (2, fill(LAYOUT, 2)[1], b"extra 2" * 10)


def test_resealing_alone_changes_nothing(directory: Path) -> None:
    """The attacks below are refused for what they change, not for how."""
    reseal(directory / "step-00000002")
    assert read_everything(directory / "step-00000002") == (2, fill(LAYOUT, 2)[1], b"extra 2" * 10)


def test_safetensors_reads_the_same(good: Path) -> None:
    found = safetensors.torch.load_file(good / "step-00000001" / MODEL)
    expected = fill(LAYOUT, 1)[1]
    for key, tensor in found.items():
        flat = tensor.contiguous().reshape(-1)
        assert (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"") == expected[f"model/{key}"]
    assert found["conv.weight"].shape == (2, 3, 2, 2)
    assert len(found) == 4


def test_a_copy_under_another_name_opens(directory: Path) -> None:
    (directory / "step-00000002").rename(directory / "exported")
    assert read_everything(directory / "exported")[0] == 2
    assert [path.name for path in find(directory)] == ["step-00000001"]


def test_tensors_come_in_file_order(good: Path) -> None:
    with open_checkpoint(good / "step-00000001") as checkpoint:
        assert list(checkpoint.tensors) == list(LAYOUT.tensors)


def test_wrong_buffers_and_names(good: Path) -> None:
    with open_checkpoint(good / "step-00000001") as checkpoint:
        with pytest.raises(KeyError):
            checkpoint.read_into("model/none", memoryview(bytearray(4)))
        with pytest.raises(ValueError, match="bytes"):
            checkpoint.read_into("model/mask", memoryview(bytearray(4)))
    with pytest.raises(StorageError, match="closed"):
        checkpoint.read_into("model/mask", memoryview(bytearray(5)))


def test_typed_buffers_are_filled(good: Path) -> None:
    target = np.empty((2, 3, 2, 2), np.float32)
    with open_checkpoint(good / "step-00000001") as checkpoint:
        checkpoint.read_into("model/conv.weight", memoryview(target).cast("B"))
    assert target.tobytes() == fill(LAYOUT, 1)[1]["model/conv.weight"]


def test_what_is_deleted_while_it_is_open_stays_readable(directory: Path) -> None:
    with open_checkpoint(directory / "step-00000001") as checkpoint:
        shutil.rmtree(directory)
        checkpoint.verify()
        assert read_all(checkpoint) == fill(LAYOUT, 1)[1]


def test_pieces_of_several_ranks_make_one_tensor(tmp_path: Path) -> None:
    """Two ranks hold half of the rows each, and a third file holds a complex tensor in four boxes."""
    source = np.random.default_rng(0)
    rows, boxes = source.random((6, 5), np.float32), source.random((4, 6)) + 1j
    path = tmp_path / "step-00000003"
    path.mkdir()
    placed: dict[str, list[manifest.Piece]] = {"model/rows": [], "model/boxes": []}
    entries: dict[str, manifest.FileEntry] = {}

    def add(shard: int, name: str, key: str, array: Any, offsets: tuple[int, ...], box: tuple[slice, ...]) -> None:
        part = np.ascontiguousarray(array[box])
        dtype = {"f": "float32", "c": "complex128"}[part.dtype.kind]
        layout = make_layout([record(f"model/{key}", part.shape, dtype)], shard=shard, shards=6)
        buffer = memoryview(bytearray(layout.buffer_bytes))
        begin = layout.tensors[f"model/{key}"].staging_offset
        buffer[begin : begin + part.nbytes] = part.tobytes()
        data = b"".join(file_image(layout.files[0], buffer, 100))
        (path / layout.files[0].name).write_bytes(data)
        entries[layout.files[0].name] = manifest.FileEntry(len(data), (xxhash.xxh3_64_hexdigest(data),))
        placed[name].append(manifest.Piece(layout.files[0].name, key, offsets, part.shape))

    add(0, "model/rows", "rows", rows, (0, 0), np.s_[:2, :])
    add(1, "model/rows", "rows", rows, (2, 0), np.s_[2:, :])
    for shard, (i, j) in enumerate([(0, 0), (0, 4), (1, 0), (1, 4)], 2):
        box = (slice(0, 1) if i == 0 else slice(1, 4), slice(0, 4) if j == 0 else slice(4, 6))
        add(shard, "model/boxes", f"b{i}{j}", boxes, (i, j), box)
    (path / "state.msgpack").write_bytes(b"x")
    entries["state.msgpack"] = manifest.FileEntry(1, (xxhash.xxh3_64_hexdigest(b"x"),))
    tensors = {
        "model/rows": manifest.TensorEntry((6, 5), "float32", tuple(placed["model/rows"])),
        "model/boxes": manifest.TensorEntry((4, 6), "complex128", tuple(placed["model/boxes"]), None, ("pair",)),
    }
    whole = manifest.Manifest(3, "run", "", 6, entries, tensors)
    (path / "manifest.json").write_bytes(manifest.dumps(whole))
    assert read_everything(path)[1] == {"model/rows": rows.tobytes(), "model/boxes": boxes.tobytes()}

    def shift(content: dict[str, Any]) -> None:
        content["tensors"]["model/boxes"]["pieces"][1]["offsets"] = [0, 3]

    reseal(path, shift)
    assert_refused(path, "overlap")


# ---------------------------------------------------------------------------------------------------- damaged files


def test_a_flipped_bit_in_any_byte_of_the_manifest(directory: Path) -> None:
    name, source = directory / "step-00000002" / "manifest.json", random.Random(1)
    data = name.read_bytes()
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1 << source.randrange(8)
        name.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match="digest does not fit"):
            open_checkpoint(name.parent)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_flipped_bit_in_any_byte_of_a_header(directory: Path, name: str) -> None:
    path, source = directory / "step-00000002" / name, random.Random(2)
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for i in range(4096):
            os.pwrite(file.fileno(), bytes([data[i] ^ 1 << source.randrange(8)]), i)
            with pytest.raises(CorruptCheckpointError, match=re.escape(name)):
                open_checkpoint(path.parent)
            os.pwrite(file.fileno(), data[i : i + 1], i)
    read_everything(path.parent)


def test_a_flipped_bit_anywhere_in_the_data(directory: Path) -> None:
    """Opening reads the first block; larger files and the extra state are refused when they are read."""
    source = random.Random(3)
    for name in (MODEL, OPTIMIZER, "state.msgpack"):
        path = directory / "step-00000002" / name
        data = path.read_bytes()
        first = 0 if name == "state.msgpack" else 4096
        for i in range(first, len(data)):
            changed = bytearray(data)
            changed[i] ^= 1 << source.randrange(8)
            path.write_bytes(changed)
            assert_refused(path.parent, "checksum")
        path.write_bytes(data)
    read_everything(directory / "step-00000002")


def test_damage_in_a_later_block_is_found_by_every_way_of_reading(tmp_path: Path) -> None:
    layout = make_layout([record("model/big", (5_000_000,)), record("model/tail", (7,), "int8")])
    staging, expected = fill(layout, 0)
    with Store(tmp_path, run_id="run") as store:
        path = store.commit(1, layout, staging, b"", {})
    big = path / layout.files[0].name
    with open_checkpoint(path) as checkpoint, big.open("r+b", buffering=0) as file:
        for block in (1, 2):
            os.pwrite(file.fileno(), b"!", block * manifest.BLOCK_BYTES + 12_345)
            data = bytearray(20_000_000)
            with pytest.raises(CorruptCheckpointError, match=f"bytes {block * manifest.BLOCK_BYTES} to"):
                checkpoint.read_into("model/big", memoryview(data))
            with pytest.raises(CorruptCheckpointError, match=f"bytes {block * manifest.BLOCK_BYTES} to"):
                checkpoint.verify()
            os.pwrite(
                file.fileno(),
                staging[block * manifest.BLOCK_BYTES + 12_345 :][:1],
                block * manifest.BLOCK_BYTES + 12_345,
            )
        checkpoint.verify()
        assert read_all(checkpoint) == expected
        file.truncate(3 * manifest.BLOCK_BYTES - 6_000_000)
        with pytest.raises(CorruptCheckpointError, match="truncated"):
            checkpoint.verify()


def test_a_manifest_of_impossible_length(directory: Path) -> None:
    """No memory is taken for it; as a sparse file it costs the disk nothing."""
    os.truncate(directory / "step-00000002" / "manifest.json", manifest.MAX_MANIFEST_BYTES + 1)
    assert_refused(directory / "step-00000002", f"has {manifest.MAX_MANIFEST_BYTES + 1} bytes, more than")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.msgpack", "manifest.json"])
def test_files_of_another_length(directory: Path, name: str) -> None:
    path = directory / "step-00000002" / name
    data = path.read_bytes()
    for length in {0, 1, 7, 8, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:length])
        assert_refused(path.parent, re.escape(name))
    for tail in (b"\0", b"\n", b"x" * 5000):
        path.write_bytes(data + tail)
        assert_refused(path.parent, re.escape(name))
    path.write_bytes(bytes(len(data)))
    assert_refused(path.parent, re.escape(name))


def test_a_file_without_room_for_its_header_s_length_is_not_read() -> None:
    def read(at: int, buffer: memoryview) -> None:
        pytest.fail("it was read")

    with pytest.raises(CorruptCheckpointError, match="is no safetensors file: it has 7 bytes"):
        store_files.read_header(Path("x"), 7, read)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.msgpack", "manifest.json"])
def test_files_that_are_none(directory: Path, name: str) -> None:
    path = directory / "step-00000002" / name
    kept = directory / "kept"
    path.rename(kept)
    assert_refused(path.parent, f"{re.escape(name)} is missing")
    path.symlink_to(kept)
    assert_refused(path.parent, "symbolic link")
    path.unlink()
    os.mkfifo(path)
    assert_refused(path.parent, "no regular file")
    path.unlink()
    path.mkdir()
    assert_refused(path.parent, "no regular file")
    path.rmdir()
    kept.rename(path)
    read_everything(path.parent)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "state.msgpack", "manifest.json"])
def test_files_of_another_checkpoint(directory: Path, name: str) -> None:
    shutil.copy(directory / "step-00000001" / name, directory / "step-00000002" / name)
    assert_refused(directory / "step-00000002")


def test_files_of_the_same_checkpoint_exchanged(directory: Path) -> None:
    path = directory / "step-00000002"
    (path / MODEL).rename(path / "x")
    (path / OPTIMIZER).rename(path / MODEL)
    (path / "x").rename(path / OPTIMIZER)
    assert_refused(path)


def test_a_checkpoint_under_the_name_of_another_step(directory: Path) -> None:
    shutil.rmtree(directory / "step-00000002")
    (directory / "step-00000001").rename(directory / "step-00000002")
    assert_refused(directory / "step-00000002", "belongs to step 1")


def test_a_linked_checkpoint(directory: Path) -> None:
    (directory / "step-00000003").symlink_to("step-00000002")
    assert_refused(directory / "step-00000003", "no directory")
    (directory / "step-00000004").write_bytes(b"")
    assert_refused(directory / "step-00000004", "no directory")
    assert_refused(directory / "step-00000005", "No such file", StorageError)


def test_huge_sparse_files_take_no_memory(directory: Path) -> None:
    path = directory / "step-00000002"
    os.truncate(path / "manifest.json", 1 << 42)
    assert_refused(path, "more than")
    shutil.copy(directory / "step-00000001" / "manifest.json", path)

    def claim(content: dict[str, Any]) -> None:
        size = manifest.MAX_EXTRA_BYTES + 1
        content["files"]["state.msgpack"] = {
            "size_bytes": size,
            "blocks": ["0" * 16] * -(-size // manifest.BLOCK_BYTES),
        }
        content["step"] = 2

    os.truncate(path / "state.msgpack", manifest.MAX_EXTRA_BYTES + 1)
    content_before = tree(directory / "step-00000001")
    for name in (MODEL, OPTIMIZER):
        (path / name).write_bytes(content_before[name])
    body = json.loads((path / "manifest.json").read_bytes())
    body.pop("digest")
    claim(body)
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    (path / "manifest.json").write_bytes(text + b',"digest":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n')
    with open_checkpoint(path) as checkpoint, pytest.raises(CorruptCheckpointError, match="more than"):
        _ = checkpoint.extra_bytes


# ------------------------------------------------------------------------------------------ attacks, with checksums


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change: follow the keys, and put the last value there."""

    def change(content: Any) -> None:
        *keys, last, value = path
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def _move_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop(OPTIMIZER)

    return change


CONV = ("tensors", "model/conv.weight")
PIECE = (*CONV, "pieces", 0)
ATTACKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown member": _set("more", 1),
    "unknown member of a tensor": _set("tensors", "model/mask", "a\nb", 1),
    "no step": lambda content: content.pop("step"),
    "step as text": _set("step", "2"),
    "step as float": _set("step", 2.0),
    "negative step": _set("step", -1),
    "endless step": _set("step", 10**4000),
    "no files": _set("files", {}),
    "parent": _move_file("../x"),
    "absolute": _move_file("/etc/passwd"),
    "empty": _move_file(""),
    "dot": _move_file("."),
    "hidden": _move_file(".lock"),
    "below": _move_file("a/b"),
    "long": _move_file("x" * 256),
    "nul": _move_file("a\0b"),
    "newline": _move_file("a\n"),
    "itself": _move_file("manifest.json"),
    "checksum too short": lambda content: content["files"][MODEL]["blocks"].__setitem__(0, "abc"),
    "too few checksums": lambda content: content["files"][MODEL]["blocks"].clear(),
    "too many checksums": lambda content: content["files"][MODEL]["blocks"].append("0" * 16),
    "another block size": _set("block_bytes", 1 << 20),
    "another format": _set("format", "other"),
    "unknown dtype": _set(*CONV, "dtype", "object"),
    "dtype of another size": _set(*CONV, "dtype", "float64"),
    "dtype of the same size": _set(*CONV, "dtype", "int32"),
    "another shape": _set(*CONV, "shape", [3, 2, 2, 2]),
    "negative shape": _set(*CONV, "shape", [-2, -3, 2, 2]),
    "huge shape": _set(*CONV, "shape", [2**62, 2**62, 2, 2]),
    "permutation of another rank": _set(*CONV, "permutation", [0, 1]),
    "permutation twice": _set(*CONV, "permutation", [0, 0, 1, 2]),
    "tags": _set(*CONV, "tags", ["pair"]),
    "no pieces": _set(*CONV, "pieces", []),
    "piece elsewhere": _set(*PIECE, "file", "state.msgpack"),
    "piece nowhere": _set(*PIECE, "file", "none.safetensors"),
    "another key": _set(*PIECE, "key", "mask"),
    "unknown key": _set(*PIECE, "key", "none"),
    "piece beyond": _set(*PIECE, "offsets", [1, 0, 0, 0]),
    "piece of another rank": _set(*PIECE, "offsets", [0]),
    "piece too small": _set(*PIECE, "lengths", [1, 3, 2, 2]),
    "piece twice": lambda content: content["tensors"]["model/conv.weight"]["pieces"].append(
        content["tensors"]["model/conv.weight"]["pieces"][0]
    ),
    "tie to nothing": _set("ties", [["model/tied", "model/none"]]),
    "tie of a tensor": _set("ties", [["model/mask", "model/conv.weight"]]),
    "no world": _set("world_size", 0),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_manifest_made_by_an_attacker(directory: Path, name: str) -> None:
    path = directory / "step-00000002"
    reseal(path, ATTACKS[name])
    before = tree(directory)
    assert_refused(path)
    assert tree(directory) == before


def test_a_manifest_of_a_newer_version_is_not_damaged(directory: Path) -> None:
    reseal(directory / "step-00000002", _set("version", 3))
    for ahead in (False, True):
        with pytest.raises(MismatchError, match="format version 3; this checkflow reads versions up to 2"):
            open_checkpoint(directory / "step-00000002", ahead=ahead)
    with Store(directory, run_id="later") as store, pytest.raises(MismatchError):
        recover(store)
    assert (directory / "step-00000002").is_dir()


def _header(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def _entry(begin: int, end: int, dtype: str = "C64", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


KEY = "conv.weight.exp_avg"
HEADERS: dict[str, Any] = {  # length (None: the text's), text, and what follows the data
    "longest": (2**63, b""),
    "all ones": (2**64 - 1, b""),
    "beyond the file": (5000, b"{}"),
    "over the limit": (100_000_001, b"{}"),
    "empty": (0, b""),
    "no object": (2, b"[]"),
    "number": (1, b"5"),
    "garbage": (4, b"\xff\xfe\0\0"),
    "deep": (20_000, b'{"a":' * 4000),
    "long number": (6013, b'{"' + KEY.encode() + b'":' + b"9" * 5990 + b"}"),
    "holes": (None, _header(**{KEY: _entry(8, 104, "F64", (2, 3, 2))})),
    "too short": (None, _header(**{KEY: _entry(0, 88, "F64", (2, 3, 2))})),
    "overlap": (None, _header(a=_entry(0, 96), **{KEY: _entry(0, 96, "F64", (2, 3, 2))})),
    "backwards": (None, _header(a=_entry(96, 0), **{KEY: _entry(0, 96, "F64", (2, 3, 2))})),
    "negative": (None, _header(a=_entry(-8, 0), **{KEY: _entry(0, 96, "F64", (2, 3, 2))})),
    "another shape": (None, _header(**{KEY: _entry(0, 96, "F64", (3, 2, 2))})),
    "another dtype": (None, _header(**{KEY: _entry(0, 96, "I64", (2, 3, 2))})),
    "shape overflow": (None, _header(**{KEY: _entry(0, 96, "F64", (2**62, 2**62, 2))})),
    "missing": (None, _header(other=_entry(0, 96, "F64", (2, 3, 2)))),
    "twice": (None, b"{%s,%s}" % ((_header(**{KEY: _entry(0, 96, "F64", (2, 3, 2))})[1:-1],) * 2)),
    "data beyond": (None, _header(**{KEY: _entry(0, 96, "F64", (2, 3, 2))}), b"12345678"),
    "no offsets": (None, _header(**{KEY: {"dtype": "F64", "shape": [2, 3, 2]}})),
    "not a number": (None, _header(**{KEY: {"dtype": "F64", "shape": [2, 3, None], "data_offsets": [0, 96]}})),
    "infinite": (None, b'{"%s":{"dtype":"F64","shape":[Infinity],"data_offsets":[0,96]}}' % KEY.encode()),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_made_by_an_attacker(directory: Path, name: str) -> None:
    path = directory / "step-00000002"
    length, text, *tail = HEADERS[name]
    data = (path / OPTIMIZER).read_bytes()[-96:] + b"".join(tail)
    (path / OPTIMIZER).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    reseal(path)
    assert_refused(path, re.escape(OPTIMIZER))


def test_the_header_attacks_differ_from_a_good_header_in_one_thing_only(directory: Path) -> None:
    path = directory / "step-00000002"
    data, text = (path / OPTIMIZER).read_bytes()[-96:], _header(**{KEY: _entry(0, 96, "F64", (2, 3, 2))})
    (path / OPTIMIZER).write_bytes(len(text).to_bytes(8, "little") + text + data)
    reseal(path)
    assert read_everything(path)[1] == fill(LAYOUT, 2)[1]


def test_random_changes_to_a_resealed_manifest_are_refused_or_harmless(directory: Path) -> None:
    """Whatever an attacker writes: a typed error, or the data of the checkpoint; never anything else."""
    path, source = directory / "step-00000002", random.Random(4)
    body = (path / "manifest.json").read_bytes()[: -len(b',"digest":""}\n') - 32]
    expected = fill(LAYOUT, 2)[1]
    refused = 0
    for _ in range(600):
        changed = bytearray(body)
        for _ in range(source.randint(1, 3)):
            changed[source.randrange(len(changed))] = source.choice(b'0123456789{}[]",:abcxyz-.')
        digest = xxhash.xxh3_128_hexdigest(bytes(changed)).encode()
        (path / "manifest.json").write_bytes(bytes(changed) + b',"digest":"' + digest + b'"}\n')
        ahead = source.random() < 0.5
        try:
            found = read_everything(path, ahead=ahead)[1]
        except (StorageError, MismatchError):
            refused += 1
        else:
            assert set(found.values()) <= set(expected.values())
    assert refused > 300


# ------------------------------------------------------------------------------------------------------------- others


@pytest.mark.parametrize("ahead", [False, True])
def test_no_descriptor_stays_open(directory: Path, ahead: bool) -> None:
    """Also when opening fails, wherever it fails."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for at in range(1, 200):
        faults = Faults(at, errno.EIO)
        with faults(), contextlib.suppress(StorageError):
            open_checkpoint(directory / "step-00000002", ahead=ahead).close()
        assert count() == before
        assert "checkflow-reader" not in [thread.name for thread in threading.enumerate()]
        if not faults.met:
            break


def test_the_schema_refuses_what_it_does_not_know() -> None:
    """Every dataclass of the manifest is strict: a new one that forgets it would read anything."""
    for kind in (manifest.Manifest, manifest.TensorEntry, manifest.Piece, manifest.FileEntry):
        schema = TypeAdapter(kind).json_schema()
        assert schema["additionalProperties"] is False


def test_the_cache_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors in one block cost one read of it, and blocks are forgotten."""
    layout: Layout = make_layout([record(f"model/{i:03d}", (65_000,)) for i in range(300)])
    staging, expected = fill(layout, 0)
    with Store(tmp_path, run_id="run") as store:
        path = store.commit(1, layout, staging, b"", {})
    with open_checkpoint(path) as checkpoint:
        reads: list[int] = []
        real = fs.preadv

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            reads.append(offset)
            return real(fd, buffers, offset)

        monkeypatch.setattr(fs, "preadv", preadv)
        assert read_all(checkpoint) == expected
    assert sorted(set(reads)) == sorted(reads)


def test_checkpoints_are_read_from_several_threads(good: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = fill(LAYOUT, 2)[1]
    with open_checkpoint(good / "step-00000002") as checkpoint:

        def read(_: int) -> dict[str, bytes]:
            return read_all(checkpoint)

        with ThreadPoolExecutor(8) as pool:
            assert all(found == expected for found in pool.map(read, range(200)))
    assert isinstance(checkpoint, Checkpoint)


def test_what_a_manifest_says_of_its_files_is_read_by_itself(directory: Path) -> None:
    """Where it stands as the writer puts it; any other order is for the whole manifest's reader."""
    name = directory / "step-00000002" / "manifest.json"
    data, body = name.read_bytes(), name.read_bytes()[: -len(b',"digest":""}\n') - 32]

    def found(changed: bytes) -> Any:
        digest = xxhash.xxh3_128_hexdigest(changed).encode()
        return manifest.files_of(changed + b',"digest":"' + digest + b'"}\n', "m")

    whole = manifest.loads(data, "m")
    assert found(body) == manifest.files_of(data, "m") == whole.files != {}
    first = whole.files[MODEL].blocks[0].encode()
    for old, new in (
        (b'{"step":', b'{"world_size":1,"step":'),
        (b'"run_id":"run"', b'"run_id":"\\"files\\":"'),
        (b'"files":{', b'"files":[{'),
        (b'"files":{', b'"files":{"state.msgpack":{},'),
        (b'"files":{', b'"files":{"manifest.json":{"size_bytes":0,"blocks":[]},'),
        (b'"files":{', b'"files":{"../x":{"size_bytes":0,"blocks":[]},'),
        (b'"files":{', b'"files":' + b"[" * 100_000),
        (b'"state.msgpack"', b'"other"'),
        (b'["' + first, b'["0' + first),
        (b'["' + first + b'"', b'["' + first + b'","' + first + b'"'),
        (MODEL.encode(), b"\xff"),
    ):
        assert old in body
        assert found(body.replace(old, new, 1)) is None
    with pytest.raises(CorruptCheckpointError, match="digest"):
        manifest.files_of(data.replace(b'"files"', b'"filez"'), "m")


def test_what_is_read_ahead_begins_before_the_manifest_is_looked_at_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout([record("model/w", (5 * manifest.BLOCK_BYTES,), "uint8")])
    with Store(tmp_path / "checkpoints", run_id="run") as store:
        path = store.commit(1, layout, memoryview(bytearray(layout.buffer_bytes)), b"", {})
    begun, read, parse = threading.Event(), store_files.read_block, store_files.loads

    def read_block(file: store_files.OpenFile, block: int, *others: Any) -> memoryview:
        if block == 3:
            begun.set()
        return read(file, block, *others)

    def loads(data: bytes, name: str) -> manifest.Manifest:
        assert begun.wait(600)
        return parse(data, name)

    monkeypatch.setattr(block_reader, "read_block", read_block)
    monkeypatch.setattr(store_files, "loads", loads)
    with open_checkpoint(path, ahead=True) as checkpoint:
        assert list(checkpoint.tensors) == ["model/w"]
