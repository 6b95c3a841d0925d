"""What intervals follow from samples: chosen once a job is profiled, and reviewed from there on.

- They grow at once, to what is measured, where the cost is beyond ``overhead`` by more than chance: the medians of the
  last few samples, or of more, less ``DOUBT`` standard errors and a ``BAND``, ask for a longer interval.
- They shrink, in one step, to what is measured: after ``PATIENCE`` persists whose median, and a standard error, asks
  for less by a ``BAND``; after ``LEAST`` that ask for half or less (``BOLD``), and what came before them is forgotten;
  and on the word of the median alone, once ``KEPT`` persists have told it. A step that was too large costs little,
  since :mod:`.overhead_budget` refuses what is too much; but the interval grows again then, and the next step waits for
  twice as many persists.
- Nothing is believed on the word of old free iterations: where none was for long, another control comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checkflow.runtime.interval.measurements import KEPT, LEAST, Samples
from checkflow.runtime.interval.policy import Asked, Costs, Intervals, choose, least_multiple

WINDOWS = (3, 10, KEPT)  # samples: few show a large change soon, many a small one
STALE, STALE_INTERVALS = 40, 2  # iterations, and intervals, without a free one
DOUBT = 3.0  # standard errors before an interval grows
BAND = 0.1  # so much more of a cost, or less of an interval, is no reason to change it
PATIENCE = 5  # persists before an interval shrinks
BOLD = 0.5  # so much less of an interval that LEAST persists suffice
MOST_PATIENCE = 24  # persists, after steps that were too large
FASTEST_GROWTH = 4  # where no interval would be long enough


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a review comes to."""

    intervals: Intervals | None  # None: they stay, until a control has shown what training takes
    costs: Costs | None  # by which they were chosen
    unsure: bool = False  # whether little is known of what captures in between would cost


class Review:
    """Intervals from what was measured.

    Args:
        unit: the plan's interval.
        tiers: whether there is host memory for a capture that storage does not take.
    """

    def __init__(self, asked: Asked, samples: Samples, *, unit: int, tiers: bool) -> None:
        self._asked, self._samples, self._unit, self._tiers = asked, samples, unit, tiers
        self._persists_before = samples.persists_seen
        self._shrunk_at: int | None = None  # persists seen when the intervals last became shorter
        self._patience = LEAST  # persists

    def changed(self) -> None:
        """The intervals are other ones from here on, or were confirmed."""
        self._persists_before = self._samples.persists_seen

    @property
    def persists(self) -> int:
        """How many there were since the intervals changed."""
        return self._samples.persists_seen - self._persists_before

    def choice(self, costs: Costs) -> Intervals | None:
        """The shortest intervals that these costs allow; None: they allow none."""
        asked = self._asked
        return choose(costs, self._unit, asked.overhead, mtbf_seconds=asked.mtbf_seconds, tiers=self._tiers)

    def first(self) -> Verdict:
        """The intervals of a job that was profiled."""
        costs, least = self._samples.estimate(), self._samples.estimate(doubt=-DOUBT)
        assert costs is not None
        assert least is not None
        one = Intervals(self._unit, self._unit, "overhead")
        return Verdict(self.choice(costs) or self.choice(least) or longer(one), costs)

    def again(self, number: int, now: Intervals, known: Costs | None) -> Verdict | None:
        """Whether other intervals are better now.

        Args:
            number: of the boundary.
            known: what the intervals were chosen by.

        Returns:
            None: these stay.
        """
        last = self._samples.estimate(LEAST, known=known)
        if last is not None and self._suffices(now, last):
            return self._shorter(now, known)  # whatever was before that
        for size in WINDOWS:
            least = self._samples.estimate(size, -DOUBT, known)
            if self._samples.largest < size or least is None:
                break
            if self._suffices(now, least.times(1 / (1 + BAND))):
                continue
            if number - (self._samples.last_free or 0) > max(STALE, STALE_INTERVALS * now.disk):
                return Verdict(None, None)  # perhaps it is training itself that has become slower
            return self._longer(size, now, known)
        return None

    def _longer(self, size: int, now: Intervals, known: Costs | None) -> Verdict | None:
        costs = self._samples.estimate(size, known=known)
        assert costs is not None
        wanted = self.choice(costs)
        if wanted is None and self.persists < LEAST:
            return None  # nothing says how much longer: first see what this one costs
        failed = self._shrunk_at is not None and self._samples.persists_seen - self._shrunk_at < 2 * MOST_PATIENCE
        self._patience = min(MOST_PATIENCE, 2 * self._patience) if failed else LEAST
        self._shrunk_at = None
        wanted = wanted or longer(now)
        memory = max(now.memory, wanted.memory)
        return Verdict(Intervals(memory, least_multiple(memory, max(now.disk, wanted.disk)), wanted.reason), costs)

    def _shorter(self, now: Intervals, known: Costs | None) -> Verdict | None:
        samples = self._samples
        for size, doubt, share in self._attempts():
            most = samples.estimate(size, doubt, known)
            wanted = None if most is None else self.choice(most)
            if wanted is None or not _is_shorter(wanted, now) or wanted.disk > share * now.disk:
                continue
            if wanted.memory > now.memory and not _is_much_less(wanted.disk, now.disk):
                continue
            if size < samples.largest:
                samples.keep_last(size)  # what was before would make the intervals grow again
            self._shrunk_at = samples.persists_seen
            unsure = size < PATIENCE and wanted.memory >= wanted.disk
            return Verdict(wanted, samples.estimate(size, known=known), unsure)
        return None

    def _attempts(self) -> Iterator[tuple[int, float, float]]:
        """How many of the last persists, the standard errors added to their cost, and the share of the interval now
        that they must ask for at most."""
        since = min(KEPT, self.persists)
        if since == KEPT:
            yield since, 0.0, 1.0
        if since >= max(PATIENCE, self._patience):
            yield since, 1.0, 1.0
        if since >= self._patience:
            yield self._patience, 1.0, BOLD

    def _suffices(self, now: Intervals, costs: Costs) -> bool:
        """Whether intervals are long enough for these costs."""
        wanted = self.choice(costs)
        if wanted is None or wanted.disk > now.disk:
            return False
        # Where storage can be written to more often, captures in between become rarer, and may have been cheap enough.
        cheap = costs.added_seconds(now.memory, now.disk) <= costs.allowed_seconds(self._asked.overhead)
        paid = _is_much_less(wanted.disk, now.disk) and cheap
        return paid or wanted.memory <= now.memory


def longer(now: Intervals) -> Intervals:
    """Where nothing may be lost to checkpoints, and something is: step by step."""
    return Intervals(now.memory * FASTEST_GROWTH, now.disk * FASTEST_GROWTH, "overhead")


def _is_much_less(interval: int, than: int) -> bool:
    """Whether the difference is a reason to change anything."""
    return interval <= (1 - BAND) * than


def _is_shorter(intervals: Intervals, than: Intervals) -> bool:
    """Whether one of them is much less, and storage is not written to less often."""
    less = _is_much_less(intervals.disk, than.disk) or _is_much_less(intervals.memory, than.memory)
    return less and intervals.disk <= than.disk
