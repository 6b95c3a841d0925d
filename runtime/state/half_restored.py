"""Marks a job whose state was restored in part: it cannot train."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from checkflow.core.errors import CorruptCheckpointError

WARNING = "the state in memory is half restored and must not be trained from: start the job again"

_marked: weakref.WeakKeyDictionary[Any, RemovableHandle] = weakref.WeakKeyDictionary()


def mark(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Have the models' forward and the optimizers' step raise CorruptCheckpointError from now on."""
    lift(models, optimizers)
    for model in models.values():
        _marked[model] = nn.Module.register_forward_pre_hook(model, _refuse, prepend=True)  # scripted ones, too
    for optimizer in optimizers.values():
        _marked[optimizer] = optimizer.register_step_pre_hook(_refuse)


def is_marked(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> bool:
    """Whether any part of the job is marked."""
    return any(one in _marked for one in (*models.values(), *optimizers.values()))


def lift(models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Remove the marks, for a restore that completes what the last one left."""
    for one in (*models.values(), *optimizers.values()):
        if one in _marked:
            _marked.pop(one).remove()


def _refuse(*_: Any) -> None:
    raise CorruptCheckpointError(f"a restore failed after it had begun; {WARNING}")
