"""Stand-ins for a step that trains on a GPU: calls that move or allocate tensors do so between two places.

All fake tensors are CPU tensors, so ``.cpu()`` would do nothing. Here a call that crosses the link makes a copy, and
:class:`.iteration.placement.HostMemory` knows where it lies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from checkflow.planner.iteration.placement import COPIED, DEVICE, PINNED, Place
from checkflow.planner.trace.fake_state import CPU, StandIns

_MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory)


class DeviceStandIns(StandIns):
    """As :class:`StandIns`, but what is allocated or moved lies where the call says."""

    def __init__(self) -> None:
        super().__init__(apart=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _MOVES:
            tensor = self.of(args[0], captured=True)
            place = self._goal(func, tensor, args[1:], keywords)
            if place is not None and self._crosses(tensor, place):
                return self._move(func, (tensor, *args[1:]), keywords, place)
            return self.call(func, args, keywords) if func is torch.Tensor.to else tensor
        with self.host.allocating(self.host.asked_by(func, args, keywords)):
            return self.call(func, args, keywords)

    def _goal(
        self, func: Any, tensor: torch.Tensor, rest: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Place | None:
        """Return where a moving method wants the tensor; None: where it is."""
        if func is torch.Tensor.cuda:
            return DEVICE
        if func is torch.Tensor.cpu:
            return COPIED
        if func is torch.Tensor.pin_memory:
            return PINNED if self.host.holds(tensor) else None
        asked = keywords.get("device", keywords.get("other", rest[0] if rest else None))
        if isinstance(asked, torch.Tensor):
            return self.host.place(self.of(asked, captured=True))
        return None if isinstance(asked, torch.dtype) else self.host.meant_by(asked)

    def _crosses(self, tensor: torch.Tensor, place: Place) -> bool:
        """Whether a tensor must be copied to get there. The few bytes of a scalar are not copied to the host."""
        here = self.host.place(tensor)
        if place == PINNED:
            return here != PINNED
        return bool(here) != bool(place) and (tensor.dim() > 0 or place == DEVICE)

    def _move(self, func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], place: Place) -> torch.Tensor:
        """Copy a tensor to the other side of the link; its gradient comes back the same way."""
        tensor, here = args[0], self.host.place(args[0])
        if func is not torch.Tensor.to:
            unwaited = keywords.get("non_blocking", func is torch.Tensor.cuda and args[2:3] == (True,))
            args, keywords = (tensor, CPU), {"non_blocking": unwaited}
        most = 3 if isinstance(args[1] if len(args) > 1 else None, torch.Tensor) else 4  # ``copy`` follows
        with self.host.allocating(place):
            moved: torch.Tensor = self.call(torch.Tensor.to, args[:most], {**keywords, "copy": True})
        if moved.requires_grad:
            moved.register_hook(lambda gradient: self._bring(gradient, here))  # type: ignore[no-untyped-call]
        return moved

    def _bring(self, gradient: torch.Tensor, place: Place) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if not self._crosses(gradient, place):
                return gradient
            return self._move(torch.Tensor.to, (gradient, CPU), {}, place)

    @contextlib.contextmanager
    def in_callbacks(self) -> Iterator[None]:
        """Keep the mode active in what operators and autograd call from C++, where modes are off.

        These are hooks on saved tensors (and forward in checkpoints), and the backward of the user's functions.
        """
        hooks, function = torch.autograd.graph.saved_tensors_hooks, torch.autograd.function.BackwardCFunction
        enter = hooks.__enter__
        applies = {name: getattr(function, name) for name in ("apply", "apply_boxed") if hasattr(function, name)}

        def entered(entering: torch.autograd.graph.saved_tensors_hooks) -> None:
            pack, unpack = self.active_in(entering.pack_hook), self.active_in(entering.unpack_hook)
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

        hooks.__enter__ = entered  # type: ignore[method-assign]
        for name, apply in applies.items():
            setattr(function, name, self.active_in(apply))
        try:
            yield
        finally:
            hooks.__enter__ = enter  # type: ignore[method-assign]
            for name, apply in applies.items():
                setattr(function, name, apply)

    def active_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any) -> Any:
            for value in args:
                if isinstance(value, torch.Tensor):
                    self.host.name_device(value)
            with self.host.allocating(None), self:
                return function(*args)

        return called
