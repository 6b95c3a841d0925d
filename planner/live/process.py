"""``python -m checkflow.planner.live.process PARENT``: the child process that plans for a live job.

Reads a :class:`checkflow.core.planner_api.Handover` as JSON from standard input, writes an
:class:`.core.planner_api.Answer` to standard output, and the plan to the file that the handover names, atomically. It
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
from checkflow.core.planner_api import Answer, Handover
from checkflow.planner.schedule.scheduler import Request, make_plan

LOOK_SECONDS = 0.5
LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1


def answer(handover: Handover) -> Answer:
    """Make the plan and write it, or say why there is none."""
    wishes = handover.wishes
    try:
        outcome = make_plan(
            handover.timeline,
            handover.fingerprint,
            Request(
                bandwidth_bytes_per_second=handover.bandwidth_bytes_per_second,
                memory_bandwidth_bytes_per_second=handover.memory_bandwidth_bytes_per_second,
                copy_seconds=handover.copy_seconds,
                memory_limit_bytes=handover.memory_limit_bytes,
                extra_memory_bytes=wishes.extra_memory_bytes,
                overhead=wishes.overhead,
            ),
            graph_peak_bytes=handover.graph_peak_bytes,
        )
        if outcome.plan is None:
            return Answer(None, _for_scripts(outcome.explanation), final=True)
        plans.save(outcome.plan, handover.path)
    except CheckflowError as error:
        return Answer(None, str(error))
    return Answer(handover.path)


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
    handover = TypeAdapter(Handover).validate_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(TypeAdapter(Answer).dump_json(answer(handover)))
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
