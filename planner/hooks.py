"""Where a trace is: the anchors that fire, the module that runs, and the phase of the iteration.

The hooks are those that the runtime hangs into real training (forward-pre hooks before the user's own, global hooks of
optimizers, post-accumulate-grad hooks), so that anchors fire in the same order here and there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from checkflow.graph import BOUNDARY, Anchor, AnchorKey, AnchorKind, Phase
from checkflow.state import module_names, parameter_paths


class Whereabouts:
    """Collects anchors with their positions, and tells module and phase of the operator that runs now.

    Args:
        operators: how many operators have run so far: the position of an anchor that fires now.
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
        self.anchors: list[Anchor] = [Anchor(BOUNDARY, 0)]
        self.autocast = ""
        self._models = models
        self._optimizers = {id(optimizer): name for name, optimizer in optimizers.items()}
        self._device_type = device_type
        self._operators, self._on_gradient, self._on_step = operators, on_gradient, on_step
        self._counts: dict[tuple[AnchorKind, str], int] = {}
        self._running: list[str] = []  # modules whose forward runs, innermost last
        self._by_sequence: dict[int, str] = {}  # module by the sequence number that autograd gave its operator
        self._phase: Phase = "forward"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hang the hooks in, and take them out again."""
        with contextlib.ExitStack() as handles:
            for name, module in module_names(self._models):
                handles.callback(module.register_forward_pre_hook(self._entering(name), prepend=True).remove)
                handles.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
            seen: set[int] = set()
            for name, parameter in parameter_paths(self._models).items():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    handle = parameter.register_post_accumulate_grad_hook(self._accumulated(name))  # type: ignore[no-untyped-call]
                    handles.callback(handle.remove)
            handles.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            handles.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield

    @property
    def phase(self) -> Phase:
        """Backward is what autograd runs; what follows it (clipping, the step, averaging) counts as optimizer."""
        return "backward" if in_backward() else self._phase

    def module(self) -> str:
        """The module whose forward runs; in backward the one whose forward made the operator that is differentiated."""
        if self._running:
            return self._running[-1]
        if in_backward():
            node = torch._C._current_autograd_node()
            return self._by_sequence.get(node._sequence_nr(), "") if node is not None else ""
        return ""

    def note_forward(self) -> None:
        """Remember which module the operator that ran just now belongs to, for its backward."""
        if self._running and torch.is_grad_enabled():
            # The newest number is that of this operator's node, unless it made none: then the node's own came first.
            self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._running[-1])

    def forget_running(self) -> None:
        """The iteration has ended in the forward that begins the next one: what runs now is no part of it."""
        for name in reversed(self._running):
            if self.anchors[-1].key.name == name and self.anchors[-1].key.kind is AnchorKind.FORWARD:
                self.anchors.pop()
        self._running.clear()

    def _fire(self, kind: AnchorKind, name: str) -> None:
        occurrence = self._counts.get((kind, name), 0)
        self._counts[kind, name] = occurrence + 1
        self.anchors.append(Anchor(AnchorKey(kind, name, occurrence), self._operators()))

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _arguments: Any) -> None:
            if not in_backward():  # activation checkpointing runs forward again there: no anchor
                self._phase = "forward"
                self._fire(AnchorKind.FORWARD, name)
                if not self.autocast and torch.is_autocast_enabled(self._device_type):
                    self.autocast = str(torch.get_autocast_dtype(self._device_type)).removeprefix("torch.")
            self._running.append(name)

        return hook

    def _leaving(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _arguments: Any, _result: Any) -> None:
            if self._running and self._running[-1] == name:  # hooks may have been hung in when it ran already
                self._running.pop()

        return hook

    def _accumulated(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._phase = "optimizer"
            self._on_gradient(name, parameter)
            self._fire(AnchorKind.GRADIENT, name)

        return hook

    def _before_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        self._phase = "optimizer"
        if id(optimizer) in self._optimizers:
            self._fire(AnchorKind.OPTIMIZER_PRE, self._optimizers[id(optimizer)])
        self._on_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        if id(optimizer) in self._optimizers:
            self._fire(AnchorKind.OPTIMIZER_POST, self._optimizers[id(optimizer)])


def in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1
