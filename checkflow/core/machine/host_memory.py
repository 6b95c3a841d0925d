"""Host memory that this process may use: the machine's, or less if a container or scheduler limits its job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class _Group(NamedTuple):
    """A control group of this process that has a limit."""

    limit_bytes: int
    used_bytes: int  # without the page cache


class _Version(NamedTuple):
    """A version of control groups: where memory is accounted, and which statistics cannot be dropped."""

    controller: str  # as in the process's list of groups
    mount: Path
    limit: str
    kept: frozenset[str]  # includes shared memory, which counts as files


def free_host_memory_bytes() -> int:
    """Return what this process can still allocate in host memory without swapping, within its groups' limits."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *(group.limit_bytes - group.used_bytes for group in _groups())]))


def host_memory_bytes() -> int:
    """Return all host memory that this process may use: a container may have less than the machine."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(group.limit_bytes for group in _groups())])


def _groups() -> Iterator[_Group]:
    """Yield this process's group and all above it, since a scheduler may limit only some in the middle."""
    for version in (
        _Version("", _MOUNT, "memory.max", frozenset(("anon", "shmem"))),
        _Version("memory", _MOUNT / "memory", "memory.limit_in_bytes", frozenset(("total_rss", "total_shmem"))),
    ):
        # A container may see its own group at the mount, with the host's path, which does not exist there.
        own = version.mount / _own_path(version.controller).lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(version.mount) and (group := _read(folder, version)) is not None:
                yield group


def _own_path(controller: str) -> str:
    rows = (line.split(":", 2) for line in _text(_OWN).splitlines())
    return next((path for _, controllers, path in rows if controller in controllers.split(",")), "")


def _read(folder: Path, version: _Version) -> _Group | None:
    """Read a group; None: it has no limit, or no readable one."""
    limit = _text(folder / version.limit).strip()
    if not limit.isdigit():  # "max"
        return None
    rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return _Group(int(limit), sum(int(value) for key, value in rows if key in version.kept))


def _text(file: Path) -> str:
    """Read a system file; "" if it is missing: another system, a sandbox, or a group that has just gone."""
    try:
        return file.read_text()
    except OSError:
        return ""
