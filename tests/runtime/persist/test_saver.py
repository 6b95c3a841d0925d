"""What of a job's captures gets a record in host memory, and what stays there when the job ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import CheckflowError, StorageError
from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.persist.saver import Saving
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.store.store import Store
from tests.support.dead_jobs import (
    folder_of,
    folders_below,
    kept_in,
    needs_memory,
    newest_on_storage,
    random_plans_and_nothing_left,
    resume,
    train,
)
from tests.support.store_tools import record

pytestmark = needs_memory
PLAN = "a plan"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with random_plans_and_nothing_left(tmp_path):
        yield


@dataclass
class Captures:
    """Of a job that does not train."""

    saving: Saving
    directory: Path

    def make(self, step: int, *, by_plan: bool = True, extra: bytes | Callable[[], bytes] = b"extra") -> Capture:
        layout = make_layout([record("model/w", (4, 4))])
        return Capture(
            step, self.saving.buffers.take(), layout, extra, {}, (), (), None, {}, PLAN, by_plan=by_plan
        )  # fmt: skip

    def kept(self) -> list[int]:
        return sorted(kept_in(self.directory))


@pytest.fixture
def captures(tmp_path: Path) -> Iterator[Captures]:
    with resume(tmp_path, host_buffers=4) as checkpointer:
        found = Captures(checkpointer._saving, tmp_path)
        yield found
        for buffer in found.saving.buffers._all:
            if buffer not in found.saving.buffers._free:
                found.saving.buffers.give_back(buffer)


def test_what_a_refuted_plan_captured_gets_no_record(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a moment, in which the job might die."""
    kept, keep = [], MemoryTier.keep
    monkeypatch.setattr(MemoryTier, "keep", lambda self, one, *rest: (kept.append(one.step), keep(self, one, *rest)))
    captures.saving.writer.breached_plans.add(PLAN)
    captures.saving._outlive(captures.make(5))
    assert captures.kept() == []
    captures.saving._outlive(captures.make(6, by_plan=False))  # copied at the boundary, all of it
    assert captures.kept() == kept == [6]


def test_a_plan_that_is_refuted_while_a_record_is_made(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = MemoryTier.keep

    def refuted(self: MemoryTier, *rest: Any) -> None:
        captures.saving.writer.breached_plans.add(PLAN)  # and has looked for records before this one was there
        keep(self, *rest)

    monkeypatch.setattr(MemoryTier, "keep", refuted)
    captures.saving._outlive(captures.make(5))
    assert captures.kept() == []


@pytest.mark.parametrize("by_plan", [True, False])
def test_what_an_audit_refutes_loses_its_record_be_its_plan_right(captures: Captures, by_plan: bool) -> None:
    """A settled tensor was written, say; or there was no plan."""
    torn, other = captures.make(5, by_plan=by_plan), captures.make(6)
    for one in (torn, other):
        captures.saving._outlive(one)
    assert captures.kept() == [5, 6]
    captures.saving._void(torn)
    assert captures.kept() == [6]


def test_extra_state_that_cannot_be_written_down_is_for_the_writer_to_tell(
    captures: Captures, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bytes:
        raise CheckflowError("a lambda is no state")

    submitted: list[Capture] = []
    monkeypatch.setattr(captures.saving.writer, "submit", submitted.append)
    capture = captures.make(5, extra=fail)
    with caplog.at_level(logging.DEBUG, "checkflow"):
        captures.saving.submit(capture)
    assert submitted == [capture]
    assert captures.kept() == []
    assert not caplog.records


@pytest.mark.parametrize("ending", ["with", "close"])
@pytest.mark.parametrize("saved", [0, 3])
def test_what_a_full_disk_refused_to_the_end_is_raised_and_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, ending: str
) -> None:
    """Such a run does not end as if all were well, whatever on_error says."""
    commit = Store.commit

    def fail(self: Store, step: int, *rest: Any, **more: Any) -> Path:
        if step > saved:
            raise StorageError("the disk is full")
        return commit(self, step, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", fail)
        checkpointer = resume(tmp_path, every=1)
        with (
            pytest.raises(StorageError) as raised,
            checkpointer if ending == "with" else contextlib.closing(checkpointer),
        ):
            for _ in checkpointer.epochs(1):
                train(checkpointer)
    last = checkpointer.iteration
    assert newest_on_storage(tmp_path) == checkpointer.durable_step == (saved or None)
    assert str(raised.value) == (
        f"the last checkpoint, of step {last}, is not on storage (StorageError: the disk is full): "
        f"{f'step {saved} is' if saved else 'nothing is'} durable in {tmp_path}; "
        f"step {last} stays in this machine's memory: the next run here saves it"
    )
    assert kept_in(tmp_path) == [last]
    assert folders_below(tmp_path) == [folder_of(tmp_path)]
    with resume(tmp_path) as checkpointer:
        report = checkpointer.report()
        assert checkpointer.resumed_from == report["reclaimed_step"] == last
        # It was closed, and could say so.
        assert (report["replayed_iterations"], report["replayed_exactly"]) == (0, True)
