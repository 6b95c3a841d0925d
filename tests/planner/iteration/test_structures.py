"""Batches and results of every kind: their tensors are found, and exchanged in a copy."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from checkflow.planner.iteration.structures import tensors_of, with_tensors


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Holder:
    def __init__(self, x: Any) -> None:
        self.x, self.name = x, "holder"


class Items(dict[str, Any]):
    pass


Named = collections.namedtuple("Named", ["x", "y"])


def wrappers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Plain, inner, inner),
        st.builds(Slotted, inner),
        st.builds(Named, inner, inner),
        st.builds(lambda x: Items(x=x), inner),
        st.builds(lambda x: collections.UserDict({"x": [x]}), inner),
    )


leaves = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.integers(1, 3).map(torch.zeros))


@given(st.recursive(leaves, wrappers, max_leaves=12))
def test_every_tensor_is_found_and_exchanged_once(structure: Any) -> None:
    before = list(tensors_of(structure))
    exchanged = with_tensors(structure, lambda tensor: tensor + 1)
    assert type(exchanged) is type(structure)
    after = list(tensors_of(exchanged))
    assert [tensor.shape for tensor in after] == [tensor.shape for tensor in before]
    assert all(bool((tensor == 1).all()) for tensor in after)
    assert [id(tensor) for tensor in tensors_of(structure)] == [id(tensor) for tensor in before]
    assert all(bool((tensor == 0).all()) for tensor in before)


@pytest.mark.parametrize("value", [Plain(1, "a"), Slotted(None), Holder(3), Items(a=1), nn.Linear(2, 2), object(), int])
def test_what_holds_no_tensors_stays_what_it_is(value: Any) -> None:
    assert list(tensors_of(value)) == []
    assert with_tensors(value, torch.neg) is value


def test_a_packed_sequence_stays_one() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    doubled = with_tensors(packed, lambda tensor: tensor * 2)
    assert isinstance(doubled, PackedSequence)
    assert doubled.batch_sizes.tolist() == [4, 2, 2]
    assert doubled.sorted_indices is None


def test_objects_that_hold_tensors_and_themselves() -> None:
    holder = Holder(torch.ones(2))
    looped = Plain(torch.ones(1))
    looped.y = looped
    assert len(list(tensors_of([holder, looped]))) == 2
    exchanged = with_tensors([holder, looped], torch.neg)
    assert exchanged[0].x.tolist() == [-1, -1]
    assert (exchanged[0].name, exchanged[1].x.tolist()) == ("holder", [-1])
    assert holder.x.tolist() == [1, 1]
