"""Host memory that this process may have: the machine's, or less where a container or a scheduler limits its job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class _Group(NamedTuple):
    """A control group that this process belongs to, and that has a limit."""

    limit_bytes: int
    used_bytes: int  # of it, without what lies in memory only because it was read from files


class _Version(NamedTuple):
    """Of control groups: where memory is accounted, and what in its statistics cannot be dropped."""

    controller: str  # as the process's own list of groups names it
    mount: Path
    limit: str
    kept: frozenset[str]  # shared memory is, though it counts as files


def free_host_memory_bytes() -> int:
    """What this process can still allocate in host memory without swapping, within the limits of its groups."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *(group.limit_bytes - group.used_bytes for group in _groups())]))


def host_memory_bytes() -> int:
    """All of the host's that this process may use: a container may have less than the machine."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(group.limit_bytes for group in _groups())])


def _groups() -> Iterator[_Group]:
    """This process's own, and all above it, each of which limits it: of a scheduler's, only some in the middle may."""
    for version in (
        _Version("", _MOUNT, "memory.max", frozenset(("anon", "shmem"))),
        _Version("memory", _MOUNT / "memory", "memory.limit_in_bytes", frozenset(("total_rss", "total_shmem"))),
    ):
        # A container may see its own group at the mount, and its path as the host has it, which is nowhere then.
        own = version.mount / _own_path(version.controller).lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(version.mount) and (group := _read(folder, version)) is not None:
                yield group


def _own_path(controller: str) -> str:
    rows = (line.split(":", 2) for line in _text(_OWN).splitlines())
    return next((path for _, controllers, path in rows if controller in controllers.split(",")), "")


def _read(folder: Path, version: _Version) -> _Group | None:
    """None: it has no limit, or none that may be known."""
    limit = _text(folder / version.limit).strip()
    if not limit.isdigit():  # "max"
        return None
    rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return _Group(int(limit), sum(int(value) for key, value in rows if key in version.kept))


def _text(file: Path) -> str:
    """Of what the system tells; nothing where it does not: another system, a sandbox, a group that has just gone."""
    try:
        return file.read_text()
    except OSError:
        return ""
