"""Real ranks over gloo save what they hold, and other numbers of ranks, cut otherwise, go on with the same state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkflow.core.boxes import first_element, shares
from checkflow.core.errors import MismatchError
from checkflow.core.state import StateTensor, collect_state, memory_order
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import TensorRecord, file_image, make_layout, write_headers
from checkflow.runtime.format.manifest import BLOCK_BYTES
from checkflow.runtime.snapshot.share import tensor_record
from checkflow.runtime.state.collect import StateWalk, capture_extra
from checkflow.runtime.state.meshes import RankView, to_held
from checkflow.runtime.state.restore import restore, restore_rank
from checkflow.runtime.store.files import glance
from checkflow.runtime.store.parts import Gathered, Source, commit_ranks, folder_name, part_records, write_part
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs
from checkflow.runtime.weights.exporter import state_dicts
from tests.support.programs import mesh_jobs
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.timeout(600)  # processes import torch, one after the other where there is one core
Values = dict[str, torch.Tensor]


def view_of(kind: str, rank: int, world_size: int) -> RankView:
    # Tensor parallelism alone does not say that the rest is the same on all ranks.
    return RankView(rank, world_size, ("model/scale", "model/norm.weight", "model/norm.bias") if kind == "tp" else ())


def values(models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> Values:
    """Every tensor, whole."""
    found = {}
    for item in collect_state(models, optimizers, of_a_rank=True).tensors:
        tensor = item.held.full_tensor() if isinstance(item.held, DTensor) else item.tensor
        found[item.name] = tensor.detach().clone()
    return found


def memory(item: StateTensor) -> memoryview:
    tensor, order = item.tensor.detach(), memory_order(item.tensor)
    flat = (tensor if order is None else tensor.permute(order)).reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()).cast("B")


def save(rank: int, world_size: int, kind: str, directory: Path) -> Values:
    """Train, and save a version as the ranks of a Checkpointer will: shares, parts, receipts, one commit."""
    model, optimizer = mesh_jobs.build(kind, world_size)
    mesh_jobs.train(model, optimizer, 0 if "tp" in kind else rank, 2)
    return save_job(model, optimizer, view_of(kind, rank, world_size), directory)


def save_job(model: nn.Module, optimizer: torch.optim.Optimizer | None, view: RankView, directory: Path) -> Values:
    rank, world_size = view.rank, view.world_size
    models: dict[str, nn.Module] = {"model": model}
    optimizers = {} if optimizer is None else {"optimizer": optimizer}
    walk = StateWalk(models, optimizers, of_a_rank=True)
    state = walk.current()
    assert walk.current() is state
    placed = view.placements(state, models, optimizers)
    records: list[TensorRecord] = []
    sources: dict[str, Source] = {}
    items = {item.name: item for item in state.tensors}
    held = {item.name: to_held(tensor_record(item), placed[item.name]) for item in state.tensors}
    for name, boxes in shares(held.values(), rank).items():
        own = placed[name].kind == "own"
        made, of = part_records(name, boxes, tensor_record(items[name]), own=own)
        records, sources = records + made, sources | of
    layout = make_layout(records, shard=rank, shards=world_size)
    staging = memoryview(bytearray(layout.buffer_bytes))
    write_headers(layout, staging)
    for key, source in sources.items():
        at, record = layout.tensors[key].staging_offset, layout.tensors[key].record
        first = first_element(held[source.tensor], source.box) * record.element_bytes
        staging[at : at + record.size_bytes] = memory(items[source.tensor])[first : first + record.size_bytes]
    extra = codec.encode({**capture_extra(walk, optimizers, {}), "iteration": 2, "epoch": 0})
    meeting = torch.distributed.distributed_c10d._get_default_store()

    def write(root: int) -> Any:
        folder = fs.open_folder(folder_name(2, "r", "a"), dir_fd=root)
        mine = codec.encode({"from": f"rank {rank}"}) if rank else None
        image = lambda file: file_image(file, staging, BLOCK_BYTES)  # noqa: E731
        return write_part(folder, rank, world_size, layout, image, sources, extra=mine, ties=state.ties)

    def gather(root: int, folder: int) -> Gathered:
        meeting.set("folder", "made")
        written: list[Any] = [None] * world_size
        torch.distributed.gather_object(write(root), written, 0)
        return Gathered(written, extra, {})

    if rank == 0:
        with Store(directory, run_id="r") as store:
            commit_ranks(store, 2, "a", gather, info={})
    else:
        meeting.wait(["folder"])
        torch.distributed.gather_object(write(fs.open_folder(str(directory))), None, 0)
    return values(models, optimizers)


def go_on(rank: int, world_size: int, kind: str, path: Path, stepped: bool) -> tuple[Values, bytes | None]:
    """Another job, with or without state of its optimizer, restores it and can train on."""
    model, optimizer = mesh_jobs.build(kind, world_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    if stepped:
        mesh_jobs.train(model, optimizer, 0 if "tp" in kind else rank, 1)
    models, optimizers = {"model": model}, {"optimizer": optimizer}
    resumed = restore_rank(path, view_of(kind, rank, world_size), models, optimizers, {})
    found = values(models, optimizers)
    mesh_jobs.train(model, optimizer, 0 if "tp" in kind else rank, 1, first=2)
    return found, resumed.of_this_rank


def assert_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def is_own(name: str) -> bool:
    """Running statistics, of which each rank has its own where nothing broadcasts them."""
    return "running" in name or "num_batches" in name


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Empty folders for the processes of a test."""
    found = [tmp_path / f"processes{number}" for number in range(6)]
    for folder in found:
        folder.mkdir()
    return found


def one_process(path: Path) -> Values:
    """A job of one process that restores it whole, every byte verified."""
    model, optimizer = mesh_jobs.build("plain", 1)
    with open_checkpoint(path) as checkpoint:
        restore(checkpoint, {"model": model}, {"optimizer": optimizer}, {})
    return values({"model": model}, {"optimizer": optimizer})


@pytest.mark.parametrize(
    ("first", "of_first", "then", "of_then"),
    [("fsdp", 2, "fsdp", 3), ("ddp", 2, "fsdp-tp", 4), ("hsdp", 4, "tp", 2), ("fsdp-tp", 4, "ddp", 2)],
)
def test_any_mesh_goes_on_from_any_other(
    tmp_path: Path, places: list[Path], first: str, of_first: int, then: str, of_then: int
) -> None:
    directory = tmp_path / "versions"
    expected = run_ranks(places[0], of_first, save, first, directory)
    path = directory / "step-00000002"
    for other in expected[1:]:
        assert_equal(
            {n: t for n, t in other.items() if not is_own(n)}, {n: t for n, t in expected[0].items() if not is_own(n)}
        )
    assert_equal(one_process(path), expected[0])
    with open_checkpoint(path) as checkpoint:
        exported = state_dicts(checkpoint)["model"]
    assert_equal(
        {f"model/{name}": tensor for name, tensor in exported.items()},
        {n: t for n, t in expected[0].items() if n.startswith("model/")},
    )
    for stepped in (False, True):
        found = run_ranks(places[1 + stepped], of_then, go_on, then, path, stepped)
        for rank, (state, own) in enumerate(found):
            # Own statistics go to the rank of that number, to new ranks those of the lowest.
            mine = expected[rank if rank < of_first and first != "ddp" and then != "ddp" else 0]
            assert_equal(state, {n: (mine if is_own(n) else expected[0])[n] for n in expected[0]})
            assert own == (codec.encode({"from": f"rank {rank}"}) if 0 < rank < of_first else None)


def test_a_version_of_one_process_goes_on_as_ranks(tmp_path: Path, places: list[Path]) -> None:
    (expected,) = run_ranks(places[0], 1, save, "plain", tmp_path / "versions")
    for state, _ in run_ranks(places[1], 2, go_on, "fsdp", tmp_path / "versions" / "step-00000002", False):
        assert_equal(state, expected)


def refused(rank: int, world_size: int, path: Path) -> str:
    model, _ = mesh_jobs.build("fsdp", world_size)
    model.up = nn.Linear(7, 11)  # of another shape
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(MismatchError) as caught:
        restore_rank(path, RankView(rank, world_size), {"model": model}, {"optimizer": optimizer}, {})
    return str(caught.value)


def test_a_mismatch_is_found_before_anything_changes(tmp_path: Path, places: list[Path]) -> None:
    run_ranks(places[0], 2, save, "fsdp", tmp_path / "versions")
    path = tmp_path / "versions" / "step-00000002"
    for message in run_ranks(places[1], 2, refused, path):
        assert f"{path}: model/up.weight is float32[10, 7] in the checkpoint, float32[11, 7] in the job" in message


# --------------------------------------------------------------------------- one rank, in this process, is enough here


@pytest.fixture
def alone() -> Iterator[RankView]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankView(0, 1, ("model",))
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))  # type: ignore[no-any-return]


def sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.optim.Adam(model.parameters())


def test_tied_parts(tmp_path: Path, alone: RankView) -> None:
    """A tied weight is saved once; and restored untied under both names, or tied from equal values only."""
    model, optimizer = sharded(Tied())
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    expected = save_job(model, optimizer, alone, tmp_path / "tied")
    path = tmp_path / "tied" / "step-00000002"
    assert set(glance(path).tensors) == set(expected)
    other, fresh = sharded(Tied())
    restore_rank(path, alone, {"model": other}, {"optimizer": fresh}, {})
    assert_equal(values({"model": other}, {"optimizer": fresh}), expected)
    # Without an optimizer, which has a parameter more, one becomes two, of which only one is sharded.
    two = Tied(tied=False)
    fully_shard(two.embedding, mesh=init_device_mesh("cpu", (1,)))
    save_job(model, None, alone, tmp_path / "weights")
    restore_rank(tmp_path / "weights" / "step-00000002", alone, {"model": two}, {}, {})
    assert torch.equal(two.head.weight, two.embedding.weight.full_tensor())
    untied, fresh = sharded(Tied(tied=False))
    with pytest.raises(MismatchError, match="parameter"):
        restore_rank(path, alone, {"model": untied}, {"optimizer": fresh}, {})
    with torch.no_grad():
        untied.head.weight.fill_(1)
    save_job(untied, fresh, alone, tmp_path / "untied")
    with pytest.raises(MismatchError, match=r"different values for model/embedding\.weight and model/head\.weight"):
        restore_rank(tmp_path / "untied" / "step-00000002", alone, {"model": other}, {"optimizer": optimizer}, {})


def test_optimizer_state_has_the_memory_order_that_it_was_saved_with(tmp_path: Path, alone: RankView) -> None:
    """Otherwise the resumed job may sum in another order than the job that was killed."""
    model, fresh = (nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last) for _ in range(2))
    optimizer, other = (torch.optim.Adam(one.parameters()) for one in (model, fresh))
    for one, by in ((model, optimizer), (fresh, other)):
        one(torch.randn(1, 3, 4, 4)).sum().backward()
        by.step()
    table = other.state[fresh.weight]
    table["exp_avg"] = table["exp_avg"].contiguous()
    expected = save_job(model, optimizer, alone, tmp_path)
    restore_rank(tmp_path / "step-00000002", alone, {"model": fresh}, {"optimizer": other}, {})
    assert other.state[fresh.weight]["exp_avg"].stride() == optimizer.state[model.weight]["exp_avg"].stride()
    assert_equal(values({"model": fresh}, {"optimizer": other}), expected)


def test_tensors_that_the_job_lacks(tmp_path: Path, alone: RankView) -> None:
    model, optimizer = sharded(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    save_job(model, optimizer, alone, tmp_path)
    less, fresh = sharded(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(MismatchError, match=r"the checkpoint's model/1\.\w+ is not in the job \(a job that grows"):
        restore_rank(tmp_path / "step-00000002", alone, {"model": less}, {"optimizer": fresh}, {})
    more, fresh = sharded(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)))
    with pytest.raises(MismatchError, match=r"the job's model/2\.weight is not in the checkpoint"):
        restore_rank(tmp_path / "step-00000002", alone, {"model": more}, {"optimizer": fresh}, {})


def with_lists(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, kind: str) -> None:
    """Give an optimizer tensors in lists, as pytorch_optimizer's SOAP has: of sharded parameters each rank its own."""
    own = rank if kind == "fsdp" else 0
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["Q"] = [torch.full((2, 3), 10.0 * number + own).t(), None]


def save_lists(rank: int, world_size: int, kind: str, directory: Path) -> Values:
    model, optimizer = mesh_jobs.build(kind, world_size)
    mesh_jobs.train(model, optimizer, rank, 2)
    with_lists(model, optimizer, rank, kind)
    return save_job(model, optimizer, view_of(kind, rank, world_size), directory)


def go_on_with_lists(rank: int, world_size: int, kind: str, path: Path) -> Values:
    model, optimizer = mesh_jobs.build(kind, world_size)
    restore_rank(path, view_of(kind, rank, world_size), {"model": model}, {"optimizer": optimizer}, {})
    assert {table["Q"][0].stride() for table in optimizer.state.values()} == {(1, 3)}
    assert {len(table["Q"]) for table in optimizer.state.values()} == {2}
    return values({"model": model}, {"optimizer": optimizer})


@pytest.mark.parametrize(("kind", "then"), [("ddp", 3), ("fsdp", 2)])
def test_tensors_in_lists_lie_as_other_state_of_their_parameter(
    tmp_path: Path, places: list[Path], kind: str, then: int
) -> None:
    """Of a replicated parameter they are divided among ranks; of a sharded one they are each rank's own."""
    expected = run_ranks(places[0], 2, save_lists, kind, tmp_path / "versions")
    path = tmp_path / "versions" / "step-00000002"
    named = [name for name in glance(path).tensors if ".Q.0" in name]
    assert any(name.startswith("rank-own/1/optimizer/") for name in named) == (kind == "fsdp")
    for rank, found in enumerate(run_ranks(places[1], then, go_on_with_lists, kind, path)):
        of = expected[rank if kind == "fsdp" else 0]
        assert_equal({n: t for n, t in found.items() if ".Q" in n}, {n: t for n, t in of.items() if ".Q" in n})
