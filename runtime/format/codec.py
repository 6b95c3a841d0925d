"""The extra state of a checkpoint as bytes: msgpack, with an extension type for everything that msgpack lacks.

Values come back equal and of the same type, except that two references to one object become two equal objects, and
tensors come back on the CPU, in their order in memory. An unknown type is refused by its path. Nothing is pickled, and
decoding runs no code but the constructors named here.

For a state tensor, which lies in another file, there is a :class:`Stored` with its name.
"""

from __future__ import annotations

import collections
import datetime
import functools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from checkflow.core.errors import CorruptCheckpointError, UnsupportedError
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import MAX_EXTRA_BYTES

MAX_DEPTH = 64
_MARK = b"\xa4form\x02"  # the first entry, "form": 2, of an extra state that older readers cannot decode
HEAD_BYTES = 1 + len(_MARK)
_Path = str | tuple[Any, Any]  # where a value is: a text, or a path and a key
_STRINGS = frozenset((str,))
_PLAIN = frozenset((type(None), bool, float, str, bytes))
_MAX_INTEGER_BYTES = 1 << 16
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?", re.ASCII)
_FACTORIES: Mapping[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
}
# Bytes of memory that decoded values take, beside a few for each byte of the data: measured with
# tracemalloc under Python 3.11. Without a bound 30 MB of empty lists would take 4 GB.
_LIST_BYTES, _DICT_BYTES, _ENTRY_BYTES, _EXTENSION_BYTES, _MEMBER_BYTES = 136, 160, 224, 320, 160
# Some millions of pairs, or 400,000 one-number tensors, take this much; larger data may take more, in
# proportion. encode allows a little less, so that with_entry can add to it.
_DECODED_BYTES, _ENCODED_BYTES, _ADDED_BYTES, _TIMES = 512 << 20, 496 << 20, 16 << 20, 32
# Extension codes. They are part of the file format: never renumber, never reuse.
TUPLE, DICT, SET, FROZENSET, DEQUE, COUNTER, ORDERED, DEFAULT = 1, 2, 3, 4, 5, 6, 7, 8
INTEGER, COMPLEX, BYTEARRAY, RANGE, SLICE, PATH = 16, 17, 18, 19, 20, 21
DATETIME, DATE, TIME, TIMEDELTA, TIMEZONE = 32, 33, 34, 35, 36
ARRAY, SCALAR = 48, 49
TENSOR, PARAMETER, SIZE, DTYPE, DEVICE = 64, 65, 66, 67, 68
# Since the second form.
PERMUTED, STORED, NAMED = 69, 70, 71


@dataclass(frozen=True, slots=True)
class Stored:
    """Stands for a state tensor.

    Args:
        name: the job's for it.
        alone: no model or optimizer holds it in its own table: it is made anew.
        parameter: whether it was an ``nn.Parameter``.
        apart: whether it lay outside of host memory.
    """

    name: str
    alone: bool = False
    parameter: bool = False
    requires_grad: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """Stands for a parameter of an optimizer as a key of a dictionary."""

    optimizer: str
    parameter: str


class _Budget:
    """Estimates the memory that containers and extensions take when they are decoded, and refuses too much."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        self.spent_bytes, self._most_bytes = 0, most_bytes
        self.data_bytes = 0  # of tensors and arrays
        self.newer = False  # whether the first form lacks something of it

    def take(self, size_bytes: int) -> None:
        self.spent_bytes += size_bytes
        if self.spent_bytes > self._most_bytes:
            raise ValueError("it would take far more memory than its size")

    def take_list(self, value: list[Any]) -> list[Any]:
        self.take(_LIST_BYTES)
        return value

    def take_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        self.take(_DICT_BYTES + _ENTRY_BYTES * len(value))
        return value

    def take_extension(self, code: int, data: bytes) -> msgpack.ExtType:
        self.take(_COSTS.get(code, _EXTENSION_BYTES))
        return msgpack.ExtType(code, data)


def encode(
    value: Any, *, name: str = "state", most_bytes: int = _ENCODED_BYTES, marks: bool | None = False
) -> bytes:  # fmt: skip
    """Encode a value so that :func:`decode` returns an equal one. UnsupportedError names what cannot be saved.

    Args:
        name: what messages call the value.
        marks: whether a dictionary of fewer than 14 entries is marked; None: if older readers cannot decode it.
        most_bytes: memory that its containers may take, beside what is in proportion to the size of the data.
    """
    budget = _Budget()
    try:
        data = _pack(_encode(value, name, 0, budget))
        if marks or (marks is None and budget.newer):
            assert 0x80 <= data[0] < 0x8E
            data = bytes((data[0] + 1,)) + _MARK + data[1:]
    except (ValueError, OverflowError) as error:  # msgpack's lengths end at 4 GiB
        raise UnsupportedError(f"{name} is too large to be saved: {error}") from None
    if budget.spent_bytes > most_bytes + _TIMES * len(data):
        raise UnsupportedError(f"{name} has too many small containers to be saved; {_ADVICE}")
    return data


def with_entry(data: bytes, key: str, value: Any) -> bytes:
    """Add an entry to an encoded dictionary of fewer than 15; ValueError for anything else."""
    if not 0x80 <= data[0] < 0x8F:  # msgpack's small map: its length in the low bits
        raise ValueError("no dictionary of less than 15 entries")
    return (
        bytes((data[0] + 1,)) + data[1:] + _pack(key) + encode(value, name=f"state[{key!r}]", most_bytes=_ADDED_BYTES)
    )


def is_newer(data: bytes) -> bool:
    """Whether this is a marked dictionary, which older readers cannot decode."""
    return data[1 : 1 + len(_MARK)] == _MARK


@dataclass(frozen=True, eq=False)
class OfTorch:
    """A value of torch's, as it is stored: its code, and what :data:`_DECODERS` makes the value of."""

    code: int
    content: Any

    def number(self) -> Any:
        """The number in a tensor of one element that numpy has the type of; itself for anything else."""
        try:
            if self.code not in (TENSOR, PARAMETER) or math.prod(self.content[1]) != 1:
                return self
            return np.frombuffer(self.content[3], self.content[0])[0].item()
        except (TypeError, ValueError, LookupError):
            return self


def decode(data: bytes, *, name: str = "the extra state", without_torch: bool = False) -> Any:
    """The value that was encoded; CorruptCheckpointError, which calls it ``name``, for other data.

    Args:
        without_torch: do not import torch; its values come as :class:`OfTorch`.
    """
    budget = _Budget(_DECODED_BYTES + _TIMES * len(data))
    decoders = {**_DECODERS, **_WITHOUT_TORCH} if without_torch else _DECODERS
    return _decode(_unpack(data, name, budget), name, 0, budget, decoders)


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass"))


def _unpack(data: bytes, name: str, budget: _Budget) -> Any:
    try:
        # Lengths are bounded by the data's own; a timestamp is msgpack's extension -1, which encode never writes.
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, unicode_errors="surrogatepass", timestamp=0,
            list_hook=budget.take_list, object_hook=budget.take_dict, ext_hook=budget.take_extension,
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise CorruptCheckpointError(f"{name} is damaged: {str(error) or type(error).__name__}") from None


# --------------------------------------------------------------------------------------------------------- encoding


def _encode(value: Any, path: _Path, depth: int, budget: _Budget) -> Any:
    """The value in msgpack's own types and extensions."""
    if depth > MAX_DEPTH:
        raise UnsupportedError(f"{_short(path)} is nested more than {MAX_DEPTH} deep, or contains itself")
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else msgpack.ExtType(INTEGER, _integer(value, path))
    if kind is list:
        budget.take(_LIST_BYTES)
        return _items(value, path, depth, budget)
    if kind is dict and _STRINGS.issuperset(map(type, value)):
        budget.take_dict(value)
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: _encode(item, (path, key), depth + 1, budget) for key, item in value.items()}
    if kind in _CONTAINERS:
        code, parts = _CONTAINERS[kind]
        content = parts(value, path, depth, budget)
        budget.take(_cost(code, content) + _LIST_BYTES)
        return msgpack.ExtType(code, _pack(content))
    encoded = _encode_leaf(value, path)
    budget.newer |= encoded.code in (PERMUTED, STORED, NAMED)
    budget.data_bytes += len(encoded.data)
    if budget.data_bytes > MAX_EXTRA_BYTES - _ADDED_BYTES:
        raise UnsupportedError(
            f"{_short(path)}: all values up to this one have {budget.data_bytes} bytes, more than state.msgpack can "
            f"hold; {_ADVICE}"
        )
    budget.take(_cost(encoded.code, []) + 3 * _LIST_BYTES)  # at most three lists: its parts, its shape and its order
    return encoded


def _encode_leaf(value: Any, path: _Path) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        code, plain = _LEAVES[kind]
        try:
            return msgpack.ExtType(code, _pack(plain(value)))
        except ValueError as error:
            raise UnsupportedError(f"{_short(path)}: {error} cannot be saved; {_ADVICE}") from None
    if kind is Stored:
        return msgpack.ExtType(
            STORED, _pack([value.name, value.alone, value.parameter, value.requires_grad, value.apart])
        )
    if kind is Named:
        return msgpack.ExtType(NAMED, _pack([value.optimizer, value.parameter]))
    if kind is np.ndarray or isinstance(value, np.generic):
        return _encode_numpy(value, path)
    encoded = _encode_torch(value, path) if "torch" in sys.modules else None
    if encoded is None:
        raise UnsupportedError(f"{_short(path)}: {_describe(value)} cannot be saved; {_ADVICE}")
    return encoded


_ADVICE = (
    "keep it out of the state, or have state_dict() return numbers, strings, containers, arrays or tensors instead"
)


def _describe(value: Any) -> str:
    kind = type(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function or class {value.__qualname__}"
    full = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of type {full}"


def _text(path: _Path) -> str:
    keys = []
    while not isinstance(path, str):
        path, key = path
        keys.append(f"[{key!r}]")
    return path + "".join(reversed(keys))


def _short(path: _Path) -> str:
    text = _text(path)
    return text if len(text) <= 300 else f"{text[:200]} … {text[-80:]}"


def _items(values: Any, path: _Path, depth: int, budget: _Budget) -> list[Any]:
    if _PLAIN.issuperset(map(type, values)):
        return list(values)
    return [_encode(item, (path, i), depth + 1, budget) for i, item in enumerate(values)]


def _pairs(value: Any, path: _Path, depth: int, budget: _Budget) -> list[Any]:
    """Keys and values in turn, because msgpack's own maps take string keys only."""
    flat = []
    for key, item in value.items():
        flat.append(_encode(key, f"{_text(path)} (the key {str(key)[:60]!r})", depth + 1, budget))
        flat.append(_encode(item, (path, key), depth + 1, budget))
    return flat


def _members(values: Any, path: _Path, depth: int, budget: _Budget) -> list[Any]:
    """Members of a set, in an order that is the same in every run."""
    members = [_encode(item, f"{_text(path)} (the member {str(item)[:60]!r})", depth + 1, budget) for item in values]
    return sorted(members, key=_pack)


def _default(value: Any, path: _Path, depth: int, budget: _Budget) -> list[Any]:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise UnsupportedError(f"{_short(path)}: the defaultdict's factory {factory!r} cannot be saved; {_ADVICE}")
    return [None if factory is None else factory.__name__, *_pairs(value, path, depth, budget)]


_CONTAINERS: Mapping[type, tuple[int, Callable[[Any, _Path, int, _Budget], list[Any]]]] = {
    tuple: (TUPLE, _items),
    dict: (DICT, _pairs),
    set: (SET, _members),
    frozenset: (FROZENSET, _members),
    collections.deque: (DEQUE, lambda value, path, depth, budget: [value.maxlen, *_items(value, path, depth, budget)]),
    collections.Counter: (COUNTER, _pairs),
    collections.OrderedDict: (ORDERED, _pairs),
    collections.defaultdict: (DEFAULT, _default),
    slice: (
        SLICE,
        lambda value, path, depth, budget: _items((value.start, value.stop, value.step), path, depth, budget),
    ),
    range: (
        RANGE,
        lambda value, path, depth, budget: _items((value.start, value.stop, value.step), path, depth, budget),
    ),
}


def _integer(value: int, path: _Path) -> bytes:
    size = value.bit_length() // 8 + 1
    if size > _MAX_INTEGER_BYTES:
        raise UnsupportedError(f"{_short(path)}: an integer of {size} bytes cannot be saved; {_ADVICE}")
    return value.to_bytes(size, "little", signed=True)


def _clock(value: Any) -> list[Any]:
    """The wall-clock parts of a datetime or time, with its zone if that is a fixed offset."""
    zone = value.tzinfo
    if zone is not None and type(zone) is not datetime.timezone:
        raise ValueError(f"a time whose zone is {zone!r}, no datetime.timezone,")
    date = [value.year, value.month, value.day] if isinstance(value, datetime.datetime) else []
    parts = [*date, value.hour, value.minute, value.second, value.microsecond, value.fold]
    return [*parts, None if zone is None else _zone(zone)]


def _zone(zone: datetime.timezone) -> list[Any]:
    offset, name = zone.utcoffset(None), zone.tzname(None)
    # A nameless zone differs from one whose name spells the same offset.
    named = repr(zone).count(",") > repr(datetime.timezone(offset)).count(",")
    return [*_delta(offset), name if named else None]


def _delta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


_LEAVES: Mapping[type, tuple[int, Callable[[Any], Any]]] = {
    complex: (COMPLEX, lambda value: [value.real, value.imag]),
    bytearray: (BYTEARRAY, bytes),
    type(pathlib.Path()): (PATH, str),
    datetime.datetime: (DATETIME, _clock),
    datetime.time: (TIME, _clock),
    datetime.date: (DATE, lambda value: [value.year, value.month, value.day]),
    datetime.timedelta: (TIMEDELTA, _delta),
    datetime.timezone: (TIMEZONE, _zone),
}


def _encode_numpy(value: Any, path: _Path) -> Any:
    dtype = value.dtype.str
    if not _NUMPY_DTYPE.fullmatch(dtype) or value.dtype.metadata:
        raise UnsupportedError(f"{_short(path)}: a numpy array of dtype {value.dtype} cannot be saved; {_ADVICE}")
    if isinstance(value, np.generic):
        # An empty string has no bytes; numpy would give one character's.
        return msgpack.ExtType(SCALAR, _pack([dtype, value.tobytes()[: value.dtype.itemsize]]))
    return msgpack.ExtType(ARRAY, _pack([dtype, list(value.shape), value.tobytes()]))


def _encode_torch(value: Any, path: _Path) -> Any:
    import torch

    kind = type(value)
    if kind is torch.Size:
        return msgpack.ExtType(SIZE, _pack(list(value)))
    if kind is torch.dtype:
        return msgpack.ExtType(DTYPE, _pack(str(value).removeprefix("torch.")))
    if kind is torch.device:
        return msgpack.ExtType(DEVICE, _pack([value.type, value.index]))
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or dtype not in STORED_TYPES or value.device.type == "meta":
        raise UnsupportedError(
            f"{_short(path)}: a {value.layout} tensor of {value.dtype} on {value.device} cannot be saved; {_ADVICE}"
        )
    # resolve_*: the memory of a lazily conjugated or negated tensor does not hold its value yet.
    from checkflow.core.state import memory_order

    order = memory_order(value)
    permuted = order is not None and value.numel() and order != tuple(range(value.dim()))
    # The clone has plain strides: contiguous() keeps odd ones in dimensions of size 1.
    plain = value.detach().permute(order) if permuted and order else value.detach()
    plain = plain.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    code = PARAMETER if kind is torch.nn.Parameter else TENSOR
    content = [dtype, list(value.shape), value.requires_grad, data]
    if permuted:
        return msgpack.ExtType(PERMUTED, _pack([code, order, *content]))
    return msgpack.ExtType(code, _pack(content))


# --------------------------------------------------------------------------------------------------------- decoding


def _decode(node: Any, name: str, depth: int, budget: _Budget, decoders: Mapping[int, Callable[[Any], Any]]) -> Any:
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"{name} is damaged: it is nested too deep")
    kind = type(node)
    if kind is list:
        return [_decode(item, name, depth + 1, budget, decoders) for item in node]
    if kind is dict:
        return {key: _decode(item, name, depth + 1, budget, decoders) for key, item in node.items()}
    if kind in _PLAIN or kind is int:
        return node
    if kind is not msgpack.ExtType or node.code not in _DECODERS:
        raise CorruptCheckpointError(f"{name} is damaged: it has a value of unknown type")
    try:
        if node.code == INTEGER:
            return int.from_bytes(node.data[:_MAX_INTEGER_BYTES], "little", signed=True)
        content = _unpack(node.data, name, budget)
        if node.code in _NESTING:
            if type(content) is not list:
                raise TypeError("not a list")
            budget.take(_cost(node.code, content) - _cost(node.code, []))
            content = [_decode(item, name, depth + 1, budget, decoders) for item in content]
        return decoders[node.code](content)
    except (ValueError, TypeError, OverflowError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
        detail = str(error).partition("\n")[0]
        raise CorruptCheckpointError(f"{name} is damaged: a value of type code {node.code}: {detail}") from None


def _to_pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _to_default(content: list[Any]) -> Any:
    factory = None if content[0] is None else _FACTORIES[content[0]]
    return collections.defaultdict(factory, _to_pairs(content[1:]))


def _to_zone(content: Any) -> datetime.timezone | None:
    if content is None:
        return None
    *parts, name = content
    offset = datetime.timedelta(*_ints(parts))
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _to_clock(kind: Callable[..., Any], content: list[Any]) -> Any:
    *parts, fold, zone = content
    return kind(*_ints(parts), tzinfo=_to_zone(zone), fold=fold)


def _ints(values: list[Any]) -> list[int]:
    if any(type(value) is not int for value in values):
        raise TypeError("not an integer")
    return values


def _numpy_dtype(text: str) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError("no dtype that is saved")
    return np.dtype(text)


def _to_array(content: list[Any]) -> Any:
    text, shape, data = content
    dtype = _numpy_dtype(text)
    if dtype.itemsize * math.prod(_ints(shape)) != len(data):
        raise ValueError("the size does not fit the shape")
    if not dtype.itemsize:
        return np.ndarray(shape, dtype)  # np.empty would add a character to each element
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _to_scalar(content: list[Any]) -> Any:
    text, data = content
    dtype = _numpy_dtype(text)
    if dtype.itemsize != len(data):
        raise ValueError("the size does not fit the type")
    # Through an array, so that every type comes back as itself (datetime64 with its unit, empty strings).
    return np.frombuffer(data, dtype)[0] if data else np.empty(1, dtype)[0]


def _to_tensor(content: list[Any], *, parameter: bool) -> Any:
    import torch

    name, shape, requires_grad, data = content
    if name not in STORED_TYPES or type(requires_grad) is not bool:
        raise ValueError("no tensor that is saved")
    dtype = getattr(torch, name)
    if dtype.itemsize * math.prod(_ints(shape)) != len(data) or min(shape, default=0) < 0:
        raise ValueError("the size does not fit the shape")
    if data:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    return _with_grad(tensor, parameter, requires_grad)


def _with_grad(tensor: Any, parameter: bool, requires_grad: bool) -> Any:
    import torch

    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _to_permuted(content: list[Any]) -> Any:
    code, order, dtype, shape, requires_grad, data = content
    if code not in (TENSOR, PARAMETER) or sorted(_ints(order)) != list(range(len(shape))):
        raise ValueError("no tensor that is saved")
    stored = _to_tensor([dtype, [shape[d] for d in order], False, data], parameter=False)
    return _with_grad(stored.permute([order.index(d) for d in range(len(order))]), code == PARAMETER, requires_grad)


def _to_stored(content: list[Any]) -> Stored:
    if [type(one) for one in content] != [str, bool, bool, bool, bool]:
        raise ValueError("no state tensor")
    return Stored(*content)


def _to_named(content: list[Any]) -> Named:
    if [type(one) for one in content] != [str, str]:
        raise ValueError("no parameter")
    return Named(*content)


def _to_torch_dtype(name: str) -> Any:
    import torch

    found = vars(torch).get(name)
    if type(found) is not torch.dtype:
        raise ValueError("no dtype of torch")
    return found


def _to_bytearray(content: Any) -> bytearray:
    if type(content) is not bytes:  # bytearray(number) makes that many zeros
        raise TypeError("not bytes")
    return bytearray(content)


def _to_size(content: list[Any]) -> Any:
    import torch

    return torch.Size(_ints(content))


def _to_device(content: list[Any]) -> Any:
    import torch

    kind, index = content
    if type(kind) is not str or (index is not None and type(index) is not int):
        raise ValueError("no device")
    return torch.device(kind) if index is None else torch.device(kind, index)


_DECODERS: Mapping[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    DICT: lambda content: dict(_to_pairs(content)),
    SET: set,
    FROZENSET: frozenset,
    DEQUE: lambda content: collections.deque(content[1:], maxlen=content[0]),
    COUNTER: lambda content: collections.Counter(dict(_to_pairs(content))),
    ORDERED: lambda content: collections.OrderedDict(_to_pairs(content)),
    DEFAULT: _to_default,
    INTEGER: int,
    COMPLEX: lambda content: complex(*content),
    BYTEARRAY: _to_bytearray,
    RANGE: lambda content: range(*content),
    SLICE: lambda content: slice(*content),
    PATH: pathlib.Path,
    DATETIME: lambda content: _to_clock(datetime.datetime, content),
    DATE: lambda content: datetime.date(*content),
    TIME: lambda content: _to_clock(datetime.time, content),
    TIMEDELTA: lambda content: datetime.timedelta(*_ints(content)),
    TIMEZONE: _to_zone,
    ARRAY: _to_array,
    SCALAR: _to_scalar,
    TENSOR: lambda content: _to_tensor(content, parameter=False),
    PARAMETER: lambda content: _to_tensor(content, parameter=True),
    SIZE: _to_size,
    DTYPE: _to_torch_dtype,
    DEVICE: _to_device,
    PERMUTED: _to_permuted,
    STORED: _to_stored,
    NAMED: _to_named,
}
_WITHOUT_TORCH: Mapping[int, Callable[[Any], Any]] = {
    code: functools.partial(OfTorch, code) for code in (TENSOR, PARAMETER, PERMUTED, SIZE, DTYPE, DEVICE)
}  # fmt: skip
_COSTS = {
    TENSOR: 1600,
    PARAMETER: 1600,
    PERMUTED: 1600,
    DEQUE: 1024,
    ARRAY: 960,
    SCALAR: 200,
}  # bytes beyond those of other extensions
_HASHING = frozenset((DICT, SET, FROZENSET, COUNTER, ORDERED, DEFAULT))


def _cost(code: int, content: list[Any]) -> int:
    """Bytes of memory that an extension takes."""
    return _COSTS.get(code, _EXTENSION_BYTES) + (_MEMBER_BYTES * len(content) if code in _HASHING else 0)


_NESTING = frozenset((TUPLE, DICT, SET, FROZENSET, DEQUE, COUNTER, ORDERED, DEFAULT, RANGE, SLICE))
