"""What one of several ranks copies: its share of what several hold alike, and all that it alone holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from checkflow.core.boxes import first_element, shares
from checkflow.core.state import StateTensor, TrainingState
from checkflow.runtime.format.layout import TensorRecord
from checkflow.runtime.state.meshes import RankView, to_held
from checkflow.runtime.store.parts import Source, part_records


@dataclass(frozen=True)
class RankShare:
    """Which parts of a job's state a rank copies, as the wrappers of its models and its DTensors say."""

    view: RankView
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]

    def of(
        self, state: TrainingState, records: Sequence[TensorRecord]
    ) -> tuple[tuple[StateTensor, ...], list[TensorRecord], dict[str, Source]]:
        """The parts, each without a gap in memory and under a name of its own; their records; and what each is.

        Args:
            records: of ``state.tensors``.
        """
        placed = self.view.placements(state, self.models, self.optimizers)
        held = {record.name: to_held(record, placed[record.name]) for record in records}
        mine = shares(held.values(), self.view.rank)
        items: list[StateTensor] = []
        kept: list[TensorRecord] = []
        sources: dict[str, Source] = {}
        for item, record in zip(state.tensors, records, strict=True):
            own = placed[item.name].kind == "own"
            parts, of = part_records(item.name, mine.get(item.name, ()), record, own=own)
            for part in parts:
                view = _part(item.tensor, first_element(held[item.name], of[part.name].box), part)
                items.append(dataclasses.replace(item, name=part.name, tensor=view, whole=item.held))
            kept += parts
            sources |= of
        return tuple(items), kept, sources


def _part(tensor: torch.Tensor, first: int, part: TensorRecord) -> torch.Tensor:
    """A part of a dense tensor that begins at this element of its memory."""
    strides, stride = [0] * len(part.shape), 1
    for d in reversed(range(len(part.shape)) if part.permutation is None else part.permutation):
        strides[d] = stride
        stride *= max(1, part.shape[d])
    return tensor.detach().as_strided(part.shape, strides, tensor.storage_offset() + first)
