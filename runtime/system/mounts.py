"""What lies under a directory: its file system by name, what that does not promise, and whether commits work there.

docs/how-to/places.md has the table. The name comes from mountinfo, since to statfs every FUSE is the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass

from checkflow.runtime.system import fs

TABLE = "/proc/self/mountinfo"
_VOLATILE = ("tmpfs", "ramfs", "overlay", "fuse.fuse-overlayfs")
_NFS, _CIFS = ("nfs", "nfs4"), ("cifs", "smb3")
# Options by which a network file system keeps locks within this machine.
_LOCAL_LOCKS = {"nolock", "local_lock=flock", "local_lock=all", "localflock", "nobrl"}
_LOCKING_FUSE = ("fuse.juicefs",)  # by its documentation: other machines see its locks
_FILE = "file"
# Of a rename: a full disk, or a running job took the folder for a leftover, and the lock keeps this one out.
_NOT_OF_THE_MOUNT = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
_ESCAPED = re.compile(r"\\([0-7]{3})")
_PLAIN = re.compile(r"[\w./:{}-]{1,100}", re.ASCII)  # a source with other characters may hold a password


@dataclass(frozen=True, slots=True)
class Mount:
    """What a directory lies on. ``kind``: such as "ext4" or "fuse.rclone"; ``source``: a device, server or bucket."""

    kind: str
    source: str
    options: frozenset[str]

    def __str__(self) -> str:
        return f"{self.kind} ({self.source})" if _PLAIN.fullmatch(self.source) else self.kind

    @property
    def late(self) -> bool:
        """Whether what was synced may reach the storage later, so that a lost machine takes it along."""
        return self.kind in (*_NFS, *_CIFS) or (_is_fuse(self.kind) and self.kind not in _VOLATILE)

    @property
    def unpromised(self) -> str | None:
        """What a job must not rely on here, for one line of the log; None: nothing that is known."""
        if self.kind in _VOLATILE:
            return f"lies on {self.kind}: its checkpoints do not outlive this machine or container"
        lacks = []
        if _is_fuse(self.kind):
            lacks.append("that a commit outlives this machine")
        if self.options & _LOCAL_LOCKS or (_is_fuse(self.kind) and self.kind not in _LOCKING_FUSE):
            lacks.append("that the lock keeps other machines out")
        return f"lies on {self}, which does not promise {', nor '.join(lacks)}" if lacks else None


def _is_fuse(kind: str) -> bool:
    """Not "fuseblk", which is a disk."""
    return kind == "fuse" or kind.startswith("fuse.")


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """What a path lies on; None: the system does not say."""
    real = os.path.realpath(path)
    try:
        device = os.stat(real).st_dev
        with open(TABLE, encoding="utf-8", errors="surrogateescape", newline="\n") as table:
            lines = table.read().split("\n")  # other separators may stand in names
    except OSError:
        return None
    above: list[tuple[bool, int, int, Mount]] = []
    for number, line in enumerate(filter(None, lines)):
        fields, _, kind = (part.split(" ") for part in line.partition(" - "))
        point = _unescaped(fields[4])
        if real == point or real.startswith(point.rstrip("/") + "/"):
            # A device tells a mount from one that hides it; but btrfs shows directories another one than its mounts.
            same = fields[2] == f"{os.major(device)}:{os.minor(device)}"
            options = frozenset((*fields[5].split(","), *kind[2].split(",")))
            above.append((same, len(point), number, Mount(kind[0], _unescaped(kind[1]), options)))
    return max(above, key=lambda one: one[:3])[3] if above else None


def _unescaped(text: str) -> str:
    r"""A field of mountinfo: blanks and backslashes stand there as \040 and \134."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def file_system(path: str | os.PathLike[str]) -> tuple[str | None, int]:
    """A directory's file system, such as "ext4", and its size in bytes; None, 0: the system does not say."""
    try:
        size = os.statvfs(path)
    except OSError:
        return None, 0
    found = mount_of(path)
    return None if found is None else found.kind, size.f_blocks * size.f_frsize


def rename_fault(directory: str, draft: str, name: str) -> OSError | None:
    """Why no folder can be renamed in a directory, as every commit does; None: one can, or it could not be tried.

    Makes, syncs and renames ``draft``, with a small file in it, and removes it.
    """
    with contextlib.suppress(OSError), fs.folder(directory) as root:  # no room, or no right: commits have words for it
        there = draft
        try:
            fs.mkdir(draft, dir_fd=root)
            with fs.folder(draft, dir_fd=root) as folder:
                fd = fs.open_new(_FILE, dir_fd=folder)
                try:
                    fs.write_all(fd, memoryview(b"checkflow"), 0)
                    fs.fsync(fd)
                finally:
                    fs.close(fd)
            try:
                fs.rename(draft, name, dir_fd=root)
            except OSError as error:
                return None if error.errno in _NOT_OF_THE_MOUNT else error
            there = name
        finally:
            with contextlib.suppress(OSError):  # what stays is a leftover, which the next commit removes
                with fs.folder(there, dir_fd=root) as folder:
                    fs.unlink(_FILE, dir_fd=folder)
                fs.rmdir(there, dir_fd=root)
    return None
