"""A version of so many ranks that its files cannot all be open at once: every command reads it, and a job resumes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from checkflow.api import Checkpointer
from checkflow.cli.main import main
from checkflow.core.boxes import Held, whole
from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.format import codec
from checkflow.runtime.store import files
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.store.trust import ForeignError, Trust
from tests.support.ranks.tools import chunk, load, save
from tests.support.store_tools import read_all

RANKS, OPEN_FILES = 400, 256  # three files a rank


def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, RANKS)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(checkpointer: Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in checkpointer.steps(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step))).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """Step 1 of one process, and the same state as step 2, one row of each tensor a rank."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where 1,200 files are synced at once
    with tempfile.TemporaryDirectory(dir=where, prefix="checkflow-test-") as folder:
        directory = Path(folder) / "checkpoints"
        model, optimizer = job()
        with Checkpointer(model, optimizer, directory=directory, every=1) as checkpointer:
            train(checkpointer, model, optimizer, 1)
        with open_checkpoint(find(directory)[0]) as one:
            extra = one.extra_bytes
            arrays = {
                name: np.frombuffer(data, one.manifest.tensors[name].dtype).reshape(one.manifest.tensors[name].shape)
                for name, data in read_all(one).items()
            }
        ranks = [
            {
                name: Held(name, chunk(whole(array.shape), 0, RANKS, rank), array.itemsize, (rank,))
                if array.ndim
                else Held(name, whole(()), array.itemsize, tuple(range(RANKS)))
                for name, array in arrays.items()
            }
            for rank in range(RANKS)
        ]
        with Store(directory, run_id="ranks") as store:
            save(store, 2, ranks, arrays, extra=extra, extras=[codec.encode({})] * RANKS)
        yield directory


@pytest.fixture
def directory(made: Path) -> Iterator[Path]:
    """A copy with links to the same files, in a process that may open few."""
    copy = made.with_name("copy")
    shutil.copytree(made, copy, copy_function=os.link)
    (copy / ".lock").unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    try:
        yield copy
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        shutil.rmtree(copy)


def test_every_command_reads_it(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [(one["step"], one["ranks"], one["fault"]) for one in entries] == [(2, RANKS, None), (1, 1, None)]
    assert main(["verify", str(directory)]) == 0
    capsys.readouterr()
    assert main(["diff", f"{directory}@1", f"{directory}@2", "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)
    assert (differences["tensors"], [one["where"] for one in differences["extra"]]) == ([], ["ranks"])
    for name in ("model.pt", "model.safetensors"):
        assert main(["export", f"{directory}@2", "-o", str(tmp_path / name)]) == 0
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    with open_checkpoint(directory / "step-00000001") as one:
        assert exported["model"]["weight"].numpy().tobytes() == read_all(one)["model/weight"]


def test_a_damaged_part_of_it_is_found(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory / "step-00000002" / f"model-00333-of-00{RANKS}.safetensors"
    data = bytearray(path.read_bytes())
    path.unlink()  # the original's file stays as it is
    for content, said in ((None, "is missing"), (bytes([*data[:-1], data[-1] ^ 1]), "do not match their checksum")):
        if content is not None:
            path.write_bytes(content)
        else:
            assert main(["ls", str(directory)]) == 1
        assert main(["verify", str(directory)]) == main(["export", f"{directory}@2", "-o", f"{directory}.pt"]) == 1
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_job_goes_on_from_it(directory: Path) -> None:
    (model, optimizer), (expected, other) = job(), job()
    with Checkpointer(expected, other, directory=directory.with_name("whole")) as checkpointer:
        train(checkpointer, expected, other, 4)
    shutil.rmtree(directory.with_name("whole"))
    shutil.rmtree(directory / "step-00000001")
    with Checkpointer(model, optimizer, directory=directory, every=1) as checkpointer:
        assert checkpointer.resumed_from == 1  # the boundary that both were saved at
        train(checkpointer, model, optimizer, 4)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), expected.parameters(), strict=True))


def test_one_of_other_ranks_reads_its_part(directory: Path) -> None:
    path = directory / "step-00000002"
    box = chunk(whole((RANKS, 3)), 0, 3, 1)
    found = load(path, {"model/weight": box}, rank=1)["model/weight"]
    with open_checkpoint(directory / "step-00000001") as one:
        weight = np.frombuffer(read_all(one)["model/weight"], np.float32).reshape(RANKS, 3)
    assert np.array_equal(found, weight[box.offsets[0] : box.offsets[0] + box.lengths[0]])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_part_that_this_user_may_not_read_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory / "step-00000002" / f"model-00333-of-00{RANKS}.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)
    directory.parent.chmod(0o755)
    os.seteuid(65534)
    try:
        assert main(["ls", str(directory), "--json"]) == 1
    finally:
        os.seteuid(0)
    (newest, other) = json.loads(capsys.readouterr().out)["entries"]
    assert "Permission denied" in newest["fault"]
    assert path.name in newest["fault"]
    assert other["fault"] is None


def test_looking_opens_the_manifest_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], files.fs.open_regular

    def count(name: str, **more: object) -> tuple[int, int]:
        opened.append(name)
        return real(name, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files.fs, "open_regular", count)
    assert glance(directory / "step-00000002").world_size == RANKS
    assert opened == ["manifest.json"]


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def write_other_bytes(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))


def shorten(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


def delete_all(path: Path) -> None:
    trash = path.parent.with_name(".trash-step-00000002")
    path.parent.rename(trash)
    shutil.rmtree(trash)


def give_away(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (link, CorruptCheckpointError, "it is a symbolic link"),
        (write_other_bytes, CorruptCheckpointError, "do not match their checksum"),
        (shorten, CorruptCheckpointError, "bytes instead of"),
        (Path.unlink, CorruptCheckpointError, "is missing"),
        (delete_all, StorageError, "the checkpoint was deleted meanwhile"),
        pytest.param(
            give_away, ForeignError, "belongs to user 12345",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
        ),
    ],
)  # fmt: skip
def test_what_is_changed_after_it_was_opened_is_noticed(
    directory: Path, change: Callable[[Path], object], error: type[StorageError], said: str
) -> None:
    path = directory / "step-00000002"
    with open_checkpoint(path, trust=Trust(directory, None)) as checkpoint:
        change(path / f"model-00007-of-00{RANKS}.safetensors")
        with pytest.raises(error, match=said) as caught:
            checkpoint.verify()
        assert isinstance(caught.value, CorruptCheckpointError) == (error is CorruptCheckpointError)
        if change is not delete_all:
            assert "model-00007" in str(caught.value)
