"""Which checkpoints stay: the rules, as a table and as what always holds; in a store that is killed, or read."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.inspect import choose, list_directory
from checkflow.runtime.store import retention
from checkflow.runtime.store.discovery import find, find_valid
from checkflow.runtime.store.files import step_name
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint
from checkflow.runtime.store.retention import Known, Rules, best, gives_way, kept, known, read_metrics, rules_of
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from tests.support.faults import CALLS, CUTS, Disk, Faults, Killed
from tests.support.store_tools import fill, read_all, small_layout

ROOT = Path(__file__).parents[3]
LAYOUT = small_layout()
CONTENT = {seed: fill(LAYOUT, seed) for seed in range(12)}
NAN, INF = math.nan, math.inf


def state(step: int, loss: float | None = None, *, end: bool = False) -> Known:
    return Known(step, end, {} if loss is None else {"loss": loss})


def states(*losses: float | None, first: int = 1) -> list[Known]:
    return [state(step, loss) for step, loss in enumerate(losses, first)]


NO_EPOCHS = {"keep_epochs": False}
BEST = {"keep_best": 1, "monitor": "loss"}
TABLE: list[tuple[str, dict[str, Any], list[Known], int, set[int]]] = [
    ("nothing", {}, [], 1, set()),
    ("one", {}, states(None), 1, {1}),
    ("exactly as many", {}, states(None, None), 2, {1, 2}),
    ("one over", {}, states(None, None, None), 3, {2, 3}),
    ("the one just written, below those of an abandoned run", {}, states(None, None, None), 1, {1, 2, 3}),
    ("the end of the newest epoch", {}, [state(n, end=n % 3 == 0) for n in range(1, 12)], 11, {9, 10, 11}),
    ("the ends of two", {"keep_epochs": 2}, [state(n, end=n % 3 == 0) for n in range(1, 12)], 11, {6, 9, 10, 11}),
    ("fewer than asked", {"keep_epochs": 9}, [state(n, end=n % 3 == 0) for n in range(1, 9)], 8, {3, 6, 7, 8}),
    ("all ends of epochs", {"keep_epochs": True}, [state(n, end=n % 2 == 0) for n in range(1, 8)], 7, {2, 4, 6, 7}),
    ("no ends of epochs", NO_EPOCHS, [state(n, end=True) for n in range(1, 5)], 4, {3, 4}),
    ("every third", {"keep_every": 3}, states(*[None] * 10), 10, {3, 6, 9, 10}),
    ("every one", {"keep_every": 1}, states(None, None, None, None), 4, {1, 2, 3, 4}),
    ("no multiple: the next one", {"keep_every": 10}, [state(n) for n in (7, 14, 21, 28)], 28, {14, 21, 28}),
    ("not one before the first multiple", {"keep_every": 10}, [state(n) for n in (3, 6, 9, 12, 15)], 15, {12, 15}),
    ("step 0 is no multiple", {"keep_every": 2}, states(None, None, None, None, first=0), 3, {2, 3}),
    ("beyond all steps", {"keep_every": 100}, states(None, None, None), 3, {2, 3}),
    ("the lowest, however old", BEST, states(1.0, *[2.0] * 20), 21, {1, 20, 21}),
    ("the highest", {**BEST, "mode": "max"}, states(3.0, 5.0, 4.0, 1.0, 1.0), 5, {2, 4, 5}),
    ("two best", {**BEST, "keep_best": 2}, states(3.0, 1.0, 2.0, 9.0, 9.0), 5, {2, 3, 4, 5}),
    ("fewer than asked", {**BEST, "keep_best": 9}, states(None, 1.0, None, None, None), 5, {2, 4, 5}),
    ("a tie: the older one", BEST, states(1.0, 1.0, 1.0, 2.0, 2.0), 5, {1, 4, 5}),
    ("NaN has no rank", BEST, states(NAN, 4.0, 5.0, 5.0), 4, {2, 3, 4}),
    ("nor has what is infinite", BEST, states(-INF, 4.0, INF, 5.0, 5.0), 5, {2, 4, 5}),
    ("never told", BEST, states(None, None, None, None), 4, {3, 4}),
    ("another metric", {**BEST, "monitor": "accuracy"}, states(1.0, 2.0, 3.0, 4.0), 4, {3, 4}),
    ("monitored, and nothing more", {"monitor": "loss"}, states(1.0, 2.0, 3.0, 4.0), 4, {3, 4}),
    (
        "all rules", {"keep_latest": 3, "keep_every": 4, **BEST},
        [state(n, abs(n - 6) + 0.5, end=n == 2) for n in range(1, 13)], 12, {2, 4, 6, 8, 10, 11, 12},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "complete", "newest", "stay"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_rules(rules: dict[str, Any], complete: list[Known], newest: int, stay: set[int]) -> None:
    assert kept(Rules(**rules), complete, newest) == stay


VALUES = st.none() | st.sampled_from([NAN, INF, -INF, 0.0, 1.0]) | st.floats(allow_nan=False, allow_infinity=False)
RULES = st.builds(
    Rules,
    keep_latest=st.integers(2, 4), keep_epochs=st.booleans() | st.integers(0, 3),
    keep_every=st.none() | st.integers(1, 7), keep_best=st.integers(0, 3), monitor=st.just("loss"),
    mode=st.sampled_from(["min", "max"]),
)  # fmt: skip
HISTORIES = st.lists(st.tuples(st.integers(1, 5), VALUES, st.booleans()), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(RULES, HISTORIES, st.data())
def test_what_always_holds(rules: Rules, history: list[tuple[int, float | None, bool]], data: st.DataObject) -> None:
    """Deleting after each commit, by runs that know only what is there, leaves what one look at everything would."""
    step, everything = 0, []
    present: list[Known] = []
    for gap, loss, end in history:
        step += gap
        everything.append(state(step, loss, end=end))
        present.append(everything[-1])
        if data.draw(st.booleans()):  # otherwise the run was killed before it could delete
            stay = kept(rules, data.draw(st.permutations(present)), step)
            present = [one for one in present if one.step in stay]
        steps = {one.step for one in present}
        assert {one.step for one in everything[-rules.keep_latest :]} <= steps
        assert set(best(rules, everything)[: rules.keep_best]) <= steps
        ends = [one.step for one in everything if one.epoch_end][::-1]
        assert set(ends if rules.keep_epochs is True else ends[: rules.keep_epochs]) <= steps
    stay = kept(rules, present, step)
    assert stay == kept(rules, everything, step)
    assert len(stay) >= min(len(everything), 2)
    assert kept(rules, [one for one in present if one.step in stay], step) == stay


GAPS = st.floats(0.01, 100.0)
SETTLE = 60.0


@settings(max_examples=300, deadline=None)
@given(RULES, st.lists(st.tuples(GAPS, VALUES, st.booleans()), min_size=1, max_size=60), st.data())
def test_what_always_holds_on_a_mount_that_stores_late(
    rules: Rules, history: list[tuple[float, float | None, bool]], data: st.DataObject
) -> None:
    """Two more at most; from a minute after the first commit on, one is that old, and never much older."""
    now, present = 0.0, []
    for step, (gap, loss, end) in enumerate(history, 1):
        now += gap
        present.append(Known(step, end, {} if loss is None else {"loss": loss}, now))
        if data.draw(st.booleans()):  # otherwise the run was killed before it could delete
            everything = data.draw(st.permutations(present))
            stay, fewer = kept(rules, everything, step, SETTLE), kept(rules, everything, step)
            assert stay >= fewer
            assert len(stay - fewer) <= 2
            assert kept(rules, everything, step, math.inf) - fewer <= {min(one.step for one in everything)}
            present = [one for one in present if one.step in stay]
        old = [now - one.committed_seconds for one in present if now - one.committed_seconds >= SETTLE]
        assert bool(old) == (now - history[0][0] >= SETTLE)
        if old:
            assert min(old) <= 2 * SETTLE + 2 * max(gap for gap, *_ in history[:step])
    assert kept(rules, present, step) <= kept(rules, present, step, SETTLE)


def test_a_clock_that_steps_costs_no_more() -> None:
    """Back by an hour: what was committed before is the one that grows, and stays as long."""
    present = [Known(step, committed_seconds=5000.0 + 30 * step) for step in range(5)]
    for step in range(5, 100):
        present.append(Known(step, committed_seconds=1000.0 + 30 * step))
        stay = kept(Rules(), present, step, SETTLE)
        present = [one for one in present if one.step in stay]
        assert len(present) <= 4
        assert step < 60 or min(stay) < step - 2


def test_what_waits_for_storage_gives_way_to_its_own_kind() -> None:
    plain, end = state(11), state(11, end=True)
    assert gives_way(Rules(), [], state(10), plain)
    assert not gives_way(Rules(), [], state(10, end=True), plain)
    assert gives_way(Rules(), [], state(10, end=True), end)
    assert gives_way(Rules(keep_epochs=False), [], state(10, end=True), plain)
    ranked = Rules(keep_epochs=False, keep_best=1, monitor="loss")
    assert not gives_way(ranked, [state(1, 5.0)], state(10, 4.0), state(11, 4.0))
    assert gives_way(ranked, [state(1, 5.0)], state(10, 4.0), state(11, 3.0))
    assert gives_way(ranked, [state(1, 3.0)], state(10, 4.0), plain)
    every = Rules(keep_every=10)
    assert gives_way(every, [], state(10), state(11))  # which is the first of its ten then
    assert gives_way(every, [], state(10), state(20))
    assert not gives_way(every, [state(20)], state(10), state(21))
    assert gives_way(every, [state(10)], state(12), state(21))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"keep_latest": 1}, "keep_latest is 1: at least 2"),
        ({"keep_latest": 2.0}, "keep_latest must be a whole number"),
        ({"keep_latest": True}, "keep_latest must be a whole number"),
        ({"keep_epochs": "no"}, "keep_epochs must be a whole number of epochs, or True for all"),
        ({"keep_epochs": -1}, "keep_epochs must be a whole number of epochs"),
        ({"keep_every": 0}, "keep_every must be a whole number of steps"),
        ({"keep_every": "1h"}, "keep_every must be a whole number of steps"),
        ({"keep_best": -1}, "keep_best must be a whole number of at least 0"),
        ({"keep_best": 1}, "keep_best=1 needs monitor"),
        ({"keep_best": 1, "monitor": ""}, "monitor must be a metric's name"),
        ({"monitor": "a\nb"}, "monitor must be a metric's name"),
        ({"monitor": 3}, "monitor must be a metric's name"),
        ({"mode": "lowest"}, 'mode must be "min" or "max"'),
    ],
)
def test_impossible_rules_are_refused_in_one_line(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Rules(**rules)
    assert "\n" not in str(caught.value)


def test_what_a_manifest_says_is_read_with_care() -> None:
    told = {"loss": 0.3, "lr": -1e-9, "a": NAN, "b": INF, "c": -INF}
    stored = json.loads(json.dumps(retention.write_metrics(told), allow_nan=False))
    assert str(read_metrics({"metrics": stored})) == str(dict(sorted(told.items())))
    odd = {"a": "0.3", "b": True, "c": None, "d": [1.0], "e": 10**400, "f": 7}
    assert read_metrics({"metrics": odd}) == {"f": 7.0}
    for nothing in ({}, {"metrics": None}, {"metrics": [1]}):
        assert read_metrics(nothing) == {}
    assert known(3, {"epoch_end": 1, "metrics": odd}) == Known(3, False, {"f": 7.0})
    rules = Rules(monitor="loss", mode="max")
    assert rules_of(retention.write_rules(rules)) == rules
    for nothing in ({}, {"monitor": "loss"}, {"monitor": {"name": "loss", "mode": "odd"}}, {"monitor": {"name": 3}}):
        assert rules_of(nothing) is None


# ------------------------------------------------------------------------------------------------ in a directory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is /dev/shm: thousands of fsyncs cost nothing there."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory, prefix="checkflow-test-") as folder:
        yield Path(folder) / "checkpoints"


def new_store(directory: Path, run_id: str = "run", **rules: Any) -> Store:
    return Store(directory, run_id=run_id, lock_wait_seconds=0, **rules)


def commit(store: Store, step: int, loss: float | None = None, *, seed: int | None = None) -> Path:
    seed = step % len(CONTENT) if seed is None else seed
    told = {} if loss is None else {"metrics": retention.write_metrics({"loss": loss})}
    info = {"seed": seed, **told, **retention.write_rules(store.rules)}
    return store.commit(step, LAYOUT, CONTENT[seed][0], f"extra {seed}".encode(), info)


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in find(directory))


def assert_whole(path: Path) -> dict[str, float]:
    """Every byte; returns its metrics."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        seed = int(checkpoint.info["seed"])
        assert read_all(checkpoint) == CONTENT[seed][1]
        assert checkpoint.extra_bytes == f"extra {seed}".encode()
        return read_metrics(checkpoint.info)


LOSSES = {1: 0.9, 2: 0.2, 3: 0.5, 4: NAN, 5: 0.3, 6: 0.25, 7: 0.4, 8: 0.7}


def test_the_ranking_is_found_again_by_other_runs(directory: Path) -> None:
    for step, loss in LOSSES.items():
        with new_store(directory, f"run{step}", keep_every=3, **BEST) as store:
            commit(store, step, loss)
    assert steps(directory) == [2, 3, 6, 7, 8]
    assert choose(f"{directory}@best").name == step_name(2)
    assert [one.step for one in list_directory(directory) if one.best] == [2]
    with new_store(directory, mode="max", **BEST) as store:  # another judgement, of what is still there
        commit(store, 9, 0.6)
    assert steps(directory) == [8, 9]
    with new_store(directory, keep_best=1, monitor="accuracy") as store:
        commit(store, 10, 0.1)
    assert steps(directory) == [9, 10]
    with pytest.raises(StorageError, match="holds no best checkpoint"):
        choose(f"{directory}@best")


def test_damaged_ones_are_not_the_best(directory: Path) -> None:
    with new_store(directory, **BEST) as store:
        for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)):
            commit(store, step, loss)
        assert steps(directory) == [1, 3, 4]
    (directory / step_name(1) / "state.msgpack").unlink()
    with new_store(directory, **BEST) as store:
        for step in (5, 6):
            commit(store, step, 0.5)
    assert steps(directory) == [1, 3, 5, 6]  # the damaged one is a restore's to set aside


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_call_of_commit_and_retention(directory: Path, after: bool) -> None:
    rules = {"keep_every": 3, **BEST}
    template = directory.with_name("template")
    with new_store(template, **rules) as store:
        for step in range(1, 8):
            commit(store, step, LOSSES[step])
    assert steps(template) == [2, 3, 6, 7]
    at = kills = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(template, directory)
        store, faults = new_store(directory, "killed", **rules), Faults(at, after=after)
        with faults(), contextlib.suppress(Killed):
            commit(store, 8, 0.1)  # the best from now on: step 2 may go, and step 3 and 6 not
        store.close()
        kills += faults.met
        with new_store(directory, "later", **rules) as store:
            assert {3, 6, 7} <= set(steps(directory))
            assert 8 in steps(directory) or 2 in steps(directory)  # the best that was acknowledged
            assert all(assert_whole(path) is not None for path in find(directory))
            commit(store, 8, 0.1)
            commit(store, 10, 0.6)
            commit(store, 11, 0.6)
        assert steps(directory) == [3, 6, 8, 10, 11]
        assert [name for name in os.listdir(directory) if name.startswith(".")] == [".lock"]
        if not faults.met:
            break
    assert kills > 25


# ------------------------------------------------------------------------------- metrics that come after a commit


def test_a_late_metric_reaches_its_checkpoint(directory: Path) -> None:
    with new_store(directory, **BEST) as store:
        for step in (1, 2):
            commit(store, step, 0.5)
        before = {path.name: path.stat().st_ino for path in (directory / step_name(1)).iterdir()}
        store.annotate(1, {"loss": 0.1, "accuracy": 0.8})
        store.annotate(7, {"loss": 0.0})  # there is none
        after = {path.name: path.stat().st_ino for path in (directory / step_name(1)).iterdir()}
        assert {name for name in before if before[name] != after[name]} == {"manifest.json"}  # nothing was copied
        assert assert_whole(directory / step_name(1)) == {"loss": 0.1, "accuracy": 0.8}
        store.annotate(1, {"loss": 0.1})  # known already
        assert after["manifest.json"] == (directory / step_name(1) / "manifest.json").stat().st_ino
        for step in (3, 4):
            commit(store, step, 0.5)
    assert steps(directory) == [1, 3, 4]


@pytest.mark.parametrize("error", [None, errno.EIO], ids=["kill", "EIO"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_any_call_for_a_late_metric_may_fail_or_kill(directory: Path, after: bool, error: int | None) -> None:
    at = met = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        with new_store(directory, **BEST) as store:
            for step in (1, 2, 3):
                commit(store, step, 0.5)
        store, faults, done = new_store(directory, "killed", **BEST), Faults(at, error, after=after), False
        with faults(), contextlib.suppress(Killed, StorageError):
            store.annotate(2, {"loss": 0.1})
            done = True
        store.close()
        met += faults.met
        with new_store(directory, "later", **BEST) as store:
            assert steps(directory) == [1, 2, 3]
            found = assert_whole(directory / step_name(2))
            assert found == {"loss": 0.1} if done else found in ({"loss": 0.1}, {"loss": 0.5})
            store.annotate(2, {"loss": 0.1})
            commit(store, 4, 0.5)
        assert steps(directory) == [2, 3, 4]
        assert [name for name in os.listdir(directory) if name.startswith(".")] == [".lock"]
        if not faults.met:
            break
    assert met > 15


@pytest.mark.parametrize("names", CUTS)
def test_a_power_cut_at_any_call_for_a_late_metric(directory: Path, names: str) -> None:
    at = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        disk, faults = Disk(directory), Faults(at, after=True)
        with disk():
            store = new_store(directory)
            for step in (1, 2):
                commit(store, step, 0.5)
            done = False
            with faults(), contextlib.suppress(Killed):
                store.annotate(2, {"loss": 0.1})
                done = True
            store.close()
            left = disk.after_power_cut(directory.with_name("left"), names)
        with new_store(left, "later") as store:
            assert steps(left) == [1, 2]
            found = assert_whole(left / step_name(2))
            assert found == {"loss": 0.1} if done else found in ({"loss": 0.1}, {"loss": 0.5})
        shutil.rmtree(left)
        if not faults.met:
            break


def test_without_hard_links_a_late_metric_counts_in_its_run(directory: Path) -> None:
    with new_store(directory, **BEST) as store:
        for step in (1, 2):
            commit(store, step, 0.5)
        with (
            Faults(1, errno.EPERM, sticky=True, only=("link",))(),
            pytest.raises(StorageError, match=r"cannot add metrics .* step 1 .*: Operation not permitted"),
        ):
            store.annotate(1, {"loss": 0.1})
        assert assert_whole(directory / step_name(1)) == {"loss": 0.5}
        for step in (3, 4):
            commit(store, step, 0.3)
        assert steps(directory) == [1, 3, 4]
    with new_store(directory, **BEST) as store:
        commit(store, 5, 0.4)
    assert steps(directory) == [3, 4, 5]


# ------------------------------------------------------------------------------------------------ beside readers

READER = """
import sys
from checkflow.runtime.store.reader import open_checkpoint
from tests.support.store_tools import fill, read_all, small_layout

checkpoint = open_checkpoint(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
checkpoint.verify()
seed = checkpoint.info["seed"]
assert read_all(checkpoint) == fill(small_layout(), seed)[1]
assert checkpoint.extra_bytes == f"extra {seed}".encode()
print("read", seed, flush=True)
sys.stdin.readline()
checkpoint.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["closes", "killed"])
def test_what_another_process_reads_is_not_deleted(directory: Path, end: str) -> None:
    with new_store(directory) as store:
        for step in (1, 2):
            commit(store, step)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(directory / step_name(1))], text=True, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            assert reader.stdout.readline() == "open\n"
            for step in (3, 4, 5):
                commit(store, step)
            assert steps(directory) == [1, 4, 5]  # the writer went on, and what is not read has gone
            print(file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "read 1\n"
            if end == "closes":
                print(file=reader.stdin, flush=True)
                assert reader.stdout.readline() == "closed\n"
            else:
                reader.send_signal(signal.SIGKILL)
                reader.wait()
            commit(store, 6)
            assert steps(directory) == [5, 6]
        finally:
            reader.kill()
            reader.communicate()
    assert sorted(os.listdir(directory)) == [".lock", step_name(5), step_name(6)]


def test_what_is_read_may_be_exchanged_again_and_again(directory: Path) -> None:
    """A new run does the same step over, twice; whoever reads the first one has the first one."""
    with new_store(directory) as store:
        commit(store, 1)
        path = commit(store, 2, seed=2)
        with open_checkpoint(path) as first:
            commit(store, 2, seed=3)
            with open_checkpoint(path) as second:
                commit(store, 2, seed=4)
                store.annotate(2, {"loss": 0.5})
                assert read_all(second) == CONTENT[3][1]
            assert read_all(first) == CONTENT[2][1]
            first.verify()
        assert assert_whole(path) == {"loss": 0.5}
        commit(store, 3)
    assert sorted(os.listdir(directory)) == [".lock", step_name(2), step_name(3)]


class Between:
    """Does something once, between two calls below the store."""

    def __init__(self, at: int, what: Callable[[], object]) -> None:
        self.at, self._what = at, what
        self.count = 0

    @property
    def met(self) -> bool:
        return self.count >= self.at

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(fs, name, self._wrap(getattr(fs, name)))
            yield

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self._what()
            return real(*args, **named)

        return call


@pytest.mark.parametrize("way", ["retired", "exchanged"])
def test_deleted_at_any_moment_of_an_opening(directory: Path, way: str) -> None:
    """It is open, and all of it can be read; or it is gone, which is no damage. And nothing of it stays behind."""
    at, outcomes = 0, []
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        with new_store(directory) as store:
            for step in (1, 2):
                commit(store, step)

            def write(store: Store = store) -> None:
                if way == "retired":
                    commit(store, 3)
                    commit(store, 4)
                else:
                    commit(store, 1, seed=7)

            between = Between(at, write)
            try:
                with between():
                    checkpoint = open_checkpoint(directory / step_name(1))
            except CorruptCheckpointError:
                raise
            except StorageError as error:
                assert "cannot open the checkpoint" in str(error)  # noqa: PT017 - the other outcome is as good
                outcomes.append("gone")
                assert way == "retired"
            else:
                with checkpoint:
                    checkpoint.verify()
                    assert read_all(checkpoint) == CONTENT[int(checkpoint.info["seed"])][1]
                    outcomes.append(f"read {checkpoint.info['seed']}")
                    assert not between.met or way == "exchanged" or step_name(1) in os.listdir(directory)
            commit(store, 5)
        assert sorted(os.listdir(directory)) == [".lock", *sorted(map(step_name, steps(directory)))]
        assert 1 not in steps(directory) or not between.met or way == "exchanged"
        if not between.met:
            break
    assert len(set(outcomes)) == 2


@pytest.mark.parametrize("what", ["commit", "annotate"])
def test_opened_at_any_moment_of_a_commit(directory: Path, what: str) -> None:
    at = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        with new_store(directory) as store:
            for step in (1, 2):
                commit(store, step)
            opened: list[Checkpoint] = []

            def read(opened: list[Checkpoint] = opened) -> None:
                checkpoint = find_valid(directory)
                assert checkpoint is not None
                opened.append(checkpoint)

            between = Between(at, read)
            with between():
                if what == "commit":
                    commit(store, 3)
                else:
                    store.annotate(2, {"loss": 0.1})
            for checkpoint in opened:
                with checkpoint:
                    checkpoint.verify()
                    assert read_all(checkpoint) == CONTENT[checkpoint.step][1]
            commit(store, 4)
            commit(store, 5)
        assert sorted(os.listdir(directory)) == [".lock", step_name(4), step_name(5)]
        if not between.met:
            break


@contextlib.contextmanager
def forking() -> Iterator[Callable[[], None]]:
    """What forks a process that lives until the block ends, as a loader's worker does, and touches nothing."""
    end, told = os.pipe()
    children: list[int] = []

    def fork() -> None:
        if child := os.fork():
            children.append(child)
            return
        try:
            os.close(told)
            os.read(end, 1)
        finally:
            os._exit(0)

    try:
        yield fork
    finally:
        os.close(told)
        for child in children:
            os.waitpid(child, 0)
        os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["commit", "annotate"])
def test_a_process_forked_at_any_moment_keeps_no_checkpoint(directory: Path, what: str) -> None:
    """What the store has open and locked at that moment, the new process has too, for as long as it lives."""
    at = forked = 0
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        with new_store(directory) as store:
            for step in (1, 2):
                commit(store, step)
        with forking() as fork, new_store(directory, "later") as store:  # which looks at what the first one left
            between = Between(at, fork)
            with between():
                if what == "commit":
                    commit(store, 3)
                else:
                    store.annotate(2, {"loss": 0.1})
            for step in (4, 5, 6):
                commit(store, step)
            assert sorted(os.listdir(directory)) == [".lock", step_name(5), step_name(6)]
        if not between.met:
            break
        forked += 1
    assert forked > 15
