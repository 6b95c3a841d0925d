"""``checkflow import``: weights that other tools wrote become checkpoints, byte for byte, and jobs begin from them."""

from __future__ import annotations

import json
import logging
import os
import pickle
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import checkflow
from checkflow.core.errors import CorruptCheckpointError, LockedError, MismatchError, StorageError
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.weights.importer import import_weights
from checkflow.runtime.weights.load import load_weights
from checkflow.runtime.weights.source import open_weights
from tests.runtime.test_inspect import as_json, damage, run
from tests.runtime.weights.test_exporter import Tied, optimizer_of
from tests.support.store_tools import small_layout
from tests.support.waiting import wait_for

KINDS = [name for name, stored in STORED_TYPES.items() if not stored.pair]
quiet = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP's, that it runs in one process


def save_dcp(state: dict[str, Any], path: Path) -> None:
    save_distributed(state, checkpoint_id=path, no_dist=True)


def tensors_of_all_types() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for kind in KINDS:
        dtype = getattr(torch, kind)
        if dtype is torch.bool:
            found[kind] = torch.randint(2, (3, 4), generator=generator).bool()
        else:
            raw = torch.randint(256, (3, 4 * STORED_TYPES[kind].element_bytes), generator=generator, dtype=torch.uint8)
            found[kind] = raw.view(dtype)
    found["scalar"] = torch.tensor(3.5)
    found["empty"] = torch.empty(0, 7, dtype=torch.int16)
    found["channels_last"] = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    found["tied.a"] = found["tied.b"] = torch.randn(5, generator=generator)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and value.shape == other[name].shape and raw(value) == raw(other[name])
        for name, value in one.items()
    )


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path)


WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
    "x.safetensors": write_safetensors,
    "dcp": lambda tensors, path: save_dcp({"model": tensors, "epoch": 1}, path),
    "flat_dcp": lambda tensors, path: save_dcp(dict(tensors), path),
    "x.pt": lambda tensors, path: torch.save({"state_dict": tensors, "epoch": 1}, path),
    "old.pt": lambda tensors, path: torch.save(tensors, path, _use_new_zipfile_serialization=False),
}


@quiet
@pytest.mark.parametrize("source", WRITERS)
def test_all_types_come_back_byte_for_byte(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tensors_of_all_types()
    if source == "old.pt":  # that format knows types up to a time
        tensors = {
            name: tensor for name, tensor in tensors.items() if not name.startswith(("float8", "float4", "uint"))
        }
    WRITERS[source](tensors, tmp_path / source)
    done = as_json(capsys, "import", tmp_path / source, tmp_path / "ckpt", "--step", 7)
    assert (done["step"], done["newest"]) == (7, 7)
    assert done["left_out"] == ([] if source in ("x.safetensors", "flat_dcp", "old.pt") else ["epoch"])
    assert run(capsys, "verify", tmp_path / "ckpt")[0] == 0
    for out in ("out.safetensors", "out"):
        assert run(capsys, "export", tmp_path / "ckpt", "-o", tmp_path / out)[0] == 0
    assert same_bytes(safetensors.torch.load_file(tmp_path / "out.safetensors"), tensors)
    # and once more, from what was exported
    for again in ("out.safetensors", "out"):
        assert run(capsys, "import", tmp_path / again, tmp_path / f"ckpt of {again}")[0] == 0
        end = tmp_path / f"end of {again}.safetensors"
        assert run(capsys, "export", tmp_path / f"ckpt of {again}", "-o", end)[0] == 0
        assert same_bytes(safetensors.torch.load_file(end), tensors)


@quiet
def test_complex_types_that_safetensors_lacks(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2, dtype=torch.complex128), "b": torch.zeros(3, dtype=torch.complex32).conj()}
    save_dcp({"model": tensors}, tmp_path / "dcp")
    with open_weights(tmp_path / "dcp") as weights:
        path = import_weights(weights, tmp_path / "one").path
    # a checkpoint's own file tells what its pairs of numbers are
    with open_weights(path / "model-00000-of-00001.safetensors") as weights:
        path = import_weights(weights, tmp_path / "two").path
    with open_weights(path) as weights:
        assert {name: str(one) for name, one in weights.tensors.items()} == {
            "a": "complex128[3, 2]",
            "b": "complex32[3]",
        }
        assert bytes(weights.read("a")) == raw(torch.view_as_real(tensors["a"]))


def shards(folder: Path) -> dict[str, torch.Tensor]:
    """As model hubs have them: an index, and links to where the data lies."""
    tensors = {f"layers.{number}.weight": torch.full((4, 4), float(number)) for number in range(4)}
    (folder / "blobs").mkdir(parents=True)
    places = {}
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        part = {name: tensor for name, tensor in tensors.items() if int(name.split(".")[1]) % 2 == number}
        write_safetensors(part, folder / "blobs" / str(number))
        (folder / file).symlink_to(folder / "blobs" / str(number))
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 256}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("source", ["hub", "hub/model.safetensors.index.json"])
def test_weights_in_shards(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = shards(tmp_path / "hub")
    assert as_json(capsys, "import", tmp_path / source, tmp_path / "ckpt")["tensors"] == 4
    assert run(capsys, "export", tmp_path / "ckpt", "-o", tmp_path / "out.safetensors")[0] == 0
    assert same_bytes(safetensors.torch.load_file(tmp_path / "out.safetensors"), tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda places: places | {"layers.0.weight": "../secret.safetensors"}, "no file beside the index"),
        (lambda places: places | {"further": next(iter(places.values()))}, "lacks 'further'"),
        (lambda places: places | {"further": "model-9.safetensors"}, "cannot read"),
        (lambda places: [places], "is no index"),
    ],
)
def test_an_index_that_is_wrong(
    change: Callable[[Any], Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards(tmp_path / "hub")
    index = tmp_path / "hub" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": change(json.loads(index.read_text())["weight_map"])}))
    refused(capsys, index, tmp_path, says)


def refused(capsys: pytest.CaptureFixture[str], source: Path, tmp_path: Path, says: str, *options: object) -> None:
    """In one line, and nothing is made."""
    code, text = run(capsys, "import", source, tmp_path / "ckpt", *options)
    assert code == 1, text
    assert says in text
    assert len(text.splitlines()) == 1, text
    assert not (tmp_path / "ckpt").exists()


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_files_that_are_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for number, (write, says) in enumerate([
        (lambda path: None, "there is no"),
        (lambda path: path.write_bytes(b""), "it has 0 bytes"),
        (lambda path: path.write_bytes(b"\xff" * 100), "claims a header"),
        (lambda path: write_header(path, {}), "holds no tensor"),
        (lambda path: write_header(path, {"a": {**one, "dtype": "F6_E2M3"}}, bytes(4)), "is F6_E2M3, which torch"),
        (lambda path: write_header(path, {"a": one}, bytes(3)), "bytes, its header describes"),
        (lambda path: write_header(path, {"a": {**one, "shape": [2]}}, bytes(4)), "as F32[2] in 4 bytes"),
        (lambda path: write_header(path, {"a": {**one, "shape": [-1, -1]}}, bytes(4)), "'-1' is no length"),
        (lambda path: write_header(path, {"a": {**one, "dtype": "F4", "shape": [1, 9]}}, bytes(4)), "pairs of these"),
        (lambda path: os.mkfifo(path), "no regular file"),
        (lambda path: path.mkdir(), "holds no weights"),
    ]):  # fmt: skip
        path = tmp_path / f"{number}.safetensors"
        write(path)
        refused(capsys, path, tmp_path, says)
    (tmp_path / "x.txt").touch()
    refused(capsys, tmp_path / "x.txt", tmp_path, "give its format")
    for content, says in (
        (b"", "is damaged, or no file of torch.save"), (b"PK\3\4" + bytes(50), "is damaged, or no file of torch.save"),
    ):  # fmt: skip
        (tmp_path / "x.pt").write_bytes(content)
        refused(capsys, tmp_path / "x.pt", tmp_path, says)
    for value, says in (
        ([1], "holds a list, no state dict"), ({"a": 1}, "holds no state dict"),
        ({"a": torch.ones(2).to_sparse()}, "which a checkpoint's files cannot hold"),
        ({"a": torch.empty(2, device="meta")}, "a tensor without values"),
        ({"g": {"w": torch.ones(1)}, "d": {"w": torch.ones(1)}}, "has weights under g, d: say which"),
    ):  # fmt: skip
        torch.save(value, tmp_path / "x.pt")
        refused(capsys, tmp_path / "x.pt", tmp_path, says)
    refused(capsys, tmp_path / "x.pt", tmp_path, "no weights under 'e', but under g, d", "--key", "e")
    assert run(capsys, "import", tmp_path / "x.pt", tmp_path / "ckpt", "--key", "g")[0] == 0


@quiet
def test_files_that_claim_more_than_they_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = torch.ones(1).expand(2**22)  # 16 MiB, in 4 bytes
    file = tmp_path / "x.pt"
    torch.save({"w": mask}, file)
    assert run(capsys, "import", file, tmp_path / "small")[0] == 0
    for zipped in (True, False):
        torch.save({"w": torch.ones(1).expand(16 * 10**9)}, file, _use_new_zipfile_serialization=zipped)
        size = file.stat().st_size
        refused(capsys, file, tmp_path, f"claims tensors of 64000000000 bytes, and has {size}")
        with pytest.raises(CorruptCheckpointError, match="claims tensors of 64000000000 bytes"):
            load_weights(nn.Linear(2, 2), file)
    torch.save({"w": torch.ones(100_003)}, file)
    larger = b"\x8a\x05" + (16 * 10**9).to_bytes(5, "little")  # as pickle writes such a number
    (tmp_path / "y.pt").write_bytes(file.read_bytes().replace(pickle.dumps(100_003, protocol=2)[2:-1], larger))
    refused(capsys, tmp_path / "y.pt", tmp_path, "is damaged, or no file of torch.save")
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name) + bytes(2**20))
    refused(capsys, tmp_path / "z.pt", tmp_path, "claims records of")
    save_dcp({"w": torch.ones(4)}, tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([16 * 10**9])
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(capsys, tmp_path / "dcp", tmp_path, "claims tensors of 64000000000 bytes")


class Code:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@quiet
def test_no_pickle_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "code": Code(tmp_path / "was here")}, tmp_path / "x.pt")
    refused(capsys, tmp_path / "x.pt", tmp_path, "never code")
    save_dcp({"model": {"w": torch.ones(1), "_extra_state": 3}}, tmp_path / "dcp")
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "was here")))
    refused(capsys, tmp_path / "dcp", tmp_path, "does not describe tensors")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused(capsys, tmp_path / "dcp", tmp_path, "contradicts itself")
    found = pickle.loads(metadata)
    for info in found.storage_data.values():
        info.relative_path = "../secret"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    refused(capsys, tmp_path / "dcp", tmp_path, "no file of this folder")
    assert not (tmp_path / "was here").exists()


@quiet
def test_damage_is_found_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"w": torch.arange(1000.0)}
    pattern = raw(tensors["w"])[400:420]
    for source, file, says in (
        ("x.pt", "x.pt", "is damaged"), ("dcp", "dcp/__0_0.distcp", "is damaged"),
    ):  # fmt: skip
        WRITERS[source](tensors, tmp_path / source)
        data = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(data.replace(pattern, pattern[::-1]))
        refused(capsys, tmp_path / source, tmp_path, says)
        (tmp_path / file).write_bytes(data[: len(data) // 2])
        refused(capsys, tmp_path / source, tmp_path, "is damaged" if source == "x.pt" else "is truncated")


def test_a_directory_that_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_safetensors({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    for step in (1, 2, 3):
        assert run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "ckpt", "--step", step)[0] == 0
    assert [path.name for path in find(tmp_path / "ckpt")] == [f"step-0000000{step}" for step in (3, 2, 1)]
    before = (tmp_path / "ckpt" / "step-00000002" / "manifest.json").read_bytes()
    code, text = run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "ckpt", "--step", 2)
    assert (code, "has a checkpoint of step 2 already" in text) == (1, True)
    assert (tmp_path / "ckpt" / "step-00000002" / "manifest.json").read_bytes() == before
    code, text = run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "ckpt")
    assert 'resume="auto" resumes from step 3' in text
    with (
        Store(tmp_path / "ckpt", run_id="a"), open_weights(tmp_path / "x.safetensors") as weights,
        pytest.raises(LockedError, match="is being written by process"),
    ):  # fmt: skip
        import_weights(weights, tmp_path / "ckpt", step=9)
    assert run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "ckpt", "--step", -1)[0] == 2
    assert run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "ckpt", "--model", "a/b", "--step", 9)[0] == 1
    assert len(find(tmp_path / "ckpt")) == 4


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    size = 1 << 22
    write_safetensors({str(number): torch.zeros(size // 4) for number in range(12)}, tmp_path / "x.safetensors")
    torch.load  # noqa: B018 - imported before it counts
    with open_weights(tmp_path / "x.safetensors") as weights:
        tracemalloc.start()
        try:
            import_weights(weights, tmp_path / "ckpt")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert size < peak < 3 * size


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # it has state before its first step
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def fine_tune(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, numbers: Any, log: list[int]) -> None:
    for number in numbers:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        scheduler.step()
        log.append(number)


def test_a_job_begins_from_imported_weights_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    given = make()[0].state_dict()
    torch.save({f"module._orig_mod.{name}": value for name, value in given.items()}, tmp_path / "w.bin")
    assert run(capsys, "import", tmp_path / "w.bin", tmp_path / "ckpt", "--step", 3)[0] == 0
    expected = make()
    expected[0].load_state_dict(given)
    log: list[int] = []
    fine_tune(*expected, range(3, 9), log)
    model, optimizer, scheduler = make()
    caplog.set_level(logging.INFO, "checkflow")
    for end in (6, 9):
        with checkflow.Checkpointer(
            model, optimizer, directory=tmp_path / "ckpt", state={"scheduler": scheduler}, resume="must"
        ) as checkpointer:
            assert checkpointer.resumed_from == end - 3
            if end == 6:
                assert same_bytes(dict(model.state_dict()), given)
                assert len(optimizer.state) == 6  # of each parameter, as the job made it
                assert "imported weights and nothing else: optimizer, scheduler, the place" in caplog.text
                assert "resumed from step 3" in caplog.text
                caplog.clear()
            fine_tune(model, optimizer, scheduler, checkpointer.steps(end), log)
        assert len(log) == 6 + end - 3
        if end == 6:
            model, optimizer, scheduler = make()
    assert "imported" not in caplog.text
    torch.testing.assert_close(dict(model.state_dict()), dict(expected[0].state_dict()))
    assert optimizer.param_groups[0]["lr"] == expected[1].param_groups[0]["lr"]


def test_other_weights_than_the_jobs_are_refused_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, scheduler = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = dict(make()[0].state_dict())
    for number, (tensors, says) in enumerate([
        ({name: value for name, value in given.items() if name != "2.bias"}, "the job's model/2.bias is not in"),
        (given | {"head": torch.ones(1)}, "the checkpoint's model/head is not in the job"),
        (given | {"2.bias": torch.ones(7)}, r"model/2.bias is float32\[7\] in the checkpoint, float32\[6\] in the job"),
        (given | {"2.bias": torch.ones(6).half()}, r"is float16\[6\] in the checkpoint"),
    ]):  # fmt: skip
        write_safetensors(tensors, tmp_path / "w.safetensors")
        assert run(capsys, "import", tmp_path / "w.safetensors", tmp_path / str(number))[0] == 0
        with pytest.raises(MismatchError, match=f"{says}.*load_weights"):
            checkflow.Checkpointer(model, optimizer, directory=tmp_path / str(number), state={"s": scheduler})
        assert same_bytes(dict(model.state_dict()), before)


@pytest.mark.parametrize("gone", [None, "a.weight", "b.weight"])
def test_ties_and_extra_state(gone: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Tied()
    model.extra = {"count": 41}
    state = {name: value for name, value in model.state_dict().items() if name != gone}
    torch.save({"model": state}, tmp_path / "w.pt")
    done = as_json(capsys, "import", tmp_path / "w.pt", tmp_path / "ckpt")
    assert done["ties"] == (1 if gone is None else 0)
    job = Tied()
    with checkflow.Checkpointer(job, optimizer_of(job), directory=tmp_path / "ckpt", resume=0):
        assert job.extra == {"count": 41}
        assert same_bytes(
            {name: value for name, value in job.state_dict().items() if name != "_extra_state"},
            {name: value for name, value in model.state_dict().items() if name != "_extra_state"},
        )
    if gone is None:
        assert run(capsys, "export", f"{tmp_path / 'ckpt'}@0", "-o", tmp_path / "out.pt")[0] == 0
        back = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
        assert back["a.weight"].data_ptr() == back["b.weight"].data_ptr()
        assert back["_extra_state"] == {"count": 41}


def test_the_weights_of_another_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, scheduler = make()
    with checkflow.Checkpointer(
        {"g": model, "d": nn.Linear(2, 2)}, optimizer, directory=tmp_path / "one", state={"s": scheduler}
    ) as checkpointer:
        fine_tune(model, optimizer, scheduler, checkpointer.steps(2), [])
    refused(capsys, tmp_path / "one", tmp_path, "has the models d, g: say which")
    done = as_json(capsys, "import", f"{tmp_path / 'one'}@2", tmp_path / "ckpt", "--key", "g", "--model", "net")
    assert done["left_out"] == ["d", "optimizer", "state s"]
    with open_checkpoint(find(tmp_path / "ckpt")[0]) as checkpoint:
        assert set(checkpoint.tensors) == {f"net/{name}" for name in model.state_dict()}


@quiet
def test_tensors_in_parts_as_several_ranks_write_them(tmp_path: Path) -> None:
    rows, columns = torch.arange(21.0).reshape(7, 3), torch.arange(10).reshape(2, 5)
    boxes = {
        "model.rows": {(0, 0): rows[:4], (4, 0): rows[4:]},
        "model.columns": {(0, 0): columns[:, :3], (0, 3): columns[:, 3:]},
    }
    whole = {"model.rows": rows, "model.columns": columns}
    parts = {f"{name}{begin}": part for name, found in boxes.items() for begin, part in found.items()}
    save_dcp(parts, tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.state_dict_metadata = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=whole[name].dtype), whole[name].size(),
            [ChunkStorageMetadata(torch.Size(begin), part.size()) for begin, part in found.items()],
        )
        for name, found in boxes.items()
    }  # fmt: skip
    metadata.planner_data = {name: tuple(name.split(".")) for name in boxes}
    metadata.storage_data = {
        MetadataIndex(name, torch.Size(begin)): infos[f"{name}{begin}"]
        for name, found in boxes.items()
        for begin in found
    }
    file.write_bytes(pickle.dumps(metadata))
    target = {"model": {name.removeprefix("model."): torch.zeros_like(tensor) for name, tensor in whole.items()}}
    load_distributed(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same_bytes(target["model"], {"rows": rows, "columns": columns})  # so torch reads it
    with open_weights(tmp_path / "dcp") as weights:
        path = import_weights(weights, tmp_path / "ckpt").path
    back = safetensors.torch.load_file(path / "model-00000-of-00001.safetensors")
    assert same_bytes(back, {"rows": rows, "columns": columns})
    metadata.state_dict_metadata["model.rows"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))
    with (
        pytest.raises(CorruptCheckpointError, match=r"'model.rows' of shape .* is not the sum of its parts"),
        open_weights(tmp_path / "dcp"),
    ):
        pass


def test_a_source_that_shrinks_leaves_no_checkpoint(tmp_path: Path) -> None:
    write_safetensors({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "x.safetensors")

    def shrink(name: str, done: float, total: float | None) -> None:
        if name == "b":
            os.truncate(tmp_path / "x.safetensors", 5000)

    with (
        open_weights(tmp_path / "x.safetensors") as weights,
        pytest.raises(CorruptCheckpointError, match="is truncated"),
    ):
        import_weights(weights, tmp_path / "ckpt", progress=shrink)
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == [".lock"]


def test_a_file_that_gets_too_few_bytes_is_no_checkpoint(tmp_path: Path) -> None:
    layout = small_layout()
    with Store(tmp_path, run_id="a") as store:
        with pytest.raises(StorageError, match=r"got \d+ of \d+ bytes"):
            store.commit(1, layout, lambda file: iter([memoryview(file.header)]), b"", {})
        assert store.checkpoints() == ()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_damage_after_an_import_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_safetensors({"a": torch.ones(1000)}, tmp_path / "x.safetensors")
    assert run(capsys, "import", tmp_path / "x.safetensors", tmp_path / "ckpt")[0] == 0
    damage(tmp_path / "ckpt" / "step-00000000" / "model-00000-of-00001.safetensors")
    assert run(capsys, "verify", tmp_path / "ckpt")[0] == 1
    with pytest.raises(StorageError, match="is damaged"):
        checkflow.load_weights(nn.Linear(1, 1), tmp_path / "ckpt", strict=False, rename=lambda name: "weight")


@pytest.mark.slow
def test_what_a_running_job_has_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, scheduler = make()
    assert as_json(capsys, "ls", tmp_path)["running"] is None
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path, every=2) as checkpointer:
        assert as_json(capsys, "ls", tmp_path)["running"]["memory_step"] is None
        assert "memory: nothing yet" in run(capsys, "ls", tmp_path)[1]
        fine_tune(model, optimizer, scheduler, checkpointer.steps(5), [])

        def told() -> int | None:
            """The step that it says, if that is the newest; the writer may be at the report's file, too."""
            checkpointer._reporter.write()
            said: int = as_json(capsys, "ls", tmp_path)["running"]["memory_step"]
            return said if said == checkpointer.report()["lag"]["captured_step"] else None

        step = wait_for(told)
        assert step in (2, 4, 5)
        assert f"a job runs here; memory: step {step}" in run(capsys, "ls", tmp_path)[1]
        os.utime(tmp_path / ".lock", (time.time() + 100,) * 2)  # as if another job had taken it, and not reported yet
        assert as_json(capsys, "ls", tmp_path)["running"] is None
    with Store(tmp_path, run_id="a"):  # no job, and the report of one that has ended
        os.utime(tmp_path / ".lock", (0, 0))
        assert as_json(capsys, "ls", tmp_path)["running"] is None
    assert as_json(capsys, "ls", tmp_path)["running"] is None
