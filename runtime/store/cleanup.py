"""What runs leave behind in a store's directory, and how it goes: half written, half exchanged, half deleted.

Functions over a descriptor of that directory (``root``); they keep no state. Whoever calls them holds the directory's
lock, so nobody else writes there. Nothing here follows a link, and only names that a store gives are touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from checkflow.runtime.format.layout import OWNER
from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.store.files import REPLACED, parse_step
from checkflow.runtime.store.lock import claimed
from checkflow.runtime.system import fs

BROKEN, SUPERSEDED = ".broken-", ".superseded-"
_TMP, _TRASH = ".tmp-", ".trash-"
DRAFT = f"{_TMP}shards"  # the next text of what processes of one version tell each other
_HALF = rf"tmp-(?:shards|[0-9]{{8,19}}-{OWNER.pattern})|replaced-step-[0-9]{{8,19}}"
_LEFTOVER = re.compile(rf"\.(?:{_HALF})|{re.escape(_TRASH)}(?:{_HALF}|step-[0-9]{{8,19}})(?:\.[0-9]+)?", re.ASCII)
Tell = Callable[[str, OSError], None]  # that something stays: its name, and why
Waits = Callable[[str], bool]  # whether what a reader holds, of this name, is to stay still


def temporary_name(step: int, run_id: str) -> str:
    """The directory in which a run writes a checkpoint that is not complete yet."""
    return f"{_TMP}{step:08d}-{run_id}"


def is_leftover(name: str) -> bool:
    """Whether it is being written, exchanged or deleted, now or by a run that did not live to end that."""
    return _LEFTOVER.fullmatch(name) is not None


def settle(root: int, void: set[str], sync: Callable[[int], None], tell: Tell, waits: Waits) -> None:
    """Finish what dead runs, or failed commits of this one, left half done.

    Args:
        void: checkpoints that got their names, but not durably: they are taken back, and out of this set.
        sync: makes the names in ``root`` durable.
        tell: what cannot be removed stays, and is no reason to fail.

    Raises:
        OSError: what was exchanged cannot be brought back, or not be made durable.
    """
    for name in sorted(void):
        if fs.exists(name, dir_fd=root):
            to_trash(root, name)
        void.discard(name)
    leftovers = []
    present = fs.names(root)
    for name in present:
        final = name.removeprefix(REPLACED)
        if name.startswith(REPLACED) and parse_step(final) is not None and final not in present:
            fs.rename(name, final, dir_fd=root)
        elif is_leftover(name):
            leftovers.append(name)
    if leftovers:
        # What takes the place of a leftover must be there for good before the leftover goes.
        sync(root)
    for name in leftovers:
        remove_quietly(root, name, tell, waits)


def remove_quietly(root: int, name: str, tell: Tell, waits: Waits) -> None:
    """Remove what no restore needs. A failure costs disk space until the next commit, and is no reason to fail."""
    try:
        if not fs.exists(name, dir_fd=root):
            return
        # First of all it loses its name. The next checkpoint may need that, and what stood in for another one must not
        # come back in its place, torn at that, when it can be deleted in part only.
        trash = name if name.startswith(_TRASH) else to_trash(root, name)
        with claimed(trash, MANIFEST, dir_fd=root) as unread:
            if unread or not waits(trash):  # otherwise the next commit tries again
                remove(trash, dir_fd=root)
    except OSError as error:
        tell(name, error)


def retire(root: int, name: str, tell: Tell, waits: Waits) -> bool:
    """Delete a checkpoint, unless a reader holds it that is waited for; False: one does.

    Raises:
        OSError: it stays, whole.
    """
    with claimed(name, MANIFEST, dir_fd=root) as unread:
        if not unread and waits(name):
            return False
        _forsake(root, name)
        trash = to_trash(root, name)
        try:
            remove(trash, dir_fd=root)
        except OSError as error:
            tell(trash, error)
    return True


def hide(root: int, name: str, prefix: str) -> str:
    """Give a checkpoint a name that no reader looks at, and return that; it is for the caller to make it durable.

    Args:
        prefix: ``BROKEN`` or ``SUPERSEDED``.
    """
    _forsake(root, name)
    hidden, count = prefix + name, 1
    while fs.exists(hidden, dir_fd=root):
        hidden, count = f"{prefix}{name}.{count}", count + 1
    fs.rename(name, hidden, dir_fd=root)
    return hidden


def _forsake(root: int, name: str) -> None:
    """Nothing comes back under this name once it is free: an older one that could not be removed yet would."""
    if fs.exists(REPLACED + name, dir_fd=root):
        to_trash(root, REPLACED + name)


def to_trash(root: int, name: str) -> str:
    """One rename makes it invisible whole; deleting file by file would leave a torn one at a crash."""
    trash, count = _TRASH + name.lstrip("."), 1
    while fs.exists(trash, dir_fd=root):  # of a dead run, or still being read
        trash, count = f"{_TRASH}{name.lstrip('.')}.{count}", count + 1
    fs.rename(name, trash, dir_fd=root)
    return trash


def remove(name: str, *, dir_fd: int) -> None:
    """Remove a directory and the files in it, or a plain file or link of this name.

    Nothing is followed. A directory inside it, which no checkpoint has, is an error, but one that is raised when all
    else is gone: it must not keep the files of a checkpoint on the disk.
    """
    try:
        folder = fs.open_folder(name, dir_fd=dir_fd)
    except NotADirectoryError:  # a symbolic link too
        fs.unlink(name, dir_fd=dir_fd)
        return
    first: OSError | None = None
    try:
        for entry in fs.names(folder):
            try:
                fs.unlink(entry, dir_fd=folder)
            except OSError as error:
                first = first or error
    finally:
        fs.close_quietly(folder)
    if first is not None:
        raise first
    fs.rmdir(name, dir_fd=dir_fd)
