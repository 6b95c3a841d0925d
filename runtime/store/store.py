"""The store: a directory of checkpoints, each whole or absent, and durable once acknowledged.

Numbers in parentheses are the steps of docs/explanation/commit.md, at the lines that do them. docs/reference/files.md
lists the names in the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from checkflow.core.errors import CheckflowError, StorageError, UnsupportedError
from checkflow.runtime.format import codec, manifest
from checkflow.runtime.format.layout import OWNER, Layout, file_image
from checkflow.runtime.store import cleanup, retention
from checkflow.runtime.store.cleanup import BROKEN, SUPERSEDED, temporary_name
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.file_writer import Image, write_file, write_files
from checkflow.runtime.store.files import REPLACED, glance, parse_step, step_name
from checkflow.runtime.store.lock import DirectoryLock
from checkflow.runtime.store.retention import Known, Mode, Rules
from checkflow.runtime.store.trust import Trust
from checkflow.runtime.system import fs, mounts
from checkflow.runtime.system.mounts import Mount

logger = logging.getLogger("checkflow")

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
#: For so long a reader's lock keeps what is to be deleted, from when that was first wanted: some 600 GB at 1 GB/s. Who
#: still reads then has all files open (unless they are more than ``files.MOST_HELD``), and goes on; else, and over a
#: network, it may get an error that says so.
READER_SECONDS = 600.0


class Store:
    """The writing side of a checkpoint directory: one at a time, over all processes and hosts.

    Args:
        directory: made if it is missing.
        run_id: names the run that writes; letters, digits, ``_``, ``.``, ``-``.
        keep_latest, keep_epochs, keep_every, keep_best, monitor, mode: see :class:`.retention.Rules`.
        lock_wait_seconds: how long to wait for another writer to end.
        trust: whose files are read, beside root's and this user's: a group's name, or "anyone"; see :mod:`.trust`.
        spare: directories that ranks have made by :func:`.parts.folder_aside` for the next commit.

    Raises:
        LockedError: another process writes here.
        ForeignError: another user may have written what is here.
        StorageError: the directory cannot be made, read or written.
        ValueError: a rule, or the run id, is out of its range.
    """

    commits = True  # unlike shared.SharedStore

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        run_id: str,
        keep_latest: int = 2,
        keep_epochs: bool | int = 1,
        keep_every: int | None = None,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Mode = "min",
        lock_wait_seconds: float = 5.0,
        trust: str | None = None,
        spare: Collection[str] = (),
    ) -> None:
        if not OWNER.fullmatch(run_id):
            raise ValueError(f"a run id is 1 to 100 letters, digits, '_', '.' and '-', not {run_id!r}")
        self.run_id = run_id
        self.rules = Rules(keep_latest, keep_epochs, keep_every, keep_best, monitor, mode)
        self.directory = Path(directory).absolute()
        self._mutex = threading.RLock()  # garbage collection may close a dropped job anywhere
        self._known: dict[int, Known] = {}  # complete checkpoints, by step
        self._left_alone: set[int] = set()  # steps of incomplete or unreadable checkpoints, logged once
        self._spare = frozenset(spare)
        self._void: set[str] = set()  # published but not durable, to be removed
        self._went_on_from: int | None = None  # retention has not run since
        self.committed_at = 0.0, 0.0  # of the last commit, by time.monotonic: all was written; it was published
        self._described: tuple[Layout, bytes] | None = None  # by the last commit
        self._root: int | None = None
        self._warned_no_sync = False
        self._warned_left: set[str] = set()  # names that could not be removed
        self._held_since: dict[str, float] = {}  # by name, time.monotonic since a reader has kept it
        with reported(f"cannot use the checkpoint directory {self.directory}"):
            fs.make_durably(str(self.directory), self._sync_folder)
            self.directory = self.directory.resolve(strict=True)  # the root may be a link, nothing below it
            self.trust = Trust(self.directory, trust)
            with fs.folder(str(self.directory)) as root:
                self.trust.check_directory(root)
        mount = mounts.mount_of(self.directory)
        self._late = mount is not None and mount.late
        if mount is not None and mount.late:  # before the lock, which some of them refuse with other words
            _refuse_without_rename(self.directory, mount)
        # (1) one writer
        access, group = self.trust.lock_access
        self._lock = DirectoryLock(self.directory, wait_seconds=lock_wait_seconds, mode=access, group=group)
        try:
            with reported(f"cannot use the checkpoint directory {self.directory}"):
                self._root = fs.open_folder(str(self.directory))
                self._settle()
                # Make durable what an earlier run renamed but did not sync.
                self._sync_folder(self._root)
            if mount is not None and mount.unpromised is not None:
                _warn_unpromised(self.directory, mount.unpromised)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def where(self) -> str:
        """The directory for messages: its path, or where it is now if it was moved."""
        if self._root is None or fs.is_at(self._root, str(self.directory)):
            return str(self.directory)
        now = fs.path_of(self._root)
        return f"{now}, moved there from {self.directory}" if now else f"no longer at {self.directory}"

    @property
    def locked(self) -> bool:
        """Whether this process may write the directory."""
        return self._root is not None

    def close(self) -> None:
        """Release the lock once a running write is done; may be called again."""
        # Not in a forked child, where nobody releases the mutex.
        with self._mutex if self._lock.held else contextlib.nullcontext():
            root, self._root = self._root, None
            if root is not None:
                fs.close_quietly(root)  # nothing is written through a directory
            self._lock.release()

    def checkpoints(self) -> tuple[Path, ...]:
        return find(self.directory)

    def commit(
        self,
        step: int,
        layout: Layout,
        staging: memoryview | Image,
        extra: bytes,
        info: Mapping[str, Any],
        *,
        ties: Sequence[tuple[str, str]] = (),
        absent: Sequence[str] = (),
        plan_digest: str = "",
        retire: bool = True,
        run_id: str | None = None,
    ) -> Path:
        """Write a checkpoint. When this returns, it survives a power cut: it is acknowledged.

        A checkpoint of the same step, left by an earlier run, is replaced: it stays until the new one is complete on
        disk, and comes back if the exchange fails.

        Args:
            staging: at least ``layout.buffer_bytes`` bytes, filled as ``layout`` says, which must not change meanwhile.
                Or a function that yields each file's bytes in order, for state that is not in memory as a whole.
            extra: the content of ``state.msgpack``.
            info: JSON values; retention reads ``"epoch_end"`` (true or false) and ``"metrics"`` (numbers by name).
            ties: (further name, name in ``layout``) of state tensors that share memory.
            absent: names of state that did not exist at this boundary.
            plan_digest: of the plan that ran.
            retire: whether to delete older ones now; otherwise the next commit does.
            run_id: of the run that captured it, if another one.

        Raises:
            StorageError: it could not be written. It is removed, earlier checkpoints are untouched, and the next commit
                may succeed.
            UnsupportedError: ``info`` holds something other than JSON values.
        """
        image = staging if callable(staging) else _staged(staging, layout)
        if len(extra) > manifest.MAX_EXTRA_BYTES:
            raise UnsupportedError(f"the extra state has {len(extra)} bytes, more than {manifest.MAX_EXTRA_BYTES}")
        plain = manifest.to_info(info)
        described = manifest.Manifest(
            step=step,
            run_id=self.run_id if run_id is None else run_id,
            plan_digest=plan_digest,
            world_size=1,
            files={},
            tensors={},
            ties=tuple(ties),
            absent=tuple(absent),
            info=plain,
            version=2 if codec.is_newer(extra) else 1,
        )
        return self.commit_written(
            step,
            lambda root, temporary: self._write_files(root, temporary, layout, image, extra, described),
            info=plain,
            retire=retire,
        )

    def _describe(self, layout: Layout) -> bytes:
        """The entries of a layout, made once: this takes milliseconds of Python's lock, and training's with it."""
        if self._described is None or self._described[0] is not layout:
            self._described = layout, manifest.dump_tensors(layout)
        return self._described[1]

    def commit_written(
        self,
        step: int,
        write: Callable[[int, str], None],
        *,
        info: Mapping[str, Any],
        retire: bool = True,
        attempt: str = "",
        published: Callable[[], None] = lambda: None,
    ) -> Path:
        """:meth:`commit` of what ``write`` writes; if it raises, nothing is left.

        Args:
            write: called with a descriptor of the store's directory and the name of the directory to make in it. When
                it returns, that holds a whole, durable checkpoint: files, manifest, and their names.
            info: the manifest's, for retention.
            attempt: joins the run's id in the temporary name, where a late process must not write into a later attempt.
            published: called as soon as the checkpoint is whole and durable, before older ones are deleted.
        """
        if not 0 <= step <= manifest.MAX_STEP:
            raise ValueError(f"a step is a number from 0 to {manifest.MAX_STEP}, not {step}")
        with self._writing(f"cannot write the checkpoint of step {step} to {self.directory}") as root:
            temporary = temporary_name(step, f"{self.run_id}.{attempt}" if attempt else self.run_id)
            final = step_name(step)
            try:
                self._settle()
                if self._went_on_from is not None:  # first free what a dead run did not delete
                    self._retire(root, self._went_on_from)
                    self._went_on_from = None
                write(root, temporary)
                written = time.monotonic()
                # (6), (7) its final name, durably: from here on it is acknowledged
                self._publish(root, temporary, final)
                self.committed_at = written, time.monotonic()
            except BaseException:
                self._remove_quietly(root, temporary)
                raise
            self._known[step] = retention.known(step, info, self._commit_time(step))
            published()
            # (8) only now may older ones go
            if retire:
                self._retire(root, step)
            return self.directory / final

    def _write_files(
        self,
        root: int,
        temporary: str,
        layout: Layout,
        image: Image,
        extra: bytes,
        described: manifest.Manifest,
    ) -> None:
        """Write a whole, durable checkpoint under a temporary name; ``described`` lacks its files and tensors."""
        # (2) a directory that no reader looks at
        fs.mkdir(temporary, dir_fd=root)
        folder = fs.open_folder(temporary, dir_fd=root)
        try:
            # (3) every shard, and the extra state: written, checksummed, fsynced
            entries = write_files(folder, layout, image)
            entries[manifest.EXTRA] = write_file(folder, manifest.EXTRA, iter([memoryview(extra)]))
            # (4) the manifest last: it names only what is on the disk by now
            content = manifest.dumps(dataclasses.replace(described, files=entries), self._describe(layout))
            write_file(folder, manifest.MANIFEST, iter([memoryview(content)]))
            # (5) the names of these files
            self._sync_folder(folder)
        finally:
            fs.close_quietly(folder)

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a checkpoint by exchanging it for one with the same files, linked, and a new manifest.

        One of the two is whole at every moment. Raises StorageError on a file system without hard links.
        """
        with self._writing(f"cannot add metrics to the checkpoint of step {step} in {self.directory}") as root:
            final, temporary = step_name(step), temporary_name(step, self.run_id)
            self._settle()
            if not fs.exists(final, dir_fd=root):
                return
            before = glance(self.directory / final, shared=False, trust=self.trust)
            merged = {**retention.read_metrics(before.info), **metrics}
            info: dict[str, Any] = {**before.info, retention.METRICS: retention.write_metrics(merged)}
            committed = self._commit_time(step)
            self._known[step] = retention.known(step, info, committed)  # for this run, even if the exchange fails
            if info == before.info:
                return
            try:
                self._link_files(root, temporary, final, dataclasses.replace(before, info=info))
                self._publish(root, temporary, final)
            except BaseException:
                self._remove_quietly(root, temporary)
                raise

    def _link_files(self, root: int, temporary: str, final: str, described: manifest.Manifest) -> None:
        """Link a checkpoint's files under a temporary name, with another manifest, durably."""
        fs.mkdir(temporary, dir_fd=root)  # (2)
        with contextlib.ExitStack() as opened:
            old, new = (opened.enter_context(fs.folder(name, dir_fd=root)) for name in (final, temporary))
            for name in described.files:  # (3) their bytes are on disk already
                fs.link(name, old_dir_fd=old, dir_fd=new)
            write_file(new, manifest.MANIFEST, iter([memoryview(manifest.dumps(described))]))  # (4)
            self._sync_folder(new)  # (5)

    def went_on_from(self, step: int) -> None:
        """A job resumed from this checkpoint, which is whole: older ones may go before the next commit."""
        self._went_on_from = step

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint to ``.broken-…``; durable with the next commit (until then it is found damaged
        again).
        """
        with self._writing(f"cannot set the damaged checkpoint {path} aside") as root:
            return self._hide(root, path, BROKEN)

    def rewind(self, step: int) -> tuple[Path, ...]:
        """Rename all checkpoints after ``step`` (or, with -1, all) to ``.superseded-…``, so that no restore
        takes them.
        """
        with self._writing(f"cannot rewind {self.directory} to step {step}") as root:
            later = [path for path in self.checkpoints() if (parse_step(path.name) or 0) > step]
            hidden = tuple(self._hide(root, path, SUPERSEDED) for path in later)
            self._sync_folder(root)
            return hidden

    def _hide(self, root: int, path: Path, prefix: str) -> Path:
        step = parse_step(path.name)
        if step is None or path.parent != self.directory:
            raise ValueError(f"{path} is no checkpoint of {self.directory}")
        hidden = cleanup.hide(root, path.name, prefix)
        self._known.pop(step, None)
        return self.directory / hidden

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[int]:
        """Serialise writing, and yield a descriptor of the directory, still this store's; errors begin with
        ``what``.
        """
        self._open_root()  # first: in a forked child the mutex may be held by a thread that is gone
        with self._mutex, reported(what):
            root = self._open_root()
            if not fs.is_at(root, str(self.directory)):
                raise StorageError(
                    f"{what}: the directory was moved or replaced since this job began: it is {self.where}"
                )
            self._lock.renew()
            yield root

    def _open_root(self) -> int:
        # A forked child has no lock, and its parent still writes.
        if self._root is None or not self._lock.held:
            raise StorageError(f"the store {self.directory} is closed in this process")
        return self._root

    def _publish(self, root: int, temporary: str, final: str) -> None:
        """Give a complete temporary directory its name, durably; undo it if that fails.

        A checkpoint of the same step first steps aside, since a directory cannot be renamed onto a full one. At every
        moment one of the two is whole under a name that :func:`.cleanup.settle` brings back.
        """
        replaced = REPLACED + final
        exchanged = False
        try:
            if fs.exists(final, dir_fd=root):
                fs.rename(final, replaced, dir_fd=root)
                exchanged = True
            # The directory's content is durable, and the name is free. What gets the name is void until (7) succeeds.
            # No second try: a failed fsync may have dropped the name, and the next would not say so.
            self._void.add(final)
            fs.rename(temporary, final, dir_fd=root)  # (6)
            self._sync_folder(root)  # (7)
            # An xfs that was shut down by a disk error since the rename has lost it, and still syncs folders without
            # an error. But it opens nothing any more.
            fs.close(fs.open_folder(final, dir_fd=root))
            self._void.discard(final)
        except BaseException:
            with contextlib.suppress(OSError):
                self._settle()
            raise
        if exchanged:
            self._remove_quietly(root, replaced)

    def _remove_quietly(self, root: int, name: str) -> None:
        cleanup.remove_quietly(root, name, self._warn_left, self._waits_for_reader)

    def _settle(self) -> None:
        cleanup.settle(
            self._open_root(), self._void, self._sync_folder, self._warn_left, self._waits_for_reader, self._spare
        )

    def _waits_for_reader(self, name: str) -> bool:
        """Whether to leave what a reader holds for a later time."""
        now = time.monotonic()
        if now - self._held_since.setdefault(name, now) < READER_SECONDS:
            return True
        del self._held_since[name]
        logger.warning("%s is deleted, though a reader has held it for %.0f s", self.directory / name, READER_SECONDS)
        return False

    def _warn_left(self, name: str, error: OSError) -> None:
        if name not in self._warned_left:
            self._warned_left.add(name)
            logger.warning("cannot remove %s: %s", self.directory / name, error.strerror)

    def _retire(self, root: int, newest: int) -> None:
        """Delete old checkpoints; that of step ``newest`` is whole and durable. What is being read stays for now.

        Only complete ones count, or damaged ones could push out the last good one.
        """
        try:
            complete = self.look()
            stay = retention.kept(self.rules, complete, newest, retention.SETTLE_SECONDS if self._late else None)
            for step in sorted((one.step for one in complete if one.step not in stay), reverse=True):
                if cleanup.retire(root, step_name(step), self._warn_left, self._waits_for_reader):
                    del self._known[step]
                    self._held_since.pop(step_name(step), None)  # a later one may have its name
                else:
                    logger.debug("step %d is being read, and stays until it is not", step)
        except (OSError, StorageError) as error:
            logger.warning("cannot delete old checkpoints in %s: %s", self.directory, error)

    def look(self) -> tuple[Known, ...]:
        """All complete checkpoints, judged by manifests, names and sizes, newest first."""
        present = {step: path for path in self.checkpoints() if (step := parse_step(path.name)) is not None}
        for gone in self._known.keys() - present.keys():
            del self._known[gone]
        for step, path in present.items():
            if step in self._known:
                continue
            try:
                info = glance(path, shared=False, trust=self.trust).info
                self._known[step] = retention.known(step, info, self._commit_time(step))
            except CheckflowError as error:
                if step not in self._left_alone:
                    self._left_alone.add(step)
                    logger.warning("leaving %s alone: %s", path, error)
        return tuple(self._known[step] for step in present if step in self._known)

    def _commit_time(self, step: int) -> float:
        """When a checkpoint was committed, where retention asks for that."""
        return retention.commit_time(self.directory / step_name(step)) if self._late else 0.0

    def known(self) -> tuple[Known, ...]:
        """What :meth:`look` and commits have found so far; callable from any thread."""
        return tuple(self._known.copy().values())

    def _sync_folder(self, fd: int) -> None:
        if not sync_folder(fd) and not self._warned_no_sync:
            self._warned_no_sync = True
            logger.warning(
                "the file system of %s cannot sync directories: a power cut may lose the newest checkpoint",
                self.directory,
            )


@functools.cache  # once: some jobs open a store for each checkpoint
def _warn_unpromised(directory: Path, unpromised: str) -> None:
    logger.warning("%s %s", directory, unpromised)


@functools.cache
def _refuse_without_rename(directory: Path, mount: Mount) -> None:
    draft = temporary_name(0, f"probe-{secrets.token_hex(8)}")
    if (fault := mounts.rename_fault(str(directory), draft, cleanup.trash_name(draft))) is not None:
        raise StorageError(
            f"cannot use the checkpoint directory {directory}: it lies on {mount}, where no folder can be renamed "
            f"({fault.strerror}), and every commit renames one: choose a directory on another file system"
        ) from fault


def sync_folder(fd: int) -> bool:
    """Make the names in a directory durable; False: its file system cannot."""
    try:
        fs.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    return True


def _staged(staging: memoryview, layout: Layout) -> Image:
    flat = staging.cast("B")
    if len(flat) < layout.buffer_bytes:
        raise ValueError(f"the staging buffer has {len(flat)} bytes, the layout needs {layout.buffer_bytes}")
    return lambda file: file_image(file, flat, manifest.BLOCK_BYTES)


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}") from error
