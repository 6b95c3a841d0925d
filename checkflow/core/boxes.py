"""Boxes of tensors: what one rank holds of a tensor, and which part of it that rank copies. Free of torch.

Elements are counted row-major within a box, unless an ``order`` gives the dimensions by memory, outermost first.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

SMALL_BYTES = 65536  # smaller tensors are not cut, and no cut moves by more than this

Shape = tuple[int, ...]
_Span = tuple[Shape, Shape]  # offsets and lengths
_BOX = re.compile(r"\[\d+:\d+(,\d+:\d+)*\]\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: ``lengths`` elements from ``offsets`` on, in each dimension of the tensor's ``shape``.

    Raises:
        ValueError: it does not lie in the tensor.
    """

    shape: Shape
    offsets: Shape
    lengths: Shape

    def __post_init__(self) -> None:
        if not lies_in(self.shape, self.offsets, self.lengths):
            raise ValueError(
                f"a box of shape {list(self.lengths)} at {list(self.offsets)} does not lie in {list(self.shape)}"
            )

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return math.prod(self.lengths)

    @property
    def is_whole(self) -> bool:
        return self.lengths == self.shape

    def __str__(self) -> str:
        """As in the key of a file: ``[0:4,8:16]``."""
        return f"[{','.join(f'{o}:{o + n}' for o, n in zip(self.offsets, self.lengths, strict=True))}]"


def part_name(tensor: str, box: Box) -> str:
    """The name of a part in a rank's plan and layout, and so its key in the file: ``model/weight[0:4,0:8]``."""
    return tensor if box.is_whole else f"{tensor}{box}"


def tensor_of(part: str) -> str:
    """The state tensor that a :func:`part_name` is of."""
    return _BOX.sub("", part)


def lies_in(shape: Shape, offsets: Shape, lengths: Shape) -> bool:
    if not len(shape) == len(offsets) == len(lengths):
        return False
    for o, n, size in zip(offsets, lengths, shape, strict=True):  # noqa: SIM110 - a generator is slow, and there are many
        if o < 0 or n < 0 or o + n > size:
            return False
    return True


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    sizes = tuple(shape)
    return Box(sizes, (0,) * len(sizes), sizes)


def common(one: Box, other: Box) -> Box | None:
    """The elements that two boxes of a tensor share; None if there are none."""
    begins = tuple(map(max, one.offsets, other.offsets))
    ends = map(min, _ends(one), _ends(other))
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(one.shape, begins, lengths) if all(length > 0 for length in lengths) else None


def overlap(offsets: Shape, lengths: Shape, box: Box) -> bool:
    """Whether :func:`common` finds elements, without making a box: for tens of thousands of pieces."""
    for a, n, b, m in zip(offsets, lengths, box.offsets, box.lengths, strict=True):
        if a + n <= b or b + m <= a or not n or not m:
            return False
    return True


def _ends(box: Box) -> Shape:
    return tuple(o + n for o, n in zip(box.offsets, box.lengths, strict=True))


def flat_range(box: Box, begin: int, end: int, order: Sequence[int] | None = None) -> Iterator[Box]:
    """The elements ``begin`` to ``end`` - 1 of a box as boxes: at most two for each dimension, less one.

    They follow each other in memory, and each lies there without a gap.
    """
    dimensions = range(len(box.shape)) if order is None else order
    place = [list(dimensions).index(d) for d in range(len(box.shape))]
    for offsets, lengths in _spans(tuple(box.lengths[d] for d in dimensions), begin, end):
        yield Box(
            box.shape,
            tuple(first + offsets[at] for first, at in zip(box.offsets, place, strict=True)),
            tuple(lengths[at] for at in place),
        )


def _spans(lengths: Shape, begin: int, end: int) -> Iterator[_Span]:
    if begin >= end:
        return
    if not lengths:
        yield (), ()
        return
    row = math.prod(lengths[1:])
    (first, skipped), (last, more) = divmod(begin, row), divmod(end, row)
    if first == last:  # within one row
        yield from (((first, *o), (1, *n)) for o, n in _spans(lengths[1:], skipped, more))
        return
    if skipped:
        yield from (((first, *o), (1, *n)) for o, n in _spans(lengths[1:], skipped, row))
        first += 1
    if first < last:
        yield (first, *(0 for _ in lengths[1:])), (last - first, *lengths[1:])
    yield from (((last, *o), (1, *n)) for o, n in _spans(lengths[1:], 0, more))


def runs(inner: Box, outer: Box) -> Iterator[tuple[int, int]]:
    """Where the elements of a box lie in one that contains it: (first element, number), as few as there can be."""
    if not inner.volume:
        return
    split = len(outer.lengths)  # dimensions from here on lie in the run
    while split and inner.lengths[split - 1] == outer.lengths[split - 1]:
        split -= 1
    split = max(0, split - 1)
    strides = [math.prod(outer.lengths[d + 1 :]) for d in range(len(outer.lengths))]
    at = [o - p for o, p in zip(inner.offsets, outer.offsets, strict=True)]
    begin = sum(first * stride for first, stride in zip(at, strides, strict=True))
    count = math.prod(inner.lengths[split:])
    for index in itertools.product(*map(range, inner.lengths[:split])):
        yield begin + sum(i * stride for i, stride in zip(index, strides, strict=False)), count


def coverage_fault(shape: Shape, boxes: Iterable[Box]) -> str:
    """Where boxes do not cover a tensor exactly once, as the end of a sentence about it; "" if they do."""
    if 0 in shape:
        return ""
    filled = [(box.offsets, box.lengths) for box in boxes if box.volume]
    if (found := _first_fault(shape, filled, 0)) is None:
        return ""
    times, place = found
    where = f"[{','.join(f'{begin}:{end}' for begin, end in place)}]"
    if not times:
        return f"is not covered by its pieces: {where} is missing"
    return f"has pieces that overlap: {where} is there {'twice' if times == 2 else f'{times} times'}"


def _first_fault(shape: Shape, boxes: list[_Span], dim: int) -> tuple[int, list[tuple[int, int]]] | None:
    """The first place that not one box covers, and by how many it is covered; dimensions before ``dim`` agree."""
    if not boxes:
        return 0, [(0, size) for size in shape[dim:]]
    if len(boxes) == 1 and boxes[0][1][dim:] == shape[dim:]:
        return None
    if dim == len(shape):
        return len(boxes), []
    waiting = sorted(boxes, key=lambda box: box[0][dim], reverse=True)
    edges = {0, shape[dim]}
    for offsets, lengths in boxes:
        edges |= {offsets[dim], offsets[dim] + lengths[dim]}
    here: list[_Span] = []
    for begin, end in itertools.pairwise(sorted(edges)):
        here = [box for box in here if box[0][dim] + box[1][dim] > begin]
        while waiting and waiting[-1][0][dim] == begin:
            here.append(waiting.pop())
        if (found := _first_fault(shape, here, dim + 1)) is not None:
            return found[0], [(begin, end), *found[1]]
    return None


# -------------------------------------------------------------------------------------------------- who copies what


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of a state tensor, and which ranks hold the same.

    Args:
        box: the rank's part of the tensor.
        holders: the ranks that share the copying of this box, ascending. A rank that is not among them copies nothing.
        group: the tensors of one group are divided together.
        order: the box's dimensions by memory, outermost first; None: row-major.
    """

    name: str
    box: Box
    element_bytes: int
    holders: tuple[int, ...]
    group: int = 0
    order: tuple[int, ...] | None = None


def shares(held: Iterable[Held], rank: int) -> dict[str, tuple[Box, ...]]:
    """What ``rank`` copies of what it holds, by name; together, the holders of a box copy it exactly once.

    The tensors of a group that have the same holders lie end to end, by name. The i-th of R holders takes the i-th of R
    equal parts. A cut moves back to a row, or to the start of a tensor below ``SMALL_BYTES``. Rows are those of the
    outermost dimension in which a row has at most ``SMALL_BYTES``: so a rank has at most 1/R of the bytes, and
    ``SMALL_BYTES``, and its part of a tensor is without gaps in memory.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[Held]] = {}
    for one in held:
        if rank in one.holders:
            groups.setdefault((one.group, one.holders), []).append(one)
    found: dict[str, tuple[Box, ...]] = {}
    for (_, holders), members in groups.items():
        total = sum(one.box.volume * one.element_bytes for one in members)
        place = holders.index(rank)
        begin, end = (total * at // len(holders) for at in (place, place + 1))
        done = 0
        for one in sorted(members, key=lambda one: one.name):
            size = one.box.volume * one.element_bytes
            first, last = (_cut(one, size, at - done) // one.element_bytes for at in (begin, end))
            done += size
            if first == 0 and last == one.box.volume:
                if size or (place == 0 and 0 in one.box.shape):  # of an empty tensor, one piece
                    found[one.name] = (one.box,)
            elif first < last:
                found[one.name] = tuple(flat_range(one.box, first, last, one.order))
    return found


def first_element(held: Held, box: Box) -> int:
    """Where in the memory of what a rank holds a box begins, in elements; the boxes of a share have no gaps there."""
    at, stride = 0, 1
    for d in reversed(range(len(box.shape)) if held.order is None else held.order):
        at += (box.offsets[d] - held.box.offsets[d]) * stride
        stride *= held.box.lengths[d]
    return at


def _cut(one: Held, size: int, at: int) -> int:
    """Where in a tensor, in bytes, a cut at ``at`` falls."""
    if not 0 < at < size:
        return min(max(0, at), size)
    step = size
    if size >= SMALL_BYTES:
        for d in range(len(one.box.shape)) if one.order is None else one.order:
            if step <= SMALL_BYTES:
                break
            step //= one.box.lengths[d]
    return at // step * step
