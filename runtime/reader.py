"""The reading side: find, open, verify and recover checkpoints. Nothing that is damaged is ever handed out.

Every byte is compared with the checksum of its block after it was read into memory and before anyone sees it; nothing
is mapped, so a file that shrinks meanwhile is an error and not a signal. All files are opened at once, by name inside
the checkpoint's directory, following no link: a checkpoint that retention deletes while it is read stays readable.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from checkflow.errors import CorruptCheckpointError, StorageError
from checkflow.runtime import files
from checkflow.runtime.layout import MAX_HEADER_BYTES, STORED_TYPES, element
from checkflow.runtime.manifest import (
    BLOCK_BYTES,
    EXTRA,
    MANIFEST,
    MAX_EXTRA_BYTES,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    loads,
)

if TYPE_CHECKING:
    from checkflow.runtime.store import Store

logger = logging.getLogger("checkflow")

_STEP = re.compile(r"step-([0-9]{8,19})", re.ASCII)
_CACHED_BLOCKS = 4  # neighbours of small tensors lie in one block, which is then read once
_VERIFY_THREADS = 8


def step_name(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint directory's name; None for every other name, ``step-000000001`` (nine digits) too."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def find(directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Paths of the checkpoints in a directory, newest (highest step) first. Reads names only; changes nothing.

    Raises:
        StorageError: the directory cannot be read.
    """
    root = Path(directory)
    try:
        found = [(step, name) for name in files.folder_names(str(root)) if (step := parse_step(name)) is not None]
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint directory {root}: {error.strerror}") from error
    return tuple(root / name for _, name in sorted(found, reverse=True))


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    fd: int
    entry: FileEntry


@dataclass(frozen=True, slots=True)
class _Stored:
    """An entry of a safetensors header, its range counted from the begin of the file."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """An open checkpoint: its manifest and headers are verified, its data is as it is read. Close it after use.

    Made by :func:`open_checkpoint`. Reading from several threads at once is fine.
    """

    def __init__(self, path: Path, manifest: Manifest, opened: Mapping[str, _OpenFile]) -> None:
        self.path = path
        self.manifest = manifest
        self._files = opened
        self._cache: collections.OrderedDict[tuple[str, int], bytes] = collections.OrderedDict()
        self._mutex = threading.Lock()
        self._stored = {
            name: _parse_header(file.path, self._header(file), file.entry.size_bytes)
            for name, file in opened.items()
            if name.endswith(".safetensors")
        }
        order: list[tuple[str, int, str]] = []
        for name, tensor in manifest.tensors.items():
            stored = [self._piece(name, tensor, piece) for piece in tensor.pieces]
            order.append((tensor.pieces[0].file, stored[0].begin, name))
        #: Name to entry of every state tensor, in file order: reading in this order touches each block once.
        self.tensors: Mapping[str, TensorEntry] = {name: manifest.tensors[name] for _, _, name in sorted(order)}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; once more is harmless."""
        opened, self._files = self._files, {}
        for file in opened.values():
            files.close(file.fd)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def info(self) -> Mapping[str, Any]:
        return self.manifest.info

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        """(further name, name in ``tensors``) of state tensors that share memory."""
        return self.manifest.ties

    @property
    def extra_bytes(self) -> bytes:
        """The content of ``state.msgpack``, verified.

        Raises:
            CorruptCheckpointError, StorageError: as :meth:`read_into`.
        """
        file = self._file(EXTRA)
        if file.entry.size_bytes > MAX_EXTRA_BYTES:
            raise CorruptCheckpointError(f"{file.path} has {file.entry.size_bytes} bytes, more than {MAX_EXTRA_BYTES}")
        data = bytearray(file.entry.size_bytes)
        self._read(file, 0, memoryview(data))
        return bytes(data)

    def size_bytes(self, name: str) -> int:
        """How many bytes :meth:`read_into` delivers for a tensor, or for a further name of one."""
        tensor = self._tensor(name)
        return math.prod(tensor.shape) * STORED_TYPES[tensor.dtype].element_bytes

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill ``buffer`` with the row-major bytes of a tensor. Every block that is touched is verified.

        Args:
            name: a state tensor's, or a further name of one (see ``ties``).
            buffer: writable, contiguous, of exactly ``size_bytes(name)`` bytes. After an error its content is void.

        Raises:
            KeyError: the checkpoint has no such tensor.
            CorruptCheckpointError: the file is damaged.
            StorageError: the file cannot be read.
        """
        tensor, out = self._tensor(name), buffer.cast("B")
        if len(out) != self.size_bytes(name):
            raise ValueError(f"{name} has {self.size_bytes(name)} bytes, the buffer {len(out)}")
        if len(tensor.pieces) == 1:
            piece = tensor.pieces[0]
            self._read(self._file(piece.file), self._stored[piece.file][piece.key].begin, out)
            return
        whole = np.frombuffer(out, element(tensor.dtype)).reshape(tensor.shape)
        for piece in tensor.pieces:
            stored = self._stored[piece.file][piece.key]
            data = bytearray(stored.end - stored.begin)
            self._read(self._file(piece.file), stored.begin, memoryview(data))
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
            whole[box] = np.frombuffer(data, element(tensor.dtype)).reshape(piece.lengths)

    def verify(self) -> None:
        """Compare every byte of every file with its checksum, with several threads.

        Raises:
            CorruptCheckpointError: a file is damaged.
            StorageError: a file cannot be read.
        """
        tasks = [(file, block) for file in self._files.values() for block in range(len(file.entry.blocks))]
        threads = max(1, min(_VERIFY_THREADS, len(tasks), os.cpu_count() or 1))

        def run(first: int) -> None:
            scratch = memoryview(bytearray(BLOCK_BYTES))
            for file, block in tasks[first::threads]:
                _read_block(file, block, scratch[: _block_bytes(file, block)])

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(run, first) for first in range(threads)]:
                done.result()

    def _tensor(self, name: str) -> TensorEntry:
        return self.manifest.tensors[dict(self.manifest.ties).get(name, name)]

    def _file(self, name: str) -> _OpenFile:
        if name not in self._files:
            raise StorageError(f"the checkpoint {self.path} is closed")
        return self._files[name]

    def _read(self, file: _OpenFile, begin: int, out: memoryview) -> None:
        """Fill ``out`` with the file's bytes from ``begin`` on."""
        end = begin + len(out)
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            low = block * BLOCK_BYTES
            high = low + _block_bytes(file, block)
            if begin <= low and high <= end:
                _read_block(file, block, out[low - begin : high - begin])
            else:
                first, last = max(begin, low), min(end, high)
                out[first - begin : last - begin] = self._cached_block(file, block)[first - low : last - low]

    def _cached_block(self, file: _OpenFile, block: int) -> bytes:
        key = (file.path.name, block)
        with self._mutex:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        data = bytearray(_block_bytes(file, block))
        _read_block(file, block, memoryview(data))
        with self._mutex:
            self._cache[key] = bytes(data)
            while len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
            return self._cache[key]

    def _header(self, file: _OpenFile) -> bytes:
        """The text of a safetensors header. Its length is checked before memory is taken for it."""
        size = file.entry.size_bytes
        if size < 8:
            raise CorruptCheckpointError(f"{file.path} is no safetensors file: it has {size} bytes")
        prefix = bytearray(8)
        self._read(file, 0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise CorruptCheckpointError(f"{file.path} claims a header of {length} bytes")
        text = bytearray(length)
        self._read(file, 8, memoryview(text))
        return bytes(text)

    def _piece(self, name: str, tensor: TensorEntry, piece: Piece) -> _Stored:
        """The header's entry for a piece; it must say the same as the manifest."""
        stored = self._stored.get(piece.file, {}).get(piece.key)
        kind = STORED_TYPES[tensor.dtype]
        if stored is None:
            raise CorruptCheckpointError(f"{self.path / piece.file} lacks {piece.key}, which the manifest places there")
        if stored.code != kind.code or stored.shape != kind.stored_shape(piece.lengths):
            raise CorruptCheckpointError(
                f"{self.path / piece.file} has {piece.key} as {stored.code}{list(stored.shape)}, the manifest has "
                f"{name} as {tensor.dtype}{list(piece.lengths)}"
            )
        if stored.end - stored.begin != math.prod(piece.lengths) * kind.element_bytes:
            raise CorruptCheckpointError(f"{self.path / piece.file} gives {piece.key} a range of another size")
        return stored


def _block_bytes(file: _OpenFile, block: int) -> int:
    return min(BLOCK_BYTES, file.entry.size_bytes - block * BLOCK_BYTES)


def _read_block(file: _OpenFile, block: int, out: memoryview) -> None:
    try:
        count = files.read_all(file.fd, out, block * BLOCK_BYTES)
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error.strerror}") from error
    if count != len(out):
        raise CorruptCheckpointError(f"{file.path} is truncated at byte {block * BLOCK_BYTES + count}")
    if xxhash.xxh3_64_hexdigest(out) != file.entry.blocks[block]:
        raise CorruptCheckpointError(
            f"{file.path} is damaged: bytes {block * BLOCK_BYTES} to {block * BLOCK_BYTES + len(out)} do not match "
            "their checksum"
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _parse_header(path: Path, text: bytes, size_bytes: int) -> dict[str, _Stored]:
    """All tensors of a safetensors file by key; their ranges follow each other without holes up to the file's end."""
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        data = 8 + len(text)
        found = {
            str(key): _Stored(
                str(entry["dtype"]),
                tuple(int(length) for length in entry["shape"]),
                data + int(entry["data_offsets"][0]),
                data + int(entry["data_offsets"][1]),
            )
            for key, entry in header.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(f"{path} has no valid safetensors header: {error}") from None
    reached = data
    for key, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != reached or stored.end < stored.begin:
            raise CorruptCheckpointError(f"{path} has a hole or an overlap before {key}")
        reached = stored.end
    if reached != size_bytes:
        raise CorruptCheckpointError(f"{path} has {size_bytes} bytes, its header describes {reached}")
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Manifest, dict[str, _OpenFile]]]:
    """The manifest and all files of a checkpoint, of the right type and size; left open only if the body succeeds."""
    opened: dict[str, _OpenFile] = {}
    try:
        folder = files.open_folder(str(path))
    except OSError as error:
        raise StorageError(f"cannot open the checkpoint {path}: {error.strerror}") from error
    try:
        manifest = _read_manifest(folder, path)
        for name, entry in manifest.files.items():
            fd, size = _open_regular(folder, path / name)
            opened[name] = _OpenFile(path / name, fd, entry)
            if size != entry.size_bytes:
                raise CorruptCheckpointError(f"{path / name} has {size} bytes instead of {entry.size_bytes}")
        yield manifest, opened
    except BaseException:
        for file in opened.values():
            with contextlib.suppress(OSError):
                files.close(file.fd)
        raise
    finally:
        files.close(folder)


def _open_regular(folder: int, path: Path) -> tuple[int, int]:
    """A regular file in an open directory, and its size."""
    try:
        fd = files.open_read(path.name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            reason = {errno.ENOENT: "is missing", errno.ELOOP: "is a symbolic link"}.get(error.errno, "is no file")
            raise CorruptCheckpointError(f"{path} {reason}") from None
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    try:
        size = files.regular_size(fd)
    except OSError as error:
        files.close(fd)
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    if size is None:
        files.close(fd)
        raise CorruptCheckpointError(f"{path} is no regular file")
    return fd, size


def _read_manifest(folder: int, path: Path) -> Manifest:
    name = path / MANIFEST
    fd, size = _open_regular(folder, name)
    try:
        if size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(f"{name} has {size} bytes, more than {MAX_MANIFEST_BYTES}")
        data = bytearray(size)
        count = files.read_all(fd, memoryview(data), 0)
    except OSError as error:
        raise StorageError(f"cannot read {name}: {error.strerror}") from error
    finally:
        files.close(fd)
    manifest = loads(bytes(data[:count]), str(name))
    if (step := parse_step(path.name)) is not None and step != manifest.step:
        raise CorruptCheckpointError(f"{name} belongs to step {manifest.step}")
    return manifest


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: its manifest, and its files' types, sizes and headers, are verified.

    Raises:
        CorruptCheckpointError: it is damaged; the message names the file.
        MismatchError: it has a format that this version does not know.
        StorageError: it cannot be read.
    """
    with _opened(Path(path).absolute()) as (manifest, opened):
        return Checkpoint(Path(path).absolute(), manifest, opened)


def glance(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, with the right sizes; their bytes are not read.

    Raises:
        CorruptCheckpointError, MismatchError, StorageError: as :func:`open_checkpoint`.
    """
    with _opened(path) as (manifest, opened):
        for file in opened.values():
            files.close(file.fd)
        return manifest


def find_valid(directory: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint of a directory that is whole, byte for byte; nothing is renamed.

    A checkpoint that vanishes while it is looked at (a running job's retention) is passed over.

    Raises:
        StorageError: the directory, or every candidate, cannot be read.
    """
    return _newest_valid(find(directory), lambda path, error: logger.warning("passing over %s: %s", path.name, error))


def recover(store: Store) -> Checkpoint | None:
    """The newest checkpoint that is whole, byte for byte, for a training job to go on from; None if there is none.

    One that is proved damaged is set aside (``.broken-…``) and the next older one taken. One that merely cannot be read
    at the moment is passed over, but stays where it is.

    Raises:
        MismatchError: the newest has a format that this version does not know.
        StorageError: checkpoints exist, and none could be read: to start from scratch would be wrong.
    """

    def set_aside(path: Path, error: StorageError) -> None:
        if not isinstance(error, CorruptCheckpointError):
            logger.error("cannot read the checkpoint %s, trying an older one: %s", path, error)
            return
        try:
            moved = store.set_aside(path)
        except StorageError as failed:
            logger.error("the checkpoint %s is damaged (%s) and stays: %s", path, error, failed)
        else:
            logger.error("the checkpoint %s is damaged (%s); set aside as %s", path, error, moved.name)

    return _newest_valid(store.checkpoints(), set_aside)


def _newest_valid(paths: tuple[Path, ...], refused: Callable[[Path, StorageError], None]) -> Checkpoint | None:
    unreadable: StorageError | None = None
    for path in paths:
        try:
            checkpoint = open_checkpoint(path)
            try:
                checkpoint.verify()
            except BaseException:
                checkpoint.close()
                raise
        except StorageError as error:
            refused(path, error)
            if not isinstance(error, CorruptCheckpointError):
                unreadable = unreadable or error
        else:
            return checkpoint
    if unreadable is not None:
        raise unreadable
    return None
