"""The order of an epoch, dealt to ranks: everything once, whatever the number of ranks and wherever it goes on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkflow.runtime.data.order import BatchSteps, RankBatch, SampleSteps, Share, Steps, Tail, count_steps

TAILS = st.sampled_from(["even", "drop", "pad"])
SIZES, BATCHES, RANKS = st.integers(0, 60), st.integers(1, 5), st.integers(1, 5)


def deal(size: int, batch: int, ranks: int, tail: Tail, position: int = 0) -> list[list[RankBatch]]:
    """By rank."""
    return [list(SampleSteps(range(size), batch, Share(rank, ranks), tail, position)) for rank in range(ranks)]


def used(steps: list[list[RankBatch]]) -> list[int]:
    return [index for step in zip(*steps, strict=True) for part in step for index in part.indices]


@given(SIZES, BATCHES, RANKS)
def test_even_takes_every_sample_once_in_order_with_no_rank_idle(size: int, batch: int, ranks: int) -> None:
    steps = deal(size, batch, ranks, "even")
    taken = used(steps)
    assert taken == list(range(len(taken)))
    assert size - len(taken) < ranks  # dropped
    assert len(taken) == size or batch == 1 or size < ranks
    for step in zip(*steps, strict=True):
        lengths = [len(part.indices) for part in step]
        assert 1 <= min(lengths) <= max(lengths) <= batch
        assert max(lengths) - min(lengths) <= 1
        assert len({part.end for part in step}) == 1


@given(SIZES, BATCHES, RANKS)
def test_drop_takes_whole_steps_only(size: int, batch: int, ranks: int) -> None:
    steps = deal(size, batch, ranks, "drop")
    assert used(steps) == list(range(size - size % (batch * ranks)))
    assert all(len(step.indices) == batch for part in steps for step in part)


@given(SIZES, BATCHES, RANKS)
def test_pad_takes_whole_steps_and_the_first_samples_again(size: int, batch: int, ranks: int) -> None:
    steps = deal(size, batch, ranks, "pad")
    taken = used(steps)
    assert taken[:size] == list(range(size))
    assert len(taken) == -(-size // (batch * ranks)) * batch * ranks
    assert taken[size:] == list(itertools.islice(itertools.cycle(range(size)), len(taken) - size))
    assert all(len(step.indices) == batch for part in steps for step in part)


@given(SIZES, BATCHES, RANKS, TAILS, st.integers(0, 70))
def test_a_step_depends_on_what_is_left_alone(size: int, batch: int, ranks: int, tail: Tail, stop: int) -> None:
    """Who goes on from any step takes those that would have come."""
    whole = deal(size, batch, ranks, tail)
    stop = min(stop, len(whole[0]))
    position = whole[0][stop - 1].end if stop else 0
    assert [part[stop:] for part in whole] == deal(size, batch, ranks, tail, position)


@given(SIZES, BATCHES, RANKS, RANKS, st.integers(0, 70))
def test_another_number_of_ranks_takes_the_rest(size: int, batch: int, before: int, after: int, stop: int) -> None:
    first = [part[:stop] for part in deal(size, batch, before, "even")]
    position = first[0][-1].end if first[0] else 0
    second = deal(size, batch, after, "even", position)
    taken = used(first) + used(second)
    assert taken == list(range(len(taken)))
    assert size - len(taken) < max(before, after)


@given(SIZES, BATCHES, RANKS, TAILS)
def test_counted_without_dealing(size: int, batch: int, ranks: int, tail: Tail) -> None:
    assert count_steps(size, batch, ranks, tail) == len(deal(size, batch, ranks, tail)[0])


@given(st.lists(st.integers(1, 4), max_size=12), RANKS, TAILS, st.integers(0, 12))
def test_ready_batches_are_dealt_whole(lengths: list[int], ranks: int, tail: Tail, stop: int) -> None:
    numbers = itertools.count()
    batches = [[next(numbers) for _ in range(length)] for length in lengths]
    every = [list(BatchSteps(batches, Share(rank, ranks), tail)) for rank in range(ranks)]
    whole = len(batches) // ranks
    for number, step in enumerate(zip(*every, strict=True)):
        if number < whole:
            assert [part.indices for part in step] == batches[number * ranks : (number + 1) * ranks]
    total, taken = sum(lengths), used(every)
    if tail == "drop":
        assert len(every[0]) == whole
    elif tail == "even":
        assert taken == list(range(len(taken)))
        assert total - len(taken) < ranks
    else:
        assert taken[:total] == list(range(total))
    stop = min(stop, len(every[0]))
    position = every[0][stop - 1].end if stop else 0
    again = [list(BatchSteps(batches, Share(rank, ranks), tail, position)) for rank in range(ranks)]
    assert again == [part[stop:] for part in every]


def test_a_position_inside_of_a_ready_batch_leaves_its_rest() -> None:
    steps = list(BatchSteps([[0, 1, 2], [3, 4]], Share(), "even", 1))
    assert [step.indices for step in steps] == [[1, 2], [3, 4]]
    assert [step.end for step in steps] == [3, 5]


@pytest.mark.parametrize(("tail", "size", "dropped", "repeated"), [
    ("even", 13, 0, 0), ("even", 3, 3, 0), ("drop", 13, 5, 0), ("pad", 13, 0, 3), ("pad", 1, 0, 7), ("pad", 16, 0, 0),
])  # fmt: skip
def test_what_is_left_out_and_repeated_is_counted(tail: Tail, size: int, dropped: int, repeated: int) -> None:
    steps: Steps = SampleSteps(range(size), 2, Share(0, 4), tail)
    assert not list(steps)[100:]
    assert (steps.dropped, steps.repeated) == (dropped, repeated)


def test_an_endless_order_is_dealt_as_it_comes() -> None:
    steps = SampleSteps(itertools.count(), 2, Share(1, 2), "even", 4)
    assert [next(steps).indices for _ in range(3)] == [[6, 7], [10, 11], [14, 15]]


@pytest.mark.parametrize(("rank", "ranks"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_that_do_not_exist(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks} ranks does not exist"):
        Share(rank, ranks)
