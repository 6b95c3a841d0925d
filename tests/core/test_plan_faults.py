"""Plan files: any damage and any trick is refused in one line, and the writer leaves a whole plan or the old one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkflow.core import plan as plans
from checkflow.core.errors import PlanError, StorageError
from checkflow.core.plan import Plan, dumps, load, loads, save
from checkflow.core.planner_api import PlanLimits
from checkflow.runtime.live_plan.cache import FOLDER, PlanCache
from checkflow.runtime.state.meshes import ALONE, RankView
from checkflow.runtime.system import fs
from tests.faults.plan_faults import good_plan
from tests.support.faults import ERRORS, Killed

PLAN = good_plan()
DATA = dumps(PLAN)
OTHER = replace(PLAN, fingerprint=replace(PLAN.fingerprint, model="other"))


def assert_refused(data: bytes, message: str | None = None) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        loads(data, "plan.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


# -------------------------------------------------------------------------------------------------------- the reader


def test_a_flipped_bit_in_any_byte() -> None:
    source = random.Random(1)
    for i in range(len(DATA)):
        changed = bytearray(DATA)
        changed[i] ^= 1 << source.randrange(8)
        assert_refused(bytes(changed), "plan.json")
    assert loads(DATA) == PLAN.sealed()


def test_any_other_length() -> None:
    for length in range(0, len(DATA), 7):
        assert_refused(DATA[:length])
    for tail in (b"\0", b" ", b"\n", b"{}", b"x" * 5000):
        assert_refused(DATA + tail)
    assert_refused(bytes(len(DATA)))


def nested(open_: bytes, close: bytes, depth: int = 100_000) -> bytes:
    return open_ * depth + b"1" + close * depth


def put(key: str, text: bytes) -> bytes:
    """The plan with other text in place of a number of its own."""
    begin = DATA.index(b'"%s":' % key.encode()) + len(key) + 3
    end = min(DATA.index(b",", begin), DATA.find(b"}", begin) % len(DATA))
    return DATA[:begin] + text + DATA[end:]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(nested(b"[", b"]"), id="lists, 100,000 deep"),
        pytest.param(nested(b'{"a":', b"}"), id="objects, 100,000 deep"),
        pytest.param(put("interval", nested(b"[", b"]")), id="lists in place of a number"),
        pytest.param(put("interval", b"9" * 5000), id="5,000 digits"),
        pytest.param(put("bandwidth_bytes_per_second", b"9" * 5000), id="5,000 digits of a rate"),
        pytest.param(put("bandwidth_bytes_per_second", b"1e400"), id="beyond floats"),
        pytest.param(put("bandwidth_bytes_per_second", b"NaN"), id="NaN"),
        pytest.param(put("bandwidth_bytes_per_second", b"Infinity"), id="Infinity"),
        pytest.param(put("bandwidth_bytes_per_second", b"-Infinity"), id="-Infinity"),
        pytest.param(put("interval", b"true"), id="a truth for a number"),
        pytest.param(put("interval", b'"1"'), id="text for a number"),
        pytest.param(put("interval", b"1.0"), id="a float for a count"),
        pytest.param(put("interval", b"null"), id="nothing for a number"),
        pytest.param(put("interval", b'1,"interval":1'), id="the same key twice, with one value"),
        pytest.param(put("interval", b'2,"interval":1'), id="the same key twice, with two values"),
        pytest.param(put("interval", b'1,"more":1'), id="an unknown key"),
        pytest.param(put("interval", b"1 "), id="a space"),
        pytest.param(b"\xef\xbb\xbf" + DATA, id="a byte order mark"),
        pytest.param(DATA.decode().encode("utf-16"), id="another encoding"),
        pytest.param(DATA.replace(b'"m"', b'"\xff"'), id="no text"),
        pytest.param(DATA.replace(b'"m"', b'"\\ud800"'), id="half a surrogate"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"5", id="a number"),
        pytest.param(b"null", id="null"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_is_no_plan(data: bytes) -> None:
    assert_refused(data)


def test_what_is_put_is_put() -> None:
    """The faults above change the place that they name, and nothing but it."""
    for key, value in (("interval", b"1"), ("bandwidth_bytes_per_second", b"8.0")):
        assert put(key, value) == DATA


def sealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A change by someone who makes the digest fit."""
    content = json.loads(DATA)
    change(content)
    content["digest"] = ""
    plan = plans.Plan
    from pydantic import TypeAdapter

    return dumps(TypeAdapter(plan).validate_python(_tuples(content), strict=False))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan["chunks"][0].update(tensor="model/none"), "model/none"),
        (lambda plan: plan["timeline"]["groups"][0]["members"].append(["model/none", 4]), "model/none"),
        (lambda plan: plan["chunks"].pop(), "copies 0 of the 1 bytes of model/z"),
        (lambda plan: plan["chunks"].append(plan["chunks"][0]), "overlap"),
        (lambda plan: plan["chunks"][0].update(offset_bytes=4, length_bytes=4), "gap"),
        (lambda plan: plan["chunks"][0].update(offload_step=3), "model/mean"),
        (lambda plan: plan["chunks"][0].update(offload_step=10**9), "model/mean"),
        (lambda plan: plan["fingerprint"]["state"].append(plan["fingerprint"]["state"][0]), "twice"),
    ],
)
def test_what_does_not_hang_together_is_refused_although_sealed(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    assert_refused(sealed(change), message)


def test_what_is_sealed_unchanged_is_the_plan() -> None:
    assert sealed(lambda content: None) == DATA


def test_a_plan_over_its_own_budget_is_refused() -> None:
    from checkflow.planner.schedule.replay import check_plan

    for change in ({"plan_peak_bytes": 29}, {"stall_seconds": 3.0}, {"bandwidth_bytes_per_second": 7.0}):
        with pytest.raises(PlanError):
            check_plan(loads(dumps(replace(PLAN, **change))))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- the writer


class WriterFaults:
    """Counts the calls with which a plan is written; the at-th fails, or kills, and what is synced is noted."""

    def __init__(self, at: int = 0, error: int | None = None, *, after: bool = False, sticky: bool = False) -> None:
        self.at, self.error, self.after, self.sticky = at, error, after, sticky
        self.count = 0
        self.synced: dict[int, bytes] = {}  # by inode

    @property
    def met(self) -> bool:
        return 0 < self.at <= self.count

    @contextlib.contextmanager
    def __call__(self) -> Iterator[WriterFaults]:
        def fsync(fd: int) -> None:
            if not os.path.isdir(f"/proc/self/fd/{fd}"):
                self.synced[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

        def opened(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            return _File(self, self._wrap(open)(path, mode, *more, **named))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans, "open", opened, raising=False)
            patch.setattr(os, "fsync", self._wrap(fsync))
            patch.setattr(os, "replace", self._wrap(os.replace))
            patch.setattr(Path, "unlink", self._wrap(Path.unlink, counted=False))
            yield self

    def _wrap(self, real: Callable[..., Any], *, counted: bool = True) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.count += counted
            due = self.met and ((counted and self.count == self.at) or self.sticky or self.error is None)
            result = real(*args, **named) if not due or (counted and self.after and self.count == self.at) else None
            if due and self.error is None:
                raise Killed
            if due:
                raise OSError(self.error, os.strerror(self.error or 0))
            return result

        return call


class _File:
    """A file whose write, flush and close may fail, too; a write that fails half is half there."""

    def __init__(self, faults: WriterFaults, file: Any) -> None:
        self._faults, self._file = faults, file

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *given: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        def write() -> int:
            return int(self._file.write(data))

        try:
            return int(self._faults._wrap(write)())
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise

    def flush(self) -> None:
        self._faults._wrap(self._file.flush)()

    def fileno(self) -> int:
        return int(self._file.fileno())


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [*ERRORS, None], ids=["EIO", "ENOSPC", "a kill"])
@pytest.mark.parametrize("old", [False, True], ids=["new", "again"])
def test_the_writer_at_any_call(tmp_path: Path, old: bool, error: int | None, after: bool, sticky: bool) -> None:
    """The new plan, or what was there before; and the next attempt works."""
    at, refused = 0, 0
    while True:
        at += 1
        path = tmp_path / str(at) / "plan.json"
        path.parent.mkdir()
        if old:
            save(OTHER, path)
        faults = WriterFaults(at, error, after=after, sticky=sticky)
        failed: BaseException | None = None
        with faults():
            try:
                save(PLAN, path)
            except (PlanError, Killed) as caught:
                failed = caught
        found = load(path) if path.exists() else None
        before = OTHER.sealed() if old else None
        if failed is None:
            assert found == PLAN.sealed()
        else:
            refused += 1
            assert found in (before, PLAN.sealed())
            if isinstance(failed, PlanError):
                assert os.strerror(error or 0) in str(failed)
        if error is not None and not sticky:
            assert os.listdir(path.parent) in ([], ["plan.json"])
        save(PLAN, path)
        assert load(path) == PLAN.sealed()
        if not faults.met:
            break
    assert refused >= 4


def test_a_power_cut_after_the_rename_finds_all_of_it(tmp_path: Path) -> None:
    """What has the plan's name was synced before it got it, to the last byte."""
    with WriterFaults()() as faults:
        save(PLAN, tmp_path / "plan.json")
    assert faults.synced[(tmp_path / "plan.json").stat().st_ino] == DATA


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match="cannot read the plan"):
            load(path)
    with pytest.raises(PlanError, match=os.strerror(errno.ENOENT)):
        save(PLAN, tmp_path / "no" / "folder" / "plan.json")
    assert isinstance(PLAN, Plan)


def test_what_has_no_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(PlanError, match="no regular file"):
            load(path)
    monkeypatch.setattr(plans, "MAX_BYTES", 1 << 16)
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 42)
    with pytest.raises(PlanError, match="more than 65536 bytes"):
        load(tmp_path / "huge")
    monkeypatch.setattr(plans, "MAX_BYTES", len(DATA))
    assert loads(dumps(PLAN)) == PLAN.sealed()
    monkeypatch.setattr(plans, "MAX_BYTES", len(DATA) - 1)
    with pytest.raises(PlanError, match=f"would have {len(DATA)} bytes"):
        dumps(PLAN)
    with pytest.raises(PlanError, match="more than"):
        loads(DATA)


# ------------------------------------------------------------------------------------------------- links that lead away


def test_the_writer_follows_no_link(tmp_path: Path) -> None:
    """Neither one at the plan's own name nor at that of its draft."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    path = tmp_path / "plan.json"
    for name in ("plan.json", f".plan.json.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(precious)
    save(PLAN, path)
    assert (precious.read_bytes(), load(path), path.is_symlink()) == (b"x", PLAN.sealed(), False)
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "precious"]


def test_what_killed_writers_left_is_removed_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PlanCache(tmp_path, PlanLimits())
    cache.tidy()  # there is no folder yet
    path = cache.file(PLAN.fingerprint)
    save(PLAN, path)
    half = cache.folder / f".{path.name}.4711.tmp"
    others = [".hidden", f".{path.name}.tmp", f"{path.name}.1.tmp", f".{path.name}.x.tmp", "notes"]
    for name in (half.name, *others):
        (cache.folder / name).write_text("x")
    monkeypatch.setattr(fs, "unlink", lambda name, *, dir_fd: os.stat("/nowhere"))
    cache.tidy()
    assert half.exists()
    assert "cannot tidy up" in caplog.text
    monkeypatch.undo()
    cache.tidy()
    assert sorted(os.listdir(cache.folder)) == sorted([path.name, *others])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / half.name).write_text("x")
    other = PlanCache(tmp_path / "other", PlanLimits())
    (tmp_path / "other").mkdir()
    other.folder.symlink_to(tmp_path / "elsewhere")
    other.tidy()  # follows no link
    assert (tmp_path / "elsewhere" / half.name).exists()


@pytest.mark.every_case
@pytest.mark.parametrize("rank", [ALONE, RankView(1, 2)])
def test_a_folder_of_plans_that_leads_elsewhere_is_not_used(tmp_path: Path, rank: RankView) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    here.mkdir()
    elsewhere.mkdir()
    cache = PlanCache(here, PlanLimits(), rank)
    name = cache.file(PLAN.fingerprint).name
    save(PLAN, cache.folder / name)
    assert cache.find(lambda _: True) is not None
    (here / FOLDER).rename(elsewhere / FOLDER)
    (here / FOLDER).symlink_to(elsewhere / FOLDER)
    assert cache.find(lambda _: True) is None
    with pytest.raises(StorageError, match="no directory of its own"):
        cache.file(PLAN.fingerprint)
    cache.keep(cache.folder / name)
    cache.drop(PLAN)
    assert os.listdir(elsewhere / cache.folder.relative_to(here)) == [name]
