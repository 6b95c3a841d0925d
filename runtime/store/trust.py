"""Whose files a job goes on from. What another user has put into its directory is his choice, not the job's.

The rule: what a job reads must belong to root or to the job's own user, and its files must not be writable for everyone
(``trust=`` lets a group's members in, or anyone). Write permission for a group alone is let be: whoever made the file
gave it, and a umask of 002 gives it always. The directory of checkpoints itself may be writable for all, since each
entry is looked at by itself; and root's job may find it another user's, as containers do.
"""

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
        """Mode and group of the lock's file: whoever is trusted may lock the directory, and nobody else. -1: any."""
        if self._who is None:
            return 0o600, -1
        if self._who == ANYONE:
            return 0o666, -1
        import grp

        return 0o660, grp.getgrnam(self._who).gr_gid

    def check_directory(self, root: int) -> None:
        """Look at an open directory, and at all in it that a start reads, without opening it.

        Raises:
            ForeignError: something is another user's.
            OSError: it cannot be read.
        """
        if self._who == ANYONE:
            return
        if os.geteuid() != 0:
            self.check(self._directory, os.fstat(root))
        for name, found in fs.entries(root):
            final = name.removeprefix(REPLACED)  # which may get its name back
            if name in READ or parse_step(final) is not None:
                self.check(self._directory / name, found, files=name != ".lock")  # whose content decides nothing
            if name == PLANS and stat.S_ISDIR(found.st_mode):
                with fs.folder(PLANS, dir_fd=root) as plans:
                    for plan, of_plan in fs.entries(plans):
                        self.check(self._directory / PLANS / plan, of_plan)

    def check(self, path: Path, found: os.stat_result, *, files: bool = True) -> None:
        """Look at what is to be read.

        Args:
            found: of the open file or folder, where it is open.
            files: whether a file may not be everyone's to write.

        Raises:
            ForeignError: it is another user's, or everyone's.
        """
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
        """Whether a user is in the group that is trusted: an owner's group says nothing, folders hand theirs on."""
        if self._who is None:
            return False
        import grp
        import pwd

        try:
            user = pwd.getpwuid(uid)
            return grp.getgrnam(self._who).gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
        except KeyError:  # unknown here
            return False

    @functools.cached_property
    def _probe(self) -> os.stat_result:
        """Of a file that this process makes there: networks turn root into nobody, and some disks know no modes."""
        name = f".tmp-00000000-probe.{secrets.token_hex(8)}"  # a leftover goes with the next start
        with fs.folder(str(self._directory)) as root:
            try:
                fd = fs.open_new(name, dir_fd=root, mode=0o600)
            except OSError:  # nothing can be made there: what that is, what comes next says
                return os.stat_result((0o600, 0, 0, 0, os.geteuid(), 0, 0, 0, 0, 0))
            try:
                return os.fstat(fd)
            finally:
                fs.close_quietly(fd)
                with contextlib.suppress(OSError):
                    fs.unlink(name, dir_fd=root)
