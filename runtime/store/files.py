"""Opens a checkpoint's files and reads blocks of them, with every check that needs no knowledge of tensors.

Files are opened by name inside the directory, without following links, and must be regular and of the manifest's size.
They stay open, up to ``MOST_HELD``. The manifest always does, under a shared lock (:func:`.lock.share`), so that
retention leaves the checkpoint alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import xxhash

from checkflow.core.errors import CheckflowError, CorruptCheckpointError, StorageError
from checkflow.core.small_files import IrregularError, refuse_irregular
from checkflow.runtime.format.layout import MAX_HEADER_BYTES
from checkflow.runtime.format.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    files_of,
    is_whole,
    loads,
    no_duplicates,
)
from checkflow.runtime.store.lock import share
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import no_collection

MOST_HELD = 64  # files of a checkpoint that stay open. Where it has more, each is opened when some of it is read
NOT_HELD = -1
REPLACED = ".replaced-"  # before the name of a checkpoint that is just being exchanged for a new one
_EXCHANGED_TRIES, _EXCHANGED_SECONDS = 50, 0.02
_STEP = re.compile(r"step-([0-9]{8,19})", re.ASCII)


def step_name(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step in a checkpoint directory's name; None for any other name, ``step-000000001`` (nine digits) too."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


class OwnerCheck(Protocol):
    """Refuses another user's files: :class:`.trust.Trust`."""

    def check(self, path: Path, found: os.stat_result) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of an open checkpoint.

    Attributes:
        fd: its descriptor, or ``NOT_HELD``: it is opened by its name in ``folder`` for each read (:func:`reading`).
    """

    path: Path
    fd: int
    entry: FileEntry
    folder: int = NOT_HELD
    trust: OwnerCheck | None = None


@contextlib.contextmanager
def reading(file: OpenFile) -> Iterator[int]:
    """A descriptor of the file: its own, or one for this block.

    Raises:
        ForeignError: another user may have written what has its name now.
        CorruptCheckpointError: it is missing, no regular file, or of another size.
        StorageError: it cannot be opened, or the checkpoint was deleted meanwhile.
    """
    if file.fd != NOT_HELD:
        yield file.fd
        return
    try:
        fd, size = _open_regular(file.folder, file.path, file.trust, passing=True)
    except CorruptCheckpointError:
        if not _is_at(file.folder, file.path.parent):
            raise StorageError(f"cannot read {file.path}: the checkpoint was deleted meanwhile") from None
        raise
    try:
        _refuse_size(file.path, size, file.entry)
        yield fd
    finally:
        fs.close_quietly(fd)


class StoredTensor(NamedTuple):
    """An entry of a safetensors header; its range counts from the start of the file."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def block_bytes(file: OpenFile, block: int) -> int:
    return min(BLOCK_BYTES, file.entry.size_bytes - block * BLOCK_BYTES)


def memory_bytes(file: OpenFile, block: int) -> int:
    """The whole pages that a block needs."""
    return -(-block_bytes(file, block) // mmap.PAGESIZE) * mmap.PAGESIZE


def read_block(file: OpenFile, block: int, memory: memoryview, direct: int | None = None) -> memoryview:
    """Read a block into memory and return its bytes, verified; ``direct``: a descriptor for page-aligned direct reads,
    of a file that is held.
    """
    begin, out = block * BLOCK_BYTES, memory[: block_bytes(file, block)]
    try:
        with reading(file) as fd, contextlib.ExitStack() as ends:
            if file.fd == NOT_HELD and (direct := fs.open_direct_if_large(fd, file.entry.size_bytes)) is not None:
                ends.callback(fs.close_quietly, direct)
            count = 0
            if direct is not None:
                count = min(len(out), fs.read_pages(direct, memory[: memory_bytes(file, block)], begin))
            count += fs.read_all(fd, out[count:], begin + count)
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error.strerror}") from error
    if count != len(out):
        raise CorruptCheckpointError(f"{file.path} is truncated at byte {begin + count}")
    digest = xxhash.xxh3_64()
    digest.update(out)  # releases the GIL
    if digest.hexdigest() != file.entry.blocks[block]:
        raise CorruptCheckpointError(
            f"{file.path} is damaged: bytes {begin} to {begin + len(out)} do not match their checksum",
            (file.path.name, block),
        )
    return out


def _stored(entry: Any, data: int) -> StoredTensor:
    """A tensor's entry in a header; its offsets count from ``data``."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{str(number)[:60]!r} is no length")
    return StoredTensor(str(entry["dtype"]), shape, data + begin, data + end)


def read_header(path: Path, size_bytes: int, read: Callable[[int, memoryview], None]) -> bytes:
    """The text of a safetensors file's header. Its length is checked before memory is taken for it.

    Args:
        read: fills a buffer with the file's bytes from an offset on.
    """
    if size_bytes < 8:
        raise CorruptCheckpointError(f"{path} is no safetensors file: it has {size_bytes} bytes")
    prefix = bytearray(8)
    read(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CorruptCheckpointError(f"{path} is no safetensors file: it claims a header of {length} bytes")
    text = bytearray(length)
    read(8, memoryview(text))
    return bytes(text)


def parse_header(path: Path, text: bytes, size_bytes: int) -> tuple[dict[str, StoredTensor], Any]:
    """All tensors of a safetensors file by key, and its metadata, which is not looked at.

    The tensors' ranges follow each other without holes up to the file's end.
    """
    try:
        header = json.loads(text.decode(), object_pairs_hook=no_duplicates)  # str: json would guess UTF-16 of bytes
        metadata = header.pop("__metadata__", None)
        data = 8 + len(text)
        found = {str(key): _stored(entry, data) for key, entry in header.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{path} has no valid safetensors header: {' '.join(str(error).split())[:200]}"
        ) from None
    reached = data
    for key, (_, _, begin, end) in sorted(found.items(), key=_range):
        if begin != reached or end < begin:
            raise CorruptCheckpointError(f"{path} has a hole or an overlap before {key!r}")
        reached = end
    if reached != size_bytes:
        raise CorruptCheckpointError(f"{path} has {size_bytes} bytes, its header describes {reached}")
    return found, metadata


def _range(item: tuple[str, StoredTensor]) -> tuple[int, int]:
    """Start and end of a tensor from :func:`parse_header`."""
    return item[1][2:]


_Looked = TypeVar("_Looked")
_Look = Callable[[bytes], tuple[_Looked, Mapping[str, FileEntry]]]  # of a manifest's bytes; with the files to open


class _GoneError(Exception):
    """The directory was renamed or deleted while it was being opened."""


Narrow = Callable[[Manifest], Manifest]


def whole(manifest: Manifest) -> Manifest:
    """The ``narrow`` that leaves nothing out."""
    return manifest


def open_files(
    path: Path, narrow: Narrow, *, early: bool, trust: OwnerCheck | None
) -> tuple[Callable[[], Manifest], dict[str, OpenFile]]:
    """Open the manifest and all files of a checkpoint, whose types and sizes are checked; returns a function that gives
    the manifest, and the files.

    Args:
        narrow: selects part of the manifest; files that it leaves out are not opened. Not with ``early``.
        early: if possible, parse only the manifest's list of files; the function raises what is wrong with the rest.
    """

    def look(data: bytes) -> tuple[Callable[[], Manifest], Mapping[str, FileEntry]]:
        if early and (found := files_of(data, str(path / MANIFEST))) is not None:
            return (lambda: narrow(_parse_manifest(data, path))), found
        manifest = narrow(_parse_manifest(data, path))
        return (lambda: manifest), manifest.files

    return _open(path, look, trust)


def _open(
    path: Path, look: _Look[_Looked], trust: OwnerCheck | None, *, only_look: bool = False, shared: bool = True
) -> tuple[_Looked, dict[str, OpenFile]]:
    """Open the files, or ``only_look`` at them: then forked children close the manifest.

    Not ``shared``: take no lock, so retention may delete the checkpoint.
    """
    for tries in range(1, _EXCHANGED_TRIES + 1):
        # Deleting starts with a rename. A lock on a checkpoint that stays only keeps others from reading.
        try:
            return _open_there(path, look, trust, only_look=only_look, shared=shared and tries < _EXCHANGED_TRIES)
        except _GoneError as error:
            gone = error
            # It is being exchanged for another of the same step (two renames), or it is gone for good.
            if not (os.path.exists(path) or os.path.exists(path.with_name(REPLACED + path.name))):
                break
            time.sleep(_EXCHANGED_SECONDS)
    raise StorageError(str(gone)) from gone


def _open_there(
    path: Path, look: _Look[_Looked], trust: OwnerCheck | None, *, only_look: bool, shared: bool
) -> tuple[_Looked, dict[str, OpenFile]]:
    opened: dict[str, OpenFile] = {}
    try:
        folder = fs.open_folder(str(path))
    except NotADirectoryError:
        raise CorruptCheckpointError(f"{path} is no directory of its own") from None
    except FileNotFoundError as error:
        raise _GoneError(f"cannot open the checkpoint {path}: {error.strerror}") from error
    except OSError as error:
        raise StorageError(f"cannot open the checkpoint {path}: {error.strerror}") from error
    try:
        if trust is not None:
            trust.check(path, os.fstat(folder))
        data, opened[MANIFEST] = _open_manifest(folder, path, trust, passing=only_look, shared=shared)
        looked, entries = look(data)
        held = not only_look and len(entries) <= MOST_HELD
        for name, entry in entries.items():
            if held:
                fd, size = _open_regular(folder, path / name, trust, passing=False)
                opened[name] = OpenFile(path / name, fd, entry)
            else:
                size = _look_at(folder, path / name, trust)
                opened[name] = OpenFile(path / name, NOT_HELD, entry, folder, trust)
            _refuse_size(path / name, size, entry)
    except BaseException:
        close_all(opened)
        raise
    finally:
        if all(file.folder == NOT_HELD for file in opened.values()):  # else close_all does
            fs.close_quietly(folder)
    return looked, opened


def close_all(opened: Mapping[str, OpenFile]) -> None:
    for fd in {fd for file in opened.values() for fd in (file.fd, file.folder)} - {NOT_HELD}:
        fs.close_quietly(fd)


def _refuse_size(path: Path, size: int, entry: FileEntry) -> None:
    if size != entry.size_bytes:
        raise CorruptCheckpointError(f"{path} has {size} bytes instead of {entry.size_bytes}")


def _look_at(folder: int, path: Path, trust: OwnerCheck | None) -> int:
    """The size of a regular file in an open directory, which is not opened."""
    try:
        found = fs.status(path.name, dir_fd=folder)
        refuse_irregular(found.st_mode)
        readable = fs.may_read(path.name, dir_fd=folder)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing") from None
    except IrregularError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise StorageError(f"cannot look at {path}: {error.strerror}") from error
    if trust is not None:
        trust.check(path, found)
    if not readable:
        raise StorageError(f"cannot open {path}: {os.strerror(errno.EACCES)}")
    return found.st_size


def _open_regular(folder: int, path: Path, trust: OwnerCheck | None = None, *, passing: bool) -> tuple[int, int]:
    """A regular file in an open directory, and its size."""
    try:
        fd, size = fs.open_regular(path.name, dir_fd=folder)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing") from None
    except IrregularError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    if passing:
        fs.pass_by(fd)
    try:
        if trust is not None:
            trust.check(path, os.fstat(fd))
    except BaseException:
        fs.close_quietly(fd)
        raise
    return fd, size


def _open_manifest(
    folder: int, path: Path, trust: OwnerCheck | None, *, passing: bool, shared: bool
) -> tuple[bytes, OpenFile]:
    """The manifest's bytes and its file. While that is open and shared, nobody deletes the checkpoint."""
    name = path / MANIFEST
    try:
        fd, size = _open_regular(folder, name, trust, passing=passing)
    except CorruptCheckpointError:
        if not _is_at(folder, path):
            raise _GoneError(f"cannot open the checkpoint {path}: it was deleted meanwhile") from None
        raise
    try:
        try:
            if shared:
                share(fd)
        except BlockingIOError:
            raise _GoneError(f"cannot open the checkpoint {path}: it is being deleted") from None
        if not _is_at(folder, path):
            raise _GoneError(f"cannot open the checkpoint {path}: it was deleted meanwhile")
        return _read_small(fd, size, name), OpenFile(name, fd, FileEntry(size, ()))
    except OSError as error:
        fs.close_quietly(fd)
        raise StorageError(f"cannot open {name}: {error.strerror}") from error
    except BaseException:
        fs.close_quietly(fd)
        raise


def _is_at(folder: int, path: Path) -> bool:
    try:
        return fs.is_at(folder, str(path))
    except OSError as error:
        raise StorageError(f"cannot open the checkpoint {path}: {error.strerror}") from error


def _parse_manifest(data: bytes, path: Path) -> Manifest:
    name = path / MANIFEST
    with no_collection():
        manifest = loads(data, str(name))
    if (step := parse_step(path.name)) is not None and step != manifest.step:
        raise CorruptCheckpointError(f"{name} belongs to step {manifest.step}")
    return manifest


def _read_small(fd: int, size: int, name: Path) -> bytes:
    try:
        if size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(f"{name} has {size} bytes, more than {MAX_MANIFEST_BYTES}")
        return fs.read_begin(fd, size)
    except OSError as error:
        raise StorageError(f"cannot read {name}: {error.strerror}") from error


def has_manifest(path: Path) -> bool:
    """Whether a checkpoint has a manifest with the right digest; its content is not checked."""
    try:
        with fs.folder(str(path)) as folder:
            fd, size = _open_regular(folder, path / MANIFEST, passing=True)
            try:
                return is_whole(_read_small(fd, size, path / MANIFEST))
            finally:
                fs.close_quietly(fd)
    except (StorageError, OSError):
        return False


def glance(path: Path, *, shared: bool = True, trust: OwnerCheck | None = None) -> Manifest:
    """The manifest of a checkpoint whose files are all there, with the right sizes; they are not opened.

    Not ``shared``: without a lock, for the one writer; a loader worker forked just then would keep the lock.
    """

    def look(data: bytes) -> tuple[Manifest, Mapping[str, FileEntry]]:
        manifest = _parse_manifest(data, path)
        return manifest, manifest.files

    manifest, opened = _open(path, look, trust, only_look=True, shared=shared)
    close_all(opened)
    return manifest


def run_of(path: Path) -> str:
    """The run that made a checkpoint, for the one writer; "" if unreadable, which a restore will explain."""
    try:
        return glance(path, shared=False).run_id
    except CheckflowError:
        return ""
