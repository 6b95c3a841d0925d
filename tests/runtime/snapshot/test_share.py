"""What ranks copy: together all state, each part once, from where it lies in memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkflow.core.boxes import SMALL_BYTES, coverage_fault, shares
from checkflow.core.errors import UnsupportedError
from checkflow.core.state import collect_state
from checkflow.runtime.format import manifest
from checkflow.runtime.format.layout import TensorRecord, make_layout
from checkflow.runtime.snapshot.share import RankShare
from checkflow.runtime.state.meshes import RankView
from checkflow.runtime.store.parts import Alike, Source, part_records, refuse_long_list
from checkflow.runtime.store.store import Store
from tests.support import store_tools
from tests.support.ranks.tools import KINDS, arranged, save

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
        assert [item.name for item in items] == [record.name for record in kept] == list(sources) == list(parts.alike)
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


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_foresees_how_large_the_manifest_will_be(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a third, from its own parts: small tensors are not cut for every rank, and replicas divide what is alike."""
    arrays = {
        f"model/layer{n}.{name}": np.zeros(shape, np.float32)
        for n in range(40)
        for name, shape in (("weight", (24, 8)), ("bias", (24,)), ("scale", (1,)), ("step", ()))
    }
    ranks = arranged(kind, arrays)
    with Store(tmp_path, run_id="r") as store:
        size_bytes = (save(store, 1, ranks, arrays) / "manifest.json").stat().st_size
    if kind == "one":
        seen = [(make_layout([store_tools.record(name, one.shape) for name, one in arrays.items()]), {}, {})]
    else:
        seen = []
        for rank, held in enumerate(ranks):
            share = RankShare(RankView(rank, len(ranks)), {}, {})
            records: list[TensorRecord] = []
            sources: dict[str, Source] = {}
            alike: dict[str, Alike] = {}
            for name, boxes in shares(held.values(), rank).items():
                made, of = part_records(name, boxes, store_tools.record(name, arrays[name].shape))
                records, sources = records + made, sources | of
                alike |= dict.fromkeys(of, share._alike(held[name], own=False))
            seen.append((make_layout(records, shard=rank, shards=len(ranks)), sources, alike))
    for layout, sources, alike in seen:
        monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", round(size_bytes / 0.66))
        refuse_long_list(layout, sources, alike, len(ranks))
        monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", round(size_bytes * 0.66))
        with pytest.raises(UnsupportedError, match="would have some"):
            refuse_long_list(layout, sources, alike, len(ranks))
