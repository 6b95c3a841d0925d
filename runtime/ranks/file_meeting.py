"""Ranks meet by small files in a directory that all see, where no network joins them; and how such a file is sealed."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from checkflow.core.small_files import IrregularError
from checkflow.runtime.format.manifest import MAX_MANIFEST_BYTES
from checkflow.runtime.store.cleanup import remove
from checkflow.runtime.store.file_writer import write_file
from checkflow.runtime.store.store import reported, sync_folder
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")

_FOLDER = ".council-"
_SEALED = re.compile(rb"([0-9a-f]{32})\n(.*)", re.DOTALL)


class FileMeeting:
    """Values as files of a folder of the job's own in ``directory``. Only processes die, not machines: no fsync.

    Args:
        generation: the start of the job; its folder is named by it.
        rank: rank 0 makes the directory and the folder.

    Raises:
        StorageError: the directory cannot be read or written, or rank 0 has not made it yet.
    """

    def __init__(self, directory: Path, generation: str, rank: int) -> None:
        self._directory, self._rank, self._name = directory, rank, f"{_FOLDER}{generation}"
        with reported(f"rank {rank} cannot meet the others in {directory}"):
            if rank == 0:
                fs.make_folders(str(directory))
            with fs.folder(str(directory.resolve())) as root:
                if rank == 0:
                    with contextlib.suppress(FileExistsError):
                        fs.mkdir(self._name, dir_fd=root)
                self._folder = fs.open_folder(self._name, dir_fd=root)

    def put(self, key: str, value: bytes) -> None:
        with reported(self._what()):
            fs.publish(_file_name(key), seal(value), dir_fd=self._folder)

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with reported(self._what()):
            for key in keys:
                if (value := read_sealed(self._folder, _file_name(key))) is not None:
                    found[key] = value
        return found

    def drop(self, keys: Sequence[str]) -> None:
        with reported(self._what()):
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(_file_name(key), dir_fd=self._folder)

    def close(self, *, last: bool = False) -> None:
        fs.close_quietly(self._folder)
        if last:
            with _warning(self._directory), fs.folder(str(self._directory.resolve())) as root:
                remove(self._name, dir_fd=root)

    def _what(self) -> str:
        return f"rank {self._rank} cannot meet the others in {self._directory}"


def seal(body: bytes) -> bytes:
    """Bytes with their digest before them."""
    return xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body


def read_sealed(folder: int, name: str) -> bytes | None:
    """What a small sealed file holds; None if it is missing or its digest is wrong."""
    try:
        found = _SEALED.fullmatch(fs.read_small(name, MAX_MANIFEST_BYTES, dir_fd=folder))
    except (FileNotFoundError, IrregularError):
        return None
    whole = found is not None and xxhash.xxh3_128_hexdigest(found[2]).encode() == found[1]
    return found[2] if found is not None and whole else None


def write_sealed(folder: int, body: bytes, draft: str, name: str) -> None:
    """Replace a small sealed file, durably and atomically."""
    fs.make_way(draft, name, dir_fd=folder)
    write_file(folder, draft, iter([memoryview(seal(body))]))
    fs.rename(draft, name, dir_fd=folder)
    sync_folder(folder)


def _file_name(key: str) -> str:
    return key.replace("/", ".")


def remove_earlier(directory: Path, generation: str = "") -> None:
    """Remove the folders in which ranks have met that did not end by themselves. What cannot be removed is logged.

    Args:
        directory: this process holds its lock: so no other job trains there.
        generation: this start's, whose folder stays; "": this process trains alone.
    """
    with _warning(directory), fs.folder(str(directory)) as root:
        for name in fs.names(root):
            if name.startswith(_FOLDER) and name != f"{_FOLDER}{generation}":
                with _warning(directory):
                    remove(name, dir_fd=root)


@contextlib.contextmanager
def _warning(directory: Path) -> Iterator[None]:
    """A folder that stays costs a few kilobytes, and the next start tries again."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove what ranks that met in %s have left there: %s", directory, error.strerror)
