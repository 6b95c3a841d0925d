"""The manifest of a checkpoint: what belongs to it, with sizes and checksums. Written last, read first.

Its last member is a digest of all bytes before it, which is checked before anything is parsed. What parses is still
validated strictly: anyone can write a digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import xxhash
from pydantic import Field, JsonValue, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from checkflow.core.boxes import Box, coverage_fault
from checkflow.core.errors import CorruptCheckpointError, MismatchError, UnsupportedError, first_fault
from checkflow.core.graph import STRICT, Many, Named
from checkflow.core.small_files import MOST_MEMBERS, check_density, check_fields, check_members
from checkflow.runtime.format.layout import STORED_TYPES, Layout

VERSIONS = (1, 2)  # 2: ``state.msgpack`` has what readers of version 1 cannot decode (:func:`.codec.is_newer`)
BLOCK_BYTES = 8388608  # 8 MiB
MANIFEST, EXTRA = "manifest.json", "state.msgpack"
STAGES = "stages"  # in ``info``: pipeline stages saved it, so ranks have other tensors and other extra state
OWN = "rank-own"  # owner, in the manifest, of what ranks hold under one name with values of their own
MAX_MANIFEST_BYTES = 1 << 28
MAX_EXTRA_BYTES = 1 << 32
MAX_STEP = 10**18
# No separator and no leading dot: the name stays in its directory and is none of the store's hidden names.
_FILE = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,249}"
_DIGEST = re.compile(rb',"digest":"([0-9a-f]{32})"}\n')
_DIGEST_BYTES = len(b',"digest":""}\n') + 32
_VERSION = re.compile(rb'"version":([0-9]{1,9})\Z')
_TWICE = "a key occurs twice"
# A manifest as ``dumps`` writes it, up to its files.
_BEGIN = re.compile(rb'{"step":[0-9]+,"run_id":"[^"\\]*","plan_digest":"[^"\\]*","world_size":[0-9]+,"files":')

Size = Annotated[int, Field(ge=0, le=2**62)]
FileName = Annotated[str, StringConstraints(pattern=rf"^{_FILE}\z")]
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}\z")]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file: its size, and the xxh3-64 of each block of ``BLOCK_BYTES`` (the last may be shorter), in hexadecimal."""

    __pydantic_config__ = STRICT
    size_bytes: Size
    blocks: Many[Checksum]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor (start and length in each dimension), stored under ``key`` in ``file``."""

    __pydantic_config__ = STRICT
    file: FileName
    key: str
    offsets: Many[Size]
    lengths: Many[Size]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A state tensor. ``permutation``: the job's memory order; files are row-major. ``tags``: "pair" for pairs of
    reals.
    """

    __pydantic_config__ = STRICT
    shape: Many[Size]
    dtype: str
    pieces: Many[Piece]
    permutation: Many[int] | None = None
    tags: Many[str] = ()


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its bytes."""

    __pydantic_config__ = STRICT
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    run_id: str
    plan_digest: str  # "" if no plan ran
    world_size: Annotated[int, Field(ge=1)]
    files: Named[FileName, FileEntry]
    tensors: Named[str, TensorEntry]
    ties: Many[tuple[str, str]] = ()  # (further name, name in ``tensors``)
    absent: Many[str] = ()  # state that the job may have, but not at this boundary
    info: dict[str, JsonValue] = field(default_factory=dict)
    block_bytes: Literal[8388608] = 8388608
    format: Literal["checkflow-checkpoint"] = "checkflow-checkpoint"
    version: Literal[1, 2] = 1


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)
_FILES_ADAPTER: TypeAdapter[dict[str, FileEntry]] = TypeAdapter(Named[FileName, FileEntry])
_TENSORS_ADAPTER: TypeAdapter[dict[str, TensorEntry]] = TypeAdapter(Named[str, TensorEntry])
# These bytes occur nowhere before this member: an entry of ``files`` is never {}, and quotes in strings are escaped.
_NO_TENSORS = b'"tensors":{}'


def dump_tensors(layout: Layout) -> bytes:
    """The entries of tensors that one rank holds whole, as JSON for :func:`dumps`."""
    entries = {
        name: TensorEntry(
            placed.record.shape,
            placed.record.dtype,
            (Piece(placed.file, placed.key, (0,) * len(placed.record.shape), placed.record.shape),),
            placed.record.permutation,
            ("pair",) if STORED_TYPES[placed.record.dtype].pair else (),
        )
        for name, placed in layout.tensors.items()
    }
    return _TENSORS_ADAPTER.dump_json(entries, ensure_ascii=True)


def dumps(manifest: Manifest, tensors: bytes | None = None) -> bytes:
    """The bytes of the manifest's file. UnsupportedError if ``info`` is not JSON, or all is too large to read back.

    Args:
        tensors: what :func:`dump_tensors` returned, in place of ``manifest.tensors``, which must be empty.
    """
    try:
        json.dumps(manifest.info, allow_nan=False)  # pydantic would write null
        body = _ADAPTER.dump_json(manifest, ensure_ascii=True)[:-1]
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise UnsupportedError(f"the checkpoint's information cannot be written as JSON: {error}") from None
    if tensors is not None:
        assert not manifest.tensors
        body = body.replace(_NO_TENSORS, b'"tensors":' + tensors, 1)
    if len(body) + _DIGEST_BYTES > MAX_MANIFEST_BYTES:
        raise UnsupportedError(f"the manifest would have {len(body)} bytes, more than {MAX_MANIFEST_BYTES}")
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def is_whole(data: bytes) -> bool:
    """Whether a manifest's bytes end in the digest of what precedes it: all was written, and nothing changed."""
    found = _DIGEST.fullmatch(data[-_DIGEST_BYTES:])
    return found is not None and found[1].decode() == xxhash.xxh3_128_hexdigest(data[:-_DIGEST_BYTES])


def loads(data: bytes, name: str) -> Manifest:
    """Read a manifest. Raises CorruptCheckpointError if it was changed or contradicts itself, MismatchError for another
    format.
    """
    text = _whole_text(data, name)
    try:
        _check_plain(text)
        manifest = _ADAPTER.validate_json(text)
        json.dumps(manifest.info, allow_nan=False)
    except ValidationError as error:
        raise CorruptCheckpointError(f"{name} is no valid manifest: {first_fault(error)}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} is no valid manifest: {' '.join(str(error).split())}") from None
    if problem := _contradiction(manifest):
        raise CorruptCheckpointError(f"{name} contradicts itself: {problem}")
    return manifest


def files_of(data: bytes, name: str) -> dict[str, FileEntry] | None:
    """Only the files of a manifest, far faster than :func:`loads`. None: ask :func:`loads`, which also says what is
    wrong.
    """
    text = _whole_text(data, name)
    if (begin := _BEGIN.match(text)) is None:
        return None
    try:
        text = text[begin.end() :]
        found = _FILES_ADAPTER.validate_json(text[: _end_of_files(text)])
    except (ValueError, RecursionError):
        return None
    return None if _files_problem(found) else found


def _whole_text(data: bytes, name: str) -> bytes:
    """The JSON of a manifest whose digest and version are right."""
    if not is_whole(data):
        raise CorruptCheckpointError(f"{name} is damaged: its digest does not fit its content")
    version = _VERSION.search(data[-_DIGEST_BYTES - 20 : -_DIGEST_BYTES])
    if version and int(version[1]) not in VERSIONS:
        raise MismatchError(
            f"{name} has format version {int(version[1])}; this checkflow reads versions up to {VERSIONS[-1]}"
        )
    return data[:-_DIGEST_BYTES] + b"}"


# What these two parse is freed before pydantic parses it again: a hostile file may be large.


def _check_plain(text: bytes) -> None:
    """Refuse JSON that readers understand differently: a key twice, NaN or infinity."""
    large: list[dict[str, Any]] = []

    def no_duplicates_and(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)  # no_duplicates inlined: a job may have thousands of tensors
        if len(found) != len(pairs):
            raise ValueError(_TWICE)
        if len(found) > MOST_MEMBERS:
            large.append(found)
        return found

    check_density(text)
    plain = json.loads(text, object_pairs_hook=no_duplicates_and, parse_constant=_refuse_constant)
    check_fields(plain, Manifest)
    named = (plain.get("files"), plain.get("tensors")) if isinstance(plain, dict) else ()
    if not all(any(one is other for other in named) for one in large):
        _check_objects(plain)


def _end_of_files(text: bytes) -> int:
    """Where the leading object of files ends; checked as :func:`loads` does."""
    check_density(text)
    decoder = json.JSONDecoder(object_pairs_hook=no_duplicates, parse_constant=_refuse_constant)
    plain, end = decoder.raw_decode(text.decode("ascii"))
    for entry in plain.values() if isinstance(plain, dict) else ():
        check_fields(entry, FileEntry)
    _check_objects({"files": plain})
    return end


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(_TWICE)
    return found


def _check_objects(plain: Any) -> None:
    """Check the objects that have named fields, wherever a manifest has them; pydantic checks the rest."""
    waiting = [plain]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            check_members(one)
            for name in ("files", "tensors"):
                waiting += one[name].values() if isinstance(one.get(name), dict) else ()
            waiting += one["pieces"] if isinstance(one.get("pieces"), list) else ()


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _contradiction(manifest: Manifest) -> str | None:
    if problem := _files_problem(manifest.files):
        return problem
    for name, tensor in manifest.tensors.items():
        if problem := tensor_problem(tensor, manifest.files):
            return f"tensor {name!r} {problem}"
    for further, first in manifest.ties:
        if first not in manifest.tensors or further in manifest.tensors:
            return f"{further!r} is tied to {first!r}"
    return None


def _files_problem(files: Mapping[str, FileEntry]) -> str | None:
    if EXTRA not in files:
        return f"it names no {EXTRA}"
    if MANIFEST in files:
        return "it names itself"
    for name, entry in files.items():
        if len(entry.blocks) != -(-entry.size_bytes // BLOCK_BYTES):
            return f"{name} has {len(entry.blocks)} checksums for {entry.size_bytes} bytes"
    return None


def tensor_problem(tensor: TensorEntry, files: Mapping[str, FileEntry]) -> str | None:
    """What is wrong with an entry, as the end of a sentence that begins with the tensor."""
    stored = STORED_TYPES.get(tensor.dtype)
    if stored is None:
        return f"has the unknown dtype {tensor.dtype!r}"
    if tensor.tags != (("pair",) if stored.pair else ()):
        return f"has tags that do not fit {tensor.dtype}"
    rank = len(tensor.shape)
    if len(tensor.pieces) == 1 and tensor.permutation is None:  # the usual case: fast for thousands of tensors
        (piece,) = tensor.pieces
        if piece.file in files and piece.lengths == tensor.shape and piece.offsets == (0,) * rank:
            return None
    if tensor.permutation is not None and sorted(tensor.permutation) != list(range(rank)):
        return "has a permutation that is none"
    for piece in tensor.pieces:
        if piece.file not in files:
            return f"lies in {piece.file}, which is not listed"
        if len(piece.offsets) != rank or len(piece.lengths) != rank:
            return "has a piece of another rank"
    if not tensor.pieces:
        return "is not covered by its pieces"
    try:
        boxes = [box_of(tensor, piece) for piece in tensor.pieces]
    except ValueError:
        return "has a piece beyond its shape"
    return coverage_fault(tensor.shape, boxes) or None


def box_of(tensor: TensorEntry, piece: Piece) -> Box:
    return Box(tensor.shape, piece.offsets, piece.lengths)


def own_name(name: str, rank: int) -> str:
    """The name, in the manifest, of a tensor that is a rank's own; the lowest rank's has the plain one."""
    return f"{OWN}/{rank}/{name}"


def names_of_rank(tensors: Collection[str], rank: int) -> dict[str, str]:
    """What a rank calls a version's tensors, to their names there: its own in place of those of the lowest rank."""
    prefix = f"{OWN}/{rank}/"
    found = {name: name for name in tensors if not is_own(name)}
    return found | {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}


def owner_of(name: str) -> tuple[int | None, str]:
    """The rank whose own tensor this is, and what it calls it; None: it has a plain name."""
    if not is_own(name):
        return None, name
    _, rank, plain = name.split("/", 2)
    return int(rank), plain


def is_own(name: str) -> bool:
    return name.startswith(f"{OWN}/")


def rank_extra_name(rank: int, ranks: int) -> str:
    """The file of the extra state that a rank has to itself, such as its random numbers."""
    return f"state-{rank:05d}-of-{ranks:05d}.msgpack"


def to_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` as plain JSON values. Raises UnsupportedError."""
    try:
        plain = json.loads(json.dumps(dict(info), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"a checkpoint's information must be JSON values: {error}") from None
    return dict(plain)
