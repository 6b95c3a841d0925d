"""Hooks at the anchors of eager training: they call back with an AnchorKey, and do nothing else.

- Module hooks are forward-pre hooks, put before those of the user (old-style spectral_norm writes a buffer in its own).
  Hooks that fire inside backward (activation checkpointing runs forward again there) match no key.
- Optimizer hooks are torch's global ones: pre-hooks of that kind run before an optimizer's own, post-hooks after.
- Occurrences are counted since the boundary, for hooked anchors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from checkflow.errors import MismatchError, UnsupportedError
from checkflow.graph import AnchorKey, AnchorKind
from checkflow.state import module_names, parameter_paths

Fire = Callable[[AnchorKey], None]


class AnchorHooks:
    """The hooks of one job.

    Args:
        fire: called with each key in ``keys`` when it is reached, and with every optimizer's pre- and post-step.
        on_forward: called at each forward pass of a whole model in training mode, outside of backward, with the model's
            name and what it was given.
        on_evaluation: called at each forward pass of a whole model in evaluation mode.
        on_training: called when a hooked module, or a whole model, runs forward in training mode, outside of backward.

    Raises:
        MismatchError: a key names a module, a parameter or an optimizer that the job does not have.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        keys: Iterable[AnchorKey],
        fire: Fire,
        on_forward: Callable[[str, Any], None],
        on_training: Callable[[], None],
        on_evaluation: Callable[[], None],
    ) -> None:
        self._fire, self._on_training = fire, on_training
        self._on_forward, self._on_evaluation = on_forward, on_evaluation
        self._counts: dict[tuple[AnchorKind, str], int] = {}
        self._handles: list[RemovableHandle] = []
        self._optimizers = {id(optimizer): name for name, optimizer in optimizers.items()}
        try:
            self._watch(models, keys)
            # Last, and so put before all others: a boundary comes before the forward's keys.
            self._watch_forward(models)
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
        except BaseException:
            self.remove()
            raise

    def reset(self) -> None:
        """A boundary: occurrences count from 0 again."""
        self._counts.clear()

    def remove(self) -> None:
        """Take all hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, models: Mapping[str, nn.Module], keys: Iterable[AnchorKey]) -> None:
        wanted = {(key.kind, key.name) for key in keys}
        modules = dict(module_names(models))
        parameters = parameter_paths(models)
        for kind, name in sorted(wanted):
            if kind is AnchorKind.FORWARD:
                if name not in modules:
                    raise MismatchError(f"the plan has an anchor at module {name}, which the job does not have")
                forward = self._forward_hook(kind, name)
                self._handles.append(modules[name].register_forward_pre_hook(forward, prepend=True))
            elif kind is AnchorKind.GRADIENT:
                if name not in parameters:
                    raise MismatchError(f"the plan has an anchor at parameter {name}, which the job does not have")
                if parameters[name].requires_grad:
                    gradient = self._gradient_hook(kind, name)
                    handle = parameters[name].register_post_accumulate_grad_hook(gradient)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)
            elif kind is not AnchorKind.BOUNDARY and name not in self._optimizers.values():
                raise MismatchError(f"the plan has an anchor at optimizer {name}, which the job does not have")

    def _watch_forward(self, models: Mapping[str, nn.Module]) -> None:
        for name, model in models.items():
            handle = model.register_forward_pre_hook(self._whole_forward_hook(name), prepend=True, with_kwargs=True)
            self._handles.append(handle)

    def _whole_forward_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if _in_backward():
                return
            if module.training:
                self._on_forward(name, (arguments, keywords))
                self._on_training()
            else:
                self._on_evaluation()

        return hook

    def _reached(self, kind: AnchorKind, name: str) -> None:
        occurrence = self._counts.get((kind, name), 0)
        self._counts[kind, name] = occurrence + 1
        self._fire(AnchorKey(kind, name, occurrence))

    def _forward_hook(self, kind: AnchorKind, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, _arguments: Any) -> None:
            if not _in_backward():
                if module.training:
                    self._on_training()
                self._reached(kind, name)

        return hook

    def _gradient_hook(self, kind: AnchorKind, name: str) -> Callable[[torch.Tensor], None]:
        def hook(_parameter: torch.Tensor) -> None:
            self._reached(kind, name)

        return hook

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        name = self._optimizers.get(id(optimizer))
        if name is None:
            return
        if any(callable(value) for value in (*arguments[1:], *keywords.values())):
            raise UnsupportedError(
                f"optimizer {name} steps with a closure, which runs forward again inside the step: "
                "call loss.backward() before optimizer.step(), without a closure"
            )
        self._reached(AnchorKind.OPTIMIZER_PRE, name)

    def _after_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        name = self._optimizers.get(id(optimizer))
        if name is not None:
            self._reached(AnchorKind.OPTIMIZER_POST, name)


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1
