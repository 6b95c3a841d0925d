"""When the last captures were made and stored, and what training did meanwhile."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

from checkflow.core.reports.capture_times import (
    KEPT_CAPTURES,
    CaptureTimes,
    CopyTimes,
    Spell,
    StorageTimes,
    merge_copies,
)
from checkflow.runtime.persist.writer import Persisted
from checkflow.runtime.snapshot.capturer import CaptureReport


class KeptSpells:
    """What training did during the last checkpoints, which the clock forgets.

    Args:
        spells: of the clock, a bounded number: what, since when, until when; the last one to end is the last.
    """

    def __init__(self, spells: deque[tuple[str, float, float]]) -> None:
        self._spells = spells
        self._kept: deque[tuple[int, list[tuple[str, float, float]]]] = deque(maxlen=KEPT_CAPTURES)

    def keep(self, step: int, begun: float) -> None:
        """Keep what has ended since the boundary of this step, at ``begun``."""
        if step not in dict(self._kept):
            latest_first = reversed(list(self._spells))  # a copy: training goes on
            self._kept.append((step, [*itertools.takewhile(lambda spell: spell[2] > begun, latest_first)][::-1]))

    def of(self, step: int, begun: float) -> Sequence[tuple[str, float, float]]:
        """What has ended since this boundary, and maybe earlier; where the clock has forgotten it, what was kept."""
        spells = list(self._spells)
        forgotten = len(spells) == self._spells.maxlen and spells[0][2] > begun
        return dict(self._kept).get(step, spells) if forgotten else spells


def times_of(
    capture: CaptureReport, persisted: Persisted | None, spells: Sequence[tuple[str, float, float]]
) -> CaptureTimes:
    """When a capture was made and stored, in seconds since its boundary.

    On Linux time.monotonic and time.perf_counter are one clock.
    """
    start, plan = capture.begun, capture.plan
    copies = [
        CopyTimes(
            span.kind,
            plan.chunks[span.chunk].tensor if plan is not None and span.chunk >= 0 else "",
            span.chunks,
            span.size_bytes,
            span.begun - start,
            span.seconds,
        )
        for span in capture.outcome.spans()
    ]
    end = max(capture.arrived_at, 0.0 if persisted is None else persisted.ended)
    storage = None
    if persisted is not None:
        audited, written, published = (
            at - start if at else None for at in (persisted.audited_at, persisted.written_at, persisted.published_at)
        )
        storage = StorageTimes(persisted.begun - start, audited, written, published, persisted.ended - start)
    return CaptureTimes(
        step=capture.step,
        begun_unix_seconds=round(time.time() - (time.monotonic() - start), 6),
        plan_digest="" if plan is None else plan.digest,
        arrived_seconds=capture.arrived_at - start,
        copies=merge_copies(copies),
        training=tuple(
            Spell(what, begun - start, ended - begun) for what, begun, ended in spells if ended > start and begun < end
        ),
        storage=storage,
    )
