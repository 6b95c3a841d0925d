"""Ways to break the runtime, so that what ``run`` checks can be seen to fail: ``make kills BREAK=name``.

Each takes away one thing that a promise rests on, in the processes that train and restore; nothing on disk is changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from checkflow.runtime.data import seeded_dataset
from checkflow.runtime.format import manifest
from checkflow.runtime.job.progress import Progress
from checkflow.runtime.loop.pacing import Pace
from checkflow.runtime.persist.writer import Writer
from checkflow.runtime.snapshot.capturer import Capturer
from checkflow.runtime.snapshot.program import AnchorWork
from checkflow.runtime.store import cleanup, store
from checkflow.runtime.store import files as store_files
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.transfer.host import HostCopyEngine
from tests.faults.kills.job import BATCH


def manifest_late() -> None:
    """The checkpoint gets its name before its manifest is there. L1, L3."""
    write, publish = store.write_file, Store._publish
    kept: list[bytes] = []

    def write_later(folder: int, name: str, pieces: Any) -> Any:
        if name != manifest.MANIFEST:
            return write(folder, name, pieces)
        kept[:] = [b"".join(bytes(piece) for piece in pieces)]
        return None

    def publish_first(self: Store, root: int, temporary: str, final: str) -> None:
        publish(self, root, temporary, final)
        time.sleep(0.05)
        folder = fs.open_folder(final, dir_fd=root)
        write(folder, manifest.MANIFEST, iter([memoryview(kept[0])]))
        fs.close(folder)

    store.write_file, Store._publish = write_later, publish_first  # type: ignore[method-assign]


def acknowledged_early() -> None:
    """A commit returns before its rename, which comes with the next commit. L1, L6."""
    publish, waiting = Store._publish, []

    def publish_later(self: Store, root: int, temporary: str, final: str) -> None:
        held = temporary.replace(".tmp-", ".held-")
        fs.rename(temporary, held, dir_fd=root)
        waiting.append((held, final))
        if len(waiting) > 1:
            publish(self, root, *waiting.pop(0))

    Store._publish = publish_later  # type: ignore[method-assign]


def retention_takes_the_newest() -> None:
    """L1."""

    def retire(self: Store, root: int, newest: int | None = None) -> None:
        for path in self.checkpoints()[:-1]:
            cleanup.remove(path.name, dir_fd=root)

    Store._retire = retire  # type: ignore[method-assign]


def nothing_retires() -> None:
    """L5: disk use."""
    Store._retire = lambda self, root, newest=None: None  # type: ignore[method-assign, assignment, misc]


def position_one_batch_late() -> None:
    """What is saved is the position before the batch that was used last. L2, L4."""
    capture = Progress.capture

    def late(self: Progress) -> dict[str, Any]:
        extra = capture(self)
        position = max(0, extra["position"] - BATCH)
        return {**extra, "position": position, "loader": {**extra["loader"], "position": position}}

    Progress.capture = late  # type: ignore[method-assign]


def generators_not_restored() -> None:
    """L2, L4."""
    Progress.restore_generators = lambda self: None  # type: ignore[method-assign]


def no_barrier() -> None:
    """Nothing waits for a copy before the write that it must come before, and nobody looks whether it was torn. L2."""
    copy = HostCopyEngine._copy

    def slowly(self: HostCopyEngine, chunks: Sequence[int]) -> None:
        if threading.current_thread().name == "checkflow-copy":
            time.sleep(0.002)  # not quick by luck
        copy(self, chunks)

    def do_without_waiting(self: Capturer, work: AnchorWork) -> None:
        self._engine.snapshot(work.snapshot, work.label)
        self._engine.offload(work.release, work.label)
        self._engine.free(work.free)

    HostCopyEngine._copy = slowly  # type: ignore[method-assign]
    Capturer._do = do_without_waiting  # type: ignore[method-assign]
    Capturer._refuse_written = lambda self, chunks: None  # type: ignore[method-assign]
    Capturer.require = lambda self, chunks: None  # type: ignore[method-assign]
    Writer._audit = lambda self, capture: None  # type: ignore[method-assign]


def rarely_captured() -> None:
    """One boundary of four is captured, whatever was asked for. L6."""
    due = Pace.is_due

    def rarely(self: Pace, number: int, *, epoch_end: bool = False, demanded: bool = False) -> bool:
        found = due(self, number, epoch_end=epoch_end, demanded=demanded)
        return found and (number % 4 == 0 or epoch_end or demanded)

    Pace.is_due = rarely  # type: ignore[method-assign]


def samples_draw_as_they_come() -> None:
    """Augmentation depends on which worker is asked, and when. L4."""
    seeded_dataset.seed_generators = lambda seed, reseed=None: None  # type: ignore[attr-defined]


def checksums_ignored() -> None:
    """What is read is not held against its checksum. L3."""

    def read_block(file: Any, block: int, memory: memoryview, direct: int | None = None) -> memoryview:
        out = memory[: store_files.block_bytes(file, block)]
        fs.read_all(file.fd, out, block * manifest.BLOCK_BYTES)
        return out

    from checkflow.runtime.store import block_reader

    store_files.read_block = block_reader.read_block = read_block


def lock_kept_by_workers() -> None:
    """Loader workers hold the directory's lock, and the job cannot start again while one lives. L5."""
    fs._close_in_child.__code__ = (lambda: None).__code__
    # A worker ends within 5 s, as long as one waits.
    Store.__init__.__kwdefaults__["lock_wait_seconds"] = 0.0  # type: ignore[index]


def closing_hangs() -> None:
    """L5."""
    Writer.close = lambda self: time.sleep(3600)  # type: ignore[method-assign]


def leftovers_stay() -> None:
    """What dead runs left half written is never removed. L5."""
    remove = cleanup.remove

    def keep(name: str, *, dir_fd: int) -> None:
        if not name.startswith((".tmp-", ".trash-tmp-")):
            remove(name, dir_fd=dir_fd)

    cleanup.remove = keep


BREAKS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        manifest_late, acknowledged_early, retention_takes_the_newest, nothing_retires, position_one_batch_late,
        generators_not_restored, no_barrier, rarely_captured, samples_draw_as_they_come, checksums_ignored,
        lock_kept_by_workers, closing_hangs, leftovers_stay,
    )
}  # fmt: skip
