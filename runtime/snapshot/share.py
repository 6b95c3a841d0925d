"""What a process copies of a job's state: all of it; or, as one of several ranks, its share of what several hold alike,
and all that it alone holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from checkflow.core.boxes import Held, first_element, shares
from checkflow.core.planner_api import RankParts
from checkflow.core.state import StateTensor, TrainingState, dtype_name, memory_order, optimizer_parameters
from checkflow.runtime.format.layout import TensorRecord
from checkflow.runtime.state.meshes import RankView, to_held
from checkflow.runtime.store.parts import Alike, Source, part_records


@dataclass(frozen=True)
class Parts:
    """What is copied: each part without a gap in memory and under a name of its own.

    Attributes:
        records: of ``items``, without deadlines.
        sources: by the name of a part, what it is of; those that are missing are whole tensors.
        alike: by the name of a part, for how many of all ranks' it stands.
    """

    items: tuple[StateTensor, ...]
    records: tuple[TensorRecord, ...]
    sources: Mapping[str, Source] = field(default_factory=dict)
    alike: Mapping[str, Alike] = field(default_factory=dict)


@dataclass(frozen=True)
class RankShare:
    """Which parts of a job's state a rank copies, as the wrappers of its models and its DTensors say."""

    view: RankView
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]

    def of(self, state: TrainingState) -> Parts:
        """This rank's parts. All ranks' parts are all of the state once, whatever plans the ranks have.

        Replicas divide what one optimizer's step writes, and what none writes: as a rule, what is due at one time.
        """
        placed = self.view.placements(state, self.models, self.optimizers)
        groups = self._groups(state)
        records = {item.name: tensor_record(item) for item in state.tensors}
        held = {name: to_held(record, placed[name], groups[name]) for name, record in records.items()}
        mine = shares(held.values(), self.view.rank)
        items: list[StateTensor] = []
        kept: list[TensorRecord] = []
        sources: dict[str, Source] = {}
        alike: dict[str, Alike] = {}
        for item in state.tensors:
            own = placed[item.name].kind == "own"
            stands_for = self._alike(held[item.name], own=own)
            parts, of = part_records(item.name, mine.get(item.name, ()), records[item.name], own=own)
            for part in parts:
                view = _part(item.tensor, first_element(held[item.name], of[part.name].box), part)
                items.append(dataclasses.replace(item, name=part.name, tensor=view, whole=item.held))
            kept += parts
            sources |= of
            alike |= dict.fromkeys(of, stands_for)
        return Parts(tuple(items), tuple(kept), sources, alike)

    def copied(self, state: TrainingState) -> TrainingState:
        """Return the state that this rank copies, in its parts."""
        return TrainingState(self.of(state).items, state.ties)

    def for_plan(self, state: TrainingState) -> RankParts | None:
        """Return the parts for the planner; None, of a process that trains alone: all of the state."""
        parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, source in self.of(state).sources.items():
            parts.setdefault(source.tensor, []).append((name, source.box.lengths))
        return RankParts(self.view.world_size, parts)

    def _alike(self, held: Held, *, own: bool) -> Alike:
        """Of all ranks' parts: what replicas hold alike they divide, and all boxes of a tensor are about as large."""
        ranks = self.view.world_size
        if own:
            return Alike(ranks, ranks)
        boxes = min(ranks, -(-math.prod(held.box.shape) // max(1, held.box.volume))) or 1
        if self.view.pipelined:  # other stages hold other tensors, about as many
            return Alike(-(-ranks // boxes), ranks)
        return Alike(len(held.holders), len(held.holders) * boxes)

    def _groups(self, state: TrainingState) -> dict[str, int]:
        """By state tensor, the number of the optimizer whose step writes it; -1: none."""
        numbers = {name: number for number, name in enumerate(sorted(self.optimizers))}
        by_parameter = {
            id(parameter): numbers[name]
            for name, optimizer in self.optimizers.items()
            for _, parameter in optimizer_parameters(self.models, optimizer)
        }
        return {
            item.name: by_parameter.get(id(item.held), numbers.get(item.name.partition("/")[0], -1))
            for item in state.tensors
        }


class WholeShare(RankShare):
    """A process that trains alone copies all of the state, each tensor whole."""

    def of(self, state: TrainingState) -> Parts:
        return Parts(state.tensors, tuple(tensor_record(item) for item in state.tensors))

    def copied(self, state: TrainingState) -> TrainingState:
        return state

    def for_plan(self, state: TrainingState) -> None:
        return None


def tensor_record(item: StateTensor) -> TensorRecord:
    """What the file layout needs to know of a state tensor, without its deadline."""
    tensor = item.tensor
    order = memory_order(tensor)
    row_major = order is None or order == tuple(range(tensor.dim()))
    return TensorRecord(
        item.name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes, tensor.element_size(),
        permutation=None if row_major else order, conjugated=tensor.is_conj(), negated=tensor.is_neg(),
    )  # fmt: skip


def _part(tensor: torch.Tensor, first: int, part: TensorRecord) -> torch.Tensor:
    """A part of a dense tensor that begins at this element of its memory."""
    strides, stride = [0] * len(part.shape), 1
    for d in reversed(range(len(part.shape)) if part.permutation is None else part.permutation):
        strides[d] = stride
        stride *= max(1, part.shape[d])
    return tensor.detach().as_strided(part.shape, strides, tensor.storage_offset() + first)
