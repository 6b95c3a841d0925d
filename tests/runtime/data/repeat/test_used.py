"""Digests of batches, and indices held against those of a checkpoint."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import UserDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from checkflow.core.errors import MismatchError
from checkflow.runtime.data.repeat.own_state import OwnState, walk
from checkflow.runtime.data.repeat.used import MOST_INDICES, MOST_PARTS, Comparison, Mark, Used, digest, name_samples
from checkflow.runtime.format import codec
from tests.support.pairing import pairs


@dataclasses.dataclass
class Graph:
    x: torch.Tensor
    y: int


def large(value: float = 0.0) -> torch.Tensor:
    tensor = torch.zeros(1 << 18)
    tensor[-1] = value
    return tensor


PAIRS: dict[str, tuple[Any, Any]] = {
    "floats": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "bfloat16": (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
    "no dimension": (torch.tensor(1), torch.tensor(2)),
    "bools": (torch.tensor([True, False]), torch.tensor([False, True])),
    "the end of a large one": (large(), large(1.0)),
    "another length": (torch.zeros(3), torch.zeros(4)),
    "transposed": (torch.arange(6).reshape(2, 3).t(), torch.arange(1, 7).reshape(2, 3).t()),
    "conjugated": ([torch.tensor([1 + 2j]).conj(), 1], [torch.tensor([1 + 2j]).conj(), 2]),
    "array": (np.arange(3.0), np.arange(1.0, 4.0)),
    "every second": (np.arange(6)[::2], np.arange(1, 7)[::2]),
    "text": (["a", "b"], ["a", "c"]),
    "bytes": (b"ab", b"ac"),
    "numbers": ([1, 2, 3], [1, 2, 4]),
    "numpy's numbers": ([np.int64(1)], [np.int64(2)]),
    "mapping": (UserDict({"x": torch.tensor(1), "y": "a"}), UserDict({"x": torch.tensor(1), "y": "b"})),
    "an object": (Graph(torch.zeros(2), 1), Graph(torch.zeros(2), 2)),
    "nested": ([({"x": [torch.tensor(1)]},)], [({"x": [torch.tensor(2)]},)]),
    "of many, one in the midst": ([torch.tensor(0)] * 40, [torch.tensor(0)] * 20 + [torch.tensor(1)] * 20),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_another_batch_has_another_digest(kind: str) -> None:
    one, other = PAIRS[kind]
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)
    assert 0 < len(digest(one)) <= MOST_PARTS
    assert len(name_samples(one)) == len(digest(one))


@pytest.mark.parametrize("batch", [None, torch.zeros(2, device="meta"), {"x": [torch.zeros(0)]}, object(), [[]]])
def test_what_is_not_there_has_no_digest(batch: Any) -> None:
    assert digest(batch) == ([] if batch is not None else digest(None))


class Broken(UserDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("it is read when it is asked for")


@pytest.mark.parametrize("batch", [Broken(x=1), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])
def test_a_batch_that_cannot_be_looked_into_ends_nothing(batch: Any) -> None:
    assert digest(batch) == []


def test_of_long_texts_both_ends_count() -> None:
    text = "a" * (1 << 20)
    assert digest([text]) == digest([text])
    assert digest([text]) not in (digest([text + "a"]), digest(["b" + text[1:]]), digest([text[1:] + "b"]))


def tokens(number: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(number, number + 9), "position_ids": torch.arange(9)}


def test_what_all_batches_have_names_no_samples() -> None:
    state = [Mark(number, digest(tokens(number)), indices=False) for number in (0, 3)]
    compared(*state).batch(3, 3, tokens(3))
    with pytest.raises(MismatchError, match="1 of its 2 tensors, arrays or texts differ"):
        compared(*state).batch(3, 0, tokens(7))


def test_what_tells_batches_apart_excuses_what_does_not_repeat(caplog: pytest.LogCaptureFixture) -> None:
    def batch(number: int, seconds: float) -> dict[str, Any]:
        return {"x": torch.full((3,), float(number)), "seconds": seconds}

    first, last = (Mark(number, digest(batch(number, 0.1)), indices=False) for number in (0, 3))
    comparison = compared(first, last)
    comparison.batch(3, 0, batch(0, 0.2))
    comparison.batch(3, 3, batch(3, 0.3))
    assert caplog.text.count("does not repeat") == 1
    with pytest.raises(MismatchError, match="2 of its 2 tensors"):
        comparison.batch(3, 3, batch(4, 0.3))


def test_what_names_samples() -> None:
    batch = [torch.rand(4), torch.tensor([3, 4]), torch.tensor([3, 3]), torch.tensor([3]), "key", np.array([1, 0])]
    assert name_samples(batch) == [False, True, False, False, True, True]


def compared(first: Mark, last: Mark, **options: Any) -> Comparison:
    """As a later run reads it."""
    state = Used().then(3, first).then(3, last).state()
    return Comparison(Used.read(codec.decode(codec.encode(state))), **options)


ORDER = list(range(100, 200))


@pytest.mark.parametrize(*pairs(last=[0, 3, 40], wrong=[None, 0, 2, 45, 70, 99], batches=[False, True]))
def test_an_order_is_compared_where_it_is_known(last: int, wrong: int | None, batches: bool) -> None:
    comparison = compared(Mark(0, ORDER[:3], True), Mark(last, ORDER[last : last + 40], True))
    known = {*range(3), *range(last + 40 - MOST_INDICES, last + 40)}
    order = [0 if at == wrong else index for at, index in enumerate(ORDER)]

    def go_by(epoch: int) -> list[int]:
        if not batches:
            return list(comparison.samples(epoch, order))
        dealt = comparison.batches(epoch, [order[at : at + 7] for at in range(0, 100, 7)])
        return [index for batch in dealt for index in batch]

    assert go_by(2) == order
    if wrong not in known:
        assert go_by(3) == order
        return
    with pytest.raises(MismatchError, match=f"sample {wrong} of epoch 3, in the loader's order, was {100 + wrong},"):
        go_by(3)


def test_an_order_that_ends_before_is_another() -> None:
    with pytest.raises(MismatchError, match="the order of epoch 3 ends before sample 2"):
        list(compared(Mark(0, [5, 6, 7], True), Mark(0, [5, 6, 7], True)).samples(3, [5, 6]))


def test_indices_of_any_kind_are_compared_where_that_means_something() -> None:
    indices = [np.int64(4), torch.tensor(5), "key", (1, "a"), object()]
    comparison = compared(Mark(0, indices, True), Mark(0, indices, True))
    assert len(list(comparison.samples(3, [4, 5, "key", [1, "a"], object()]))) == 5
    with pytest.raises(MismatchError, match=r"was \[1, 'a'\], and is \[1, 'b'\] now"):
        list(comparison.samples(3, [4, 5, "key", (1, "b")]))


def test_an_accepted_difference_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    comparison = compared(Mark(0, [1, 2], True), Mark(0, [1, 2], True), accepted=True)
    assert list(comparison.samples(3, [2, 1])) == [2, 1]
    assert list(comparison.samples(3, [2, 1])) == [2, 1]
    assert caplog.text.count("which accept= allows") == 1


def test_other_ranks_had_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Used().then(0, Mark(0, [1], True)).state()
    monkeypatch.setattr("checkflow.runtime.data.repeat.used.ranks", lambda: 2)
    assert Used.read(state) == Used()


# Generators and counts in attributes


class Holder:
    def __init__(self, rng: Any) -> None:
        self.parts, self.again, self.itself = ({"rng": [rng]},), rng, self
        self.passes = self.opened = self.size = 0


def test_generators_are_found_wherever_they_lie_once() -> None:
    rng = np.random.default_rng(1)
    own = OwnState({"sampler": Holder(rng), "none": None})
    state = codec.decode(codec.encode(own.at(0)))
    assert list(state["generators"]) == ["sampler.again"]
    expected = rng.random()
    own.put_back(state)
    assert rng.random() == expected


def test_the_process_s_generators_belong_to_nobody() -> None:
    held = Holder([random._inst, np.random.mtrand._rand, torch.default_generator, np.random, random])
    assert OwnState({"sampler": held}).at(0) == {}


def test_what_grows_with_each_epoch_is_a_count() -> None:
    holder = Holder(None)
    own = OwnState({"loader": holder})
    assert own.at(0) == {}
    holder.passes, holder.opened, holder.size = 2, 7, 1
    assert own.at(2) == {"counts": {"loader.passes": 2}}
    other = Holder(None)
    OwnState({"loader": other}).put_back(own.at(2))
    assert (other.passes, other.opened, other.size) == (2, 0, 0)


class Lazy:
    """Makes its generator when it is first needed; ``anew``: in each pass."""

    def __init__(self, kind: Any, *, anew: bool) -> None:
        self.kind, self.anew = kind, anew
        if not anew:
            self.rng = None

    def draw(self) -> list[Any]:
        if self.anew or self.rng is None:
            self.rng = self.kind()
        draw = getattr(self.rng, "random", None) or (lambda: torch.rand((), generator=self.rng).item())
        return [draw() for _ in range(3)]


KINDS = [
    lambda: np.random.default_rng(1),
    lambda: np.random.Generator(np.random.Philox(1)),
    lambda: np.random.RandomState(1),
    lambda: random.Random(1),
    lambda: torch.Generator().manual_seed(1),
]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_generators_that_are_made_when_they_are_needed(kind: Any, anew: bool) -> None:
    one, other = Lazy(kind, anew=anew), Lazy(kind, anew=anew)
    own, own_of_other = OwnState({"sampler": one}), OwnState({"sampler": other})
    begin, first = own.at(0), one.draw()
    own.put_back(begin)
    assert one.draw() == first
    state = codec.decode(codec.encode(own.at(1)))
    expected = one.draw()
    own_of_other.put_back(state)
    assert other.draw() == expected


def test_a_generator_of_a_kind_that_cannot_be_made_is_named() -> None:
    state = {"generators": {"sampler.rng": {"bit_generator": "Unknown"}}}
    with pytest.raises(MismatchError, match=r"sampler\.rng, and this one has none there"):
        OwnState({"sampler": Lazy(None, anew=False)}).put_back(state)


def test_what_the_standard_library_counts_is_no_count_of_passes() -> None:
    holder = Holder(None)
    holder.pool = ThreadPoolExecutor(1)  # type: ignore[attr-defined]
    own = OwnState({"loader": holder})
    holder.pool._idle_semaphore.release()  # type: ignore[attr-defined]
    assert own.at(1) == {}


def test_a_number_that_says_what_was_opened_is_no_count() -> None:
    holder = Holder(None)
    holder.file = None  # type: ignore[attr-defined]
    own = OwnState({"loader": holder})
    holder.opened, holder.file = 1, object()  # type: ignore[attr-defined]
    assert own.at(1) == {}
    holder.passes = 2
    assert own.at(2) == {"counts": {"loader.passes": 2}}


def test_what_other_threads_change_can_be_looked_through() -> None:
    """Two threads would meet there rarely."""

    class Meanwhile(deque[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("the container's own way is not asked")

    holder, queue = Holder(None), Meanwhile([object()])

    class Changing(dict[str, Any]):
        pass

    holder.queue, holder.lock = queue, threading.Lock()  # type: ignore[attr-defined]
    holder.parts = (Changing(a=1),)  # type: ignore[assignment]
    paths = []
    for path, _ in walk({"loader": holder}):
        paths.append(path)
        queue.append(object())
        holder.__dict__[f"more{len(paths)}"] = 1
    assert "loader.queue[0]" in paths
