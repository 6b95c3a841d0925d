"""What shows whether a loader repeats itself: indices, or digests of contents, of an epoch's first batch and the last.

A batch's digest is taken when it is handed out, since loops change batches in place. It takes microseconds: some
kilobytes of each tensor, spread over it. Tensors on devices are not touched.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
import xxhash

from checkflow.core.errors import MismatchError

logger = logging.getLogger("checkflow")

MOST_BYTES = 32 << 10  # of one batch that are read; a checkpoint has two batches
MOST_PARTS = 8  # of one batch: each takes some microseconds
MOST_INDICES = 32
_PIECES = 4  # of one tensor
_DEPTH = 8
_WHOLE = "?bBhHiIlLqQ"  # memoryview's formats
_ITSELF = torch.Tensor.__torch_dispatch__  # of tensors that are no other's wrappers
_NUMBERS = (bool, int, float, complex, type(None), np.generic)


def ranks() -> int:
    """How many processes train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


class Mark(NamedTuple):
    """A batch that was handed out.

    Attributes:
        at: what of its epoch comes before it, in what the loader's position counts.
        what: its indices, or what :func:`digest` gave.
    """

    at: int
    what: Sequence[Any]
    indices: bool

    def state(self, *, last: bool) -> list[Any]:
        """As extra state: of indices, the first or the last ones."""
        if not self.indices:
            return [self.at, list(self.what), False]
        begin = max(0, len(self.what) - MOST_INDICES) if last else 0
        return [self.at + begin, [_plain(index) for index in self.what[begin : begin + MOST_INDICES]], True]


class Used(NamedTuple):
    """Batches that reached a step: the first of the epoch that the last one is of, and that one."""

    epoch: int = -1
    first: Mark | None = None
    last: Mark | None = None

    def then(self, epoch: int, mark: Mark | None) -> Used:
        """This batch is used after these."""
        return Used(epoch, self.first if epoch == self.epoch and self.first is not None else mark, mark)

    def state(self) -> dict[str, Any] | None:
        """As extra state; None: nothing can be compared."""
        if self.first is None or self.last is None:
            return None
        first, last = self.first.state(last=False), self.last.state(last=True)
        return {"epoch": self.epoch, "first": first, "last": last, "ranks": ranks()}

    @classmethod
    def read(cls, state: Mapping[str, Any] | None) -> Used:
        """From that; nothing, of another number of ranks: each had its own batches."""
        if state is None or state["ranks"] != ranks():
            return cls()
        return cls(state["epoch"], Mark(*state["first"]), Mark(*state["last"]))


class Comparison:
    """What a checkpoint says of its epoch's first batch and of the last that was used, held against what comes now.

    Args:
        used: what it says; nothing, perhaps.
        accepted: whether a difference is accepted, and logged.
    """

    def __init__(self, used: Used | None = None, *, accepted: bool = False) -> None:
        used = used or Used()
        self._epoch, self._marks = used.epoch, [mark for mark in (used.first, used.last) if mark is not None]
        self._accepted = accepted
        self._told = False  # that augmentation does not repeat
        # Which parts tell one batch from another: those that differ between both, so not positions of tokens. None: it
        # is one batch.
        self._telling: set[int] | None = None
        if len(self._marks) == 2 and self._marks[0].at != self._marks[1].at:
            both = enumerate(zip(self._marks[0].what, self._marks[1].what, strict=False))
            self._telling = {part for part, (one, two) in both if one != two}

    def batch(self, epoch: int, number: int, batch: Any) -> None:
        """This batch was fetched again.

        Raises:
            MismatchError: it is another one.
        """
        for mark in self._marks:
            if (epoch, number, False) == (self._epoch, mark.at, mark.indices):
                now = digest(batch)
                other = [part for part, one in enumerate(mark.what) if part >= len(now) or now[part] != one]
                if not other and len(now) == len(mark.what):
                    continue
                said = f"batch {number} of epoch {epoch}, fetched again, is another one than was used: "
                if len(now) != len(mark.what):
                    self._differs(f"{said}it has {len(now)} tensors, arrays or texts, and had {len(mark.what)}")
                elif self._tells(batch).difference(other):
                    told, self._told = self._told, True
                    if not told:
                        logger.warning(
                            "batch %d of epoch %d, fetched again, has the labels or names that it had, and %d of its "
                            "%d tensors, arrays or texts differ: the loader's augmentation does not repeat", number,
                            epoch, len(other), len(now),
                        )  # fmt: skip
                else:
                    self._differs(f"{said}{len(other)} of its {len(now)} tensors, arrays or texts differ")
                return

    def _tells(self, batch: Any) -> set[int]:
        """Which of its parts say which samples it has."""
        if self._telling is not None:
            return self._telling
        return {part for part, named in enumerate(name_samples(batch)) if named}

    def skip(self, why: str) -> None:
        """Nothing of it comes again."""
        if self._marks:
            self._marks = []
            tell_uncompared(why)

    def samples(self, epoch: int, order: Iterable[Any]) -> Iterator[Any]:
        """An epoch's order, from its begin, compared as it goes by.

        Raises:
            MismatchError: it is another one.
        """
        known = self._known(epoch)
        return self._samples(epoch, known, iter(order)) if known else iter(order)

    def batches(self, epoch: int, order: Iterable[Iterable[Any]]) -> Iterator[Any]:
        """Likewise, of an order of batches."""
        known = self._known(epoch)
        return self._batches(epoch, known, iter(order)) if known else iter(order)

    def _samples(self, epoch: int, known: dict[int, Any], order: Iterator[Any]) -> Iterator[Any]:
        place = 0
        for at in sorted(known):
            yield from itertools.islice(order, at - place)
            for index in itertools.islice(order, 1):
                self._compare(epoch, at, known[at], index)
                yield index
                break
            else:
                self._differs(f"the order of epoch {epoch} ends before sample {at}, which was used")
            place = at + 1
        yield from order

    def _batches(self, epoch: int, known: dict[int, Any], order: Iterator[Iterable[Any]]) -> Iterator[Any]:
        place = 0
        for batch in order:
            indices = list(batch)
            for at, index in enumerate(indices, place):
                if at in known:
                    self._compare(epoch, at, known[at], index)
            place += len(indices)
            yield indices
            if place > max(known):
                break
        else:
            if place <= max(known):
                self._differs(f"the order of epoch {epoch} ends before sample {max(known)}, which was used")
        yield from order

    def _known(self, epoch: int) -> dict[int, Any]:
        """Indices by their places in the order."""
        marks = [mark for mark in self._marks if mark.indices and epoch == self._epoch]
        return {mark.at + number: index for mark in marks for number, index in enumerate(mark.what)}

    def _compare(self, epoch: int, at: int, known: Any, index: Any) -> None:
        now = _plain(index)
        if now != known and None not in (now, known):
            self._differs(f"sample {at} of epoch {epoch}, in the loader's order, was {known!r}, and is {now!r} now")

    def _differs(self, how: str) -> None:
        if not self._marks:
            return
        if not self._accepted:
            raise MismatchError(
                f"the loader does not repeat what it gave before: {how}; samples would be used twice or never. Have "
                "its order follow from set_epoch, a seed or a generator in an attribute, resume from the end of an "
                'epoch, or pass accept=("loader",)'
            )
        self._marks = []
        logger.warning(
            "the loader does not repeat what it gave before, which accept= allows: %s; samples are used twice or never",
            how,
        )


def tell_uncompared(why: str) -> None:
    """Say, once for a start, that nothing is compared."""
    logger.info("nothing shows whether the loader goes on with the samples that come next: %s", why)


def _plain(index: Any) -> Any:
    """What can be compared, in another process, too; None: it cannot."""
    if isinstance(index, np.integer) or (isinstance(index, torch.Tensor) and index.numel() == 1):
        index = index.item()
    if isinstance(index, list | tuple):
        return [_plain(one) for one in index]
    return index if isinstance(index, int | str | bytes) else None


def digest(batch: Any) -> list[int]:
    """Of each of a batch's parts: tensors, arrays, texts, rows of numbers; not what lies on devices. Of a batch that
    cannot be looked into, nothing: training goes on with it."""
    try:
        parts = _parts_of(batch)
        most = MOST_BYTES // max(1, len(parts))
        return [_hashed(part, most) for part in parts]
    except Exception as error:  # noqa: BLE001 - of containers that are not what they seem, and of odd tensors
        logger.debug("nothing of a batch can be compared: %s", error)
        return []


def name_samples(batch: Any) -> list[bool]:
    """Whether each part names samples: whole numbers or text (labels, tokens, keys), and not all of them the same.
    Augmentation leaves these as they are."""
    return [_names_samples(part) for part in _parts_of(batch)]


def _parts_of(batch: Any) -> list[torch.Tensor | memoryview]:
    return list(itertools.islice(_parts(batch, _DEPTH), MOST_PARTS))


def _parts(value: Any, depth: int) -> Iterator[torch.Tensor | memoryview]:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        plain = value.is_cpu and value.layout is torch.strided and not value.is_nested and not value.is_quantized
        if plain and value.nbytes and kind.__torch_dispatch__ is _ITSELF:
            yield value
    elif issubclass(kind, np.ndarray):
        if value.size and value.dtype.kind in "biufc":
            yield _view(value if value.flags.c_contiguous else np.ascontiguousarray(_thinned(value)))
    elif issubclass(kind, str):
        if len(value) > MOST_BYTES:
            value = f"{value[: MOST_BYTES // 2]}{len(value)}{value[-MOST_BYTES // 2 :]}"
        yield memoryview(value.encode(errors="replace"))
    elif issubclass(kind, bytes | bytearray):
        yield memoryview(value)
    elif issubclass(kind, _NUMBERS):
        yield _row([value])
    elif not depth:
        return
    elif issubclass(kind, list | tuple):
        if value and issubclass(type(value[0]), _NUMBERS):
            yield _row([one for one in value[:MOST_INDICES] if issubclass(type(one), _NUMBERS)])
        else:
            for one in value[:: -(-len(value) // MOST_PARTS) or 1]:
                yield from _parts(one, depth - 1)
    elif issubclass(kind, Mapping):
        for key in value:
            yield from _parts(value[key], depth - 1)
    elif type(attributes := getattr(value, "__dict__", None)) is dict:  # a container of the user's own, or a library's
        yield from _parts(attributes, depth // 2)


def _row(numbers: list[Any]) -> memoryview:
    row = np.array(numbers)
    return _view(row) if row.dtype.kind in "biufc" else memoryview(repr(numbers).encode())


def _view(array: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type] # numpy's types hide its buffer from Python 3.11


def _names_samples(part: torch.Tensor | memoryview) -> bool:
    if isinstance(part, torch.Tensor):
        some = part.detach().reshape(-1)[:MOST_INDICES]
        return not (part.is_floating_point() or part.is_complex()) and len(set(some.tolist())) > 1
    item, first = part.itemsize, bytes(part.cast("B")[: MOST_INDICES * part.itemsize])
    return part.format in _WHOLE and first != first[:item] * (len(first) // item)


def _hashed(part: torch.Tensor | memoryview, most: int) -> int:
    """Of its bytes, or of some pieces of them; a tensor's as they lie in memory, where its values fill that."""
    if not isinstance(part, torch.Tensor):
        data = part.cast("B")
        return _hash_of(lambda begin, end: data[begin:end], len(data), most)
    whole = part if part.is_contiguous() or _is_dense(part) else _thinned(part.detach()).contiguous()
    address = whole.data_ptr()  # NumPy's view of it would take several calls, each slow after an iteration
    return _hash_of(lambda begin, end: ctypes.string_at(address + begin, end - begin), whole.nbytes, most)


def _hash_of(read: Callable[[int, int], bytes | memoryview], size: int, most: int) -> int:
    if size <= most:
        return xxhash.xxh3_64_intdigest(read(0, size))
    found, piece = xxhash.xxh3_64(), most // _PIECES
    for number in range(_PIECES):
        begin = (size - piece) * number // (_PIECES - 1)
        found.update(read(begin, begin + piece))
    return found.intdigest()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values lie side by side, in whatever order (channels_last)."""
    count = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != count:
                return False
            count *= size
    return True


def _thinned(part: Any) -> Any:
    """Some elements of it, spread over all."""
    return part[tuple(slice(None, None, -(-size // 4)) for size in part.shape)]
