"""What others would do on the same timeline: stop and copy, and CheckFreq."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from checkflow.core.timeline import Timeline


@dataclass(frozen=True)
class Baselines:
    """Peak memory and stall of one checkpoint. CheckFreq's modes are those of its paper, section 4.2."""

    synchronous_stall_seconds: float  # training waits while all state crosses the link; no memory
    checkfreq_peak_bytes: int  # GPU mode as its code does it: the snapshot of all state is kept
    checkfreq_released_peak_bytes: int  # GPU mode, each byte of the snapshot freed once it has left
    checkfreq_gpu_link_stall_seconds: float  # GPU modes: the next snapshot waits until this one has left
    checkfreq_cpu_stall_seconds: float  # CPU mode: no snapshot; a write waits until what it changes has left


def baselines(timeline: Timeline, bandwidth_bytes_per_second: float) -> Baselines:
    """Return the baselines of a timeline.

    CheckFreq snapshots at the boundary. A snapshot every iteration must leave within it, else training waits for the
    rest; copies inside device memory count no time. Its CPU mode is taken at its best: it copies in the order of
    deadlines and waits for each tensor's own first write only, where its code waits for all state before the
    optimizer's step, and leaves buffers that forward changes torn.
    """
    capacity = timeline.capacities_bytes(bandwidth_bytes_per_second)
    state = timeline.state_bytes
    reached = list(accumulate(capacity))
    before = [0, *reached]
    released = max(
        (step.live_bytes + max(0, state - gone) for step, gone in zip(timeline.steps, before, strict=False)), default=0
    )
    due, late = 0, 0
    for group in timeline.groups:  # sorted by deadline
        due += group.size_bytes
        last = len(reached) - 1 if group.first_write is None else group.first_write - 1
        late = max(late, due - reached[last])
    return Baselines(
        synchronous_stall_seconds=state / bandwidth_bytes_per_second,
        checkfreq_peak_bytes=timeline.training_peak_bytes + state,
        checkfreq_released_peak_bytes=released,
        checkfreq_gpu_link_stall_seconds=max(0, state - reached[-1]) / bandwidth_bytes_per_second,
        checkfreq_cpu_stall_seconds=late / bandwidth_bytes_per_second,
    )
