"""Plans kept beside the checkpoints, so that a restarted job makes none. The newest that fits is used.

``<directory>/plans/<digest>.json``, by a digest of the job's fingerprint and the user's wishes; of several ranks, each
has a folder of its own in ``plans``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError, StorageError
from checkflow.core.plan import Fingerprint, Plan
from checkflow.core.planner_api import PlanLimits, plan_name
from checkflow.runtime.state.meshes import ALONE, RankView
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")

FOLDER = "plans"
KEPT = 16
_HALF = re.compile(r"\.[0-9a-f]{32}\.json\.[0-9]+\.tmp", re.ASCII)  # left by a killed process
_OURS = re.compile(rf"[0-9a-f]{{32}}\.json|{_HALF.pattern}", re.ASCII)


class PlanCache:
    """The plans of one checkpoint directory.

    Args:
        directory: exists, and is locked by this process, or by rank 0.
        limits: the user's for a plan; plans made for others do not count.
        rank: whose plans these are.
    """

    def __init__(self, directory: Path, limits: PlanLimits, rank: RankView = ALONE) -> None:
        self._directory, self._limits = directory, limits
        self._folders = (FOLDER, *rank.folders)
        self.folder = directory.joinpath(*self._folders)
        self._damaged: set[str] = set()  # names that were logged as damaged

    def find(self, fits: Callable[[Plan], bool]) -> tuple[Plan, Path] | None:
        """The newest plan that fits, and its file. Damaged files are skipped and logged once."""
        try:
            with self._open() as folder:
                names = _plans(folder)
        except OSError:  # no folder yet, or unreadable: no plans
            return None
        for path in (self.folder / name for name in names if name not in self._damaged):
            try:
                plan = plans.load(path)
                if plan_name(plan.fingerprint, self._limits) == path.name and fits(plan):
                    return plan, path
            except CheckflowError as error:
                self._damaged.add(path.name)
                logger.warning("passing over a plan: %s", error)
        return None

    def file(self, fingerprint: Fingerprint) -> Path:
        """Where to write the plan of such a job; the folder is made, durably."""
        try:
            with self._open(make=True):
                pass
        except OSError as error:
            raise StorageError(f"cannot make {self.folder}: {_reason(error)}") from error
        return self.folder / plan_name(fingerprint, self._limits)

    def keep(self, path: Path) -> None:
        """Make a new plan's name durable and remove the oldest of too many. Failing only costs another recording."""
        self._damaged.discard(path.name)
        try:
            with self._open() as folder:
                fs.fsync(folder)
                kept = {path.name, *_plans(folder)[:KEPT]}
                for name in fs.names(folder):
                    if _OURS.fullmatch(name) and name not in kept:
                        fs.unlink(name, dir_fd=folder)
        except OSError as error:
            logger.warning("cannot keep the plan in %s: %s", self.folder, _reason(error))

    def tidy(self) -> None:
        """Remove half-written files; no process is writing a plan now."""
        if not os.path.lexists(self.folder):
            return
        try:
            with self._open() as folder:
                for name in filter(_HALF.fullmatch, fs.names(folder)):
                    fs.unlink(name, dir_fd=folder)
        except OSError as error:
            logger.warning("cannot tidy up %s: %s", self.folder, _reason(error))

    def drop(self, plan: Plan) -> None:
        """Remove a plan that the job has refuted, if it is kept."""
        name = plan_name(plan.fingerprint, self._limits)
        try:
            with contextlib.suppress(FileNotFoundError), self._open() as folder:
                fs.unlink(name, dir_fd=folder)
        except OSError as error:
            logger.warning("cannot remove the refuted plan %s: %s", self.folder / name, error.strerror or error)

    @contextlib.contextmanager
    def _open(self, *, make: bool = False) -> Iterator[int]:
        """The folder, through no link. OSError if it cannot be opened, or made."""
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(fs.folder(str(self._directory)))
            for name in self._folders:
                if make and not fs.exists(name, dir_fd=folder):
                    with contextlib.suppress(FileExistsError):  # another rank has made it meanwhile
                        fs.mkdir(name, dir_fd=folder)
                    fs.fsync(folder)
                folder = opened.enter_context(fs.folder(name, dir_fd=folder))
            yield folder


def _plans(folder: int) -> list[str]:
    """Names of the plans in an open folder, newest first."""
    with os.scandir(folder) as entries:
        found = [(entry.stat().st_mtime_ns, entry.name) for entry in entries if _is_plan(entry)]
    return [name for _, name in sorted(found, reverse=True)]


def _reason(error: OSError) -> str:
    if isinstance(error, NotADirectoryError):
        return "it is no directory of its own: remove it"
    return error.strerror or str(error)


def _is_plan(entry: os.DirEntry[str]) -> bool:
    return bool(_OURS.fullmatch(entry.name)) and entry.name[0] != "." and entry.is_file(follow_symlinks=False)
