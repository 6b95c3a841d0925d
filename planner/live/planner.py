"""The planner of a live job: recorders for its iterations, and a process of its own that makes the plan.

The training process turns a recorded iteration into a timeline, which is little work, and hands it over; no solver is
ever imported there. The other process (:mod:`.live.process`) runs at the lowest priority, imports no torch,
and ends when the training process does.
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
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from checkflow.core import plan as plans
from checkflow.core.device import DeviceKind, usable_bytes
from checkflow.core.errors import CheckflowError, PlanError, TraceError
from checkflow.core.host_memory import host_memory_bytes
from checkflow.core.plan import Fingerprint
from checkflow.core.planner_api import Answer, Handover, Making, Recorder, Wishes
from checkflow.planner.live.bandwidth import Bandwidths, measure_bandwidths
from checkflow.planner.record.recorder import Recorded
from checkflow.planner.record.recorder import Recorder as IterationRecorder
from checkflow.planner.schedule.scheduler import fingerprint_for
from checkflow.planner.timeline.steps import make_timeline

CHILD_SECONDS = 600.0  # then it is ended


class LivePlanner:
    """Plans for one job: see :class:`checkflow.core.planner_api.Planner`."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    def recorder(
        self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer], *, name: str
    ) -> Recorder:
        self._device = _training_device(models)
        return IterationRecorder(models, optimizers, name=name)

    def start(
        self,
        recorded: Recorded,
        *,
        usual_seconds: float,
        autocast: str,
        device: str,
        wishes: Wishes,
        file: Callable[[Fingerprint], Path],
    ) -> Making:
        return PlanProcess(
            self.handover(
                recorded, usual_seconds=usual_seconds, autocast=autocast, device=device, wishes=wishes, file=file
            )
        )

    def handover(
        self,
        recorded: Recorded,
        *,
        usual_seconds: float,
        autocast: str,
        device: str,
        wishes: Wishes,
        file: Callable[[Fingerprint], Path],
    ) -> Handover:
        """What the process that plans is given; the arguments are those of ``start``."""
        graph = recorded.graph
        durations = scaled_seconds(recorded, usual_seconds)
        kind: DeviceKind = "cuda" if self._device.type == "cuda" else "cpu"
        fingerprint = replace(fingerprint_for(graph, device, kind), autocast=autocast)
        bandwidths = _bandwidths(self._device)
        return Handover(
            timeline=make_timeline(graph, durations, "segment"),
            fingerprint=fingerprint,
            graph_peak_bytes=max(max(part, default=0) for part in graph.live_bytes(eager=False)),
            bandwidth_bytes_per_second=bandwidths.link_bytes_per_second,
            memory_bandwidth_bytes_per_second=bandwidths.memory_bytes_per_second,
            copy_seconds=bandwidths.copy_seconds,
            memory_limit_bytes=usable_bytes(_memory_bytes(self._device)),
            wishes=wishes,
            path=str(file(fingerprint)),
        )


def scaled_seconds(recorded: Recorded, usual_seconds: float) -> list[float]:
    """Seconds of each operator, such that together they last as long as an iteration usually does.

    Watching an iteration makes it slower, by about as much for a short operator as for a long one; and between its
    operators an iteration spends time that belongs to none. Both are spread over all operators by their measured
    durations: the whole is right, and short operators get more of it than they have in truth.

    Raises:
        TraceError: nothing was measured.
    """
    total = sum(recorded.durations_seconds)
    if not total > 0:
        raise TraceError("the iteration that was recorded ran no operator: what trains is not what was passed as model")
    return [seconds * usual_seconds / total for seconds in recorded.durations_seconds]


class PlanProcess:
    """A process that makes one plan.

    Input, answer and complaints go through files without names: nothing waits for a pipe, and nothing is left behind.

    Raises:
        PlanError: the process cannot be started.
    """

    def __init__(self, handover: Handover) -> None:
        self._begun = time.monotonic()
        self._closed = False
        with contextlib.ExitStack() as undo:
            try:
                given, self._told, self._said = (undo.enter_context(tempfile.TemporaryFile()) for _ in range(3))
                given.write(TypeAdapter(Handover).dump_json(handover))
                given.seek(0)
                self._process = subprocess.Popen(
                    # -P: nothing in the user's folder is taken for a library.
                    [sys.executable, "-P", "-m", "checkflow.planner.live.process", str(os.getpid())],
                    stdin=given,
                    stdout=self._told,
                    stderr=self._said,
                    env={**os.environ, "PYTHONPATH": _search_path()},
                    process_group=0,  # a terminal's Ctrl-C is the training job's
                )
            except OSError as error:
                raise PlanError(f"cannot start a process that plans: {error.strerror or error}") from error
            given.close()
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Answer | None:
        if self._closed:
            return None
        code = self._process.poll()
        seconds = time.monotonic() - self._begun
        if code is None and seconds <= CHILD_SECONDS:
            return None
        told, said = _content(self._told), _content(self._said).decode(errors="replace")
        self.close()
        if code is None:
            return Answer(None, f"the process that plans had not ended after {CHILD_SECONDS:.0f} s")
        if code < 0:
            return Answer(None, f"the process that plans was ended by {_signal_name(-code)}")
        if code > 0:
            last = said.strip().rpartition("\n")[2] or "it gave no reason"
            return Answer(None, f"the process that plans failed with exit code {code}: {last}")
        try:
            return replace(TypeAdapter(Answer).validate_json(told), seconds=seconds)
        except ValidationError:
            return Answer(None, "the process that plans gave no answer")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._told.close()
        self._said.close()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _search_path() -> str:
    """Where the other process finds this very package, and whatever this one was told to find."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(plans.__file__))))
    given = os.environ.get("PYTHONPATH")
    return own if not given else os.pathsep.join([own, given])


@functools.cache
def _bandwidths(device: torch.device) -> Bandwidths:
    try:
        return measure_bandwidths(device)
    except RuntimeError as error:  # no device memory left for it
        raise CheckflowError(f"cannot measure the link: {str(error).partition(chr(10))[0]}") from error


def _memory_bytes(device: torch.device) -> int:
    """Of the device that the job trains on."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory_bytes()


def _training_device(models: Mapping[str, nn.Module]) -> torch.device:
    """Of the first parameter on an accelerator, else the CPU."""
    devices = (parameter.device for model in models.values() for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
