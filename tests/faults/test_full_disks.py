"""Files that may not grow, disks that turn read-only under a commit, other users' directories; damage; rivals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.mounting import in_namespace, need_mount, why_not

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory, prefix="checkflow-test-") as name:
        yield Path(name)


def run(program: str, *arguments: str, mounts: bool = False) -> dict[str, Any]:
    """What a program of tests/ prints."""
    command = [sys.executable, "-m", f"tests.faults.{program}", *arguments]
    done = subprocess.run(
        in_namespace(*command) if mounts else command,
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == []
    return found


@pytest.mark.parametrize(("way", "count"), [("sizes", 8), ("limits", 12), ("read-only", 6), ("strangers", 4)])
def test_disks_and_directories(way: str, count: int) -> None:
    need_mount(why_not("ext4"))
    assert run("full_disks", way, "--count", str(count), mounts=True)["tried"] == count


def test_random_damage(folder: Path) -> None:
    """``make faults`` has 20,000."""
    found = run("damage", str(folder), "500", "1")
    assert (found["tried"], found["refused"] > 400) == (500, True)


@pytest.mark.slow
def test_rivals(folder: Path) -> None:
    """``make faults`` has 1,000 rounds."""
    found = run("rivals", str(folder / "checkpoints"), "20", "1")
    assert found["tried"] == 20
    assert found["commits"] > 100
