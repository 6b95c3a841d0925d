"""A restore reads what it restores once: what it met no damage in is the job's, and never a mixture of two."""

from __future__ import annotations

import collections
import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MismatchError, StorageError
from checkflow.core.state import collect_state, dtype_name
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import TensorRecord, make_layout, write_headers
from checkflow.runtime.format.manifest import BLOCK_BYTES
from checkflow.runtime.state import half_restored
from checkflow.runtime.state.collect import StateWalk, capture_extra
from checkflow.runtime.state.restore import resume_from
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import scratch
from tests.support.oracle import same_bits

WIDTH = 1700  # 11.6 MB each of two layers: more than two blocks of the model's file, and as many of the optimizer's


class Job:
    """A model, an optimizer and a scheduler; a few steps make their state one that no other seed has."""

    def __init__(self, seed: int, *, steps: int = 1, width: int = WIDTH) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1 + seed, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        for _ in range(steps):
            self.step()
            self.scheduler.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, self.model[0].in_features)).square().mean().backward()
        self.optimizer.step()

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return {"model": self.model}, {"optimizer": self.optimizer}, {"scheduler": self.scheduler}

    def save(self, store: Store, step: int, *, imported: bool = False) -> None:
        models, optimizers, objects = self.parts
        walk = StateWalk(models, optimizers)
        walk.current()
        state = collect_state(models, optimizers).tensors
        layout = make_layout(
            [
                TensorRecord(
                    one.name, dtype_name(one.tensor.dtype), tuple(one.tensor.shape), one.tensor.nbytes,
                    one.tensor.element_size(),
                )
                for one in state
            ]
        )  # fmt: skip
        staging = scratch(layout.buffer_bytes)
        write_headers(layout, staging)
        for one in state:
            begin = layout.tensors[one.name].staging_offset
            staging[begin : begin + one.tensor.nbytes] = ctypes.string_at(one.tensor.data_ptr(), one.tensor.nbytes)
        extra = {**capture_extra(walk, optimizers, objects), "iteration": step}
        extra |= {"imported": True} if imported else {}
        store.commit(step, layout, staging, codec.encode(extra), {})

    def state(self) -> dict[str, Any]:
        models, optimizers, _ = self.parts
        found: dict[str, Any] = {one.name: one.tensor.clone() for one in collect_state(models, optimizers).tensors}
        return found | {"scheduler": self.scheduler.state_dict(), "lr": self.optimizer.param_groups[0]["lr"]}

    def restore(self, store: Store, mode: str | int = "auto") -> int | None:
        resumed = resume_from(store, mode, *self.parts)
        return None if resumed is None else resumed.step


def assert_same(job: Job, other: dict[str, Any]) -> None:
    found = job.state()
    assert found.keys() == other.keys()
    for name, value in other.items():
        assert same_bits(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """A directory with checkpoints of steps 1 (before the first step: without momenta) and 2; and their states."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    states = {}
    with Store(directory, run_id="run") as store:
        for step, job in ((1, Job(11, steps=0)), (2, Job(12))):
            job.save(store, step)
            states[step] = job.state()
    return directory, states


@pytest.fixture
def store(saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path) -> Iterator[Store]:
    """Of hard links to what was saved: what is to be changed is replaced."""
    os.makedirs(tmp_path / "checkpoints")
    for path in find(saved[0]):
        (tmp_path / "checkpoints" / path.name).mkdir()
        for file in path.iterdir():
            os.link(file, tmp_path / "checkpoints" / path.name / file.name)
    with Store(tmp_path / "checkpoints", run_id="later") as one:
        yield one


def damage(store: Store, step: int, name: str, position: int) -> None:
    path = next(store.directory.glob(f"step-{step:08d}/{name}*"))
    data = bytearray(path.read_bytes())
    data[position] ^= 8
    path.unlink()
    path.write_bytes(data)


def broken(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.glob(".broken-*"))


def test_each_block_is_read_once(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: collections.Counter[tuple[int, int]] = collections.Counter()
    real = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset or len(buffers[0]) > 8:  # the length of a header is read before
            reads[os.fstat(fd).st_ino, offset] += 1
        return real(fd, buffers, offset)

    monkeypatch.setattr(fs, "preadv", preadv)
    job = Job(0)
    assert job.restore(store) == 2
    assert_same(job, saved[1][2])
    for path in store.directory.glob("step-00000002/*"):
        offsets = range(0, path.stat().st_size, BLOCK_BYTES)
        assert [reads[path.stat().st_ino, offset] for offset in offsets if path.suffix != ".json"] == [
            1 for _ in offsets if path.suffix != ".json"
        ]


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("model", 5000), ("model", BLOCK_BYTES), ("model", -1), ("optimizer", 10_000), ("optimizer", BLOCK_BYTES + 9),
        ("optimizer", -1), ("state", -1), ("manifest", 40),
    ],
)  # fmt: skip
def test_damage_anywhere_leaves_the_older_one_and_nothing_of_the_newer(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]], name: str, position: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its momenta too, which the older does not have, and the job did not."""
    damage(store, 2, name, position)
    job = Job(0, steps=0)
    assert job.restore(store) == 1
    assert_same(job, saved[1][1])
    assert not job.optimizer.state
    assert broken(store) == [".broken-step-00000002"]
    assert [one.levelno for one in caplog.records if "is damaged" in one.message] == [logging.ERROR]
    job.step()


def test_tensors_that_cannot_be_read_into_are_made_good_too(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]]
) -> None:
    damage(store, 2, "optimizer", -1)
    job = Job(0)
    with torch.no_grad():
        for parameter in job.model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.t().contiguous().t()
    assert job.restore(store) == 1
    assert_same(job, saved[1][1])


def test_without_an_older_one_the_job_begins_anew_as_it_was(store: Store) -> None:
    """Its state is what it was: damage was looked for before the first byte was set."""
    damage(store, 2, "optimizer", -1)
    damage(store, 1, "manifest", 9)
    job = Job(0)
    before = job.state()
    assert job.restore(store) is None
    assert_same(job, before)
    job.step()


@pytest.mark.parametrize("again", ["auto", "never", "must"])
def test_without_any_whole_one_the_job_cannot_train(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path, again: str
) -> None:
    damage(store, 2, "optimizer", -1)
    damage(store, 1, "model", -1)
    job = Job(0)
    with pytest.raises(CorruptCheckpointError, match="half restored and must not be trained from"):
        job.restore(store)
    assert broken(store) == [".broken-step-00000001", ".broken-step-00000002"]
    for use in (job.step, job.optimizer.step, lambda: job.model(torch.zeros(1, WIDTH))):
        with pytest.raises(CorruptCheckpointError, match="must not be trained from"):
            use()
    # Nothing is there any more to begin anew from; a new job may.
    with pytest.raises(StorageError, match="must not be trained from"):
        job.restore(store, again)
    with pytest.raises(CorruptCheckpointError):
        job.step()
    assert Job(0, steps=0).restore(store) is None
    # A whole one makes it good.
    with Store(tmp_path / "other", run_id="other") as other:
        Job(12).save(other, 5)
        assert job.restore(other) == 5
    assert_same(job, saved[1][2])
    job.step()
    assert not half_restored.is_marked(*job.parts[:2])


def test_a_job_that_must_resume_is_told_that_it_cannot_train(store: Store) -> None:
    damage(store, 2, "model", -1)
    damage(store, 1, "manifest", 9)
    job = Job(0)
    with pytest.raises(StorageError, match=r'resume="must".*must not be trained from'):
        job.restore(store, "must")
    with pytest.raises(CorruptCheckpointError):
        job.step()


def test_the_step_that_was_asked_for_is_whole_or_nothing_changes(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]]
) -> None:
    damage(store, 2, "optimizer", -1)
    job = Job(0)
    before = job.state()
    with pytest.raises(CorruptCheckpointError, match="do not match") as caught:
        job.restore(store, 2)
    assert "trained" not in str(caught.value)
    assert_same(job, before)
    assert not broken(store)
    assert job.restore(store, 1) == 1
    assert_same(job, saved[1][1])


def test_a_damaged_checkpoint_of_another_job_does_not_hide_one_of_this(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]]
) -> None:
    Job(3, width=WIDTH + 1).save(store, 3)
    job = Job(0)
    before = job.state()
    with pytest.raises(MismatchError, match=r"step-00000003: model/.* run the job as it was"):
        job.restore(store)
    assert_same(job, before)
    damage(store, 3, "optimizer", -1)
    assert job.restore(store) == 2
    assert_same(job, saved[1][2])
    assert broken(store) == [".broken-step-00000003"]


def test_an_older_one_of_another_job_makes_nothing_good(store: Store) -> None:
    """Newest first: 3 is this job's and damaged, 2 another one's."""
    with Store(store.directory / "other", run_id="other") as other:
        Job(4, width=WIDTH + 1).save(other, 1)
        Job(5).save(other, 2)
        damage(other, 2, "optimizer", -1)
        job = Job(0)
        with pytest.raises(MismatchError, match="must not be trained from"):
            job.restore(other)
    with pytest.raises(CorruptCheckpointError):
        job.step()


def failing(error: BaseException, inode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of this file's later blocks raise."""
    real = fs.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_ino == inode and offset >= BLOCK_BYTES:
            raise error
        return real(fd, buffers, offset)

    monkeypatch.setattr(fs, "preadv", preadv)


def test_one_that_cannot_be_read_to_its_end_stays(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = store.directory.glob("step-00000002/optimizer*")
    failing(OSError(errno.EIO, os.strerror(errno.EIO)), path.stat().st_ino, monkeypatch)
    job = Job(0)
    assert job.restore(store) == 1
    assert_same(job, saved[1][1])
    assert not broken(store)
    monkeypatch.undo()
    assert job.restore(store) == 2
    assert_same(job, saved[1][2])


def test_if_none_can_be_read_to_its_end_the_job_cannot_train(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = store.directory.glob("step-00000002/optimizer*")
    failing(OSError(errno.EIO, os.strerror(errno.EIO)), path.stat().st_ino, monkeypatch)
    damage(store, 1, "model", -1)
    job = Job(0)
    with pytest.raises(StorageError, match="Input/output error; the state in memory is half restored"):
        job.restore(store)
    with pytest.raises(CorruptCheckpointError):
        job.step()


def test_an_interrupt_leaves_a_job_that_cannot_train(
    store: Store, saved: tuple[Path, dict[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = store.directory.glob("step-00000002/optimizer*")
    failing(KeyboardInterrupt(), path.stat().st_ino, monkeypatch)
    job = Job(0)
    with pytest.raises(KeyboardInterrupt):
        job.restore(store)
    with pytest.raises(CheckflowError, match="half restored"):
        job.step()
    monkeypatch.undo()
    assert job.restore(store) == 2
    assert_same(job, saved[1][2])
    job.step()


def test_what_is_not_wanted_of_it_is_verified_too(store: Store, saved: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    """What a job goes on from is whole, although of imported weights it reads no optimizer's state."""
    Job(6).save(store, 3, imported=True)
    assert Job(0).restore(store) == 3
    damage(store, 3, "optimizer", -1)
    job = Job(0)
    assert job.restore(store) == 2
    assert_same(job, saved[1][2])
    assert broken(store) == [".broken-step-00000003"]


class Deep(Job):
    """So many small layers, each with two parameters, and two optimizer states for each of them."""

    def __init__(self, layers: int, *, steps: int) -> None:
        torch.manual_seed(layers + steps)
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters())  # type: ignore[assignment]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        for _ in range(steps):
            self.step()


def test_state_that_is_not_there_yet_is_made_with_as_few_walks_for_many_tensors_as_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: collections.Counter[nn.Module] = collections.Counter()
    real = nn.Module.named_modules

    def named_modules(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        walks[self] += 1
        return real(self, *arguments, **options)

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    counts = []
    for layers in (1, 2, 40):
        trained, fresh = Deep(layers, steps=1), Deep(layers, steps=0)
        with Store(tmp_path / str(layers), run_id="run") as store:
            trained.save(store, 1)
            walks.clear()
            assert fresh.restore(store) == 1
        counts.append(walks[fresh.model])
        assert_same(fresh, trained.state())
    assert 0 < counts[0] == counts[1] == counts[2]
