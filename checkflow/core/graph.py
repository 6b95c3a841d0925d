"""TrainingGraph: one training iteration as operators, storages, state and anchors.

Pure data. The planner's trace (or the runtime's recorder) makes it; :mod:`checkflow.core.timeline` is made from it.

Positions: operator ``i`` runs in slot ``i`` (from 0). A *position* ``p`` lies before operator ``p``: an anchor at
position ``p`` fires after operators ``0 … p-1`` and before operator ``p``; the boundary is at position 0.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

Phase = Literal["forward", "backward", "optimizer"]
StateKind = Literal["parameter", "buffer", "optimizer"]
Placement = Literal["device", "host"]
# For pydantic, which reads plan files back into these dataclasses: nothing is coerced, nothing is ignored.
STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _FirstFault:
    """For pydantic: the first bad item ends the reading of its collection.

    A hostile file may hold a million of them, and each would be kept with its place and reason. pydantic's own FailFast
    says the same, but importing a plan imports no pydantic, and some of its versions cannot hash that.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "fail_fast": True}


# Collections of any number of items, wherever they are read from a file.
Many = Annotated[tuple[T, ...], _FirstFault()]
Named = Annotated[dict[K, T], _FirstFault()]

StorageKind = Literal["parameter", "buffer", "optimizer", "input", "activation", "gradient"]


class AnchorKind(enum.StrEnum):
    """Places in eager training that surely run: a checkpoint's work hangs on them."""

    BOUNDARY = "boundary"  # between two iterations; the first step of every timeline
    FORWARD = "forward"  # a module's forward-pre hook; name: "<model>/<module path>"
    GRADIENT = "gradient"  # a parameter's post-accumulate-grad hook; name: "<model>/<parameter>"
    OPTIMIZER_PRE = "optimizer_pre"  # before an optimizer's step; name: the optimizer's
    OPTIMIZER_POST = "optimizer_post"  # after an optimizer's step; name: the optimizer's

    __hash__ = str.__hash__  # that of enumerations is written in Python, and anchors are looked up all the time


@dataclass(frozen=True, slots=True)
class AnchorKey:
    """Identity of an anchor within one iteration: what fired, and for which time (from 0) since the boundary."""

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
        """As people say it: "layer4.1.bn2's forward", "the start of optimizer.step()"."""
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
    writes: tuple[int, ...]  # likewise: outputs and everything mutated in place
    link_bytes: int = 0  # that it copies from device to host
    waited_bytes: int = 0  # that cross the link, in either direction, while training waits
    winograd: bool = False  # a convolution that Winograd's algorithm can do with fewer multiplications
    relaid_bytes: int = 0  # of a convolution's tensors, those that matrix units take in another layout than they have
    transient_bytes: int = 0  # of device memory that it frees itself, such as a library's workspace; a trace knows none


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation: live at position p iff created < p <= its end, during operator i iff created <= i <= its end.

    ``created`` is the operator that allocates it, -1 for what lives at the boundary already. Ends are the last operator
    during which it is live; ``len(operators)`` for what also lives at the next boundary. What lives at the boundary and
    is freed before operator 0 (gradients, by ``zero_grad``) has an ``eager_end`` of -1: it is live at position 0 only.
    """

    name: str
    kind: StorageKind
    size_bytes: int
    created: int
    graph_end: int  # freed after the last use
    eager_end: int  # freed when eager PyTorch frees it: Python and autograd hold some things longer


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor that training needs to go on. ``name`` is ``<owner>/<key>``; see :mod:`checkflow.core.state`."""

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    placement: Placement  # "host": lies in host memory already, such as Adam's step counters; copied at the boundary
    storage: int | None  # index into TrainingGraph.storages; None for host entries
    first_write: int | None  # operator index of the first write in an iteration; None if it is never written
    # Where the runtime must assume a write, whether one was seen or not: the first forward of the buffer's module, or
    # of the compiled region around it; the boundary where nothing tells when a compiled optimizer steps.
    barrier: AnchorKey | None = None


@dataclass(frozen=True)
class TrainingGraph:
    """One training iteration. All tuples are in execution order except ``state``, which is in naming order."""

    model: str  # what the user called it
    batch: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each tensor of the batch
    micro_batches: int
    optimizers: tuple[tuple[str, str], ...]  # (name, implementation), such as ("optimizer", "Adam foreach")
    autocast: str  # dtype, or "" where autocast is off
    operators: tuple[Operator, ...]
    storages: tuple[Storage, ...]
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
        """Device bytes live during each operator, with what it takes for a moment, and at each position.

        Returns ``(during, at)``: ``during[i]`` for operator i (length n), ``at[p]`` for position p (length n + 1).
        """
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
