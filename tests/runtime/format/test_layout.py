"""The layout: what any reader of safetensors sees, and what the staging buffer looks like."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow.core.errors import UnsupportedError
from checkflow.core.state import memory_order
from checkflow.runtime.format.layout import (
    PAGE_BYTES,
    STORED_TYPES,
    FileLayout,
    TensorRecord,
    element,
    file_image,
    make_layout,
    write_headers,
)
from tests.support.store_tools import fill, record


def image(file: FileLayout, staging: memoryview, limit_bytes: int = 1 << 20) -> bytes:
    return b"".join(file_image(file, staging, limit_bytes))


def stage(tensors: dict[str, torch.Tensor]) -> tuple[Any, memoryview]:
    """Real tensors, staged as the copy engine stages them: the bytes of their memory, as they lie there."""
    layout = make_layout(
        [
            TensorRecord(
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                t.nbytes,
                t.element_size(),
                0,
                memory_order(t),
            )
            for name, t in tensors.items()
        ]
    )
    staging = memoryview(bytearray(layout.buffer_bytes))
    write_headers(layout, staging)
    for name, placed in layout.tensors.items():
        tensor = tensors[name]
        if tensor.numel():
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            begin = tensor.storage_offset() * tensor.element_size()
            staging[placed.staging_offset : placed.staging_offset + tensor.nbytes] = flat[
                begin : begin + tensor.nbytes
            ].numpy()
    return layout, staging


def load(path: Path, data: bytes) -> dict[str, torch.Tensor]:
    path.write_bytes(data)
    return safetensors.torch.load_file(path)


def test_an_empty_job_has_no_files() -> None:
    layout = make_layout([])
    assert (layout.files, dict(layout.tensors), layout.buffer_bytes) == ((), {}, 0)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (dtype, shape)
        for dtype, stored in sorted(STORED_TYPES.items())
        for shape in [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5)]
        if shape or not stored.packed  # two elements in a byte: torch has no such scalar
    ],
)
def test_every_dtype_reads_right_with_safetensors(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    layout = make_layout([record("model/t", shape, dtype)])
    staging, expected = fill(layout, 1)
    found = load(tmp_path / "t", image(layout.files[0], staging))["t"]
    kind = getattr(torch, dtype)
    if STORED_TYPES[dtype].pair:
        assert found.shape == (*shape, 2)
        found = torch.view_as_complex(found)
    assert found.dtype is kind
    assert found.shape == shape
    assert found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == expected["model/t"]


def test_every_dtype_of_torch_that_safetensors_writes_is_known() -> None:
    for dtype, size in safetensors.torch._SIZE.items():
        assert STORED_TYPES[str(dtype).removeprefix("torch.")].element_bytes == size


def test_channels_last_reads_right_for_anyone(tmp_path: Path) -> None:
    tensors = {
        "model/conv": torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
        "model/conv3d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "model/transposed": torch.randn(6, 5).t(),
        "model/one": torch.randn(1, 3, 1, 1).to(memory_format=torch.channels_last),
        "model/plain": torch.randn(3, 3),
        "model/half": torch.randn(3, 3, 2, 2).half().to(memory_format=torch.channels_last),
        "model/pair": torch.randn(4, 6, dtype=torch.complex128).t(),
        "model/byte": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).permute(2, 0, 1),
    }
    layout, staging = stage(tensors)
    for limit in (1, 8, 100, 1 << 20):
        found = load(tmp_path / "model", image(layout.files[0], staging, limit))
        for name, tensor in tensors.items():
            back = found[name.removeprefix("model/")]
            assert torch.equal(torch.view_as_complex(back) if tensor.is_complex() else back, tensor), (name, limit)


def test_turning_is_piecewise() -> None:
    layout = make_layout([record("model/t", (3, 64, 8, 8), order=(0, 2, 3, 1))])
    staging, expected = fill(layout, 2)
    for limit in (4, 32, 1000, 40_000):
        pieces = list(file_image(layout.files[0], staging, limit))
        assert max(len(piece) for piece in pieces[1:]) <= max(limit, 8 * 4)
        assert b"".join(pieces[1:]) == expected["model/t"]


def test_what_is_not_turned_is_not_copied() -> None:
    layout = make_layout([record("model/a", (1000,)), record("model/b", (10, 10), order=(0, 1))])
    staging, _ = fill(layout, 3)
    pieces = [piece for piece in file_image(layout.files[0], staging, 64) if len(piece)]
    assert len(pieces) == 2
    staging[-1] ^= 1
    staging[layout.tensors["model/a"].staging_offset] ^= 1
    assert b"".join(pieces) == bytes(staging[: layout.files[0].size_bytes])


def test_the_buffer_is_the_images_of_the_files() -> None:
    layout = make_layout(
        [record("model/a", (5,)), record("opt.sgd/a.m", (3,), "bfloat16"), record("ema/a", (5,), "int8")]
    )
    staging, _ = fill(layout, 4)
    assert [file.name for file in layout.files] == [
        "ema-00000-of-00001.safetensors", "model-00000-of-00001.safetensors", "opt.sgd-00000-of-00001.safetensors",
    ]  # fmt: skip
    for file in layout.files:
        assert bytes(staging[file.staging_offset : file.staging_offset + file.size_bytes]) == image(file, staging)
        assert file.staging_offset % PAGE_BYTES == 0
    assert layout.buffer_bytes == 6 * PAGE_BYTES


def test_packing_order() -> None:
    layout = make_layout(
        [
            record("model/z", (1,), "uint8"),
            record("model/late", (1,), deadline=9),
            record("model/b", (1,), deadline=1),
            record("model/a", (1,), deadline=1),
            record("model/pair", (1,), "complex128", deadline=10),
            record("model/wide", (1,), "int64", deadline=10),
        ]
    )
    assert [name.removeprefix("model/") for name in layout.tensors] == ["pair", "wide", "a", "b", "late", "z"]


def test_shards_go_into_names() -> None:
    assert make_layout([record("m/a", (1,))], shard=3, shards=16).files[0].name == "m-00003-of-00016.safetensors"


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def records(draw: st.DrawFn) -> list[TensorRecord]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=8, unique=True))
    found = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(STORED_TYPES)))
        shape = draw(shapes) or ((1,) if STORED_TYPES[dtype].packed else ())
        order = draw(st.none() | st.permutations(range(len(shape))))
        owner = draw(st.sampled_from(["model", "optimizer", "G"]))
        found.append(record(f"{owner}/{name}", shape, dtype, deadline=draw(st.integers(0, 3)), order=order))
    return found


@settings(max_examples=80, deadline=None)
@given(st.data(), records(), st.integers(1, 300))
def test_any_state_is_packed_without_holes_and_reads_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, items: list[TensorRecord], limit: int
) -> None:
    if any(item.name.endswith("/__metadata__") for item in items):
        return
    layout = make_layout(items)
    assert make_layout(data.draw(st.permutations(items))) == layout
    staging, expected = fill(layout, 5)
    assert layout.tensors.keys() == {item.name for item in items}
    folder = tmp_path_factory.mktemp("any")
    for file in layout.files:
        reached = len(file.header)
        assert reached % PAGE_BYTES == 0
        for placed in file.tensors:
            assert placed.file_offset == reached
            assert placed.staging_offset == file.staging_offset + reached
            assert placed.staging_offset % placed.record.element_bytes == 0
            reached += placed.record.size_bytes
        assert reached == file.size_bytes
        (folder / file.name).write_bytes(image(file, staging, limit))
        with safetensors.safe_open(folder / file.name, "pt") as opened:
            assert set(opened.keys()) == {placed.key for placed in file.tensors}
            assert opened.metadata()["format"] == "pt"
            for placed in file.tensors:
                stored = opened.get_tensor(placed.key).contiguous().reshape(-1)
                raw = stored.view(torch.uint8).numpy().tobytes() if stored.numel() else b""
                assert raw == expected[placed.record.name]
                is_pair = STORED_TYPES[placed.record.dtype].pair
                assert (f"dtype {placed.key}" in opened.metadata()) == is_pair
    for one, other in itertools.pairwise(layout.files):
        assert one.staging_offset + one.size_bytes <= other.staging_offset


def test_numpy_reads_it_too(tmp_path: Path) -> None:
    layout = make_layout([record("model/a", (2, 3), order=(1, 0)), record("model/b", (4,), "int64")])
    staging, expected = fill(layout, 6)
    (tmp_path / "f").write_bytes(image(layout.files[0], staging))
    found = safetensors.numpy.load_file(tmp_path / "f")
    assert {f"model/{key}": array.tobytes() for key, array in found.items()} == expected


def test_the_header_grows_by_pages() -> None:
    for count in (1, 40, 41, 42, 43, 400):
        layout = make_layout([record(f"model/{i:04d}" + "x" * 60, (1,)) for i in range(count)])
        header = layout.files[0].header
        assert len(header) % PAGE_BYTES == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert len(json.loads(header[8:])) == count + 1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (record("nothing", (1,)), "cannot be stored"),
        (record("model/", (1,)), "cannot be stored"),
        (record("/a", (1,)), "cannot be stored"),
        (record("../a", (1,)), "cannot be stored"),
        (record(".hidden/a", (1,)), "cannot be stored"),
        (record("a b/c", (1,)), "cannot be stored"),
        (record("m" * 101 + "/c", (1,)), "cannot be stored"),
        (record("model/__metadata__", (1,)), "cannot be stored"),
        (record("model/\ud800", (1,)), "Unicode"),
        (record("model/t", (), "float4_e2m1fn_x2"), "dimension"),
        (record("model/t", (2, 3), order=(0, 0)), "order"),
        (record("model/t", (2, 3), order=(0,)), "order"),
        (TensorRecord("model/q", "qint8", (1,), 1, 1), "qint8"),
        (TensorRecord("model/q", "float32", (2,), 4, 4), "4 bytes"),
        (TensorRecord("model/q", "float32", (2,), 4, 2), "elements of 2"),
    ],
)
def test_what_cannot_be_stored_is_refused(item: TensorRecord, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make_layout([record("model/ok", (1,)), item])


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="two state tensors"):
        make_layout([record("model/a", (1,)), record("model/a", (2,))])


@pytest.mark.parametrize("dtype", sorted(STORED_TYPES))
def test_element_moves_whole_elements(dtype: str) -> None:
    assert element(dtype).itemsize == STORED_TYPES[dtype].element_bytes == getattr(torch, dtype).itemsize
    data = bytes(range(256))  # NaNs with payloads among them
    assert np.frombuffer(data, element(dtype))[::-1].copy()[::-1].copy().tobytes() == data
