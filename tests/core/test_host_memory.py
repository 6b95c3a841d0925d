"""How much host memory a process may have, where control groups limit it."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from checkflow.core.errors import StorageError
from checkflow.core.machine import host_memory
from checkflow.core.machine.host_memory import free_host_memory_bytes, host_memory_bytes
from checkflow.runtime.memory_tier.staging import StagingBuffers

TOTAL, FREE = 1000, 900  # of the machine


class Groups:
    """The files by which Linux tells of control groups, for one process."""

    def __init__(self, folder: Path) -> None:
        self.mount, self.own = folder / "cgroup", folder / "own"

    def belong(self, *lines: str) -> None:
        self.own.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, limit: str, statistics: str, *, file: str = "memory.max") -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f"{limit}\n")
        (folder / "memory.stat").write_text(statistics)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    groups = Groups(tmp_path)
    monkeypatch.setattr(host_memory, "_MOUNT", groups.mount)
    monkeypatch.setattr(host_memory, "_OWN", groups.own)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=TOTAL, available=FREE))
    return groups


def found() -> tuple[int, int]:
    return host_memory_bytes(), free_host_memory_bytes()


def test_without_groups_it_is_the_machines(groups: Groups) -> None:
    assert found() == (TOTAL, FREE)
    groups.belong("0::/job")
    assert found() == (TOTAL, FREE)


def test_shared_memory_counts_as_used_and_what_was_read_does_not(groups: Groups) -> None:
    groups.belong("0::/")
    groups.group("", "500", "anon 100\nfile 290\nshmem 40\nkernel 7\n")
    assert found() == (500, 360)


def test_every_group_above_limits_too(groups: Groups) -> None:
    groups.belong("0::/slurm/job_1/step_0")
    groups.group("slurm", "max", "anon 800\nshmem 0\n")
    groups.group("slurm/job_1", "600", "anon 400\nshmem 50\n")
    groups.group("slurm/job_1/step_0", "550", "anon 10\nshmem 0\n")
    groups.group("slurm/job_2", "1", "anon 1\nshmem 0\n")
    assert found() == (550, 150)


def test_groups_of_version_1(groups: Groups) -> None:
    groups.belong("9:cpu,cpuacct:/elsewhere", "4:cpuset,memory:/a/b", "0::/elsewhere")
    file = "memory.limit_in_bytes"
    groups.group("memory", "9223372036854771712", "total_rss 1\n", file=file)
    groups.group("memory/a", "700", "rss 1\ntotal_rss 300\ncache 90\ntotal_shmem 200\nshmem 3\n", file=file)
    assert found() == (700, 200)


def test_a_container_sees_its_own_group_at_the_mount(groups: Groups) -> None:
    groups.belong("0::/system.slice/docker-1.scope")
    groups.group("", "300", "anon 30\nshmem 5\n")
    assert found() == (300, 265)


def test_what_the_system_does_not_tell_limits_nothing_more(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.belong("0::/sandbox/job")
    groups.group("sandbox", "400", "")
    (groups.mount / "sandbox" / "memory.stat").unlink()
    groups.group("sandbox/job", "1", "anon 1\n")
    text = Path.read_text

    def gone(self: Path, *rest: Any) -> str:
        if self.parent.name == "job":
            raise OSError(errno.ENODEV, "No such device")
        return text(self, *rest)

    monkeypatch.setattr(Path, "read_text", gone)
    assert found() == (400, 400)


def test_more_used_than_granted_leaves_nothing(groups: Groups) -> None:
    groups.belong("0::/")
    groups.group("", "300", "anon 310\nshmem 5\n")
    assert found() == (300, 0)


def test_staging_buffers_stay_within_the_limit(groups: Groups) -> None:
    """The machine has more; to touch it would have the job killed."""
    groups.belong("0::/")
    groups.group("", "300", "anon 0\nshmem 1\n")
    buffers = StagingBuffers(3)
    with pytest.raises(StorageError, match="3 staging buffers of 100 B do not fit into the 299 B of host memory"):
        buffers.grow(100)
    buffers.grow(99)
    assert buffers.free == 3
    buffers.close()
