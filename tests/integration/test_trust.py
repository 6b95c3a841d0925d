"""Plans that cannot be made, plans that a job refutes, anchors that have not fired yet: what is trusted, and when."""

from __future__ import annotations

import logging
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkflow import api
from checkflow.planner.live import planner
from checkflow.planner.live.bandwidth import CopyBandwidths
from checkflow.planner.schedule.replay import check_plan
from checkflow.runtime.format.digest import Digests
from checkflow.runtime.live_plan import planning
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.store.discovery import find
from tests.support.oracle import assert_checkpoint_is, same_bits
from tests.support.own_plans import Beside, Job, check, kept, nothing_left, open_job, train

DISTRUSTED = "the plan does not fit this job: from now on"


@pytest.fixture(autouse=True)
def _planner(monkeypatch: pytest.MonkeyPatch) -> None:
    Beside.recordings = 0
    monkeypatch.setattr(api, "check_plan", check_plan)
    monkeypatch.setattr(api, "make_planner", Beside)
    monkeypatch.setattr(planning, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(planner, "_bandwidths", lambda _: CopyBandwidths(1e10, 2e10))


def tear(monkeypatch: pytest.MonkeyPatch, at: int, until: threading.Event | None = None) -> list[int]:
    """One bit of a checkpoint, the first from a step on, is wrong when the writer comes to audit it, which may be late.

    Returns:
        Its step, as soon as it is known.
    """
    audit, torn = Writer._audit, []

    def audit_torn(self: Writer, capture: Capture) -> None:
        if capture.step >= at and not torn:
            torn.append(capture.step)
            assert until is None or until.wait(600)
            capture.buffer.view[capture.layout.tensors["model/0.weight"].staging_offset] ^= 1
        audit(self, capture)

    monkeypatch.setattr(Writer, "_audit", audit_torn)
    return torn


def test_a_fault_of_the_planner_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not when the iteration is recorded, but when the process that plans is to be started."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Beside, "start", fail)
    plain, job = Job(), Job()
    torch.manual_seed(1)
    for _ in range(9):
        plain.iterate()
    torch.manual_seed(1)
    with open_job(job, tmp_path, every=3, on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 9)
    expected = plain.state()
    assert all(same_bits(expected[name], tensor) for name, tensor in job.state().items())
    assert check(tmp_path, truths) == [3, 6, 9]
    report = checkpointer.report()
    assert (report["planning"]["stage"], report["planning"]["failure"]) == ("given up", "ZeroDivisionError: planted")
    assert caplog.text.count("this job gets no plan") == 1
    assert "Traceback" in caplog.text
    assert nothing_left(job)


@pytest.mark.slow
def test_a_breach_refutes_the_plan_that_it_was_captured_by_and_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer comes to a checkpoint of the old plan when the new one is in place already."""
    job, released = Job(), threading.Event()
    torn = tear(monkeypatch, 6, released)
    seen: list[str] = []

    def before(n: int) -> None:
        while n == 9 and not torn:  # the writer comes to one of those before
            time.sleep(0.001)
        job.batch_size = 9 if n >= 10 else 6
        if (plan := checkpointer.report()["plan"]) is not None and plan["digest"] not in seen:
            seen.append(plan["digest"])
        if len(seen) == 2:
            released.set()

    with open_job(job, tmp_path, plan="auto", on_error="warn") as checkpointer:
        truths = train(job, checkpointer, 32, before)
    assert released.is_set()
    report = checkpointer.report()
    assert (report["plan"]["digest"], report["breaches"], report["failed"]) == (seen[1], 1, 1)
    assert DISTRUSTED not in caplog.text
    assert len(kept(tmp_path)) == 2
    steps = check(tmp_path, truths)
    assert 6 <= torn[0] <= 9
    assert torn[0] not in steps
    assert steps[-1] == 32
    # The new plan is executed still: at the boundary itself only what lies in host memory is copied.
    assert report["newest_capture"]["boundary_bytes"] == sum(
        t.nbytes for name, t in truths[32].items() if name.endswith(".step")
    )


@pytest.mark.slow
def test_a_breach_under_the_plan_in_place_refutes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the next start does not begin with it."""
    job = Job()
    with open_job(job, tmp_path) as checkpointer:
        train(job, checkpointer, 8)
    assert len(kept(tmp_path)) == 1
    first = checkpointer.report()["plan"]["digest"]
    job = Job()
    with monkeypatch.context() as patch:
        tear(patch, 10)
        with open_job(job, tmp_path, every=1, on_error="warn") as checkpointer:
            assert checkpointer.report()["plan"]["digest"] == first
            truths = train(job, checkpointer, 16)
    report = checkpointer.report()
    assert (report["breaches"], Beside.recordings) == (1, 1)
    assert caplog.text.count(DISTRUSTED) == 1
    assert report["newest_capture"]["boundary_bytes"] == sum(tensor.nbytes for tensor in truths[16].values())
    assert kept(tmp_path) == []
    for path in find(tmp_path):
        if (step := int(path.name[5:])) > 8:
            assert step != 10
            assert_checkpoint_is(path, truths[step])
    job = Job()
    with open_job(job, tmp_path, every=1) as checkpointer:
        assert checkpointer.report()["plan"] is None
        train(job, checkpointer, 24)
    assert (checkpointer.report()["plan"]["source"], Beside.recordings) == ("recorded", 2)


@pytest.fixture
def _something_compiled() -> Iterator[None]:
    """From here on nobody knows which hooks compiled code passes by."""
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_something_compiled")
def test_an_anchor_is_called_silent_only_after_an_iteration_in_which_it_could_have_fired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan is put in place at a boundary that is captured at once: its hooks were never passed."""
    job = Job()
    with caplog.at_level(logging.INFO, "checkflow"), open_job(job, tmp_path, every=1) as checkpointer:
        truths = train(job, checkpointer, 12)
    assert check(tmp_path, truths) == list(range(1, 13))
    assert "a plan runs from here on" in caplog.text
    assert "whose forward no hook sees" not in caplog.text
    report = checkpointer.report()
    assert (report["plan"]["source"], report["breaches"]) == ("recorded", 0)
    assert report["newest_capture"]["boundary_bytes"] == sum(
        t.nbytes for name, t in truths[12].items() if name.endswith(".step")
    )


def test_what_a_refuted_plan_had_under_way_is_void() -> None:
    """Audited captures tell themselves, and those that copy all at the boundary are as true as ever."""
    layout = types.SimpleNamespace(buffer_bytes=0, files=())
    written: list[int] = []

    def commit(capture: Any) -> Path:
        written.append(capture.step)
        return Path()

    writer = Writer(commit, lambda _: None, supersede=False)
    writer.breached_plans.add("refuted")
    rows = [
        (1, "refuted", None, True),
        (2, "refuted", Digests(()), True),
        (3, "refuted", None, False),
        (4, "other", None, True),
    ]
    for step, plan, digests, by_plan in rows:
        capture: Any = types.SimpleNamespace(
            step=step,
            plan_digest=plan,
            digests=digests,
            by_plan=by_plan,
            settled={},
            layout=layout,
            begun=0.0,
            written_at=0.0,
            published_at=0.0,
        )
        writer.submit(capture)
    writer.close()
    assert (written, writer.failed, writer.breaches) == ([2, 3, 4], 1, 0)
