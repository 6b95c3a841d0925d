"""What this rank holds of every state tensor, and which ranks hold the same: from placements and wrappers alone.

No messages are sent, so the answer is a claim: ranks that contradict each other are found when a version is joined.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from checkflow.core.boxes import Box, Held, whole
from checkflow.core.errors import UnsupportedError
from checkflow.core.state import (
    StateTensor,
    TrainingState,
    clean_key,
    collect_state,
    inside_of,
    is_composite,
    is_distributed,
    optimizer_parameters,
)
from checkflow.runtime.format.layout import TensorRecord

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Kind = Literal["sharded", "replicated", "own"]
STAGE_DIMENSIONS = ("pp",)  # of a mesh, by name: its ranks hold different tensors, not replicas


@dataclass(frozen=True, slots=True)
class Placement:
    """What a rank holds of a state tensor.

    Args:
        kind: "own": other ranks hold other values under this name.
        box: this rank's part.
        holders: the ranks that save it, ascending; see :class:`checkflow.core.boxes.Held`. Without this rank if another
            one's values count, as for buffers that DistributedDataParallel broadcasts before each forward pass.
    """

    kind: Kind
    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank, and what is replicated though no wrapper says so; see :func:`placements`.

    Attributes:
        pipelined: ranks are pipeline stages, so others hold other tensors.
        whole: a process trains alone, so that it holds whole tensors, and all of them.
        folders: this rank's own folder in that of plans.
    """

    rank: int
    world_size: int
    replicated: tuple[str, ...] = ()
    pipelined: bool = False
    whole: ClassVar[bool] = False

    @property
    def folders(self) -> tuple[str, ...]:
        return (f"{self.rank:05d}-of-{self.world_size:05d}",)

    def state(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> TrainingState:
        """Return the job's state as :func:`checkflow.core.state.collect_state` does: a rank's part of DTensors."""
        return collect_state(models, optimizers, of_a_rank=True)

    def placements(
        self, state: TrainingState, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> dict[str, Placement]:
        """Where tensors lie, by name; none of them, if they are whole."""
        return placements(state, models, optimizers, self.rank, self.world_size, replicated=self.replicated)


@dataclass(frozen=True, slots=True)
class LoneView(RankView):
    """A process that trains alone holds whole tensors, and all of them."""

    whole: ClassVar[bool] = True
    folders: ClassVar[tuple[str, ...]] = ()

    def state(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> TrainingState:
        return collect_state(models, optimizers)

    def placements(
        self, state: TrainingState, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> dict[str, Placement]:
        return {}


ALONE = LoneView(0, 1)


def placements(
    state: TrainingState,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    rank: int,
    world_size: int,
    *,
    replicated: Collection[str] = (),
) -> dict[str, Placement]:
    """Where every tensor of ``state`` (of ``collect_state(..., of_a_rank=True)``) lies, by name.

    A DTensor lies as its placements say. Parameters of a DistributedDataParallel are replicated; so are buffers that it
    broadcasts, and its rank 0 saves them. Other tensors of a model are the rank's own. State of an optimizer lies as
    its parameter; numbers of a sharded parameter, such as ``step``, are replicated on its mesh.

    Args:
        replicated: models, optimizers or tensors, by name, that are the same on all ranks, though no wrapper says so.

    Raises:
        UnsupportedError: a tensor has no definite place; the message names it.
    """
    everywhere = tuple(range(world_size))
    wrapped = {owner: _Wrapped(owner, model, everywhere) for owner, model in models.items()}
    found: dict[str, Placement] = {}
    by_identity: dict[int, Placement] = {}
    parameter_of = {
        id(value): parameter
        for optimizer in optimizers.values()
        for _, parameter in optimizer_parameters(models, optimizer)
        for entry in optimizer.state.get(parameter, {}).values()
        for value in ((entry,) if isinstance(entry, torch.Tensor) else (one for _, one in inside_of(entry, "")))
    }
    for item in state.tensors:
        owner = item.name.partition("/")[0]
        if is_distributed(item.held):
            placed = _of_dtensor(item, rank)
        elif owner in replicated or item.name in replicated:
            placed = Placement("replicated", whole(item.tensor.shape), everywhere)
        elif (parameter := parameter_of.get(id(item.held))) is not None:
            placed = _of_number(item, parameter, rank, by_identity.get(id(parameter)))
        elif owner in wrapped and (holders := wrapped[owner].holders(item)) is not None:
            placed = Placement("replicated", whole(item.tensor.shape), holders)
        else:
            placed = Placement("own", whole(item.tensor.shape), (rank,))
        found[item.name] = by_identity[id(item.held)] = placed
    return found


def ranks_around(item: StateTensor, placement: Placement) -> tuple[int, ...]:
    """The ranks that hold a tensor together, parts of it or the same, and so know it by one name."""
    if not is_distributed(item.held):
        return placement.holders
    mesh: Any = item.held.device_mesh  # type: ignore[attr-defined]
    return tuple(sorted(mesh.mesh.reshape(-1).tolist()))


def to_held(record: TensorRecord, placement: Placement, group: int = 0) -> Held:
    """What :func:`checkflow.core.boxes.shares` divides among replicas; ``record`` is of this rank's part."""
    return Held(record.name, placement.box, record.element_bytes, placement.holders, group, record.permutation)


# ----------------------------------------------------------------------------------------------------------- wrappers


class _Wrapped:
    """What DistributedDataParallel, if there is one around a model, says of its tensors."""

    def __init__(self, owner: str, model: nn.Module, everywhere: tuple[int, ...]) -> None:
        self._owner, self._ddp, self._group = owner, _ddp_of(model), everywhere
        for module in model.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise UnsupportedError(
                    f"model {owner} is in FullyShardedDataParallel, whose flat parameters have no place in a "
                    "checkpoint: use torch.distributed.fsdp.fully_shard"
                )
        if self._ddp is None:
            return
        from torch.distributed import get_process_group_ranks

        self._group = tuple(sorted(get_process_group_ranks(self._ddp.process_group)))
        self._first = get_process_group_ranks(self._ddp.process_group)[0]
        self._ignored = {clean_key(name) for name in self._ddp.parameters_to_ignore}
        self._broadcasts = bool(getattr(self._ddp, "forward_sync_buffers", self._ddp.broadcast_buffers))

    def holders(self, item: StateTensor) -> tuple[int, ...] | None:
        """The ranks that save a tensor of this model; None: the rank's own."""
        if self._ddp is None or item.name.removeprefix(f"{self._owner}/") in self._ignored:
            return None
        if item.kind == "parameter":
            return self._group
        # Each rank changes its buffers in the forward pass; before the next one, the first rank's replace them.
        return (self._first,) if self._broadcasts else None


def _ddp_of(model: nn.Module) -> Any:
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    return model


# --------------------------------------------------------------------------------------------------- DTensors, meshes


def _of_dtensor(item: StateTensor, rank: int) -> Placement:
    tensor: Any = item.held
    if is_composite(tensor._local_tensor):
        raise UnsupportedError(f"state tensor {item.name} is a DTensor of parts that are not dense")
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(f"state tensor {item.name} lies on a mesh that rank {rank} is not part of")
    box = _box(item.name, tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements)
    if box.lengths != tuple(item.tensor.shape):
        raise UnsupportedError(
            f"state tensor {item.name} has {list(item.tensor.shape)} on rank {rank}, where {tensor.placements} of "
            f"{list(tensor.shape)} give {list(box.lengths)}"
        )
    alike = [d for d, placement in enumerate(tensor.placements) if placement.is_replicate()]
    holders = _ranks_around(mesh, _along(mesh.mesh, coordinate, alike))
    kind: Kind = "replicated" if len(alike) == mesh.ndim else "sharded"
    return Placement(kind, box, holders)


def _of_number(item: StateTensor, parameter: torch.Tensor, rank: int, of_parameter: Placement | None) -> Placement:
    """Optimizer state that is no DTensor."""
    here = whole(item.tensor.shape)
    if is_distributed(parameter):
        if item.tensor.numel() != 1:
            return Placement("own", here, (rank,))
        distributed: DTensor = parameter  # type: ignore[assignment]
        mesh = distributed.device_mesh
        return Placement("replicated", here, _ranks_around(mesh, mesh.mesh.reshape(-1).tolist()))
    if of_parameter is None:
        return Placement("own", here, (rank,))
    return dataclasses.replace(of_parameter, box=here)


def _box(
    name: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], laid: Sequence[Any]
) -> Box:
    """The part of a tensor at a coordinate of its mesh: each mesh dimension cuts a dimension of the tensor.

    ``_StridedShard`` (FSDP2 over tensor parallel) says that mesh dimensions to its right have cut before it. torch's
    own ``compute_local_shape_and_global_offset`` cuts from left to right, which differs where a cut is uneven.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    strided = []
    for at, placement in enumerate(laid):
        if placement.is_replicate():
            continue
        if hasattr(placement, "split_factor"):
            strided.append(at)
        else:
            _narrow(offsets, lengths, placement.dim, mesh_shape[at], coordinate[at])
    for at in reversed(strided):
        dim = laid[at].dim
        before = math.prod(mesh_shape[d] for d in range(at + 1, len(laid)) if getattr(laid[d], "dim", None) == dim)
        if before != laid[at].split_factor or any(getattr(laid[d], "dim", None) == dim for d in range(at)):
            raise UnsupportedError(f"state tensor {name} is a DTensor with {tuple(laid)}, whose parts are no boxes")
        _narrow(offsets, lengths, dim, mesh_shape[at], coordinate[at])
    return Box(shape, tuple(offsets), tuple(lengths))


def _narrow(offsets: list[int], lengths: list[int], dim: int, parts: int, number: int) -> None:
    """Take one of several parts as torch.chunk cuts them; the last ones may be shorter, or empty."""
    size = -(-lengths[dim] // parts)
    begin = min(lengths[dim], size * number)
    offsets[dim] += begin
    lengths[dim] = min(lengths[dim] - begin, size)


def _along(ranks: torch.Tensor, coordinate: Sequence[int], dimensions: Collection[int]) -> list[int]:
    """The ranks that differ from a coordinate of a mesh in these dimensions only."""
    index = tuple(slice(None) if d in dimensions else at for d, at in enumerate(coordinate))
    return list(torch.as_tensor(ranks[index]).reshape(-1).tolist())


def _ranks_around(mesh: Any, ranks: Collection[int]) -> tuple[int, ...]:
    """These ranks of a mesh, and those that hold the same in the larger mesh that it was cut from, as where FSDP2 takes
    the "dp" of ("dp", "tp"). Pipeline stages hold other tensors.
    """
    root = mesh._get_root_mesh()
    if root.ndim == mesh.ndim and root.size() == mesh.size():
        return tuple(sorted(ranks))
    names = root.mesh_dim_names or ("",) * root.ndim
    coordinate, members = root.get_coordinate(), set(mesh.mesh.reshape(-1).tolist())
    inside = [d for d in range(root.ndim) if set(_along(root.mesh, coordinate, (d,))) <= members]
    if set(_along(root.mesh, coordinate, inside)) != members:  # not cut along its dimensions: say nothing of others
        return tuple(sorted(ranks))
    found = torch.isin(root.mesh, torch.tensor(sorted(ranks)))
    for d in range(root.ndim):
        if d not in inside and names[d] not in STAGE_DIMENSIONS:
            found = found.any(d, keepdim=True).expand_as(found)
    return tuple(sorted(root.mesh[found].tolist()))
