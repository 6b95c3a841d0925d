"""What may go wrong below the store, call by call: retention, starts among leftovers, damage, plans, two in a row.

The functions here try one fault after the other and raise AssertionError where something is lost; they return how many
they tried. ``test_call_faults.py`` runs some, ``make faults`` all. Free of torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from checkflow.core import plan as plans
from checkflow.core.errors import PlanError, StorageError
from checkflow.core.planner_api import PlanLimits
from checkflow.runtime.live_plan.cache import FOLDER, KEPT, PlanCache
from checkflow.runtime.system import fs
from tests.faults.plan_faults import good_plan
from tests.runtime.store.test_store import CUTS, commit, new_store, newest, prepare, steps
from tests.support.faults import Disk, Faults, Killed
from tests.support.store_tools import recover

Found = tuple[int, int] | None  # step, seed


@dataclass(frozen=True)
class Scenario:
    """What lies in a directory, what is then done, and what must be found after.

    ``act`` stops after each commit, and ``done`` is what each leaves. After a fault it may be what the last one left,
    or any later one; and if there was none, anything of ``before``.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path], Iterator[None]]
    done: tuple[Found, ...]
    before: tuple[Found, ...]
    least_calls: int
    least_complete: int = 2


def _commit_step(step: int) -> Callable[[Path], Iterator[None]]:
    def act(directory: Path) -> Iterator[None]:
        with new_store(directory) as store:
            commit(store, step, 7)
            yield

    return act


def _four(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with new_store(directory, keep_latest=4) as store:
        for step in range(1, 5):
            commit(store, step, step, epoch_end=step == 1)


def _retire(directory: Path) -> Iterator[None]:
    """Step 5 comes, 2 and 3 go; then 6 comes, and 4 goes; 1 ends an epoch."""
    with new_store(directory) as store:
        checkpoint = recover(store)
        assert checkpoint is not None
        checkpoint.close()
        store.went_on_from(checkpoint.step)
        commit(store, 5, 6)
        yield
        commit(store, 6, 7)
        yield


def _leftovers(directory: Path) -> None:
    """Of runs that died in writing, in deleting and in exchanging."""
    prepare(directory)
    shutil.copytree(directory / "step-00000002", directory / ".tmp-00000003-dead")
    shutil.copytree(directory / "step-00000002", directory / ".trash-step-00000000")
    (directory / "step-00000002").rename(directory / ".replaced-step-00000002")


def _start(directory: Path) -> Iterator[None]:
    with new_store(directory) as store:
        checkpoint = recover(store)
        assert checkpoint is not None
        checkpoint.close()
        commit(store, 3, 7)
        yield


def _abandoned(directory: Path) -> None:
    prepare(directory)
    with new_store(directory, keep_latest=4) as store:
        commit(store, 3, 3)


def _rewind(directory: Path) -> Iterator[None]:
    """The job is told to go on from step 1, and does."""
    with new_store(directory) as store:
        store.rewind(1)
        commit(store, 2, 7)
        yield


SCENARIOS = {
    "a new step": Scenario(prepare, _commit_step(3), ((3, 7),), ((2, 2),), 40),
    "the same step again": Scenario(prepare, _commit_step(2), ((2, 7),), ((2, 2),), 40),
    "retention": Scenario(_four, _retire, ((5, 6), (6, 7)), ((4, 4),), 150),
    "a start among leftovers": Scenario(_leftovers, _start, ((3, 7),), ((2, 2),), 60),
    "a rewind": Scenario(_abandoned, _rewind, ((2, 7),), ((3, 3), (2, 2), (1, 1)), 50, least_complete=1),
}


def try_every_call(scenario: Scenario, directory: Path, error: int | None, *, after: bool, sticky: bool) -> int:
    """Each call fails, or kills (``error`` None), until a run meets no fault."""
    at = 0
    while True:
        at += 1
        scenario.prepare(directory)
        faults = Faults(at, error, after=after, sticky=sticky)
        acknowledged = 0
        with contextlib.suppress(Killed, StorageError), faults():
            for _ in scenario.act(directory):
                acknowledged += 1
        _check(scenario, directory, acknowledged, f"call {at}")
        if not faults.met:
            assert acknowledged == len(scenario.done)
            assert at > scenario.least_calls, at
            return at - 1


def try_every_short_write(scenario: Scenario, directory: Path) -> int:
    """Each write writes a part, then finds no room; then the rest would go in."""
    real, at = fs.pwrite, 0
    while True:
        at += 1
        scenario.prepare(directory)
        count, failing = 0, False

        def pwrite(fd: int, data: memoryview, offset: int, at: int = at) -> int:
            nonlocal count, failing
            count += 1
            if failing:
                failing = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if count != at:
                return real(fd, data, offset)
            failing = True
            return real(fd, data[: len(data) // 2 or 1], offset)

        acknowledged = 0
        fs.pwrite = pwrite
        try:
            with contextlib.suppress(StorageError):
                for _ in scenario.act(directory):
                    acknowledged += 1
        finally:
            fs.pwrite = real
        _check(scenario, directory, acknowledged, f"write {at}")
        if count < at:
            assert at > 3
            return at - 1


def _check(scenario: Scenario, directory: Path, acknowledged: int, where: str) -> None:
    """L1 to L3 and L5. ``acknowledged``: how many commits."""
    new_store(directory, "look").close()  # which settles what was half done
    assert len(steps(directory)) >= scenario.least_complete, f"{where}: {steps(directory)} are left"
    for path in directory.glob(".superseded-*"):  # of a rewind: left for people
        shutil.rmtree(path)
    found = newest(directory)
    allowed = scenario.done[acknowledged - 1 :] if acknowledged else (*scenario.done, *scenario.before)
    assert found in allowed, f"{where}: {found} instead of {allowed}"
    with new_store(directory, "next") as store:
        commit(store, 9, 8)
    assert newest(directory) == (9, 8), where
    assert len(steps(directory)) <= 4, where


# Two in a row


def random_faults(source: random.Random, calls: int) -> Faults:
    error = source.choice((None, None, errno.EIO, errno.ENOSPC))
    return Faults(
        source.randint(1, calls), error, after=source.random() < 0.5, sticky=error is not None and source.random() < 0.5
    )


def try_two_faults(directory: Path, source: random.Random) -> str:
    """A fault in a commit; another one while the next start recovers and commits; what is then found, in words.

    One time in three the power goes after that.
    """
    shutil.rmtree(directory, ignore_errors=True)
    step = source.choice((2, 3))
    disk = Disk(directory)
    acknowledged: list[Found] = [(2, 2)]
    attempted: list[Found] = []
    with disk():
        prepare(directory)
        first, second = random_faults(source, 60), random_faults(source, 120)
        for faults, at, seed in ((first, step, 7), (second, step + 1, 8)):
            with contextlib.suppress(Killed, StorageError), faults(), new_store(directory) as store:
                if (checkpoint := recover(store)) is not None:
                    checkpoint.close()
                    store.went_on_from(checkpoint.step)
                attempted.append((at, seed))
                commit(store, at, seed)
                acknowledged.append((at, seed))
        allowed = [acknowledged[-1], *(one for one in attempted if one not in acknowledged)]
        if acknowledged[-1] == (step + 1, 8):
            allowed = [acknowledged[-1]]
        if source.random() < 1 / 3:
            for names in CUTS:
                copy = directory.with_name(f"{directory.name}-cut")
                found = newest(disk.after_power_cut(copy, names), every=names != "torn")
                shutil.rmtree(copy)
                assert found in allowed, f"{found} after a power cut, instead of {allowed}"
    found = newest(directory)
    assert found in allowed, f"{found} instead of {allowed}"
    with new_store(directory, "next") as store:
        commit(store, 11, 9)
    assert newest(directory) == (11, 9)
    return f"{first.met and second.met}"


def try_many_two_faults(directory: Path, seed: int, count: int) -> int:
    """How many pairs of faults were met, of ``count`` that were drawn."""
    source, met = random.Random(seed), 0
    for number in range(count):
        try:
            met += try_two_faults(directory, source) == "True"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, pair {number}: {error}") from error
    return met


# Plans beside checkpoints


def try_every_call_of_a_plan(directory: Path, error: int | None, *, after: bool, sticky: bool) -> int:
    """A plan is kept, the oldest of too many goes: the plan is there whole, or the old ones are; training goes on."""
    plan, limits = good_plan(), PlanLimits()
    at = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        cache = PlanCache(directory, limits)
        older = [replace(plan, fingerprint=replace(plan.fingerprint, model=f"m{number}")) for number in range(KEPT)]
        for age, one in enumerate(older):
            path = cache.file(one.fingerprint)
            plans.save(one, path)
            os.utime(path, (age + 1, age + 1))
        faults, kept = Faults(at, error, after=after, sticky=sticky), False
        with contextlib.suppress(Killed, StorageError, PlanError), faults():
            path = cache.file(plan.fingerprint)
            plans.save(plan, path)
            cache.keep(path)
            kept = True
        again = PlanCache(directory, limits)
        found = again.find(lambda one: one.fingerprint == plan.fingerprint)
        assert found is None or found[0] == plan.sealed(), at
        assert not kept or found is not None, at
        # The newer ones of the old are there whatever happened.
        assert again.find(lambda one: one.fingerprint.model == f"m{KEPT - 1}") is not None, at
        path = again.file(plan.fingerprint)
        plans.save(plan, path)
        again.keep(path)
        assert again.find(lambda one: one.fingerprint == plan.fingerprint) is not None
        assert len(os.listdir(directory / FOLDER)) == KEPT
        if not faults.met:
            assert at > 7, at
            return at - 1
