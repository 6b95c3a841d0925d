"""How the runtime asks the planner for a plan during training.

The package hands the runtime a :class:`Planner`, so that neither wing imports the other. What crosses to the planner's
process and back (:class:`PlannerInput`, :class:`PlanResponse`) is pure data, as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from checkflow.core.graph import STRICT
from checkflow.core.plan import Fingerprint
from checkflow.core.timeline import Timeline

if TYPE_CHECKING:
    import torch
    from torch import nn

    from checkflow.core.state import StateTensor


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits that the user sets for a plan."""

    __pydantic_config__ = STRICT
    overhead: float = 0.035  # stall allowed, as a share of training's time
    extra_memory_bytes: int | None = None  # may be added to training's own peak; None: what the device has


@dataclass(frozen=True)
class PlannerInput:
    """Everything that the planner's process needs to know."""

    __pydantic_config__ = STRICT
    timeline: Timeline
    fingerprint: Fingerprint
    graph_peak_bytes: int
    bandwidth_bytes_per_second: float
    memory_bandwidth_bytes_per_second: float
    memory_limit_bytes: int
    limits: PlanLimits
    path: str  # the file to write the plan to
    copy_seconds: float = 0.0  # what each piece of state costs the link besides its bytes


@dataclass(frozen=True, slots=True)
class PlanResponse:
    """The planner's result: a plan at ``path``, or ``reason`` says why there is none."""

    __pydantic_config__ = STRICT
    path: str | None
    reason: str = ""  # one line
    final: bool = False  # no plan keeps the limits: asking again is useless
    seconds: float = 0.0  # from the start of the process


@dataclass(frozen=True, slots=True)
class Carried:
    """What an iteration got from the one before and passed on to the next, and is neither batch nor state."""

    what: str  # such as "a tensor float32[2, 20]"
    place: str  # the source line that used it, "" if unknown
    advice: str  # how the script can have it saved
    identity: int  # a tensor's storage address at the iteration's begin, else its ``id``


class Recorded(Protocol):
    """One iteration of the live job: see ``checkflow.planner.record.recorder.RecordedIteration``."""

    @property
    def carried(self) -> tuple[Carried, ...]: ...


class Recorder(Protocol):
    """Watches one iteration of the live job: see ``checkflow.planner.record.recorder.IterationRecorder``."""

    def begin(self, batch: Any = None) -> None: ...
    def end(self, *, batch: Any = None, micro_batches: int = 1) -> Recorded: ...
    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankParts:
    """What one of several ranks copies.

    Args:
        ranks: of the job.
        parts: by state tensor, the name and shape of each part (:func:`checkflow.core.boxes.part_name`).
    """

    ranks: int
    parts: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]


class PendingPlan(Protocol):
    """A plan that another process is making."""

    def poll(self) -> PlanResponse | None:
        """Return the result, once; None while there is none. Never blocks or raises."""

    def close(self) -> None:
        """End the process, if it has not ended."""


class Planner(Protocol):
    """What the runtime asks of the planner."""

    def recorder(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        name: str,
        beside: Callable[[], Sequence[StateTensor]] = lambda: (),
    ) -> Recorder:
        """Return what records one iteration.

        Args:
            beside: gives the state that is neither a model's nor in an optimizer's ``state``, as it is now.
        """

    def start(
        self,
        recorded: Any,
        *,
        usual_seconds: float,
        autocast: str,
        device: str,
        limits: PlanLimits,
        file: Callable[[Fingerprint], Path],
        of_rank: RankParts | None = None,
    ) -> PendingPlan:
        """Start a process that makes the plan of a recorded iteration.

        Args:
            recorded: what a recorder's ``end`` returned.
            usual_seconds: how long such an iteration lasts when it is not recorded.
            autocast: the dtype under which whole models are called, "" if off; compared with a running job.
            device: the name of the device that the job trains on.
            file: the file for the plan of a job with this fingerprint.
            of_rank: what is copied, if the job has several ranks; None: all.

        Raises:
            CheckflowError: nothing was recorded that could be planned, or the process cannot be started.
        """


def plan_name(fingerprint: Fingerprint, limits: PlanLimits) -> str:
    """Return the file name of a plan for a job and limits: a digest of both, ``.json``."""
    data = {"fingerprint": asdict(fingerprint), "wishes": asdict(limits)}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"
