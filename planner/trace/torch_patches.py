"""Patches torch during a trace, where no mode sees the step's call, because all tensors are fake and on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn


@contextlib.contextmanager
def torch_patched() -> Iterator[None]:
    """Patch moves of modules, selective checkpoints and questions to masks as a trace needs them."""
    with (
        _modules_stay(),
        # They would take make_fx for a compiler that decides what to keep, and keep all.
        _replaced(torch.utils.checkpoint, "_is_compiling", lambda *_: False),
        _replaced(torch.cuda, "synchronize", lambda device=None: None),
        _replaced(nn.modules.transformer, "_detect_is_causal_mask", _is_causal),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Say that a square mask is causal unless given: nn.Transformer would look into it."""
    return is_causal is True or (is_causal is None and mask is not None and mask.shape[-2:] == (mask.shape[-1],) * 2)


@contextlib.contextmanager
def _modules_stay() -> Iterator[None]:
    """Make ``model.to(device)`` do nothing; torch would try to exchange fake tensors for themselves."""
    original = nn.Module._apply

    @functools.wraps(original)
    def applied(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        held = [*self.parameters(recurse), *self.buffers(recurse)]
        if all(fn(tensor) is tensor for tensor in held):
            return self
        return original(self, fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    with _replaced(nn.Module, "_apply", applied):
        yield
