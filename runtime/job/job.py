"""The live job as the user gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.state.collect import Stateful, StateWalk


@dataclass(frozen=True)
class Job:
    """Models, optimizers and further objects with state, by name; the loader, if any; the walk that finds all state."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    objects: Mapping[str, Stateful]
    loader: ResumableLoader | None
    walk: StateWalk
