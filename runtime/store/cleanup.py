"""Removes what runs leave half written, half exchanged or half deleted in a store's directory.

The caller holds the lock of ``root``, a descriptor of it. Nothing follows a link; only a store's names are touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from checkflow.runtime.format.layout import OWNER
from checkflow.runtime.format.manifest import MANIFEST
from checkflow.runtime.store.files import REPLACED, parse_step
from checkflow.runtime.store.lock import claimed
from checkflow.runtime.system import fs

BROKEN, SUPERSEDED = ".broken-", ".superseded-"
_TMP, _TRASH = ".tmp-", ".trash-"
DRAFT = f"{_TMP}shards"  # draft of the file by which processes of one version meet
_HALF = rf"tmp-(?:shards|[0-9]{{8,19}}-{OWNER.pattern})|replaced-step-[0-9]{{8,19}}"
_LEFTOVER = re.compile(rf"\.(?:{_HALF})|{re.escape(_TRASH)}(?:{_HALF}|step-[0-9]{{8,19}})(?:\.[0-9]+)?", re.ASCII)
Warn = Callable[[str, OSError], None]  # called with the name of what stays, and why
Waits = Callable[[str], bool]  # whether to wait for the reader of this name


def temporary_name(step: int, run_id: str) -> str:
    """The directory in which a run writes a checkpoint until it is complete."""
    return f"{_TMP}{step:08d}-{run_id}"


def trash_name(name: str) -> str:
    """What a folder is renamed to, to be deleted."""
    return _TRASH + name.lstrip(".")


def is_leftover(name: str) -> bool:
    """Whether the name is of something being written, exchanged or deleted, by this run or a dead one."""
    return _LEFTOVER.fullmatch(name) is not None


def settle(
    root: int,
    void: set[str],
    sync: Callable[[int], None],
    warn: Warn,
    waits: Waits,
    spare: Collection[str] = (),
) -> None:
    """Finish what dead runs, or failed commits of this one, left half done; ``warn`` of what cannot be removed.

    Args:
        void: checkpoints whose names are not durable: they are removed, and taken out of this set.
        sync: makes the names in ``root`` durable.
        spare: half written, and still needed.
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
        elif is_leftover(name) and name not in spare:
            leftovers.append(name)
    if leftovers:
        # What replaces a leftover must be durable before the leftover goes.
        sync(root)
    for name in leftovers:
        remove_quietly(root, name, warn, waits)


def remove_quietly(root: int, name: str, warn: Warn, waits: Waits) -> None:
    """Remove what no restore needs. A failure only costs disk space until the next commit."""
    try:
        if not fs.exists(name, dir_fd=root):
            return
        # Rename first: the next checkpoint may need the name, and a half-deleted ``.replaced-…`` must never
        # be brought back.
        trash = name if name.startswith(_TRASH) else to_trash(root, name)
        with claimed(trash, MANIFEST, dir_fd=root) as unread:
            if unread or not waits(trash):  # else the next commit tries again
                remove(trash, dir_fd=root)
    except OSError as error:
        warn(name, error)


def retire(root: int, name: str, warn: Warn, waits: Waits) -> bool:
    """Delete a checkpoint; False if a reader holds it and is waited for. After an OSError it stays, whole."""
    with claimed(name, MANIFEST, dir_fd=root) as unread:
        if not unread and waits(name):
            return False
        _abandon(root, name)
        trash = to_trash(root, name)
        try:
            remove(trash, dir_fd=root)
        except OSError as error:
            warn(trash, error)
    return True


def hide(root: int, name: str, prefix: str) -> str:
    """Rename a checkpoint by a prefix (``BROKEN``, ``SUPERSEDED``) so that no reader looks at it; not yet durable."""
    _abandon(root, name)
    hidden, count = prefix + name, 1
    while fs.exists(hidden, dir_fd=root):
        hidden, count = f"{prefix}{name}.{count}", count + 1
    fs.rename(name, hidden, dir_fd=root)
    return hidden


def _abandon(root: int, name: str) -> None:
    """Make sure that nothing comes back under this name: a stale ``.replaced-…`` would."""
    if fs.exists(REPLACED + name, dir_fd=root):
        to_trash(root, REPLACED + name)


def to_trash(root: int, name: str) -> str:
    """Hide it whole by one rename: deleting file by file would leave a torn checkpoint after a crash."""
    trash, count = trash_name(name), 1
    while fs.exists(trash, dir_fd=root):  # a dead run's, or still being read
        trash, count = f"{trash_name(name)}.{count}", count + 1
    fs.rename(name, trash, dir_fd=root)
    return trash


def remove(name: str, *, dir_fd: int) -> None:
    """Remove a directory and the files in it, or a plain file or link. Nothing is followed.

    A directory inside, which no checkpoint has, is an error, raised after all else is gone.
    """
    try:
        folder = fs.open_folder(name, dir_fd=dir_fd)
    except NotADirectoryError:  # or a symbolic link
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
