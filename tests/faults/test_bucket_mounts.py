"""Nodes that are lost while they train on a mounted bucket leave a whole checkpoint in it; without the rule none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Failed, Skipped

from tests.faults.bucket_mounts import alone, why_not
from tests.faults.mounting import MUST_FUSE, need_mount

ROOT = Path(__file__).parents[2]
LEAST_COMMITS = 10  # in a life, each of which deletes an older one


@pytest.mark.slow
def test_five_losses_leave_a_whole_checkpoint_each_and_without_the_rule_nothing_is_left() -> None:
    """``tests/faults/bucket_mounts.py``. Skips where no bucket can be mounted, and fails there in CI."""
    need_mount(why_not(), MUST_FUSE)
    done = subprocess.run(
        alone(sys.executable, "-m", "tests.faults.bucket_mounts", "--losses", "5"),
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    losses, bare = found["losses"], found["without the rule"]
    assert len(losses) == 5
    for loss in (*losses, bare):
        assert len(loss["acknowledged"]) >= LEAST_COMMITS
        (told,) = loss["told"]
        assert "which does not promise that a commit outlives this machine, nor that the lock" in told
    start = 0
    for loss in losses:
        assert loss["start"] == start
        assert loss["whole"], loss
        assert set(loss["whole"]) <= {start, *loss["acknowledged"]}
        start = loss["whole"][-1]  # the next machine goes on from it
    assert bare["whole"] == []


def test_what_must_mount_a_bucket_is_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = why_not()
    assert missing is not None
    assert missing in ("there is no /dev/fuse", "there is no fusermount3: apt-get install fuse3")
    monkeypatch.setenv(MUST_FUSE, "0")
    with pytest.raises(Skipped, match="there is no"):
        need_mount(missing, MUST_FUSE)
    monkeypatch.setenv(MUST_FUSE, "1")
    with pytest.raises(Failed, match="CHECKFLOW_MUST_FUSE is set, and there is no"):
        need_mount(missing, MUST_FUSE)
