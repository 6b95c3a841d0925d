"""Opens, reads and verifies checkpoints. Damaged bytes are never handed out.

Every block is compared with its checksum after it was read into memory. Nothing is mapped, so a shrinking file is an
error and not a signal. Files stay open (up to ``files.MOST_HELD``), so a checkpoint that is deleted meanwhile stays
readable.
"""

from __future__ import annotations

import collections
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from checkflow.core.boxes import Box, common, runs
from checkflow.core.boxes import whole as whole_of
from checkflow.core.errors import CorruptCheckpointError, StorageError
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import (
    BLOCK_BYTES,
    EXTRA,
    MAX_EXTRA_BYTES,
    Manifest,
    Piece,
    TensorEntry,
    box_of,
    is_own,
    rank_extra_name,
)
from checkflow.runtime.store.block_reader import THREADS, Ahead, Block, read_blocks, read_one
from checkflow.runtime.store.box_copies import BoxCopy, box_copies
from checkflow.runtime.store.files import (
    Narrow,
    OpenFile,
    StoredTensor,
    close_all,
    open_files,
    parse_header,
    read_header,
    reading,
    whole,
)
from checkflow.runtime.store.trust import Trust
from checkflow.runtime.system import fs
from checkflow.runtime.system.aligned_memory import copy_bytes, no_collection

_CACHED_BLOCKS = 2  # small neighbouring tensors share a block
Key = tuple[str, int]  # a file's name and a block's number
Parts = dict[Key, list[tuple[int, memoryview]]]  # where bytes of a block, from the one of this number on, go
Strided = dict[Key, list[BoxCopy]]


class Checkpoint:
    """An open checkpoint, made by :func:`open_checkpoint`, to be closed after use.

    Data is verified when it is read, by several threads if need be; with ``ahead``, headers by the first read.
    """

    manifest: Manifest

    def __init__(self, path: Path, opened: Mapping[str, OpenFile]) -> None:
        self.path = path
        self._files = opened
        self._cache: collections.OrderedDict[Key, memoryview] = collections.OrderedDict()
        self._process = os.getpid()  # whose cache it is
        self._mutex, self._proving = threading.Lock(), threading.Lock()
        self._verified: set[Key] = set()
        self._ahead: Ahead | None = None
        self._heads: dict[str, int] = {}  # by file, its first block's number in the read-ahead
        self._unproved: dict[str, bytes] = {}  # by file, the header as read before its block was verified
        self._extra: bytes | None = None

    def begin(self, manifest: Callable[[], Manifest], *, ahead: bool) -> None:
        """Called once, by :func:`open_checkpoint`; close it after an error."""
        held = {name: file for name, file in self._files.items() if name.endswith(".safetensors")}
        if ahead:
            self._begin_ahead([file for file in held.values() if file.entry.blocks])
        with no_collection():
            self.manifest = manifest()
            try:
                self._look({name: self._header(file) for name, file in held.items()})
            except CorruptCheckpointError:
                self._prove()  # if the disk damaged a header, raise that instead
                raise

    def _begin_ahead(self, held: list[OpenFile]) -> None:
        """Start reading data while manifest and headers are parsed.

        Extra state and headers are read first, or they would wait, and used once their blocks are verified.
        """
        self._extra = self._read_extra()
        heads = {file.path.name: head for file in held if (head := _glimpse(file)) is not None}
        if len(heads) < len(held):
            return  # a header is unreadable, or longer than a block and needs the memory
        self._unproved = heads
        first = [(file, 0) for file in held]
        others = [(file, block) for file in held for block in range(1, len(file.entry.blocks))]
        # Threads and cache share the memory; headers that no thread has are read through the cache.
        threads = THREADS + 1 if len(held) <= THREADS + 1 else THREADS + 1 - _CACHED_BLOCKS
        self._heads = {file.path.name: number for number, file in enumerate(held)}
        self._ahead = Ahead(first + others, threads, looks=len(held), look=_head)
        self._ahead.begin()

    def _look(self, headers: Mapping[str, bytes]) -> None:
        """Compare the headers with the manifest."""
        manifest, opened = self.manifest, self._files
        self._names = dict(manifest.ties)
        self._stored = {
            name: parse_header(opened[name].path, text, opened[name].entry.size_bytes)[0]
            for name, text in headers.items()
        }
        order: list[tuple[str, int, str]] = []
        for name, tensor in manifest.tensors.items():
            stored = [self._piece(name, tensor, piece) for piece in tensor.pieces]
            if not is_own(name):
                order.append((tensor.pieces[0].file, stored[0].begin, name))
        order.sort()
        #: Name to entry of every state tensor, in file order: reading in this order touches each block once. What other
        #: ranks than the lowest have as their own is in the manifest alone.
        self.tensors: Mapping[str, TensorEntry] = {name: manifest.tensors[name] for _, _, name in order}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, after all reading threads have ended; may be called again."""
        raised: BaseException | None = None
        while self._ahead is not None:
            try:
                self._stop_ahead()
            except BaseException as error:  # noqa: BLE001 - raised below
                raised = raised or error
        opened, self._files = self._files, {}
        close_all(opened)
        if raised is not None:
            raise raised

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
        """The content of ``state.msgpack``, verified."""
        extra, self._extra = self._extra, None  # it may be large
        return self._read_extra() if extra is None else extra

    def rank_extra_bytes(self, rank: int) -> bytes | None:
        """What a rank other than 0 has to itself, verified; None if it was not there, or had nothing."""
        name = rank_extra_name(rank, self.manifest.world_size)
        return self._read_extra(name) if name in self.manifest.files else None

    def _read_extra(self, name: str = EXTRA) -> bytes:
        file = self._file(name)
        if file.entry.size_bytes > MAX_EXTRA_BYTES:
            raise CorruptCheckpointError(f"{file.path} has {file.entry.size_bytes} bytes, more than {MAX_EXTRA_BYTES}")
        data = bytearray(file.entry.size_bytes)
        self._read(file, 0, memoryview(data))
        return bytes(data)

    def size_bytes(self, name: str) -> int:
        """How many bytes :meth:`read_into` delivers for a tensor."""
        tensor = self._tensor(name)
        return math.prod(tensor.shape) * STORED_TYPES[tensor.dtype].element_bytes

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill ``buffer`` with the verified row-major bytes of a tensor, by any of its names; after an error they are
        void.
        """
        tensor, out = self._tensor(name), buffer.cast("B")
        if len(out) != self.size_bytes(name):
            raise ValueError(f"{name} has {self.size_bytes(name)} bytes, the buffer {len(out)}")
        if _in_one_piece(tensor):
            self._read(*self._place(tensor.pieces[0]), out)
        else:
            self._deliver(*self._sort([(name, None, out)]), keep=True)

    def read_many_into(self, targets: Collection[tuple[str, memoryview]]) -> None:
        """:meth:`read_into` for many (name, buffer); each block is read once."""
        if len(targets) == 1 and self._ahead is None:  # later calls may ask for its neighbours
            self.read_into(*next(iter(targets)))
            return
        self.read_boxes_into([(name, None, buffer) for name, buffer in targets])

    def read_boxes_into(self, targets: Collection[tuple[str, Box | None, memoryview]]) -> None:
        """Fill each buffer with the verified row-major bytes of a box of a tensor (None: of all of it).

        Each block that holds some of them is read once, whatever pieces the tensors were saved in.
        """
        self._deliver(*self._sort(targets), keep=False)

    def _sort(self, targets: Collection[tuple[str, Box | None, memoryview]]) -> tuple[Parts, Strided]:
        """By block, where its bytes go."""
        parts: Parts = {}
        strided: Strided = {}
        for name, box, buffer in targets:
            tensor, out = self._tensor(name), buffer.cast("B")
            if box is None and _in_one_piece(tensor):  # nearly all of one process's
                _, _, begin, end = self._stored[tensor.pieces[0].file][tensor.pieces[0].key]
                if len(out) != end - begin:
                    raise ValueError(f"{name} has {end - begin} bytes, the buffer {len(out)}")
                self._want(parts, tensor.pieces[0], begin, out)
                continue
            box = whole_of(tensor.shape) if box is None else box
            size = STORED_TYPES[tensor.dtype].element_bytes
            if len(out) != box.volume * size:
                raise ValueError(f"{box} of {name} has {box.volume * size} bytes, the buffer {len(out)}")
            left = box.volume
            for piece in tensor.pieces:
                if (shared := common(box_of(tensor, piece), box)) is None:
                    continue
                left -= shared.volume
                begin = self._stored[piece.file][piece.key].begin
                here, there = islice(runs(shared, box_of(tensor, piece)), 2), islice(runs(shared, box), 2)
                (first, count), *more = (*here, *there)
                if len(more) == 1:  # without a gap in the file and in memory
                    at = more[0][0] * size
                    self._want(parts, piece, begin + first * size, out[at : at + count * size])
                    continue
                for block, copy in box_copies(box_of(tensor, piece), shared, box, size, begin, out):
                    strided.setdefault((piece.file, block), []).append(copy)
            if left:
                raise ValueError(f"{box} of {name} lies in pieces that were left out when {self.path} was opened")
        return parts, strided

    def _want(self, parts: Parts, piece: Piece, begin: int, out: memoryview) -> None:
        """Note where the bytes of a piece's file from ``begin`` on go."""
        self._held(piece.file)  # raises if closed
        end = begin + len(out)
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            low = block * BLOCK_BYTES
            if low <= begin and end <= low + BLOCK_BYTES:  # fast for thousands of small ones
                part = begin - low, out
            else:
                start, last = max(begin, low), min(end, low + BLOCK_BYTES)
                part = start - low, out[start - begin : last - begin]
            parts.setdefault((piece.file, block), []).append(part)

    def _deliver(self, parts: Parts, strided: Strided, *, keep: bool) -> None:
        """Read the blocks that something is wanted of. ``keep`` few ones: the next tensor may lie in them."""
        wanted = parts.keys() | strided.keys()

        def use(key: Key, data: memoryview) -> None:
            self._verified.add(key)
            for first, target in parts.get(key, ()):
                copy_bytes(target, data[first : first + len(target)])
            for copy in strided.get(key, ()):
                copy(data)

        self._prove()
        missing = []
        for key in sorted(wanted):
            if (data := self._cached(key)) is None:
                missing.append(key)
            else:
                use(key, data)
        if self._ahead is not None:
            begun = [(file.path.name, block) for file, block in self._ahead.blocks]
            try:
                if set(begun) <= wanted | {(name, 0) for name in self._heads}:  # all that is read ahead is wanted
                    self._ahead.finish(lambda n, data: use(begun[n], data))
                    return
            finally:
                self._stop_ahead()
        if keep and len(missing) <= _CACHED_BLOCKS:
            for name, block in missing:
                use((name, block), self._one_block(self._file(name), block))
            return
        read_blocks(
            [(self._file(name), block) for name, block in missing],
            lambda n, data: use(missing[n], data),
            threads=self._threads,
        )

    def read_rows_into(self, piece: Piece, first: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with whole rows of a piece, which count along its first dimension, from row ``first`` on."""
        stored, out = self._stored[piece.file][piece.key], buffer.cast("B")
        begin = stored.begin + (first * ((stored.end - stored.begin) // piece.lengths[0]) if first else 0)
        if begin + len(out) > stored.end:
            raise ValueError(f"{piece.key} in {piece.file} ends before {len(out)} bytes from row {first}")
        self._read(self._file(piece.file), begin, out)

    def verify(self, progress: Callable[[int], None] = lambda size_bytes: None) -> None:
        """Verify every byte of every file in several threads, which call ``progress`` with the size of each block."""
        self._verify(self._blocks(), progress)

    def verify_block(self, name: str, block: int) -> None:
        """Verify one block of a file."""
        self._verify([(self._file(name), block)])

    def verify_rest(self) -> None:
        """:meth:`verify`, except for blocks that were read, and so verified, since opening."""
        self._verify([one for one in self._blocks() if (one[0].path.name, one[1]) not in self._verified])

    @property
    def _threads(self) -> int:
        """How many threads may hold a block: one fewer with a second block in the cache."""
        return min(THREADS, THREADS + 1 - len(self._cache))

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()  # first: after an interrupt, close() comes back to it
            self._ahead = None

    def _blocks(self) -> list[Block]:
        return [(file, block) for file in self._files.values() for block in range(len(file.entry.blocks))]

    def _verify(self, blocks: list[Block], progress: Callable[[int], None] = lambda size_bytes: None) -> None:
        self._stop_ahead()
        read_blocks(blocks, lambda _, data: progress(len(data)), threads=self._threads)
        self._verified.update((file.path.name, block) for file, block in blocks)

    def _tensor(self, name: str) -> TensorEntry:
        return self.manifest.tensors[self._names.get(name, name)]

    def _held(self, name: str) -> OpenFile:
        if name not in self._files:
            raise StorageError(f"the checkpoint {self.path} is closed")
        return self._files[name]

    def _file(self, name: str) -> OpenFile:
        """A file, with its header verified."""
        self._prove()
        return self._held(name)

    def _prove(self) -> None:
        """Compare headers that were read early with the verified blocks that they lie in."""
        if not self._unproved:
            return
        with self._proving:
            try:
                for name, head in list(self._unproved.items()):
                    file, found = self._held(name), None
                    if self._ahead is not None:
                        found = self._ahead.looked(self._heads[name])
                    if found is None:  # no thread has it
                        found = _head(self._one_block(file, 0))
                    if found != head:  # but the block is whole: the file is not damaged
                        raise StorageError(f"cannot read {file.path}: its header reads otherwise each time")
                    self._unproved.pop(name, None)
            except BaseException:
                self._stop_ahead()  # later reads go on their own
                raise

    def _place(self, piece: Piece) -> tuple[OpenFile, int]:
        return self._file(piece.file), self._stored[piece.file][piece.key].begin

    def _read(self, file: OpenFile, begin: int, out: memoryview) -> None:
        """Fill ``out`` with the file's bytes from ``begin`` on."""
        end = begin + len(out)
        whole = [*range(-(-begin // BLOCK_BYTES), end // BLOCK_BYTES)]
        if end == file.entry.size_bytes and end % BLOCK_BYTES and begin <= end // BLOCK_BYTES * BLOCK_BYTES:
            whole.append(end // BLOCK_BYTES)

        def use(number: int, data: memoryview) -> None:
            self._verified.add((file.path.name, whole[number]))
            at = whole[number] * BLOCK_BYTES - begin
            copy_bytes(out[at : at + len(data)], data)

        read_blocks([(file, block) for block in whole], use, threads=self._threads)
        for block in sorted({begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES} - {*whole}) if out else ():
            low = block * BLOCK_BYTES
            first, last = max(begin, low), min(end, low + BLOCK_BYTES)
            copy_bytes(out[first - begin : last - begin], self._one_block(file, block)[first - low : last - low])

    def _one_block(self, file: OpenFile, block: int) -> memoryview:
        """A block that is needed in part, and cached: its neighbours are wanted next."""
        key = (file.path.name, block)
        if (held := self._cached(key)) is not None:
            return held
        data = read_one(file, block)
        with self._mutex:
            self._verified.add(key)
            self._cache[key] = data
            while len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        return data

    def _cached(self, key: Key) -> memoryview | None:
        with self._mutex:
            if self._process != os.getpid():  # a forked child has zeros in place of the blocks
                self._cache.clear()
                self._process = os.getpid()
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _header(self, file: OpenFile) -> bytes:
        """The text of a safetensors header."""
        if (head := self._unproved.get(file.path.name)) is not None:
            return head[8:]
        return read_header(file.path, file.entry.size_bytes, lambda begin, out: self._read(file, begin, out))

    def _piece(self, name: str, tensor: TensorEntry, piece: Piece) -> StoredTensor:
        """The header's entry for a piece, which must agree with the manifest."""
        stored = self._stored.get(piece.file, {}).get(piece.key)
        kind, lengths = STORED_TYPES[tensor.dtype], piece.lengths
        if stored is None:
            raise CorruptCheckpointError(
                f"{self.path / piece.file} lacks {piece.key!r}, which the manifest places there"
            )
        code, shape, begin, end = stored
        if code != kind.code or shape != (kind.stored_shape(lengths) if kind.pair or kind.packed else lengths):
            raise CorruptCheckpointError(
                f"{self.path / piece.file} has {piece.key!r} as {code!r}{list(shape)}, the manifest has "
                f"{name!r} as {tensor.dtype}{list(lengths)}"
            )
        if end - begin != math.prod(lengths) * kind.element_bytes:
            raise CorruptCheckpointError(f"{self.path / piece.file} gives {piece.key!r} a range of another size")
        return stored


def _in_one_piece(tensor: TensorEntry) -> bool:
    return len(tensor.pieces) == 1 and tensor.pieces[0].lengths == tensor.shape


def _glimpse(file: OpenFile) -> bytes | None:
    """The header of a safetensors file with its length, not verified; None: unreadable, or longer than a block."""
    room, prefix = min(file.entry.size_bytes, BLOCK_BYTES) - 8, bytearray(8)
    try:
        with reading(file) as fd:
            if room < 0 or fs.read_all(fd, memoryview(prefix), 0) < 8:
                return None
            if (length := int.from_bytes(prefix, "little")) > room:
                return None
            text = bytearray(length)
            count = fs.read_all(fd, memoryview(text), 8)
    except OSError:
        return None
    return bytes(prefix + text) if count == length else None


def _head(block: memoryview) -> bytes:
    """The same from the verified block."""
    return bytes(block[: 8 + int.from_bytes(block[:8], "little")])


def open_checkpoint(
    path: str | os.PathLike[str], narrow: Narrow = whole, *, ahead: bool = False, trust: Trust | None = None
) -> Checkpoint:
    """Open a checkpoint and verify its manifest, and its files' types, sizes and headers.

    While any process has it open, the job that writes there does not delete it. Forked children hold it open, too.

    Args:
        narrow: selects part of the verified manifest: fewer tensors, pieces, files. The rest is not read.
        ahead: read data from now on, for one call of ``read_many_into`` that takes all of it. Not with ``narrow``.
        trust: whose files are accepted by a job that resumes; None: only looking.

    Raises:
        ForeignError: another user may have written it.
        CorruptCheckpointError: it is damaged; the message names the file.
        MismatchError: it has a format that this version does not know.
        StorageError: it cannot be read.
    """
    absolute = Path(path).absolute()
    manifest, opened = open_files(absolute, narrow, early=ahead, trust=trust)
    try:
        checkpoint = Checkpoint(absolute, opened)
    except BaseException:
        close_all(opened)
        raise
    try:
        checkpoint.begin(manifest, ahead=ahead)
        return checkpoint
    except BaseException:
        checkpoint.close()
        raise
