"""Where each chunk of the state lies and where it goes, shared by all captures of one layout."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from checkflow.core.errors import UnsupportedError
from checkflow.core.plan import Plan
from checkflow.core.state import StateTensor, TrainingState, is_beside
from checkflow.core.units import format_size
from checkflow.runtime.format.layout import STORED_TYPES, Layout, TensorRecord, make_layout
from checkflow.runtime.snapshot.share import RankShare
from checkflow.runtime.store.parts import Source, refuse_long_list

logger = logging.getLogger("checkflow")


@dataclass(frozen=True)
class ChunkMap:
    """What captures share as long as the layout stays the same.

    Attributes:
        items: what is copied: all state tensors, or a rank's parts of them, which ``sources`` describes.
    """

    state: TrainingState
    items: tuple[StateTensor, ...]
    planned: frozenset[str]  # tensors that leave as the plan says
    holds: tuple[torch.Tensor, ...]  # aliases keep the memory if ``.data`` is reassigned during a capture
    layout: Layout
    absent: tuple[str, ...]
    at_boundary: tuple[StateTensor, ...]
    chunks: tuple[tuple[int, int, int], ...]  # source address, staging offset, length
    chunk_bytes: int
    boundary_bytes: int  # of ``at_boundary``
    sources: Mapping[str, Source] = field(default_factory=dict)

    def moved(self, plan: Plan, state: TrainingState) -> tuple[ChunkMap, Sequence[str]] | None:
        """The same for a state in whose lists some tensors have other memory, and their names; None: make a new map."""
        if state.ties != self.state.ties or len(state.tensors) != len(self.holds):
            return None
        now: dict[str, StateTensor] = {}
        for old, hold, item in zip(self.state.tensors, self.holds, state.tensors, strict=True):
            if old.name != item.name or hold.device != item.tensor.device:
                return None
            if not _same_form(hold, item.tensor):
                return None
            if hold.data_ptr() != item.tensor.data_ptr():
                if not item.inside:
                    return None
                now[item.name] = item
        known = {item.name: item.tensor.shape for item in self.items}
        if any(known.get(name) != item.tensor.shape for name, item in now.items()):  # divided among ranks
            return None
        items = tuple(now.get(item.name, item) for item in self.items)
        chunks = tuple(
            (now[chunk.tensor].tensor.data_ptr() + chunk.offset_bytes, *place[1:])
            if chunk.tensor in now and chunk.tensor in self.planned
            else place
            for chunk, place in zip(plan.chunks, self.chunks, strict=True)
        )
        at_boundary = tuple(now.get(item.name, item) for item in self.at_boundary)
        holds = tuple(item.tensor.detach() for item in state.tensors)
        moved = dataclasses.replace(
            self, state=state, items=items, holds=holds, at_boundary=at_boundary, chunks=chunks
        )  # fmt: skip
        return moved, [*now]


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()) == (
        other.dtype, other.shape, other.stride(), other.is_conj(), other.is_neg()
    )  # fmt: skip


def make_chunk_map(
    plan: Plan,
    state: TrainingState,
    source: torch.device,
    *,
    at_boundary: bool,
    share: RankShare,
    warns: bool = True,
) -> ChunkMap:
    """Lay out files for the state as it is now; the plan's chunks leave from ``source``'s memory.

    Args:
        warns: whether to say that the plan does not know tensors in optimizers' lists, which may grow.
        share: which parts of the state this rank copies.

    Raises:
        UnsupportedError: the job has more tensors, or parts of them, than a checkpoint can list.
    """
    parts, ranks = share.of(state), share.view.world_size
    items = parts.items
    deadlines, last = plan.deadlines, plan.horizon_steps
    layout = make_layout(
        [
            dataclasses.replace(record, deadline=last if (due := deadlines.get(record.name)) is None else due)
            for record in parts.records
        ],
        shard=share.view.rank,
        shards=ranks,
    )
    refuse_long_list(layout, parts.sources, parts.alike, ranks)
    live = {item.name: item for item in items}
    planned = frozenset() if at_boundary else _planned(plan, live, source)
    others = tuple(item for item in items if item.name not in planned)
    if not at_boundary:
        given = {item.name for item in state.given}
        _log_unknown(plan, [item for item in others if item.name not in given and (warns or not item.inside)])
    chunks = tuple(
        (
            live[chunk.tensor].tensor.data_ptr() + chunk.offset_bytes,
            layout.tensors[chunk.tensor].staging_offset + chunk.offset_bytes,
            chunk.length_bytes,
        )
        if chunk.tensor in planned
        else (0, 0, 0)
        for chunk in plan.chunks
    )
    known = {plan.whole_name(spec.name) for spec in plan.fingerprint.state if not is_beside(spec.name)}
    return ChunkMap(
        state,
        items,
        planned,
        tuple(item.tensor.detach() for item in state.tensors),
        layout,
        tuple(sorted(known - {item.name for item in state.tensors} - {name for name, _ in state.ties})),
        others,
        chunks,
        sum(length for _, _, length in chunks),
        sum(item.tensor.nbytes for item in others),
        parts.sources,
    )


def _planned(plan: Plan, live: dict[str, StateTensor], source: torch.device) -> frozenset[str]:
    deadlines = plan.deadlines
    sizes = {
        name: size
        for group in plan.timeline.groups
        for name, size in group.members
        # A variable may be written in few iterations only, and in no optimizer's step: then at the boundary.
        if not is_beside(name) or deadlines[name] is not None
    }
    return frozenset(
        name
        for name, size in sizes.items()
        if name in live and live[name].tensor.nbytes == size and live[name].tensor.device == source
    )


def _log_unknown(plan: Plan, others: Sequence[StateTensor]) -> None:
    host = set(plan.host_tensors)
    if unknown := [item for item in others if item.name not in host]:
        size = sum(item.tensor.nbytes for item in unknown)
        logger.warning(
            "%d state tensors (%s) are not in the plan, %s is the first: they are copied at each boundary, "
            "which pauses training; a new plan would hide them",
            len(unknown), format_size(size), unknown[0].name,
        )  # fmt: skip


def planned_records(plan: Plan) -> list[TensorRecord]:
    """The state tensors that a plan expects, row-major."""
    records = []
    for spec in plan.fingerprint.state:
        if spec.dtype not in STORED_TYPES:
            raise UnsupportedError(f"the plan has {spec.name} of dtype {spec.dtype!r}, which checkpoints cannot hold")
        item_bytes = STORED_TYPES[spec.dtype].element_bytes
        records.append(TensorRecord(spec.name, spec.dtype, spec.shape, spec.size_bytes, item_bytes))
    return records
