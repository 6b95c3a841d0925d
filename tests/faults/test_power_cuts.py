"""Power cuts of real file systems lose nothing that was acknowledged; and what would be lost is seen."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Failed, Skipped

from tests.faults.mounting import MUST_MOUNT, in_namespace, need_mount, why_not

ROOT = Path(__file__).parents[2]
reason = functools.cache(why_not)


def cut(*arguments: str) -> dict[str, Any]:
    """What ``tests/faults/power_cuts.py`` finds. Skips where mounting is not allowed, and fails there in CI."""
    need_mount(reason(arguments[0]))
    done = subprocess.run(
        in_namespace(sys.executable, "-m", "tests.faults.power_cuts", *arguments),
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    return found


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        pytest.param(["ext4"], 70, id="ext4"),
        pytest.param(["xfs", "--every", "3"], 23, id="xfs"),
        pytest.param(["ext4", "--direct", "--every", "3"], 30, id="ext4, around the page cache"),
        pytest.param(["xfs", "--direct", "--every", "4"], 22, id="xfs, around the page cache"),
        pytest.param(["ext4", "--fresh", "--every", "2"], 12, id="ext4, a new directory"),
        pytest.param(["xfs", "--fresh", "--every", "3"], 8, id="xfs, a new directory"),
    ],
)
def test_the_power_goes_after_any_call(arguments: list[str], least: int) -> None:
    """Every call of two commits and an exchange; ``make faults`` does without the steps."""
    found = cut(*arguments)
    assert found["problems"] == []
    assert found["tried"] >= least
    assert found["acknowledged"] > 0


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_the_disk_goes_and_the_job_stays(kind: str) -> None:
    """A file system that shut down may still sync a folder without a word (xfs does): that is no acknowledgement."""
    found = cut(kind, "--survives", "--first", "22", "--most", "8")
    assert found["problems"] == []
    assert found["tried"] == 8


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("lie", ["file", "root"])
def test_without_a_sync_something_is_lost(kind: str, lie: str) -> None:
    """The tests above are worth something. (Both systems write the names in a folder whenever they sync a file.)"""
    found = cut(kind, "--first", "26", "--every", "3", "--most", "5", "--lie", lie)
    assert any("L1 to L3" in problem for problem in found["problems"])


def test_what_must_mount_is_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = why_not("xfs")
    assert missing is not None
    assert "no mkfs.xfs" in missing
    for value in ("", "0"):
        monkeypatch.setenv(MUST_MOUNT, value)
        with pytest.raises(Skipped, match=r"no mkfs\.xfs: apt-get install xfsprogs"):
            need_mount(missing)
    monkeypatch.setenv(MUST_MOUNT, "1")
    with pytest.raises(Failed, match=r"CHECKFLOW_MUST_MOUNT is set, and there is no mkfs\.xfs"):
        need_mount(missing)
    need_mount(None)


def test_where_mounting_fails_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("mkfs.ext4", "mount", "umount"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
    (tmp_path / "unshare").write_text("#!/bin/sh\necho unshare: Operation not permitted >&2\nexit 1\n")
    for tool in tmp_path.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert why_not("ext4") == "mounting ext4 is not allowed here: unshare: Operation not permitted"
