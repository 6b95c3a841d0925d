"""What a live job and the planner say to each other when a plan is made while training goes on.

The runtime asks, through :class:`Planner`; the planner answers. Neither wing imports the other: the package's face
hands one an object of the other's. What crosses into the process that plans, and back, is pure data
(:class:`Handover`, :class:`Answer`), as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from checkflow.core.graph import STRICT
from checkflow.core.plan import Fingerprint
from checkflow.core.timeline import Timeline

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asks of a plan."""

    __pydantic_config__ = STRICT
    overhead: float = 0.035  # stall allowed, as a share of training's time
    extra_memory_bytes: int | None = None  # that the plan may add to training's own peak; None: what the device has


@dataclass(frozen=True)
class Handover:
    """All that the process that plans needs to know."""

    __pydantic_config__ = STRICT
    timeline: Timeline
    fingerprint: Fingerprint
    graph_peak_bytes: int
    bandwidth_bytes_per_second: float
    memory_bandwidth_bytes_per_second: float
    memory_limit_bytes: int
    wishes: Wishes
    path: str  # where the plan is to be written
    copy_seconds: float = 0.0  # what each piece of state costs the link besides its bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it. There is a plan at ``path``, or ``reason`` says why not."""

    __pydantic_config__ = STRICT
    path: str | None
    reason: str = ""  # one line
    final: bool = False  # asking again would give the same answer: no plan satisfies what was asked
    seconds: float = 0.0  # from the start of the process


@dataclass(frozen=True, slots=True)
class Carried:
    """What an iteration got from the one before, and handed on to the next: neither batch nor state."""

    what: str  # such as "a tensor float32[2, 20]"
    place: str  # the source line that used it, "" where none is known
    advice: str  # how the script can have it saved
    identity: int  # of a tensor the address of the storage that it had at the iteration's begin, else its ``id``


class Recorded(Protocol):
    """One iteration of the live job: see ``checkflow.planner.record.recorder.Recorded``."""

    @property
    def carried(self) -> tuple[Carried, ...]: ...


class Recorder(Protocol):
    """Watches one iteration of the live job: see ``checkflow.planner.record.recorder.Recorder``."""

    def begin(self, batch: Any = None) -> None: ...
    def end(self, *, batch: Any = None, micro_batches: int = 1) -> Recorded: ...
    def abandon(self) -> None: ...


class Making(Protocol):
    """A plan that is being made in another process."""

    def poll(self) -> Answer | None:
        """The answer, once; None as long as there is none. Returns at once, and raises nothing."""

    def close(self) -> None:
        """End the process, if it has not ended."""


class Planner(Protocol):
    """What the runtime asks of the planner."""

    def recorder(
        self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], *, name: str
    ) -> Recorder: ...

    def start(
        self,
        recorded: Any,
        *,
        usual_seconds: float,
        autocast: str,
        device: str,
        wishes: Wishes,
        file: Callable[[Fingerprint], Path],
    ) -> Making:
        """Begin to make the plan of a recorded iteration, in a process of its own.

        Args:
            recorded: what a recorder's ``end`` gave.
            usual_seconds: how long such an iteration lasts when it is not recorded.
            autocast: the dtype under which whole models are called, "" where it is off: what a running job can be
                held against.
            device: the name of the device that the job trains on.
            file: where the plan of a job with this fingerprint is to be written.

        Raises:
            CheckflowError: nothing was recorded that could be planned, or the process cannot be started.
        """


def plan_name(fingerprint: Fingerprint, wishes: Wishes) -> str:
    """The name of the file of a plan made for a job and wishes: a digest of both, ``.json``."""
    data = {"fingerprint": asdict(fingerprint), "wishes": asdict(wishes)}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"
