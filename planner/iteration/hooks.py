"""Watches where an iteration is: the anchors that fire, the module that runs, and the phase.

An AnchorStream (:mod:`checkflow.anchors.stream`), as a running job has one, says what fires, in which order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from checkflow.anchors import regions
from checkflow.anchors.stream import AnchorStream, Subscriber
from checkflow.core.errors import TraceError
from checkflow.core.graph import BOUNDARY, Anchor, AnchorKey, AnchorKind, Phase, StateKind
from checkflow.core.state import module_names, parameter_paths


class RegionWatcher(Protocol):
    """Notified when a compiled region's forward, or an optimizer's step in compiled code, begins and ends."""

    def entered(self) -> None: ...
    def left(self, modules: Mapping[str, nn.Module], result: Any) -> None: ...
    def stepped(self, optimizer: torch.optim.Optimizer) -> None: ...


class Whereabouts:
    """Collects anchors with their positions, and knows module and phase of the operator that runs now.

    Args:
        operators: gives the number of operators so far: the position of an anchor that fires now.
        on_gradient: called with the name and the parameter whose gradient was accumulated.
        on_step: called before an optimizer steps.
        device_type: of the tensors that the step computes with; its autocast is the one that counts.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        operators: Callable[[], int],
        on_gradient: Callable[[str, torch.Tensor], None],
        on_step: Callable[[torch.optim.Optimizer], None],
        device_type: str = "cpu",
    ) -> None:
        self.autocast = ""
        #: Why this iteration cannot be planned by, if so.
        self.failure: TraceError | None = None
        self.compiled: set[str] = set()  # compiled calls seen: modules, and functions as "name()"
        self._anchors: list[Anchor] = [Anchor(BOUNDARY, 0)]
        self._models, self._optimizers = models, optimizers
        self._stream = AnchorStream(models, optimizers, planning=True)
        self._regions = regions.compiled_regions(models)
        self._within: dict[int, str] = {}  # the compiled call that a parameter is used in, by the parameter's id
        self._brought_by: dict[str, str] = {}  # the same by name, for parameters that had a gradient
        self._instead: dict[str, AnchorKey] = {}  # the anchor before a module's first forward in compiled code
        self._thread = threading.get_ident()  # the watched one: a dispatch mode sees one thread
        self.elsewhere = ""  # the first module that ran forward in another thread
        #: Set for a live job, whose compiled regions get no hooks.
        self.regions: RegionWatcher | None = None
        self._members: dict[str, dict[str, nn.Module]] = {}  # of each region, by name
        for name, module in module_names(models):
            if (region := self._regions.get(name)) is not None:
                self._members.setdefault(region.name, {})[name] = module
        self._device_type = device_type
        self._operators, self._on_gradient, self._on_step = operators, on_gradient, on_step
        self._running: list[str] = []  # modules whose forward runs, innermost last
        self._by_sequence: dict[int, str] = {}  # module by the sequence number that autograd gave its operator
        self._phase: Phase = "forward"

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Subscribe to all anchors, and leave afterwards. Watches forward in the calling thread."""
        parameters = parameter_paths(self._models)
        # By weak references: what the iteration drops must be freed.
        self._modules = weakref.WeakValueDictionary(module_names(self._models))
        self._parameters = weakref.WeakValueDictionary(parameters)
        places = {id(p): (AnchorKind.GRADIENT, name) for name, p in reversed(parameters.items()) if p.requires_grad}
        for name, module in self._modules.items():
            if self.regions is None or regions.entry_of(self._regions, name, module) is not None:
                places[id(module)] = AnchorKind.FORWARD, name
        subscriber = Subscriber(
            places=frozenset(places.values()), entering=self._entering, leaving=self._leaving,
            gradient=self._accumulated, step_begins=self._fire, stepping=self._stepping, stepped=self._stepped,
            step_ends=self._fire, unseen=self._note_compiled, repeated=self._again,
        )  # fmt: skip
        return self._subscribed(self._stream, subscriber)

    def watching_threads(self) -> contextlib.AbstractContextManager[None]:
        """In an otherwise unwatched iteration, note modules that run in other threads than the caller's."""
        places = frozenset((AnchorKind.FORWARD, name) for name, _ in module_names(self._models))
        subscriber = Subscriber(places=places, entering=lambda name, *_: self._seen(name))
        return self._subscribed(AnchorStream(self._models, {}, planning=True), subscriber)

    @contextlib.contextmanager
    def _subscribed(self, stream: AnchorStream, subscriber: Subscriber) -> Iterator[None]:
        self._thread = threading.get_ident()
        stream.subscribe("plan", subscriber)
        try:
            yield
        finally:
            stream.remove()

    @property
    def steps_unseen(self) -> bool:
        """Return whether an optimizer steps in compiled code that torch may not leave for an anchor."""
        return self._stream.steps.known

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """Return the anchors that fire in the job, by position."""
        if self.steps_unseen:  # then the time of the parameters' writes is unknown, too
            return (self._anchors[0],)
        last: dict[tuple[str, int], int] = {}
        for anchor in self._anchors:
            if (call := self._call_of(anchor.key)) is not None:
                last[call] = anchor.position
        moved = [
            anchor if (call := self._call_of(anchor.key)) is None else replace(anchor, position=last[call])
            for anchor in self._anchors
        ]
        return tuple(sorted(moved, key=lambda anchor: anchor.position))

    def barrier(self, kind: StateKind, module: str) -> AnchorKey | None:
        """Return the anchor at which a state tensor counts as written, whether an operator was seen or not.

        A module may write its buffers unseen, so none passes its forward, which the runtime guards.
        """
        if self.steps_unseen:
            return BOUNDARY
        if kind != "buffer":
            return None
        if (AnchorKind.FORWARD, module) in self._stream.fired:
            return AnchorKey(AnchorKind.FORWARD, module)
        # In a live job, code compiled earlier bypasses hooks.
        passed_by = self.regions is not None and regions.anything_compiled()
        return self._instead.get(module, BOUNDARY if passed_by else None)

    @property
    def phase(self) -> Phase:
        """Backward is what autograd runs; what follows it (clipping, the step, averaging) counts as optimizer."""
        return "backward" if regions.in_backward() else self._phase

    def module(self) -> str:
        """Return the module whose forward runs; in backward the one whose forward made the differentiated operator."""
        if self._running:
            return self._running[-1]
        if regions.in_backward():
            node = torch._C._current_autograd_node()
            return self._by_sequence.get(node._sequence_nr(), "") if node is not None else ""
        return ""

    def note_forward(self) -> None:
        """Remember, for its backward, which module the last operator belongs to."""
        if self._running and torch.is_grad_enabled():
            # The newest number is this operator's, unless it made no node: then the entry of the node before stays.
            self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._running[-1])

    def forget_running(self) -> None:
        """The iteration ended in the forward that begins the next one: what runs now is not part of it."""
        for name in reversed(self._running):
            if self._anchors[-1].key.name == name and self._anchors[-1].key.kind is AnchorKind.FORWARD:
                self._anchors.pop()
        self._running.clear()

    def _fire(self, key: AnchorKey) -> None:
        self._anchors.append(Anchor(key, self._operators()))

    def _call_of(self, key: AnchorKey) -> tuple[str, int] | None:
        """Return the compiled call whose backward brings a gradient, and its occurrence."""
        if key.kind is not AnchorKind.GRADIENT or key.name not in self._brought_by:
            return None
        return self._brought_by[key.name], key.occurrence

    def _entering(self, name: str, key: AnchorKey | None, function: str | None) -> None:
        if not self._seen(name):
            return
        if not regions.in_backward():  # activation checkpointing repeats forward
            self._phase = "forward"
            region = self._regions.get(name)
            if function is not None:
                known = region is not None and (region.entry is None or region.name in self.compiled)
                call = region.name if region is not None and known else f"{function}()"
                self._enter_compiled(call, {name: self._modules[name]})
            elif key is not None:
                self._fire(key)
                if region is not None:
                    self._enter_compiled(name, self._members[name])
                    if self.regions is not None:
                        self.regions.entered()
            if not self.autocast and torch.is_autocast_enabled(self._device_type):
                self.autocast = str(torch.get_autocast_dtype(self._device_type)).removeprefix("torch.")
        self._running.append(name)

    def _note_compiled(self, name: str) -> None:
        self._enter_compiled(f"{regions.compiled_function() or 'compiled code'}()", {name: self._modules[name]})

    def _seen(self, module: str) -> bool:
        """Return whether the module's operators are seen; autograd takes the dispatch mode along to its own threads."""
        seen = threading.get_ident() == self._thread or regions.in_backward()
        self.elsewhere = self.elsewhere or ("" if seen else module)
        return seen

    def _enter_compiled(self, call: str, modules: Mapping[str, nn.Module]) -> None:
        """A compiled call begins, or a module's forward within one."""
        self.compiled.add(call)
        before = next(anchor.key for anchor in reversed(self._anchors) if anchor.key.kind is not AnchorKind.GRADIENT)
        for name, module in modules.items():
            self._instead.setdefault(name, before)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._within.setdefault(id(parameter), call)

    def _leaving(self, name: str, result: Any) -> None:
        if self._seen(name) and self._running and self._running[-1] == name:  # hooks may be hung while it runs
            if self.regions is not None and name in self._members and not regions.in_backward():
                self.regions.left(self._members[name], result)
            self._running.pop()

    def _accumulated(self, key: AnchorKey) -> None:
        parameter = self._parameters[key.name]
        self._phase = "optimizer"
        self._on_gradient(key.name, parameter)
        self._fire(key)
        if (call := self._within.get(id(parameter))) is not None:
            self._brought_by[key.name] = call

    def _again(self, optimizer: str) -> None:
        self.failure = TraceError(
            f"cannot plan a step in which {type(self._optimizers[optimizer]).__name__} runs its closure more than "
            "once, and writes parameters in between: Checkpointer(plan=None) copies all state at the boundaries that "
            "it saves"
        )
        if self.regions is None:  # a live job goes on
            raise self.failure

    def _stepping(self, optimizer: torch.optim.Optimizer) -> None:
        self._phase = "optimizer"
        if (function := regions.compiled_function()) is not None:
            self.compiled.add(f"{function}()")
        self._on_step(optimizer)
        if self.regions is not None and function is not None:
            self.regions.entered()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.regions is not None and regions.compiled_function() is not None:
            self.regions.stepped(optimizer)


@contextlib.contextmanager
def deeper(times: int) -> Iterator[None]:
    """Raise the recursion limit, so that modules nest as deep as in training in spite of the watchers' frames."""
    before, raised = sys.getrecursionlimit(), times * sys.getrecursionlimit()
    sys.setrecursionlimit(raised)
    try:
        yield
    finally:
        if sys.getrecursionlimit() == raised:  # the user may have changed it meanwhile
            sys.setrecursionlimit(before)
