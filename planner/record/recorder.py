"""A live iteration -> TrainingGraph, from the job's own tensors: operators, their times, memory and storages.

Watching changes nothing: the same kernels run in the same order, and torch's memory statistics stay. Optimizer state
and kept gradients must exist at the begin, so a job's second iteration is the first to record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass_type,
)

from checkflow.core.errors import TraceError
from checkflow.core.graph import AnchorKind, TrainingGraph
from checkflow.core.planner_api import Carried
from checkflow.core.state import StateTensor, host_counters, optimizer_implementation, training_device
from checkflow.planner.iteration.hooks import deeper
from checkflow.planner.iteration.iteration import CAPTURED, WatchedIteration
from checkflow.planner.iteration.placement import NO_CROSSING, Crossing, crossing
from checkflow.planner.operators import operators as op
from checkflow.planner.operators.collectives import collective
from checkflow.planner.record.allocator import Transients, allocated
from checkflow.planner.record.carried import CarriedWatch
from checkflow.planner.record.compiled_regions import LiveRegions, Spans
from checkflow.planner.record.cuda_events import OperatorEvents
from checkflow.planner.record.live_objects import find_objects

# Calls that reach a dispatch mode but are not the model's operators.
_NO_OPERATORS = frozenset(("prim", "profiler", "debugprims"))


@dataclass(frozen=True)
class RecordedIteration:
    """One iteration of a live job."""

    graph: TrainingGraph
    #: One for each operator of the graph, as recorded: on the CPU from call to return, on a GPU between events less the
    #: launch on an idle device (:mod:`.cuda_events`). Time between operators is in neither.
    durations_seconds: tuple[float, ...]
    #: What came from the iteration before, besides batch and state.
    carried: tuple[Carried, ...] = ()


class IterationRecorder:
    """Records one iteration of a live job, from boundary to boundary. Use it once."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        name: str,
        beside: Callable[[], Sequence[StateTensor]] = lambda: (),
    ) -> None:
        self._name, self._models, self._optimizers = name, models, optimizers
        self._device = device = training_device(models)
        places = _LivePlaces(device, optimizers)
        self._iteration = WatchedIteration(models, optimizers, places, device_type=device.type, beside=beside)
        self._clock: _Clock = _HostClock() if device.type == "cpu" else OperatorEvents(device)
        transients = Transients(device)
        self._mode = _LiveMode(self._iteration, places, self._clock, transients)
        self._regions = self._iteration.where.regions = LiveRegions(self._iteration, self._clock, transients)
        self._hooks = contextlib.ExitStack()

    def begin(self, batch: Any = None, *, held: Any = None) -> None:
        """Start watching at a boundary, with the batch and what the loop still holds of the last iteration, if any."""
        apart = self._device.type != "cpu"  # on the CPU, data sets lie beside the tensors of training
        alive = held_tensors(self._device)
        entered = self._iteration.begin(batch, held, alive if apart else ())
        storages = [(name, part.untyped_storage()) for name, one in entered for part in op.tensors_in(one)]
        if apart:
            seen = {storage._cdata: storage.nbytes() for _, storage in storages}
            self._iteration.ledger.enter_unseen("other", allocated(self._device).now_bytes - sum(seen.values()))
        known = {storage._cdata for name, storage in storages if name != CAPTURED}
        self._mode.carried = CarriedWatch(self._models, alive, known)
        del entered, storages, alive  # else they keep alive what the iteration drops
        self._hooks.enter_context(deeper(2))
        self._hooks.enter_context(self._iteration.where.watching())
        self._hooks.enter_context(self._iteration.ledger.watching_sizes())
        self._regions.start()
        self._mode.enter()

    def end(self, *, batch: Any = None, micro_batches: int = 1) -> RecordedIteration:
        """Return what was seen, at the next boundary; ``batch``: the batch, or one micro-batch.

        Raises TraceError if the iteration was unlike later ones: state was made or removed, or no optimizer stepped.
        """
        self.abandon()
        if (failure := self._mode.failure or self._iteration.where.failure) is not None:
            raise failure
        self._iteration.where.forget_running()
        self._iteration.end()
        stepped = {a.key.name for a in self._iteration.where.anchors if a.key.kind is AnchorKind.OPTIMIZER_POST}
        if self._optimizers and not (stepped or self._iteration.where.steps_unseen):
            raise TraceError(f"cannot plan {self._name}: no optimizer stepped in the iteration that was recorded")
        implementations = tuple(
            (name, optimizer_implementation(optimizer, self._device.type))
            for name, optimizer in self._optimizers.items()
        )
        graph = self._iteration.graph(self._name, batch, micro_batches, implementations)
        watch = self._mode.carried
        return RecordedIteration(graph, self._clock.seconds(), () if watch is None else watch.carried())

    def abandon(self) -> None:
        """Stop watching and remove all hooks; safe at any time."""
        self._mode.leave()
        self._regions.stop()
        self._hooks.close()


def held_tensors(device: torch.device) -> list[torch.Tensor]:
    """Return every tensor on this device that a Python object refers to: a loop's logits, averages, caches."""
    # By exact types: isinstance would wake lazy objects of other libraries.
    found = find_objects((torch.Tensor, nn.Parameter, nn.Buffer))
    return [tensor for tensor in found if tensor.device == device and tensor.layout is torch.strided]


class _LivePlaces:
    """Where real tensors lie. On the CPU only counters count as host memory, as in a trace for it."""

    def __init__(self, device: torch.device, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._apart = device.type != "cpu"
        self._counters = [tensor for optimizer in optimizers.values() for tensor in host_counters(optimizer)]
        self._addresses = frozenset(tensor.untyped_storage()._cdata for tensor in self._counters)

    def holds(self, tensor: torch.Tensor, /) -> bool:
        if self._apart:
            return tensor.device.type == "cpu"
        return tensor.dim() == 0 and tensor.untyped_storage()._cdata in self._addresses

    def crossing(self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any], result: Any, /) -> Crossing:
        return crossing(func, args, keywords, result, self.holds, _waits) if self._apart else NO_CROSSING


def _waits(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> bool:
    """Only a copy from or to pinned memory can overlap training."""
    host = source if source.device.type == "cpu" else target
    return not (non_blocking and host.is_pinned())


class _Clock(Spans, Protocol):
    """Measures operators: ``start``, the operator, ``stop``; ``keep`` if it counts."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def keep(self) -> None: ...
    def seconds(self) -> tuple[float, ...]: ...


class _HostClock:
    """On the CPU an operator is done when its call returns."""

    def __init__(self) -> None:
        self._started = self._last = 0.0
        self._kept: list[float] = []

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._last = time.perf_counter() - self._started

    def keep(self) -> None:
        self._kept.append(self._last)

    def open(self) -> object:
        return len(self._kept), time.perf_counter()

    def keep_rest(self, span: Any, apart_seconds: float, /) -> None:
        first, begun = span
        self._kept.append(max(0.0, time.perf_counter() - begun - apart_seconds - sum(self._kept[first:])))

    def seconds(self) -> tuple[float, ...]:
        return tuple(self._kept)


class _LiveMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that runs while it is entered."""

    supports_higher_order_operators = True  # lets them pass, but the recording fails

    def __init__(self, iteration: WatchedIteration, places: _LivePlaces, clock: _Clock, transients: Transients) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._iteration, self._places, self._clock, self._transients = iteration, places, clock, transients
        self._names: dict[str, int] = {}
        self._thread: int | None = None  # the one that entered it
        self._watching = False
        self.carried: CarriedWatch | None = None
        self.failure: Exception | None = None  # while noting an operator
        # Autograd runs backward for several devices on several threads.
        self._lock = threading.RLock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run. By default torch runs it eagerly under a mode, and never compiled again."""
        return True

    def enter(self) -> None:
        """Put the mode below all others, since those active now may end first, each popping the topmost."""
        self._thread = threading.get_ident()
        self._watching = True
        above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        _push_mode(self)
        for mode in reversed(above):
            _push_mode(mode)

    def leave(self) -> None:
        """Take the mode off the stack, even from below others that are still active."""
        self._watching = False
        if self.carried is not None:
            self.carried.stop()
        # Another thread cannot remove it; it is inactive from now on.
        if self._thread == threading.get_ident() and self in _get_current_dispatch_mode_stack():
            above: list[TorchDispatchMode] = []
            while (mode := _pop_mode()) is not self:
                above.append(mode)
            for mode in reversed(above):
                _push_mode(mode)
            self._thread = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if op.compares_constants(func, args):
            return op.compare_constants(args)
        if isinstance(func, HigherOrderOperator):
            if self._watching:
                self._watching = False
                self.failure = TraceError(
                    f"an iteration with {func} cannot be recorded: it takes functions, and runs operators unseen; "
                    "write it as plain Python or with torch.where, or compile what calls it"
                )
            return func(*args, **keywords)
        if not self._watching or func.namespace in _NO_OPERATORS or func is torch.ops.aten.lift_fresh.default:
            return func(*args, **keywords)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass calls other operators, which arrive here
        if op.is_view(func):
            result = func(*args, **keywords)
            self._iteration.where.note_forward()
            return result
        with self._lock:
            mark_bytes = self._transients.begin()
            self._clock.start()
            result = func(*args, **keywords)
            self._clock.stop()
            transient_bytes = self._transients.end(mark_bytes)
            try:
                effect = op.effects(func, args, keywords, result, self._places.holds)
                if effect.reads or effect.writes:
                    self._note(func, args, keywords, result, effect, transient_bytes)
            except Exception as error:  # noqa: BLE001 — the job goes on unwatched; ``end`` raises it
                self.failure, self._watching = error, False
            return result

    def _note(
        self,
        func: OpOverload,
        args: Sequence[Any],
        keywords: Mapping[str, Any],
        result: Any,
        effect: op.Effects,
        transient_bytes: int,
    ) -> None:
        crossed = self._places.crossing(func, args, keywords, result)
        self._iteration.where.note_forward()
        name = self._name(func)
        if effect.computes or crossed.to_host_bytes:
            self._clock.keep()
            flops = op.flops(func, args, keywords, result)
            moved = collective(func, args, keywords, result)
            self._iteration.append(name, op.target_name(func), effect, flops, crossed, transient_bytes, moved)
            if self.carried is not None and effect.writes:
                self.carried.note(effect)
        else:
            self._iteration.allocate(effect, name)

    def _name(self, func: OpOverload) -> str:
        """Name as torch.fx names nodes: "add", "add_1", …"""
        base = func._schema.name.rpartition("::")[2]
        number = self._names.get(base, 0)
        self._names[base] = number + 1
        return f"{base}_{number}" if number else base
