"""The council of one job's ranks: a thread that drives the machines over the meeting place, and the calls on them.

The training thread writes into a queue and reads ``view``: it takes no lock and never waits, but where all ranks end.
Other threads may wait for news, each with a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from checkflow.core.errors import CheckflowError, MissingShardsError, StorageError, VoidCheckpointError
from checkflow.runtime.ranks import receipts, starting
from checkflow.runtime.ranks.chair import Chair, Overview
from checkflow.runtime.ranks.meeting import MeetingPlace
from checkflow.runtime.ranks.member import Member, View
from checkflow.runtime.ranks.records import Attempt, Receipt, Start, StartReport
from checkflow.runtime.ranks.rounds import Event, Rounds

logger = logging.getLogger("checkflow")
_FAST_SECONDS, _SLOW_SECONDS = 0.005, 0.05  # between looks: while a thread waits for news, and otherwise
_SECONDS_A_RANK = 5e-5  # at least so many for each rank, or they would keep the store from its work
_BEAT_SECONDS = 1.0
_MARGIN_SECONDS = 5.0  # for rank 0's word after its own deadline
_CLOSE_SECONDS = 2.0
RECLAIM_SECONDS = 1800.0  # for each version of a dead run; a rank that ends or cannot write ends the wait at once
_T = TypeVar("_T")


class Council:
    """One rank's seat in the council; rank 0 has the chair, too.

    Attributes:
        alone: whether a process trains alone, so that nothing is to be agreed.

    Args:
        open_place: makes this rank's connection to the meeting place, on the council's thread; tried again while it
            raises StorageError.
        silent_seconds: after which a rank that says nothing counts as dead.
        start_seconds: within which all ranks come to the start.
    """

    alone = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        generation: str,
        open_place: Callable[[], MeetingPlace],
        *,
        silent_seconds: float = 15.0,
        start_seconds: float = 60.0,
    ) -> None:
        now = time.monotonic()
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self._open_place, self._start_seconds, self._silent_seconds = open_place, start_seconds, silent_seconds
        chair = None
        if rank == 0:
            # All ranks have met to agree on the generation: a first card takes no longer than any other.
            come_seconds = min(start_seconds, silent_seconds)
            chair = Chair(generation, world_size, now, silent_seconds=silent_seconds, start_seconds=come_seconds)
        self._rounds = Rounds(
            Member(rank, generation, now, silent_seconds), chair, world_size, _BEAT_SECONDS, self._publish
        )
        self.view = View()
        self.overview = Overview()  # rank 0's
        self._collected: tuple[int, Mapping[int, Receipt]] = 0, {}  # rank 0's: an attempt's, once all are there
        self._patience_seconds = receipts.LEAST_WAIT_SECONDS  # for the others' receipts
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._wake = threading.Event()
        self._waiting = 0  # threads
        self._closing = self._ended = False
        self._last = False  # rank 0's: no other rank is left
        self._error: BaseException | None = None  # that has ended the thread
        self.under_way: Callable[[], bool] = lambda: False  # whether an iteration has begun since the last boundary
        self._uneven_told = False
        self._round_begun = math.inf  # time.monotonic, while a round runs: torch's store may never answer
        self._thread = threading.Thread(target=self._run, name="checkflow-council", daemon=True)
        self._thread.start()

    # The start

    def agree_start(
        self,
        report: StartReport,
        choose: Callable[[Mapping[int, StartReport]], int | None] | None = None,
        run_id: str = "",
        assist: Callable[[Start, Attempt], None] = lambda start, attempt: None,
    ) -> Start:
        """Come to the start with all ranks; returns what rank 0 says: the step that all restore, and the run's id.

        Args:
            choose: rank 0's: the step, from all ranks' reports; None to begin anew. After :meth:`reclaim` it may make
                attempts.
            run_id: rank 0's.
            assist: another rank's: called with each such attempt, it posts a receipt.

        Raises:
            MissingShardsError: a rank did not come, or ended; ``ranks`` names it.
            MismatchError: the ranks' ``job`` differs; the message says in what.
            CheckflowError: what another rank has refused with, by the same class.
        """
        self._tell(lambda member, chair, now: member.report(report))
        if self.rank == 0:
            assert choose is not None, "rank 0 chooses the step"
            self._await_start(lambda: self.overview.reports or None, self._start_seconds)
            try:
                step = choose(self.overview.reports)
            except BaseException as error:
                self.refuse(error)
                raise
            self._tell(lambda member, chair, now: None if chair is None else chair.resume(step, run_id))
        # Rank 0 may read much to choose; if it does not come to that, or ends, it is silent or refuses before.
        self._await_start(lambda: self.view.start.stage != "reports" or None, RECLAIM_SECONDS)
        assisted = 0
        while (start := self.view.start).stage == "reclaim":

            def begun(after: int = assisted) -> Attempt | bool | None:
                """A further attempt; True: there are no more."""
                if self.view.start.stage != "reclaim":
                    return True
                newest = self.view.attempts[-1] if self.view.attempts else None
                return newest if newest is not None and newest.number > after and not newest.ended else None

            found = self._await_start(begun, RECLAIM_SECONDS)
            if isinstance(found, Attempt):
                assisted = found.number
                if self.rank:
                    assist(start, found)
        self._tell(lambda member, chair, now: member.report(StartReport()))  # it was read, and may be long
        return self.view.start

    def reclaim(self, run_id: str, dead_run_id: str) -> None:
        """Rank 0, in ``choose``: the attempts that follow put a dead run's captures on storage, before the start."""
        self._tell(lambda member, chair, now: None if chair is None else chair.reclaim(run_id, dead_run_id))

    def agree_restored(self, report: StartReport, wait_seconds: float) -> None:
        """This rank has restored; returns when all have, and their replicas agree. Raises as :meth:`agree_start`."""
        self._tell(lambda member, chair, now: member.report(report))
        self._await_start(lambda: self.view.start.stage == "train" or None, wait_seconds)
        self._tell(lambda member, chair, now: member.report(StartReport(restored=True)))

    def refuse(self, error: BaseException) -> BaseException:
        """This rank cannot start: all others raise the same. Returns when that is at the meeting place, if it can.

        What is returned is to be raised: the error, or the earlier refusal of another rank that is the cause.
        """
        refusal = starting.refusal_of(error, self.rank)
        self._tell(lambda member, chair, now: member.refuse(refusal))
        self._wait_quietly(lambda: self.view.refusal is not None, _MARGIN_SECONDS)
        first = self.view.refusal
        if isinstance(error, StorageError) and first is not None and self.rank not in first.ranks:
            cause = starting.error_of(first)  # rank 0 may have set aside what this rank was reading
            return error if str(cause) == str(error) else cause
        return error

    def settle(self) -> None:
        """Rank 0: the damaged version is set aside, or was found whole. The others' :meth:`await_settled` returns."""
        self._tell(lambda member, chair, now: None if chair is None else chair.settle())

    def await_settled(self, wait_seconds: float) -> None:
        """Another rank, before it ends: a launcher ends all ranks as soon as one has, and rank 0 would set nothing
        aside.
        """

        def settled() -> bool:
            refusal = self.view.refusal
            return (refusal is not None and refusal.settled) or 0 in self.view.silent

        self._wait_quietly(settled, wait_seconds)

    def tell_best(self, best: tuple[tuple[int, float], ...]) -> None:
        """Rank 0, in ``choose``: the best ranked checkpoints, by step and metric."""
        self._tell(lambda member, chair, now: None if chair is None else chair.tell_best(best))

    def _await_start(self, happened: Callable[[], _T | None], wait_seconds: float) -> _T:
        def settled() -> _T | CheckflowError | None:
            if self.view.refusal is not None:
                return starting.error_of(self.view.refusal)
            if 0 in self.view.silent and self.rank:
                return MissingShardsError(f"rank 0 of {self.world_size} does not answer: did it end?", (0,))
            return happened()

        found: Any = self._wait(settled, wait_seconds + _MARGIN_SECONDS)
        if isinstance(found, CheckflowError):
            raise found
        if found is None:
            raise MissingShardsError(
                f"the start of {self.world_size} ranks was not agreed within {wait_seconds + _MARGIN_SECONDS:g} s"
                + (f": {self._rounds.fault}" if self._rounds.fault else ": rank 0 has not decided"),
                (0,),
            )
        return cast(_T, found)

    # The training thread

    def note_boundary(self, step: int) -> View:
        """Training has come to a boundary; what holds there. :meth:`leave_boundary` or :meth:`await_end` comes next."""
        self._note(lambda member, chair, now: member.arrived(step))
        return self.view  # read after the event is in the queue: see member.py

    def leave_boundary(self, step: int, *, captured: bool) -> None:
        """Training goes on; whether a capture of this boundary has begun."""
        passed = time.monotonic()
        self._note(lambda member, chair, now: member.passed(step, passed, captured=captured))

    def await_end(self, step: int, *, captured: bool, wait_seconds: float) -> bool:
        """Wait at a boundary at which ``view.stops_at(step)``; False: training goes on to a later one.

        Args:
            captured: whether a capture of this boundary has begun.
            wait_seconds: what is left of the grace. When it is over, training ends here.
        """
        self._tell(lambda member, chair, now: member.waits(step, captured=captured))

        def decided() -> bool | None:
            view = self.view
            if view.end is None or view.end_now or view.end.at is None or (view.end.at == step and view.end.agreed):
                return True
            return False if view.end.at != step else None

        ends = True
        with contextlib.suppress(StorageError):  # nothing will be agreed any more
            ends = self._wait(decided, wait_seconds) is not False
        if not ends:
            self.leave_boundary(step, captured=captured)
        return ends

    def note_over(self, step: int | None) -> None:
        """Training has ended on this rank after this iteration; None: another loop begins."""
        self._note(lambda member, chair, now: member.over(step))

    def request_end(self, reason: str, grace_seconds: float) -> None:
        """All ranks are to end. A signal handler may call this."""
        self._note(lambda member, chair, now: member.ask_end(reason, now, grace_seconds))

    def note_plan(self, interval: int) -> None:
        """Another plan runs here, with this interval; 0: none. Rank 0 finds that of all in its ``overview``."""
        self._note(lambda member, chair, now: member.plan(interval))

    def schedule(self, steps: tuple[int, ...]) -> None:
        """Rank 0: which boundaries are captured, decided ``overview.lead`` iterations ahead."""
        self._note(lambda member, chair, now: None if chair is None else chair.schedule(steps))

    # The writer's thread

    def note_dropped(self, step: int) -> None:
        """The capture of a boundary is lost, or replaced: a version of it is void."""
        self._tell(lambda member, chair, now: member.dropped(step))

    def note_costs(self, held_seconds: float, copied_bytes: int, written_bytes: int, failed: int) -> None:
        """What checkpoints have cost this rank so far. Rank 0 finds those of all in its ``overview``."""
        self._tell(lambda member, chair, now: member.tell_costs(held_seconds, copied_bytes, written_bytes, failed))

    def open_attempt(self, step: int, patience_seconds: float | None = None) -> Attempt:
        """Rank 0: begin to write a version. The others' :meth:`await_attempt` returns.

        Args:
            patience_seconds: for the others' receipts; None: by what rank 0 needed for its own.
        """
        answer: queue.SimpleQueue[int] = queue.SimpleQueue()

        def open_it(member: Member, chair: Chair | None, now: float) -> None:
            assert chair is not None, "rank 0 opens attempts"
            answer.put(chair.open(step, now, patience_seconds))

        self._tell(open_it)
        found = self._wait(lambda: None if answer.empty() else answer.get(), _MARGIN_SECONDS)
        if found is None:
            raise StorageError(f"the council does not answer: {self._rounds.fault or 'its thread is held up'}")
        return Attempt(found, step)

    def await_attempt(self, step: int, wait_seconds: float, *, after: int = 0) -> Attempt:
        """Another rank: the attempt to write this step, newer than attempt ``after``.

        Raises:
            MissingShardsError: rank 0 does not begin it in time, or does not answer.
            VoidCheckpointError: rank 0 writes a later step instead, or the attempt is void already.
            StorageError: the attempt has failed already.
        """
        silent = False

        def begun() -> Attempt | bool | None:
            later = [one for one in self.view.attempts if one.number > after and one.step >= step]
            mine = [one for one in later if one.step == step]
            if mine or later:
                return mine[-1] if mine else False
            nonlocal silent
            silent = 0 in self.view.silent
            return True if silent else None

        found = self._wait(begun, wait_seconds)
        if isinstance(found, Attempt):
            if found.ended in ("failed", "void"):
                raise _error_of(found)
            return found
        if found is False:
            raise VoidCheckpointError(f"rank 0 saves a later step than {step}", (0,))
        if silent:
            raise MissingShardsError(f"rank 0 does not answer, and did not begin to save step {step}", (0,))
        uneven = self.view.uneven
        why = f": {uneven}" if uneven is not None and uneven.going else ""
        raise MissingShardsError(f"rank 0 did not begin to save step {step} within {wait_seconds:g} s{why}", (0,))

    def post_receipt(self, receipt: Receipt) -> None:
        """This rank's files of an attempt are on storage, or why they are not."""
        self._patience_seconds = receipts.wait_seconds(receipt.persist_seconds) + self.view.capture_seconds
        self._tell(lambda member, chair, now: member.post(receipt))

    def collect(
        self, attempt: Attempt, coverage: receipts.Coverage, patience_seconds: float | None = None
    ) -> tuple[Receipt, ...]:
        """Rank 0, after its own receipt: all ranks' receipts, which make a version. :meth:`conclude` comes next.

        Args:
            patience_seconds: as for :meth:`open_attempt`.

        Raises:
            MissingShardsError: a rank's receipt did not come in time, or cannot come; ``ranks`` names it.
            VoidCheckpointError: a rank has passed the boundary without a capture of it.
            StorageError: a rank could not write.
            MismatchError: ranks contradict each other; and what ``coverage`` raises.
        """

        def whole() -> Mapping[int, Receipt] | Attempt | None:
            ended = self.view.attempt(attempt.number)
            if ended is not None and ended.ended:
                return ended
            number, found = self._collected
            return found if number == attempt.number else None

        # The chair ends the attempt at its deadline, and this wait with it.
        wait_seconds = self._patience_seconds if patience_seconds is None else patience_seconds
        found: Any = self._wait(whole, wait_seconds + _MARGIN_SECONDS)
        if found is None:
            raise StorageError(f"step {attempt.step} was not saved: the council of the ranks does not answer")
        if isinstance(found, Attempt):
            raise _error_of(found)
        return receipts.check_version(found, self.generation, attempt.number, attempt.step, self.world_size, coverage)

    def conclude(self, attempt: Attempt, error: BaseException | None = None) -> None:
        """Rank 0: the version is on storage, or why it is not. The others' :meth:`await_verdict` returns."""
        end = attempt.concluded(error)
        self._tell(
            lambda member, chair, now: (
                None if chair is None else chair.conclude(end.number, end.ended, end.reason, end.missing)
            )
        )

    def await_verdict(self, attempt: Attempt, wait_seconds: float) -> None:
        """Another rank: returns when the version is on storage.

        Raises:
            MissingShardsError: a rank is missing, or rank 0 does not say in time; then nothing is known of the version.
            VoidCheckpointError: the attempt is void.
            StorageError: it has failed.
        """

        def ended() -> Attempt | bool | None:
            found = self.view.attempt(attempt.number)
            if found is not None and found.ended:
                return found
            newer = any(one.number > attempt.number for one in self.view.attempts)
            return False if 0 in self.view.silent or (found is None and newer) else None

        found = self._wait(ended, wait_seconds)
        if not isinstance(found, Attempt):
            raise MissingShardsError(f"rank 0 did not say how step {attempt.step} ended: did the process end?", (0,))
        if found.ended != "committed":
            raise _error_of(found)

    # The end

    def close(self, reason: str = "done") -> None:
        """Take part no longer; the others learn of it. May be called again."""
        if self._closing:
            return
        if self.rank == 0:  # the store may end with this process, and the others have not read its last word
            others = set(range(1, self.world_size))
            self._wait_quietly(lambda: others <= {*self.overview.left, *self.view.silent}, _CLOSE_SECONDS)
            self._last = others <= {*self.overview.left, *self.view.silent}

        def leave(member: Member, chair: Chair | None, now: float) -> None:
            member.leave(reason)
            if chair is not None:
                chair.leave(reason)

        self._note(leave)
        self._closing = True  # after the event: the last round takes it along
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        if self.running:
            logger.warning("the meeting place of the ranks does not answer: it is left without a word")

    @property
    def running(self) -> bool:
        """Whether the council's thread goes on: after :meth:`close` while the meeting place does not answer."""
        return self._thread.is_alive()

    # The council's thread

    def _publish(self, view: View) -> None:
        self.view = view

    def _note(self, event: Event) -> None:
        """Leave an event for the council's thread, without waking it."""
        self._events.put(event)

    def _tell(self, event: Event) -> None:
        self._note(event)
        self._wake.set()

    def _drain(self) -> Iterator[Event]:
        for _ in range(self._events.qsize()):
            yield self._events.get()

    def _run(self) -> None:
        place: MeetingPlace | None = None
        try:
            while not self._ended:
                # What was asked before this round is in the queue, and goes out with it.
                self._ended = self._closing
                self._wake.clear()
                self._round_begun = time.monotonic()
                if place is None:
                    place = self._try_place()
                self._compare()
                self._rounds.run(place or _NoPlace(self._rounds.fault), time.monotonic(), self._drain)
                self._round_begun = math.inf
                if self._rounds.chair is not None:
                    self.overview = self._rounds.chair.overview()
                    self._collected = self._rounds.chair.collected()
                with self._news:
                    self._news.notify_all()
                if not self._closing:
                    fast = _FAST_SECONDS if self._waiting else _SLOW_SECONDS
                    self._wake.wait(max(fast, _SECONDS_A_RANK * self.world_size))
        except BaseException as error:  # noqa: BLE001 - each wait raises it, on its own thread
            self._error = error
            logger.error("the council of the ranks has ended: %s", error)
        finally:
            if place is not None:
                place.close(last=self._last)
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _compare(self) -> None:
        """Say once that training goes on past its end on other ranks. Before a round: what has passed by then comes
        before what is under way now.
        """
        uneven = self.view.uneven
        if uneven is None or self._uneven_told:
            return
        here = self._rounds.member.goes_past(uneven.at, under_way=self.under_way())
        if here and not uneven.going:  # rank 0 may have ended, and say nothing any more
            uneven = replace(uneven, going=(self.rank,))
        if uneven.going and (self.rank in (0, *uneven.ended) or (here and 0 in self.view.silent)):
            self._uneven_told = True
            logger.error(
                "%s; no later one is saved, and ranks that train on may wait for the others without end", uneven
            )

    def _try_place(self) -> MeetingPlace | None:
        try:
            return self._open_place()
        except StorageError as error:
            self._rounds.fault = error
            return None

    def _wait_quietly(self, happened: Callable[[], bool], wait_seconds: float) -> None:
        """:meth:`_wait`, where it does not matter why it ended."""
        with contextlib.suppress(StorageError):
            self._wait(lambda: happened() or None, wait_seconds)

    def _wait(self, happened: Callable[[], _T | None], wait_seconds: float) -> _T | None:
        """Wait for news until ``happened`` returns something; None when the time is over.

        Raises:
            StorageError: the meeting place does not answer, or the council has ended.
        """
        end = time.monotonic() + wait_seconds
        with self._news:
            self._waiting += 1
            try:
                while (found := happened()) is None:
                    if self._error is not None:
                        raise StorageError(f"the council of the ranks has ended: {self._error}")
                    if time.monotonic() - self._round_begun >= self._silent_seconds:
                        raise StorageError("the meeting place of the ranks does not answer: did the launcher stop?")
                    left = end - time.monotonic()
                    if left <= 0 or self._ended:
                        return None
                    self._news.wait(min(left, _BEAT_SECONDS))
                return found
            finally:
                self._waiting -= 1


class _NoPlace:
    """Stands for a meeting place that cannot be reached yet."""

    def __init__(self, fault: StorageError | None) -> None:
        self._fault = fault or StorageError("the meeting place of the ranks is not there yet")

    def put(self, key: str, value: bytes) -> None:
        raise self._fault

    def get(self, keys: object) -> dict[str, bytes]:
        raise self._fault

    def drop(self, keys: object) -> None:
        raise self._fault

    def close(self, *, last: bool = False) -> None:
        """Nothing is open."""


def _error_of(attempt: Attempt) -> StorageError:
    text = f"step {attempt.step} was not saved: {attempt.reason}"
    if attempt.ended == "void":
        return VoidCheckpointError(text, attempt.missing)
    return MissingShardsError(text, attempt.missing) if attempt.missing else StorageError(text)
