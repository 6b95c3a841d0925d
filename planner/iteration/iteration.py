"""One watched iteration: its operators, storages, anchors and state, and the TrainingGraph made of them.

Both the trace (:mod:`.trace.trace`) and the record (:mod:`checkflow.planner.record.recorder`) use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkflow.core.errors import TraceError
from checkflow.core.graph import AnchorKey, Collective, Operator, StateEntry, StateKind, StorageKind, TrainingGraph
from checkflow.core.state import StateTensor, TrainingState, collect_state, dense_parts, dtype_name, with_shapes
from checkflow.planner.iteration.hooks import Whereabouts
from checkflow.planner.iteration.lifetimes import StorageLedger
from checkflow.planner.iteration.placement import Crossing
from checkflow.planner.iteration.spread import OWN, Spread, spreads
from checkflow.planner.iteration.structures import tensors_of
from checkflow.planner.operators import operators as op

CAPTURED: Final = "captured"  # reachable tensors that are neither state nor batch


class Places(Protocol):
    """Which tensors lie in separate host memory, and what crosses the link."""

    def holds(self, tensor: torch.Tensor, /) -> bool: ...

    def crossing(
        self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any], result: Any, /
    ) -> Crossing: ...


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a state tensor at the boundary."""

    name: str
    kind: StateKind
    module: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    storage: int | None  # None: in host memory
    spread: Spread
    inside: bool

    @classmethod
    def of(cls, item: StateTensor, storage: int | None, spread: Spread) -> _Known:
        tensor = item.tensor
        return cls(
            name=item.name,
            kind=item.kind,
            module=item.module,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            size_bytes=tensor.numel() * tensor.element_size(),
            storage=storage,
            spread=spread,
            inside=item.inside,
        )

    @property
    def described(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class WatchedIteration:
    """Collects what one iteration does, and makes its graph.

    Args:
        on_step: called before an optimizer steps.
        beside: gives the state that is neither a model's nor in an optimizer's ``state``, as it is now.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        places: Places,
        *,
        on_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
        device_type: str = "cpu",
        beside: Callable[[], Sequence[StateTensor]] = lambda: (),
    ) -> None:
        self._beside = beside
        self.operators: list[Operator] = []
        self.ledger = StorageLedger(self.position)
        self.where = Whereabouts(
            models,
            optimizers,
            operators=self.position,
            on_gradient=self._name_gradient,
            on_step=on_step,
            device_type=device_type,
        )
        self.places = places
        self._models, self._optimizers = models, optimizers
        # Keeps no tensors of the state at the boundary: what the iteration drops must be freed.
        self._before: tuple[_Known, ...] = ()
        self._ties: tuple[tuple[str, str], ...] = ()
        self._parameters = 0
        self._after = TrainingState((), ())

    def position(self) -> int:
        return len(self.operators)

    def begin(self, batch: Any, held: Any, captured: Sequence[torch.Tensor] = ()) -> list[tuple[str, torch.Tensor]]:
        """Enter everything that lives at the boundary; return it by name.

        Args:
            held: a structure with what the loop still holds of the last iteration.
            captured: further tensors that the iteration may reach.
        """
        before = self._collect()
        parameters = [item for item in before.tensors if item.kind == "parameter"]
        entered: list[tuple[str, torch.Tensor | None, StorageKind]] = [
            *((item.name, item.tensor, item.kind) for item in before.tensors),
            *_named(batch, "batch", "input"),
            # After the batch, whose indices a sparse gradient may hold.
            *((f"gradient of {item.name}", item.held.grad, "gradient") for item in parameters),
            *((CAPTURED, tensor, "input") for tensor in captured),
            *(("gradient of a captured tensor", tensor.grad, "gradient") for tensor in captured),
            *_named(held, "result", "activation"),
        ]
        found = [(name, tensor, kind) for name, tensor, kind in entered if tensor is not None]
        for name, tensor, kind in found:
            self.enter(tensor, name, kind)
        spread = spreads(before.tensors, self._models, self._optimizers)
        self._before = tuple(
            _Known.of(item, self._index(item.tensor), spread.get(item.name, OWN)) for item in before.tensors
        )
        self._ties = before.ties
        # Each once, even if it consists of several state tensors.
        self._parameters = sum(whole.numel() for whole in {id(item.held): item.held for item in parameters}.values())
        return [(name, part) for name, tensor, _ in found for part in _without_wrapper(tensor)]

    def state(self) -> list[tuple[str, torch.Tensor]]:
        """Return the current state tensors by name."""
        return [(item.name, item.tensor) for item in self._collect().tensors]

    def _collect(self) -> TrainingState:
        return collect_state(self._models, self._optimizers, of_a_rank=True, beside=self._beside())

    def enter(self, tensor: torch.Tensor, name: str, kind: StorageKind) -> None:
        """Enter what lives at the boundary, unless it lies in host memory."""
        for part in op.tensors_in(tensor):
            if not self.places.holds(part):
                self.ledger.enter(part, name, kind, -1)

    def append(
        self,
        name: str,
        target: str,
        effect: op.Effects,
        flops: int,
        crossing: Crossing,
        transient_bytes: int = 0,
        collective: Collective | None = None,
    ) -> None:
        index = len(self.operators)
        # A storage first seen when it is read lived at the boundary: a value that the user keeps.
        reads: dict[int, None] = {}
        writes: dict[int, None] = {}
        read_bytes = written_bytes = 0
        for tensor, size in effect.reads:
            reads[self.ledger.enter(tensor, f"{name}.input", "input", -1)] = None
            read_bytes += size
        for tensor, size in effect.writes:
            writes[self.ledger.enter(tensor, name, "activation", index)] = None
            written_bytes += size
        for storage in reads:
            self.ledger.use(storage, index, writes=False)
        for storage in writes:
            self.ledger.use(storage, index, writes=True)
        self.operators.append(
            Operator(
                name=name,
                target=target,
                phase=self.where.phase,
                module=self.where.module(),
                dtype=op.compute_dtype(effect),
                flops=flops,
                read_bytes=read_bytes,
                written_bytes=written_bytes,
                reads=tuple(reads),
                writes=tuple(writes),
                link_bytes=crossing.to_host_bytes,
                waited_bytes=crossing.waited_bytes,
                winograd=effect.winograd,
                relaid_bytes=effect.relaid_bytes,
                transient_bytes=transient_bytes,
                collective=collective,
            )
        )

    def allocate(self, effect: op.Effects, name: str) -> None:
        """Note what was allocated without computing, or seen through a view."""
        for tensor, _ in effect.writes:
            self.ledger.enter(tensor, name, "activation", len(self.operators))

    def end(self) -> None:
        """Close the iteration at the next boundary: what lives now goes on living."""
        self.ledger.close()
        self._after = self._collect()
        for item in self._after.tensors:  # one that replaced another is state from now on
            self.ledger.rename(item.tensor, item.name, item.kind)

    def graph(
        self, name: str, batch: Any, micro_batches: int, implementations: tuple[tuple[str, str], ...]
    ) -> TrainingGraph:
        """Return everything seen as plain data.

        Raises TraceError if the iteration made or removed state, or a module ran in another thread.
        """
        self.refuse_threads(name)
        after = {item.name: item.tensor for item in self._after.tensors}
        # Lists may grow. What does not stay as it is, is copied at the boundary.
        before = [
            item
            for item in self._before
            if not item.inside or (item.name in after and _described(after[item.name]) == item.described)
        ]
        have = {item.name for item in self._after.tensors if not item.inside}
        if odd := have ^ {item.name for item in before if not item.inside}:
            raise TraceError(
                f"cannot plan {name}: its second iteration changes the set of state ({min(odd)}): make all state "
                "before training, or in the first iteration"
            )
        storages, places = self.ledger.storages()
        for item in before:
            if (now := _described(after[item.name])) != item.described:
                raise TraceError(
                    f"cannot plan {name}: {item.name} is {item.described} before its second iteration and "
                    f"{now} after it: state keeps its shape; give it its full size from the "
                    "start, or keep it out of the state (a buffer with persistent=False)"
                )
        anchors = self.where.anchors
        fired = {anchor.key for anchor in anchors}
        return TrainingGraph(
            model=name,
            batch=tuple(
                (tuple(tensor.shape), dtype_name(tensor.dtype))
                for leaf in tensors_of(batch)
                for tensor in with_shapes(leaf)
            ),
            micro_batches=micro_batches,
            optimizers=implementations,
            autocast=self.where.autocast,
            operators=tuple(_renumbered(operator, places) for operator in self.operators),
            storages=storages,
            state=tuple(self._state_entry(item, after[item.name], places, fired) for item in before),
            anchors=anchors,
            ties=self._ties,
            parameters=self._parameters,
            compiled=tuple(sorted(self.where.compiled)),
        )

    def refuse_threads(self, name: str) -> None:
        """Refuse an iteration with an unseen part: TraceError names the first module that ran in another thread."""
        if module := self.where.elsewhere.rstrip("/"):
            raise TraceError(
                f"cannot plan {name}: {module} runs forward in another thread, where no operator is seen: call it in "
                "the thread that trains"
            )

    def _index(self, tensor: torch.Tensor) -> int | None:
        return None if self.places.holds(tensor) else self.ledger.find(tensor)

    def _state_entry(
        self,
        item: _Known,
        after: torch.Tensor,
        places: Mapping[int, int],
        fired: set[AnchorKey],
    ) -> StateEntry:
        index = item.storage
        barrier = self.where.barrier(item.kind, item.module)
        return StateEntry(
            name=item.name,
            kind=item.kind,
            shape=item.shape,
            dtype=item.dtype,
            size_bytes=item.size_bytes,
            placement="host" if index is None else "device",
            storage=None if index is None else places[index],
            first_write=None if index is None else self._first_write(index, after),
            barrier=barrier if index is not None and barrier in fired else None,
            whole_shape=item.spread.whole_shape,
            ranks=item.spread.ranks,
            replicas=item.spread.replicas,
        )

    def _first_write(self, index: int, after: torch.Tensor) -> int | None:
        """Return the first write to a state tensor's storage, or to the one that replaced it by the iteration's end.

        An exchanged buffer is written as any other; a new one when it is made, by the last operator at the latest.
        """
        writes = [self.ledger.first_write(index)]
        successor = self.ledger.find(after)
        if successor is not None and successor != index:
            created = self.ledger.created(successor)
            last = len(self.operators) - 1
            writes.append(min(created, last) if created >= 0 else self.ledger.first_write(successor))
        return min((write for write in writes if write is not None and write >= 0), default=None)

    def _name_gradient(self, name: str, parameter: torch.Tensor) -> None:
        for part in op.tensors_in(parameter.grad):
            if not self.places.holds(part):  # first seen here if compiled code made it
                self.ledger.enter(part, f"gradient of {name}", "gradient", len(self.operators) - 1)
            self.ledger.rename(part, f"gradient of {name}", "gradient")


def _named(structure: Any, name: str, kind: StorageKind) -> list[tuple[str, torch.Tensor, StorageKind]]:
    """Return the tensors of a structure, numbered in its order."""
    return [(f"{name}.{number}", tensor, kind) for number, tensor in enumerate(tensors_of(structure))]


def _described(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _without_wrapper(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that operators get: those inside a subclass that only wraps them."""
    if is_traceable_wrapper_subclass(tensor):
        yield from (part for _, part in dense_parts(tensor))
    else:
        yield tensor


def _renumbered(operator: Operator, places: Mapping[int, int]) -> Operator:
    """Return an operator with the final indices of its storages."""
    return replace(
        operator,
        reads=tuple(places[i] for i in operator.reads if i in places),
        writes=tuple(places[i] for i in operator.writes if i in places),
    )
