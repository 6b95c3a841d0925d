"""What ranks copy: together all state, each part once, from where it lies in memory."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkflow.core.boxes import SMALL_BYTES, coverage_fault
from checkflow.core.state import collect_state
from checkflow.runtime.snapshot.share import RankShare
from checkflow.runtime.state.meshes import RankView
from checkflow.runtime.store.parts import Source

SIZES = st.integers(1, 9) | st.sampled_from([64, 257, 1031])


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.lists(SIZES, max_size=3).filter(lambda shape: math.prod(shape) < 10**6), min_size=1, max_size=5),
    ranks=st.integers(1, 5),
    turned=st.booleans(),
)
def test_replicas_copy_each_element_once(shapes: list[list[int]], ranks: int, turned: bool) -> None:
    model = nn.ParameterDict({str(n): nn.Parameter(torch.randn(shape)) for n, shape in enumerate(shapes)})
    if turned:  # in memory, the dimensions lie in another order
        for name, parameter in model.items():
            model[name] = nn.Parameter(parameter.detach().permute(tuple(reversed(range(parameter.dim())))))
    state = collect_state({"model": model}, {}, of_a_rank=True)
    whole = {item.name: item.tensor for item in state.tensors}
    copied: dict[str, list[Source]] = {}
    for rank in range(ranks):
        share = RankShare(RankView(rank, ranks, ("model",)), {"model": model}, {})
        parts = share.of(state)
        items, kept, sources = parts.items, parts.records, parts.sources
        assert [item.name for item in items] == [record.name for record in kept] == list(sources)
        size_bytes = sum(item.tensor.nbytes for item in items)
        assert size_bytes <= sum(item.tensor.nbytes for item in state.tensors) / ranks + SMALL_BYTES
        for item, record in zip(items, kept, strict=True):
            source = sources[item.name]
            copied.setdefault(source.tensor, []).append(source)
            slices = tuple(slice(o, o + n) for o, n in zip(source.box.offsets, source.box.lengths, strict=True))
            assert torch.equal(item.tensor, whole[source.tensor][slices])
            assert item.tensor.nbytes == record.size_bytes
            assert item.tensor.untyped_storage().data_ptr() == whole[source.tensor].untyped_storage().data_ptr()
    for name, tensor in whole.items():
        assert coverage_fault(tuple(tensor.shape), [source.box for source in copied[name]]) == ""


def test_a_model_that_no_wrapper_describes_is_each_rank_s_own() -> None:
    model = nn.Linear(3, 2)
    state = collect_state({"model": model}, {}, of_a_rank=True)
    for rank in range(2):
        share = RankShare(RankView(rank, 2), {"model": model}, {})
        parts = share.of(state)
        assert [item.name for item in parts.items] == ["model/weight", "model/bias"]
        assert all(source.own for source in parts.sources.values())
