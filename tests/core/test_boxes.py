"""Boxes against numpy's own slices, and shares that are the state exactly once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.core import boxes
from checkflow.core.boxes import (
    SMALL_BYTES,
    Box,
    Held,
    common,
    coverage_fault,
    first_element,
    flat_range,
    overlap,
    part_name,
    runs,
    shares,
    tensor_of,
    whole,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    cuts = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(shape, tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that fill a tensor: it is cut in two again and again, anywhere."""
    found = [whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        n = draw(st.integers(0, box.lengths[d]))
        rest = box.lengths[d] - n
        moved = tuple(o + n * (i == d) for i, o in enumerate(box.offsets))
        found.append(Box(shape, box.offsets, tuple(n if i == d else m for i, m in enumerate(box.lengths))))
        found.append(Box(shape, moved, tuple(rest if i == d else m for i, m in enumerate(box.lengths))))
    return draw(st.permutations(found))


def part(array: np.ndarray, box: Box) -> np.ndarray:  # type: ignore[type-arg]
    return array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]


def numbered(shape: tuple[int, ...]) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize(
    ("offsets", "lengths"), [((0,), (2,)), ((0, 3), (2, 3)), ((-1, 0), (1, 1)), ((0, 0), (2, -1)), ((2, 0), (2, 5))]
)
def test_a_box_must_lie_in_its_tensor(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not lie in \[3, 5\]"):
        Box((3, 5), offsets, lengths)


@given(st.data(), st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_a_part_is_named_by_its_tensor_and_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    lengths = tuple(data.draw(st.integers(0, size - begin)) for size, begin in zip(shape, offsets, strict=True))
    for tensor in ("model/0.weight", "optimizer/a[0].b.exp_avg", "m/[x]"):
        assert tensor_of(part_name(tensor, Box(shape, offsets, lengths))) == tensor
    assert part_name("m/w", whole(shape)) == "m/w"


def test_a_box_is_named_as_a_slice() -> None:
    assert str(Box((3, 5), (1, 0), (2, 5))) == "[1:3,0:5]"
    assert str(whole(())) == "[]"
    assert Box((3,), (3,), (0,)).volume == 0
    assert whole(()).volume == 1
    assert whole((3, 5)).is_whole
    assert not Box((3,), (0,), (2,)).is_whole


@given(st.data(), SHAPES)
def test_what_two_boxes_share(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    expected = np.intersect1d(part(numbered(shape), one), part(numbered(shape), other))
    shared = common(one, other)
    assert shared == common(other, one)
    found = [] if shared is None else part(numbered(shape), shared).reshape(-1).tolist()
    assert sorted(found) == expected.tolist()
    assert shared is None or found
    assert overlap(one.offsets, one.lengths, other) == (shared is not None)


@given(st.data(), SHAPES)
def test_a_range_of_elements_is_few_boxes_that_follow_each_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    order = data.draw(st.permutations(range(len(shape))))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, box.volume)] * 2)))
    in_memory = part(numbered(shape), box).transpose(order).reshape(-1)
    found = list(flat_range(box, begin, end, order))
    elements = [part(numbered(shape), one).transpose(order).reshape(-1).tolist() for one in found]
    assert list(itertools.chain(*elements)) == in_memory[begin:end].tolist()
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(one.volume for one in found)


@given(st.data(), SHAPES)
def test_runs_of_a_box_in_another(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.lengths))
    moved = Box(shape, tuple(o + p for o, p in zip(outer.offsets, inner.offsets, strict=True)), inner.lengths)
    flat = part(numbered(shape), outer).reshape(-1)
    found = list(runs(moved, outer))
    elements = [n for begin, count in found for n in flat[begin : begin + count].tolist()]
    assert elements == part(numbered(shape), moved).reshape(-1).tolist()


def test_runs_are_as_long_as_can_be() -> None:
    assert list(runs(Box((8, 4), (2, 0), (3, 4)), whole((8, 4)))) == [(8, 12)]
    assert list(runs(Box((3, 4, 5), (1, 1, 0), (2, 2, 5)), whole((3, 4, 5)))) == [(25, 10), (45, 10)]


# ------------------------------------------------------------------------------------------------------- coverage


@given(st.data(), SHAPES)
def test_a_tiling_covers(data: st.DataObject, shape: tuple[int, ...]) -> None:
    assert coverage_fault(shape, data.draw(tilings(shape))) == ""


@given(st.data(), SHAPES)
def test_the_first_fault_is_found_where_it_is(data: st.DataObject, shape: tuple[int, ...]) -> None:
    given_boxes = data.draw(st.lists(boxes_in(shape), max_size=6) | tilings(shape))
    if given_boxes and data.draw(st.booleans()):
        given_boxes = given_boxes[1:]
    counts = np.zeros(shape, int)
    for box in given_boxes:
        counts[(..., *(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)))] += 1
    fault = coverage_fault(shape, given_boxes)
    assert (fault == "") == bool((counts == 1).all())
    if fault and shape:
        place = fault[fault.index("[") + 1 : fault.index("]")]
        there = counts[tuple(slice(*map(int, one.split(":"))) for one in place.split(","))]
        assert there.size
        assert (there == there.flat[0]).all()
        assert ("is missing" in fault) == (there.flat[0] == 0)
        assert ("twice" in fault) == (there.flat[0] == 2)


@pytest.mark.parametrize(
    ("shape", "given_boxes", "fault"),
    [
        ((), [], "is not covered by its pieces: [] is missing"),
        ((), [((), ())] * 2, "has pieces that overlap: [] is there twice"),
        ((4, 3), [], "is not covered by its pieces: [0:4,0:3] is missing"),
        ((10,), [((0,), (5,)), ((4,), (6,))], "has pieces that overlap: [4:5] is there twice"),
        ((4, 6), [((0, 0), (4, 2)), ((0, 3), (4, 3))], "is not covered by its pieces: [0:4,2:3] is missing"),
        ((2, 2), [((0, 0), (2, 2))] * 3, "has pieces that overlap: [0:2,0:2] is there 3 times"),
        ((0, 5), [], ""),
    ],
)
def test_faults_in_words(
    shape: tuple[int, ...], given_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], fault: str
) -> None:
    assert coverage_fault(shape, [Box(shape, *one) for one in given_boxes]) == fault


def test_thousands_of_pieces_are_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, columns and a grid: of each, the steps grow as the number of pieces and not as its square."""
    steps, count = 0, 1024
    real = boxes._first_fault

    def counted(shape: tuple[int, ...], those: list[object], dim: int) -> object:
        nonlocal steps
        steps += len(those) + 1
        return real(shape, those, dim)  # type: ignore[arg-type]

    monkeypatch.setattr(boxes, "_first_fault", counted)
    for high, wide in ((count, 1), (1, count), (32, 32)):
        shape = (high * 3, wide * 5)
        pieces = [Box(shape, (3 * i, 5 * j), (3, 5)) for i in range(high) for j in range(wide)]
        steps = 0
        assert coverage_fault(shape, pieces) == ""
        assert steps <= 5 * count
        assert "is missing" in coverage_fault(shape, pieces[:-1])


# --------------------------------------------------------------------------------------------------------- shares

SIZES = st.sampled_from([0, 1, 2, 3, 7, 64, 300, 1000])


@st.composite
def states(draw: st.DrawFn) -> tuple[int, list[Held]]:
    """What ranks that hold the same hold: some tensors below and some above the size that goes whole."""
    count = draw(st.integers(1, 5))
    ranks = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=count, max_size=count))))
    held = []
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(SIZES, max_size=2)))
        if draw(st.booleans()):
            shape = (*shape, draw(st.sampled_from([1, 5, 40_000])))
        box = draw(boxes_in(shape))
        order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
        size = draw(st.sampled_from([1, 2, 4, 16]))
        held.append(Held(f"t{number}", box, size, ranks, draw(st.integers(0, 1)), order))
    return count, held


@given(states())
def test_shares_are_the_state_once_and_even(given_state: tuple[int, list[Held]]) -> None:
    count, held = given_state
    found = {rank: shares(held, rank) for rank in range(10)}
    for one in held:
        pieces = [box for of_rank in found.values() for box in of_rank.get(one.name, ())]
        inside = [
            Box(one.box.lengths, tuple(o - p for o, p in zip(b.offsets, one.box.offsets, strict=True)), b.lengths)
            for b in pieces
        ]
        assert coverage_fault(one.box.lengths, inside) == ""
        if one.box.volume * one.element_bytes < SMALL_BYTES:
            assert len(pieces) <= 1
        for box in pieces:
            order = one.order or range(len(one.box.shape))
            at = [box.offsets[d] - one.box.offsets[d] for d in order]
            lengths = [one.box.lengths[d] for d in order]
            assert not (box.volume and order) or first_element(one, box) == np.ravel_multi_index(at, lengths)
    for group in (0, 1):
        members = [one for one in held if one.group == group]
        total = sum(one.box.volume * one.element_bytes for one in members)
        for of_rank in found.values():
            mine = sum(b.volume * one.element_bytes for one in members for b in of_rank.get(one.name, ()))
            assert mine <= total / count + SMALL_BYTES


def test_a_share_follows_memory() -> None:
    """A channels-last weight, cut in its memory order: each part has no gap there."""
    order = (0, 2, 3, 1)
    held = Held("w", whole((64, 32, 16, 16)), 4, (0, 1, 2), order=order)
    memory = numbered((64, 16, 16, 32)).transpose(0, 3, 1, 2)
    end = 0
    for rank in range(3):
        assert first_element(held, shares([held], rank)["w"][0]) == end
        elements = [n for box in shares([held], rank)["w"] for n in part(memory, box).transpose(order).flat]
        assert elements == list(range(end, end + len(elements)))
        end += len(elements)
    assert end == memory.size


def test_who_holds_something_else_takes_part_in_that_only() -> None:
    held = [
        Held("both", whole((1000, 100)), 4, (0, 1)),
        Held("mine", whole((1000, 100)), 4, (1,)),
        Held("theirs", whole((1000, 100)), 4, (0,)),
    ]
    assert shares(held, 1) == {"both": (Box((1000, 100), (500, 0), (500, 100)),), "mine": (whole((1000, 100)),)}
    assert shares(held, 7) == {}


def test_the_order_in_which_tensors_are_named_does_not_matter() -> None:
    held = [Held(f"t{n}", whole((100, n + 1)), 400, (0, 1)) for n in range(9)]
    assert shares(held, 1) == shares(held[::-1], 1)
