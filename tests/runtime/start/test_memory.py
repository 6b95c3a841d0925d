"""What dead ranks had in host memory becomes a version if all of it is there, whoever sees it."""

from __future__ import annotations

import errno
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkflow.core.errors import LockedError, StorageError
from checkflow.runtime.memory_tier import orphans, recovery
from checkflow.runtime.memory_tier.records import NOTHING, OWNER
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.start import memory
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import glance, step_name
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.retention import EPOCH_END
from checkflow.runtime.store.store import Store
from tests.support.dead_jobs import folders_below, give_back, needs_memory
from tests.support.ranks.dead import DeadRun, extra_of, holds, save_whole, start_again

pytestmark = needs_memory
KINDS = {1: "one", 2: "fsdp 2", 3: "fsdp 3", 4: "hsdp 2x2"}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    give_back(tmp_path)


def stored(directory: Path, *steps: int, run_id: str = "dead") -> None:
    with Store(directory, run_id=run_id) as store:
        for step in steps:
            save_whole(store, step)


def names(directory: Path) -> list[str]:
    return [path.name for path in find(directory)]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2), (4, 1), (1, 2), (2, 1)])
def test_any_ranks_take_what_dead_ranks_left(tmp_path: Path, before: int, after: int) -> None:
    """As their run would have written it: its extra state by rank, and its name."""
    stored(tmp_path, 4)
    DeadRun(tmp_path, "dead", KINDS[before], ({5, 6},) * before, durable=4).leave()
    assert orphans.left_step(tmp_path) == 6
    outcomes = start_again(tmp_path, after)
    assert outcomes[0] in (6, {6})
    assert [start.step for start in outcomes[1:]] == [6] * (after - 1)
    path = tmp_path / step_name(6)
    described = glance(path)
    assert (described.run_id, described.world_size, described.info) == ("dead", before, {"epoch": 6})
    assert holds(path, 6)
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        assert checkpoint.extra_bytes == extra_of(6, 0)
        for rank in range(1, before):
            assert checkpoint.rank_extra_bytes(rank) == extra_of(6, rank)
    assert folders_below(tmp_path) == []
    assert list(tmp_path.glob(".memory*")) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_newest_step_that_all_ranks_have_counts_if_storage_is_older(data: st.DataObject) -> None:
    """No version has parts of two steps."""
    steps = st.lists(st.integers(2, 7), min_size=1, max_size=3, unique=True)
    runs = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=2), label="ranks of each run")
    kept = {f"run{number}": data.draw(st.tuples(*[steps] * ranks)) for number, ranks in enumerate(runs)}
    base = data.draw(st.integers(1, 7), label="on storage")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        try:
            stored(directory, base, run_id="before")
            for run_id, parts in kept.items():
                DeadRun(directory, run_id, KINDS[len(parts)], parts, base=(base, "before")).leave()
            start_again(directory, 1)
            whole = [step for parts in kept.values() for step in set.intersection(*map(set, parts))]
            found = [int(path.name.removeprefix("step-")) for path in find(directory)]
            assert found[0] == max([base, *whole])
            assert all(holds(directory / step_name(step), step) for step in found)
            assert folders_below(directory) == []
        finally:
            give_back(directory)


@pytest.mark.parametrize("after", [1, 2])
def test_of_what_one_process_and_what_ranks_have_left_the_newest_step_counts(tmp_path: Path, after: int) -> None:
    DeadRun(tmp_path, "one", "one", ({5},)).leave()
    DeadRun(tmp_path, "two", "fsdp 2", ({6}, {6})).leave()
    assert start_again(tmp_path, after)[0] in (6, {6})
    assert names(tmp_path) == [step_name(6)]


def test_a_part_that_is_gone_leaves_what_storage_has(tmp_path: Path) -> None:
    """Its machine did not come back. Another rank's part of the same tensors does not stand for it."""
    stored(tmp_path, 4)
    _, second = DeadRun(tmp_path, "dead", "ddp 2", ({5, 6}, {5, 6}), durable=4).leave()
    shutil.rmtree(second)
    assert orphans.left_step(tmp_path) is None
    assert start_again(tmp_path, 2)[0] == frozenset()
    assert names(tmp_path) == [step_name(4)]
    assert folders_below(tmp_path) == []
    assert list(tmp_path.glob(".memory*")) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_torn_bytes_on_one_rank_are_passed_over_for_the_next_older(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    DeadRun(tmp_path, "dead", "fsdp 2", ([5, 6], [5, 6]), audited={5, 6}, torn={6}).leave()
    assert start_again(tmp_path, ranks)[0] in (5, {5})
    assert "step 6 of rank 1 in host memory is passed over: it is torn" in caplog.text
    assert "step 6 in host memory is passed over: the part of rank 1 is damaged" in caplog.text
    assert names(tmp_path) == [step_name(5)]
    assert holds(tmp_path / step_name(5), 5)


def test_a_plan_that_an_audit_refutes_is_trusted_with_no_other_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [4, 5, 6]
    DeadRun(tmp_path, "dead", "fsdp 2", (steps, steps), by_plan=[5, 6], audited={5}, torn={5}).leave()
    assert start_again(tmp_path, 2)[0] == {4}
    assert caplog.text.count("step 6 in host memory is passed over: it was captured by a plan that does not fit") == 1


@pytest.mark.parametrize("after", [1, 2])
def test_what_a_refuted_plan_made_keeps_nothing_else_from_being_saved(tmp_path: Path, after: int) -> None:
    """Not by its metric among the best, and not as the newest step of all runs."""
    loss, steps = {3: 0.4, 4: 0.2, 5: 9.0, 6: 0.1, 7: 5.0}, [3, 4, 5, 6, 7]
    best, runs = tmp_path / "best", tmp_path / "runs"
    for directory in (best, runs):
        directory.mkdir()
    DeadRun(
        best, "dead", "fsdp 2", (steps, steps), by_plan=[5, 6], audited={5}, torn={5},
        info=lambda step: {"epoch": step, "metrics": {"loss": loss[step]}},
    ).leave()  # fmt: skip
    start_again(best, after, keep_best=1, monitor="loss")
    assert names(best) == [step_name(7), step_name(4)]
    DeadRun(runs, "one", "fsdp 2", ([4, 6], [4, 6]), by_plan=[4, 6], audited={4}, torn={4}).leave()
    DeadRun(runs, "two", "fsdp 2", ([5], [5])).leave()
    assert start_again(runs, after)[0] in (5, {5})
    give_back(best)
    give_back(runs)


def test_storage_that_another_run_has_written_since_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, 4, run_id="another")
    DeadRun(tmp_path, "dead", "fsdp 2", ({5}, {5}), base=(3, "before"), durable=NOTHING).leave()
    assert start_again(tmp_path, 2)[0] == frozenset()
    assert "step 5 in host memory is passed over: storage is not what its run left there" in caplog.text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_on_one_rank_is_refused_on_all_and_keeps_what_memory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    DeadRun(tmp_path, "dead", "fsdp 2", ({5}, {5})).leave()
    write = memory.write_staged

    def full(folder: int, rank: int, *rest: Any, **more: Any) -> Any:
        if rank == victim:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, rank, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "write_staged", full)
        outcomes = start_again(tmp_path, 2)
    for outcome in outcomes:
        assert isinstance(outcome, StorageError)
        assert "step 5 lies in host memory" in str(outcome)
        assert "No space left on device" in str(outcome)
    assert names(tmp_path) == []
    assert start_again(tmp_path, 2)[0] == {5}


def test_a_rank_that_ends_meanwhile_ends_the_start_and_keeps_what_memory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeadRun(tmp_path, "dead", "fsdp 2", ({5}, {5})).leave()

    def end(left: memory.LeftMemory, council: Council, *_: Any) -> None:
        council.close("it ends")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory.LeftMemory, "assist", end)
        leader, _ = start_again(tmp_path, 2)
    assert isinstance(leader, StorageError)
    assert "rank 1" in str(leader)
    assert names(tmp_path) == []
    assert start_again(tmp_path, 2)[0] == {5}


def test_ranks_that_are_to_begin_anew_are_told(tmp_path: Path) -> None:
    DeadRun(tmp_path, "dead", "fsdp 2", ({5}, {5})).leave()
    for outcome in start_again(tmp_path, 2, "never"):
        assert 'resume="never", but the run before left step 5 of' in str(outcome)
    assert start_again(tmp_path, 2)[0] == {5}


def test_going_back_to_a_step_that_memory_has_saves_the_newest_too(tmp_path: Path) -> None:
    DeadRun(tmp_path, "dead", "fsdp 2", ([5, 6, 7], [5, 6, 7])).leave()
    assert start_again(tmp_path, 2, 5)[0] == {5, 7}


@pytest.mark.parametrize("before", [1, 2])
def test_going_back_to_the_newest_step_that_memory_has_saves_that_alone(tmp_path: Path, before: int) -> None:
    DeadRun(tmp_path, "dead", KINDS[before], ([5, 6, 7],) * before).leave()
    assert start_again(tmp_path, 1, 7) == [7]
    assert names(tmp_path) == [step_name(7)]


def test_what_retention_keeps_is_saved_beside_the_newest(tmp_path: Path) -> None:
    steps = [5, 6, 7]
    run = DeadRun(tmp_path, "dead", "fsdp 2", (steps, steps), info=lambda step: {EPOCH_END: step == 5})
    run.leave()
    assert start_again(tmp_path, 2)[0] == {5, 7}


def test_memory_that_a_living_rank_uses_is_refused_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WAIT_SECONDS", 0.1)
    first, _ = DeadRun(tmp_path, "dead", "fsdp 2", ({5}, {5})).leave()
    with (first / OWNER).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for outcome in start_again(tmp_path, 2):
            assert isinstance(outcome, LockedError)
    assert start_again(tmp_path, 2)[0] == {5}
