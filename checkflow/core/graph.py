"""TrainingGraph: one training iteration as operators, storages, state and anchors. Pure data.

Positions: operator ``i`` runs in slot ``i`` (from 0). A *position* ``p`` lies before operator ``p``: an anchor at
position ``p`` fires after operators ``0 … p-1`` and before operator ``p``; the boundary is at position 0.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

Phase = Literal["forward", "backward", "optimizer"]
StateKind = Literal["parameter", "buffer", "optimizer"]
Placement = Literal["device", "host"]
# For pydantic, which reads these dataclasses from files: coerce nothing, ignore nothing.
STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _FirstFault:
    """For pydantic: the first bad item ends the reading of its collection.

    A hostile file may hold a million, each kept with its place and reason. pydantic's FailFast does the same, but
    importing a plan imports no pydantic, and some versions cannot hash it.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "fail_fast": True}


# Collections of any length, read from files.
Many = Annotated[tuple[T, ...], _FirstFault()]
Named = Annotated[dict[K, T], _FirstFault()]

CollectiveKind = Literal[
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "receive",
]
StorageKind = Literal["parameter", "buffer", "optimizer", "input", "activation", "gradient"]


class AnchorKind(enum.StrEnum):
    """Places in eager training that surely run, where checkpoints do their work."""

    BOUNDARY = "boundary"  # between two iterations; the first step of every timeline
    FORWARD = "forward"  # a module's forward-pre hook; name: "<model>/<module path>"
    GRADIENT = "gradient"  # a parameter's post-accumulate-grad hook; name: "<model>/<parameter>"
    OPTIMIZER_PRE = "optimizer_pre"  # before an optimizer's step; name: the optimizer's
    OPTIMIZER_POST = "optimizer_post"  # after an optimizer's step; name: the optimizer's

    __hash__ = str.__hash__  # the enum's own is slow Python, and anchors are looked up constantly


@dataclass(frozen=True, slots=True)
class AnchorKey:
    """What fired within one iteration, and its occurrence (from 0) since the boundary."""

    __pydantic_config__ = STRICT

    kind: AnchorKind
    name: str
    occurrence: int = 0

    def __str__(self) -> str:
        if self.kind is AnchorKind.BOUNDARY:
            return "boundary"
        times = f" #{self.occurrence}" if self.occurrence else ""
        return f"{self.kind} {self.name}{times}"

    @property
    def words(self) -> str:
        """The anchor for people: "layer4.1.bn2's forward", "the start of optimizer.step()"."""
        if self.kind is AnchorKind.BOUNDARY:
            return "the boundary"
        again = f" (time {self.occurrence + 1})" if self.occurrence else ""
        if self.kind in (AnchorKind.OPTIMIZER_PRE, AnchorKind.OPTIMIZER_POST):
            side = "start" if self.kind is AnchorKind.OPTIMIZER_PRE else "end"
            return f"the {side} of {self.name}.step(){again}"
        owner, _, path = self.name.partition("/")
        place = path or f"the {owner}"
        return f"{place}'s {self.kind}{again}"


BOUNDARY = AnchorKey(AnchorKind.BOUNDARY, "", 0)


@dataclass(frozen=True, slots=True)
class Anchor:
    """An anchor and its position in the operator order."""

    key: AnchorKey
    position: int


@dataclass(frozen=True, slots=True)
class Collective:
    """What an operator moves between the ranks of a group, as one of them sees it."""

    kind: CollectiveKind
    size_bytes: int  # of the whole: all that is gathered, reduced, scattered or sent
    ranks: int  # of the group
    stride: int  # the largest distance from a rank of the group to the next: says how many nodes it spans


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the traced graph that computes (views and metadata are no operators)."""

    name: str  # unique in the graph, as torch.fx names it
    target: str  # such as "aten.convolution.default"
    phase: Phase
    module: str  # "<model>/<module path>" of the module whose forward made it, or ""
    dtype: str  # the dtype it computes in, such as "float32"
    flops: int  # as torch.utils.flop_counter counts: one multiply-add is 2
    read_bytes: int
    written_bytes: int
    reads: tuple[int, ...]  # indices into TrainingGraph.storages
    writes: tuple[int, ...]  # the same: outputs and everything mutated in place
    link_bytes: int = 0  # copied from device to host
    waited_bytes: int = 0  # cross the link, either way, while training waits
    winograd: bool = False  # a convolution that Winograd's algorithm fits
    relaid_bytes: int = 0  # a convolution's tensors that matrix units take in another layout
    transient_bytes: int = 0  # device memory that it frees itself, such as workspaces; unknown to a trace
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class GraphStorage:
    """One allocation: live at position p iff created < p <= its end, during operator i iff created <= i <= its end.

    ``created`` is the operator that allocates it, -1 for what lives at the boundary. Ends are the last operator during
    which it is live; ``len(operators)`` for what also lives at the next boundary. What lives at the boundary and is
    freed before operator 0 (gradients, by ``zero_grad``) has an ``eager_end`` of -1: it is live at position 0 only.
    """

    name: str
    kind: StorageKind
    size_bytes: int
    created: int
    graph_end: int  # freed after the last use
    eager_end: int  # freed when eager PyTorch frees it: Python and autograd hold some longer


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor that a resume needs. ``name`` is ``<owner>/<key>``; see :mod:`checkflow.core.state`."""

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    placement: Placement  # "host": in host memory, such as Adam's step counters; copied at the boundary
    storage: int | None  # index into TrainingGraph.storages; None for host entries
    first_write: int | None  # operator of the first write in an iteration; None if never written
    # Where the runtime must assume a write, seen or not: the first forward of the buffer's module, or of the compiled
    # region around it; the boundary if a compiled optimizer's step cannot be seen.
    barrier: AnchorKey | None = None
    # Of several ranks. A tensor on ranks / replicas different ranks is sharded; with 1 and 1 it is the rank's own.
    whole_shape: tuple[int, ...] | None = None  # None: as ``shape``, which is the part of this rank
    ranks: int = 1  # that hold all of it together
    replicas: int = 1  # of them, how many hold what this one holds

    @property
    def whole_bytes(self) -> int:
        """Bytes of the tensor that these ranks hold together."""
        if self.whole_shape is None or not self.size_bytes:
            return self.size_bytes
        return self.size_bytes // math.prod(self.shape) * math.prod(self.whole_shape)


@dataclass(frozen=True)
class TrainingGraph:
    """One training iteration. All tuples are in execution order except ``state``, which is in naming order."""

    model: str  # the user's name for it
    batch: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each tensor of the batch
    micro_batches: int
    optimizers: tuple[tuple[str, str], ...]  # (name, implementation), such as ("optimizer", "Adam foreach")
    autocast: str  # dtype, or "" where autocast is off
    operators: tuple[Operator, ...]
    storages: tuple[GraphStorage, ...]
    state: tuple[StateEntry, ...]
    anchors: tuple[Anchor, ...]  # sorted by position, boundary first; equal positions in firing order
    ties: tuple[tuple[str, str], ...] = ()  # (further name, name in ``state``) of tied tensors
    parameters: int = 0  # number of elements of all parameters, each counted once
    compiled: tuple[str, ...] = ()  # what torch.compile made: modules as in anchors, functions as "name()"

    @functools.cached_property
    def flops(self) -> int:
        return sum(operator.flops for operator in self.operators)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of all state, host entries included."""
        return sum(entry.size_bytes for entry in self.state)

    def live_bytes(self, *, eager: bool) -> tuple[list[int], list[int]]:
        """Device bytes live during each operator, transient ones included (length n), and at each position (n + 1)."""
        n = len(self.operators)
        during, at = [0] * (n + 2), [0] * (n + 2)
        for storage in self.storages:
            end = storage.eager_end if eager else storage.graph_end
            during[max(storage.created, 0)] += storage.size_bytes
            during[min(end, n - 1) + 1] -= storage.size_bytes
            at[storage.created + 1] += storage.size_bytes
            at[min(max(end, 0) if eager else end, n) + 1] -= storage.size_bytes
        for i in range(1, n + 2):
            during[i] += during[i - 1]
            at[i] += at[i - 1]
        taken = (operator.transient_bytes for operator in self.operators)
        return [live + own for live, own in zip(during[:n], taken, strict=True)], at[: n + 1]
