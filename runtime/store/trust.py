"""Whose files a job resumes from: docs/explanation/commit.md, "Whom a job trusts". The directory may be open to all."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from pathlib import Path

from checkflow.core.errors import StorageError
from checkflow.runtime.store.files import REPLACED, parse_step
from checkflow.runtime.system import fs

ANYONE = "anyone"
PLANS = "plans"
#: What a start reads beside the checkpoints, whichever part of the runtime does.
READ = (".lock", ".memory.json", ".shards.json", PLANS, "profile.json", "report.json")


class ForeignError(StorageError):
    """Another user may have written what is to be read."""


class Trust:
    """What may be read of one directory.

    Args:
        directory: of checkpoints; exists.
        who: beside root and this process's user: a group's name, "anyone", or None for nobody.
    """

    def __init__(self, directory: Path, who: str | None) -> None:
        self._directory, self._who = directory.resolve(), who
        self._trusted = {0, os.geteuid()}

    @property
    def lock_access(self) -> tuple[int, int]:
        """Mode and group of the lock file, so that only trusted users can lock the directory. -1: any group."""
        if self._who is None:
            return 0o600, -1
        if self._who == ANYONE:
            return 0o666, -1
        import grp

        return 0o660, grp.getgrnam(self._who).gr_gid

    def check_directory(self, root: int) -> None:
        """Check an open directory, and all in it that a start reads, without opening it. Raises ForeignError."""
        if self._who == ANYONE:
            return
        if os.geteuid() != 0:
            self.check(self._directory, os.fstat(root))
        for name, found in fs.entries(root):
            final = name.removeprefix(REPLACED)  # settle may restore its name
            if name in READ or parse_step(final) is not None:
                self.check(self._directory / name, found, files=name != ".lock")  # its content decides nothing
            if name == PLANS and stat.S_ISDIR(found.st_mode):
                self._check_plans(root, PLANS, self._directory / PLANS)

    def _check_plans(self, root: int, name: str, path: Path) -> None:
        """Check all plans in a folder, and in those of ranks."""
        with fs.folder(name, dir_fd=root) as folder:
            for plan, found in fs.entries(folder):
                self.check(path / plan, found)
                if stat.S_ISDIR(found.st_mode):
                    self._check_plans(folder, plan, path / plan)

    def check(self, path: Path, found: os.stat_result, *, files: bool = True) -> None:
        """Check one entry; ForeignError if it is another user's, or, of ``files``, everyone's to write."""
        if self._who == ANYONE or not (reason := self._reason(found, files)):
            return
        raise ForeignError(f"{path} {reason}")

    def _reason(self, found: os.stat_result, files: bool) -> str | None:
        mode = stat.S_IMODE(found.st_mode)
        known = found.st_uid in self._trusted or self._is_member(found.st_uid)
        if not known and found.st_uid != self._probe.st_uid:
            return (
                f"belongs to {fs.user_name(found.st_uid)} (mode {mode:o}), and would decide what this job goes on "
                'from: pass trust="anyone", or trust= a group of that user, or remove it'
            )
        open_to_all = files and stat.S_ISREG(found.st_mode) and mode & stat.S_IWOTH
        if open_to_all and not self._probe.st_mode & stat.S_IWOTH:
            return (
                f"of {fs.user_name(found.st_uid)} may be written by everyone (mode {mode:o}), who would decide what "
                'this job goes on from: chmod o-w it if nobody has, or pass trust="anyone"'
            )
        return None

    def _is_member(self, uid: int) -> bool:
        """Whether a user is in the trusted group. The file's own group says nothing: folders pass theirs on."""
        if self._who is None:
            return False
        import grp
        import pwd

        try:
            user = pwd.getpwuid(uid)
            return grp.getgrnam(self._who).gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
        except KeyError:  # unknown on this machine
            return False

    @functools.cached_property
    def _probe(self) -> os.stat_result:
        """How a file of this process looks there: networks turn root into nobody, and some disks have no modes."""
        name = f".tmp-00000000-probe.{secrets.token_hex(8)}"  # the next start removes a leftover
        with fs.folder(str(self._directory)) as root:
            try:
                fd = fs.open_new(name, dir_fd=root, mode=0o600)
            except OSError:  # nothing can be made there; the next call says why
                return os.stat_result((0o600, 0, 0, 0, os.geteuid(), 0, 0, 0, 0, 0))
            try:
                return os.fstat(fd)
            finally:
                fs.close_quietly(fd)
                with contextlib.suppress(OSError):
                    fs.unlink(name, dir_fd=root)
