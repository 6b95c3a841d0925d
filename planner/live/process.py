"""``python -m checkflow.planner.live.process PARENT``: the child process that plans for a live job.

Reads a :class:`checkflow.core.planner_api.PlannerInput` as JSON from standard input, writes an
:class:`.core.planner_api.PlanResponse` to standard output, and the plan atomically to the file that the input names. It
ends with the process whose id is PARENT: by a signal on Linux, and by polling the parent's id everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from pydantic import TypeAdapter

from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError
from checkflow.core.planner_api import PlannerInput, PlanResponse
from checkflow.planner.schedule.scheduler import PlanRequest, make_plan

LOOK_SECONDS = 0.5
LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1


def respond(given: PlannerInput) -> PlanResponse:
    """Make the plan and write it, or say why there is none."""
    limits = given.limits
    try:
        outcome = make_plan(
            given.timeline,
            given.fingerprint,
            PlanRequest(
                bandwidth_bytes_per_second=given.bandwidth_bytes_per_second,
                memory_bandwidth_bytes_per_second=given.memory_bandwidth_bytes_per_second,
                copy_seconds=given.copy_seconds,
                memory_limit_bytes=given.memory_limit_bytes,
                extra_memory_bytes=limits.extra_memory_bytes,
                overhead=limits.overhead,
            ),
            graph_peak_bytes=given.graph_peak_bytes,
        )
        if outcome.plan is None:
            return PlanResponse(None, _for_scripts(outcome.explanation), final=True)
        plans.save(outcome.plan, given.path)
    except CheckflowError as error:
        return PlanResponse(None, str(error))
    return PlanResponse(given.path)


def _for_scripts(explanation: str) -> str:
    """Replace command-line options in the advice by the Checkpointer's arguments."""
    return explanation.replace("--overhead ", "overhead=").replace(
        ", another device, or --relax-memory", " or another device"
    )


def main(arguments: Sequence[str]) -> int:
    """Serve the process whose id is the only argument."""
    (parent,) = arguments
    _end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the training job ends this process
    with contextlib.suppress(OSError):
        os.nice(LOWEST_PRIORITY)
    given = TypeAdapter(PlannerInput).validate_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(TypeAdapter(PlanResponse).dump_json(respond(given)))
    return 0


def _end_with(parent: int) -> None:
    """Exit within ``LOOK_SECONDS`` of the parent's end, however that comes."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
