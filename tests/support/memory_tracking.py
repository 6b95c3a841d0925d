"""torch's own memory tracker on a training step, operator by operator, and a traced iteration beside it.

:class:`torch.distributed._tools.mem_tracker.MemTracker` keeps account of storages by weak references, as the trace
does, but is torch's own code, runs the step as it is, without make_fx and on real tensors too, and knows nothing of
what the trace takes for an operator. Here it notes the total after each call that is dispatched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree as pytree

from checkflow.core.graph import TrainingGraph
from checkflow.core.training_step import TrainingStep
from checkflow.planner.operators.sparse import parts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Moment:
    """A call that was dispatched, and what lived right after it."""

    target: str
    phase: str
    modules: frozenset[str]  # that run, or whose gradients are computed: paths, "" for the model itself
    live_bytes: int


class OperatorTracker(MemTracker):  # type: ignore[misc]
    """A memory tracker that notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Moment] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "prim":  # a look at a tensor's device
            return result
        phase = "backward" if self._mod_tracker.is_bw else "optimizer" if self._in_opt else "forward"
        paths = frozenset(name.partition(".")[2] for name in self._mod_tracker.parents - {"Global"})
        self.moments.append(Moment(str(func), phase, paths, int(self._curr_mem_snap[CPU]["Total"])))
        return result

    def _update_peak_stats(self, _state: Any) -> None:
        """The moments tell the peak. To keep one of each module takes half of the tracker's time."""

    def _no_statistics(self, *_arguments: Any) -> None:
        """Statistics of modules refuse one that runs twice."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _no_statistics

    def _track(self, kind: Any, tensor: torch.Tensor) -> None:
        for part in parts(tensor):  # of a sparse tensor the tracker knows nothing
            super()._track(kind, part)

    def _update_and_maybe_create_winfos(self, tensor: torch.Tensor, *arguments: Any) -> set[Any]:
        found: set[Any] = set()
        for part in parts(tensor):
            found |= super()._update_and_maybe_create_winfos(part, *arguments)
        return found


def tracked(step: TrainingStep, *, large: bool = False) -> list[Moment]:
    """What the tracker sees of a step's second iteration.

    Args:
        large: follow modules in backward too. For that the tracker hangs hooks on the inputs of every module, which
            hold the gradients of some until those of all are there: memory that the step alone would not need. And do
            not track the first iteration, which takes time; what a module keeps from it, unless in a buffer, stays
            unknown.
    """
    no_hooks = mock.patch("torch.distributed._tools.mod_tracker.register_multi_grad_hook", _no_hook)
    with contextlib.nullcontext() if large else no_hooks:
        tracker = OperatorTracker()
        held = step.run(step.batch) if large else None  # as a training loop holds it until the next iteration returns
        tensors = [leaf for leaf in pytree.tree_leaves((step.batch, held)) if isinstance(leaf, torch.Tensor)]
        tracker.track_external(*step.models.values(), *step.optimizers.values(), *tensors)
        with tracker:
            held = held if large else step.run(step.batch)
            tracker.moments.clear()
            held = step.run(step.batch)
    return tracker.moments


def _no_hook(*_arguments: Any, **_keywords: Any) -> None:
    """In place of a mock, which would keep every tensor that it is called with."""


@contextlib.contextmanager
def on_fake_memory(step: TrainingStep, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Iterator[TrainingStep]:
    """A step that was built on meta with fake tensors on the CPU in its place, and a new optimizer. One model only."""
    (model,) = step.models.values()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CPU)
        batch = pytree.tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=CPU), step.batch)
        yield TrainingStep(model, optimizer(model.parameters()), loss=step.loss, batch=batch)


@dataclass(frozen=True)
class Comparison:
    """One iteration as the trace and as the tracker tell it. Both count what a GPU's job has in host memory."""

    graph: TrainingGraph
    live_bytes: list[int]  # by the trace, during each operator
    moments: list[Moment]
    places: list[int]  # of each operator among the moments

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes)

    @property
    def tracked_peak_bytes(self) -> int:
        return max(moment.live_bytes for moment in self.moments)

    def at_tracked_peak(self) -> tuple[int, Moment]:
        """The operator during which the tracker's peak occurs (a bare allocation counts with what follows it)."""
        peak = max(range(len(self.moments)), key=lambda place: self.moments[place].live_bytes)
        operator = next(index for index, place in enumerate(self.places) if place >= peak)
        return operator, self.moments[self.places[operator]]

    def differences_bytes(self) -> list[int]:
        """What the trace counts more than the tracker, for each operator."""
        pairs = zip(self.live_bytes, self.places, strict=True)
        return [live - self.moments[place].live_bytes for live, place in pairs]


def compare(graph: TrainingGraph, moments: list[Moment]) -> Comparison:
    """Find each operator of a trace among what was dispatched, in order; what is left over are views and allocations.

    torch's tracker counts the step counters of optimizers, which a GPU's job has in host memory.
    """
    hosts = sum(entry.size_bytes for entry in graph.state if entry.placement == "host")
    places: list[int] = []
    rest = iter(enumerate(moments))
    for operator in graph.operators:
        place = next((place for place, moment in rest if moment.target == operator.target), None)
        assert place is not None, f"{operator.name} ({operator.target}) of the trace was not dispatched"
        places.append(place)
    return Comparison(graph, [live + hosts for live in graph.live_bytes(eager=True)[0]], moments, places)
