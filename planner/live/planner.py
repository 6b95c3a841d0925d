"""The planner of a live job: recorders for its iterations, and a child process that makes the plan.

The training process makes the timeline, which is little work, and imports no solver. The child (:mod:`.live.process`)
runs at the lowest priority, imports no torch, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError, PlanError, TraceError
from checkflow.core.machine.device import DeviceKind, usable_bytes
from checkflow.core.machine.host_memory import host_memory_bytes
from checkflow.core.plan import Fingerprint
from checkflow.core.planner_api import PendingPlan, PlanLimits, PlannerInput, PlanResponse, RankParts, Recorder
from checkflow.core.state import StateTensor
from checkflow.planner.live.bandwidth import CopyBandwidths, measure_bandwidths
from checkflow.planner.record.recorder import IterationRecorder, RecordedIteration
from checkflow.planner.schedule.scheduler import fingerprint_for
from checkflow.planner.timeline.shares import take_parts
from checkflow.planner.timeline.steps import make_timeline

CHILD_SECONDS = 600.0  # then it is killed


class LivePlanner:
    """Plans for one job: see :class:`checkflow.core.planner_api.Planner`."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    def recorder(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        name: str,
        beside: Callable[[], Sequence[StateTensor]] = lambda: (),
    ) -> Recorder:
        self._device = _training_device(models)
        return IterationRecorder(models, optimizers, name=name, beside=beside)

    def start(
        self,
        recorded: RecordedIteration,
        *,
        usual_seconds: float,
        autocast: str,
        device: str,
        limits: PlanLimits,
        file: Callable[[Fingerprint], Path],
        of_rank: RankParts | None = None,
    ) -> PendingPlan:
        return PlanProcess(
            self.planner_input(
                recorded, usual_seconds=usual_seconds, autocast=autocast, device=device, limits=limits, file=file,
                of_rank=of_rank,
            )
        )  # fmt: skip

    def planner_input(
        self,
        recorded: RecordedIteration,
        *,
        usual_seconds: float,
        autocast: str,
        device: str,
        limits: PlanLimits,
        file: Callable[[Fingerprint], Path],
        of_rank: RankParts | None = None,
    ) -> PlannerInput:
        """Return the planner process's input; the arguments are those of ``start``."""
        graph = recorded.graph
        timeline = make_timeline(graph, scaled_seconds(recorded, usual_seconds), "segment")
        ranks = 1
        if of_rank is not None:
            ranks, (graph, timeline) = of_rank.ranks, take_parts(graph, timeline, of_rank.parts)
        kind: DeviceKind = "cuda" if self._device.type == "cuda" else "cpu"
        fingerprint = replace(fingerprint_for(graph, device, kind), autocast=autocast, ranks=ranks)
        bandwidths = _bandwidths(self._device)
        return PlannerInput(
            timeline=timeline,
            fingerprint=fingerprint,
            graph_peak_bytes=max(max(part, default=0) for part in graph.live_bytes(eager=False)),
            bandwidth_bytes_per_second=bandwidths.link_bytes_per_second,
            memory_bandwidth_bytes_per_second=bandwidths.memory_bytes_per_second,
            copy_seconds=bandwidths.copy_seconds,
            memory_limit_bytes=usable_bytes(_memory_bytes(self._device)),
            limits=limits,
            path=str(file(fingerprint)),
        )


def scaled_seconds(recorded: RecordedIteration, usual_seconds: float) -> list[float]:
    """Scale the operators' recorded seconds so that they sum to ``usual_seconds``; TraceError if nothing was measured.

    Recording costs every operator about as much, and some time lies between operators. Both are spread by measured
    durations: the sum is right, and short operators get more than their due.
    """
    total = sum(recorded.durations_seconds)
    if not total > 0:
        raise TraceError("the iteration that was recorded ran no operator: what trains is not what was passed as model")
    return [seconds * usual_seconds / total for seconds in recorded.durations_seconds]


class PlanProcess:
    """A process that makes one plan. PlanError if it cannot be started.

    Input, output and errors are unnamed files: nothing waits for a pipe, and nothing is left behind.
    """

    def __init__(self, given: PlannerInput) -> None:
        self._begun = time.monotonic()
        self._closed = False
        with contextlib.ExitStack() as undo:
            try:
                stdin, self._stdout, self._stderr = (undo.enter_context(tempfile.TemporaryFile()) for _ in range(3))
                stdin.write(TypeAdapter(PlannerInput).dump_json(given))
                stdin.seek(0)
                self._process = subprocess.Popen(
                    # -P: keeps the user's folder off sys.path.
                    [sys.executable, "-P", "-m", "checkflow.planner.live.process", str(os.getpid())],
                    stdin=stdin,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    env={**os.environ, "PYTHONPATH": _search_path()},
                    process_group=0,  # a terminal's Ctrl-C is for the training job
                )
            except OSError as error:
                raise PlanError(f"cannot start a process that plans: {error.strerror or error}") from error
            stdin.close()
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> PlanResponse | None:
        if self._closed:
            return None
        code = self._process.poll()
        seconds = time.monotonic() - self._begun
        if code is None and seconds <= CHILD_SECONDS:
            return None
        stdout, stderr = _content(self._stdout), _content(self._stderr).decode(errors="replace")
        self.close()
        if code is None:
            return PlanResponse(None, f"the process that plans had not ended after {CHILD_SECONDS:.0f} s")
        if code < 0:
            return PlanResponse(None, f"the process that plans was ended by {_signal_name(-code)}")
        if code > 0:
            last = stderr.strip().rpartition("\n")[2] or "it gave no reason"
            return PlanResponse(None, f"the process that plans failed with exit code {code}: {last}")
        try:
            return replace(TypeAdapter(PlanResponse).validate_json(stdout), seconds=seconds)
        except ValidationError:
            return PlanResponse(None, "the process that plans gave no answer")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._stdout.close()
        self._stderr.close()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _search_path() -> str:
    """Return a PYTHONPATH on which the child finds this very package, and what the parent's path has."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(plans.__file__))))
    given = os.environ.get("PYTHONPATH")
    return own if not given else os.pathsep.join([own, given])


@functools.cache
def _bandwidths(device: torch.device) -> CopyBandwidths:
    try:
        return measure_bandwidths(device)
    except RuntimeError as error:  # no device memory left for it
        raise CheckflowError(f"cannot measure the link: {str(error).partition(chr(10))[0]}") from error


def _memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory_bytes()


def _training_device(models: Mapping[str, nn.Module]) -> torch.device:
    """Return the first accelerator that a parameter lies on, else the CPU."""
    devices = (parameter.device for model in models.values() for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
