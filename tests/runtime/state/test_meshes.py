"""Where state tensors lie: by real ranks over gloo, against torch's own gathering, and by meshes that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from checkflow.core.boxes import Held, coverage_fault, whole
from checkflow.core.state import StateTensor, collect_state
from checkflow.runtime.snapshot.share import tensor_record
from checkflow.runtime.state import meshes
from checkflow.runtime.state.meshes import Placement, placements, to_held
from tests.support.programs import mesh_jobs
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.timeout(600)  # processes import torch, one after the other where there is one core
Found = dict[str, Placement]


def look(rank: int, world_size: int, kind: str, replicated: tuple[str, ...] = ()) -> Found:
    """What a rank says of its tensors after a step; the values of each part are those of torch's whole tensor."""
    model, optimizer = mesh_jobs.build(kind, world_size)
    mesh_jobs.train(model, optimizer, 0 if "tp" in kind else rank, 1)
    models, optimizers = {"model": model}, {"optimizer": optimizer}
    state = collect_state(models, optimizers, of_a_rank=True)
    found = placements(state, models, optimizers, rank, world_size, replicated=replicated)
    for item in state.tensors:
        box = found[item.name].box
        if isinstance(item.held, DTensor):
            full = item.held.full_tensor()
            there = full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
            assert torch.equal(there, item.tensor), item.name
        else:
            assert box.lengths == tuple(item.tensor.shape)
    return found


def holders(found: list[Found], name: str) -> list[tuple[int, ...]]:
    return [one[name].holders for one in found]


def boxes(found: list[Found], name: str) -> list[str]:
    return [str(one[name].box) for one in found]


def assert_whole(found: list[Found], name: str) -> None:
    """Where each of several ranks that hold the same saves a part of it, the tensor is saved once."""
    saved = {str(one[name].box): one[name].box for one in found if one[name].kind != "own"}
    assert coverage_fault(found[0][name].box.shape, saved.values()) == "", name


def test_fsdp(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 3, look, "fsdp")
    assert boxes(found, "model/down.weight") == ["[0:2,0:10]", "[2:4,0:10]", "[4:5,0:10]"]
    assert boxes(found, "model/scale") == ["[0:1]", "[1:1]", "[1:1]"]
    for name, one in found[0].items():
        if name.startswith("model/norm.") and name.count("running") + name.count("num_batches"):
            assert [one[name] for one in found] == [Placement("own", one.box, (rank,)) for rank in range(3)]
        elif name.endswith(".step"):
            assert [one[name] for one in found] == [Placement("replicated", whole(()), (0, 1, 2))] * 3
        else:
            assert {one[name].kind for one in found} == {"sharded"}
            assert holders(found, name) == [(0,), (1,), (2,)]
            assert_whole(found, name)
    assert boxes(found, "optimizer/up.weight.exp_avg") == boxes(found, "model/up.weight")


@pytest.mark.slow
def test_hsdp_has_replicas(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 4, look, "hsdp")
    assert boxes(found, "model/up.weight") == ["[0:5,0:7]", "[5:10,0:7]"] * 2
    assert holders(found, "model/up.weight") == [(0, 2), (1, 3)] * 2
    assert holders(found, "optimizer/up.weight.exp_avg") == [(0, 2), (1, 3)] * 2
    assert holders(found, "optimizer/up.weight.step") == [(0, 1, 2, 3)] * 4
    assert_whole(found, "model/up.bias")


def test_tensor_parallel(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, look, "tp")
    assert boxes(found, "model/up.weight") == ["[0:5,0:7]", "[5:10,0:7]"]
    assert boxes(found, "model/down.weight") == ["[0:5,0:5]", "[0:5,5:10]"]
    assert found[1]["model/down.bias"] == Placement("replicated", whole((5,)), (0, 1))
    assert found[1]["model/scale"].kind == "own"  # nothing says that it is the same


def test_fsdp_over_tensor_parallel(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 4, look, "fsdp-tp")
    assert boxes(found, "model/up.weight") == ["[0:3,0:7]", "[5:8,0:7]", "[3:5,0:7]", "[8:10,0:7]"]
    assert holders(found, "model/up.weight") == [(0,), (1,), (2,), (3,)]
    assert boxes(found, "model/norm.weight") == ["[0:3]", "[0:3]", "[3:5]", "[3:5]"]
    assert holders(found, "model/norm.weight") == [(0, 1), (0, 1), (2, 3), (2, 3)]  # on "dp" alone, so twice in "tp"
    for name in ("model/up.weight", "model/up.bias", "model/down.weight", "model/norm.weight", "model/scale"):
        assert_whole(found, name)
        assert boxes(found, name) == boxes(found, f"optimizer/{name.removeprefix('model/')}.exp_avg")
        assert holders(found, f"optimizer/{name.removeprefix('model/')}.step") == [(0, 1, 2, 3)] * 4


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """Its buffers differ after a step, and the first rank's are those that count."""
    found = run_ranks(tmp_path, 2, look, "ddp")
    for name in ("model/up.weight", "optimizer/up.weight.exp_avg", "optimizer/up.weight.step", "model/scale"):
        assert {(one[name].kind, one[name].holders) for one in found} == {("replicated", (0, 1))}
    assert holders(found, "model/norm.running_mean") == [(0,), (0,)]


def test_a_plain_model_is_the_ranks_own_unless_declared(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "declared").mkdir()
    found = run_ranks(tmp_path / "plain", 2, look, "plain")
    assert {(rank, p.kind, p.holders) for rank in (0, 1) for p in found[rank].values()} == {
        (0, "own", (0,)),
        (1, "own", (1,)),
    }
    found = run_ranks(tmp_path / "declared", 2, look, "plain", ("model", "optimizer/scale.step"))
    assert found[1]["model/norm.running_mean"].holders == (0, 1)
    assert found[1]["optimizer/scale.exp_avg"].kind == "replicated"  # as its parameter
    assert found[1]["optimizer/scale.step"].kind == "replicated"


# ------------------------------------------------------------------------------------------------ one of many ranks


@pytest.fixture
def fake_ranks() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, world_size: int) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def of(model: nn.Module, rank: int, world_size: int) -> Found:
    state = collect_state({"model": model}, {}, of_a_rank=True)
    return placements(state, {"model": model}, {}, rank, world_size)


# A size for each rank: torch keeps meshes, with the rank that first made them.
@pytest.mark.parametrize(("rank", "size"), [(0, 64), (517, 32), (1023, 128)])
def test_hybrid_shards_of_a_thousand_ranks(fake_ranks: Any, rank: int, size: int) -> None:
    fake_ranks(rank, 1024)
    mesh = init_device_mesh("cpu", (1024 // size, size), mesh_dim_names=("dp", "shard"))
    rows = 2 * size + 1
    found = of(fully_shard(nn.Linear(3, rows, device="meta"), mesh=mesh), rank, 1024)
    assert found["model/weight"].holders == tuple(range(rank % size, 1024, size))
    begin = min(rows, 3 * (rank % size))
    assert str(found["model/weight"].box) == f"[{begin}:{min(rows, begin + 3)},0:3]"


def test_pipeline_stages_are_no_replicas(fake_ranks: Any) -> None:
    fake_ranks(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    found = of(fully_shard(nn.Linear(3, 4), mesh=mesh["dp"]), 5, 8)
    assert found["model/weight"].holders == (4, 5)  # of the second stage those with the same rows


def test_of_a_mesh_that_was_cut_otherwise_only_its_own_ranks_are_known(fake_ranks: Any) -> None:
    fake_ranks(0, 6)
    init_device_mesh("cpu", (6,))
    model = nn.Linear(3, 4, bias=False)
    mesh = torch.distributed.DeviceMesh("cpu", [0, 1, 2, 3])
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()], src_data_rank=None))
    assert of(model, 0, 6)["model/weight"].holders == (0, 1, 2, 3)


@pytest.mark.parametrize("shape", [(12, 8), (7, 5), (1, 3), (0, 4)])
@pytest.mark.parametrize(
    "laid", [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Shard(0))]
)
def test_boxes_are_torchs(shape: tuple[int, ...], laid: tuple[Any, ...]) -> None:
    for coordinate in [(i, j) for i in range(3) for j in range(2)]:
        lengths, offsets = _compute_local_shape_and_global_offset(shape, (3, 2), list(coordinate), laid)
        box = meshes._box("x", shape, (3, 2), coordinate, laid)
        assert (box.lengths, box.offsets) == (lengths, offsets)


@pytest.mark.parametrize("rows", [8, 12, 9, 1])
def test_strided_shards_cut_from_right_to_left(rows: int) -> None:
    """As FSDP2 does over tensor parallel: torch.chunk over "tp", and of that over "dp"."""
    laid = (_StridedShard(0, split_factor=2), Shard(0))
    for dp, tp in [(i, j) for i in range(4) for j in range(2)]:
        half = -(-rows // 2)
        mine = torch.arange(rows)[half * tp : half * (tp + 1)]
        chunks = mine.chunk(4) if len(mine) else ()
        expected = chunks[dp].tolist() if dp < len(chunks) else []
        box = meshes._box("x", (rows,), (4, 2), (dp, tp), laid)
        assert list(range(box.offsets[0], box.offsets[0] + box.lengths[0])) == expected
        if rows == 8:
            assert ((*box.lengths,), (*box.offsets,)) == _compute_local_shape_and_global_offset(
                (rows,), (4, 2), [dp, tp], laid
            )


def test_replicas_share_in_the_order_of_memory() -> None:
    weight = torch.empty(64, 32, 16, 16).to(memory_format=torch.channels_last)
    placed = Placement("replicated", whole(weight.shape), (0, 1))
    held = to_held(tensor_record(StateTensor("model/w", "parameter", weight)), placed, 3)
    assert held == Held("model/w", placed.box, 4, (0, 1), 3, (0, 2, 3, 1))
