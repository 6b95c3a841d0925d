"""What ranks tell each other, as frozen data: each rank its card and its receipts, rank 0 its board.

A card or a board holds all that its writer has to say, and replaces the one before: what is lost, late or read twice
does no harm. ``serial`` says which of two is newer; two that say the same are equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from checkflow.core.errors import MissingShardsError, StorageError, first_fault
from checkflow.core.graph import STRICT, Many, Named
from checkflow.core.reports.run_report import RankCosts
from checkflow.runtime.format.manifest import MAX_STEP

Rank = Annotated[int, Field(ge=0, lt=2**20)]
Count = Annotated[int, Field(ge=0)]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Seconds = Annotated[float, Field(ge=0)]
Generation = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,80}\z")]
Ended = Literal["", "committed", "failed", "void"]
_ATTEMPTS = 16  # that a board names; a rank is at most one behind
HIDDEN = "#"  # what follows is not for people
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a rank has written durably for one attempt; or, with ``failure``, why it has not.

    Attributes:
        written: the store's record of the files, their checksums and what they hold, as JSON. The council does not read
            it: whoever writes the manifest does.
        persist_seconds: that writing took.
    """

    __pydantic_config__ = STRICT
    rank: Rank
    world_size: Annotated[int, Field(ge=1)]
    generation: Generation
    attempt: Count
    step: Step
    written: str = ""
    persist_seconds: Seconds = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of all ranks to write one version. ``ended``: "" while it is open; "void": a rank has no capture."""

    __pydantic_config__ = STRICT
    number: Count
    step: Step
    ended: Ended = ""
    reason: str = ""
    missing: Many[Rank] = ()  # ranks whose receipts did not come

    def concluded(self, error: BaseException | None = None) -> Attempt:
        """This attempt, committed; or failed, by an error."""
        if error is None:
            return replace(self, ended="committed")
        missing = error.ranks if isinstance(error, MissingShardsError) else ()
        return replace(self, ended="failed", reason=in_words(error), missing=missing)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that one rank has met and all are to raise.

    Attributes:
        kind: the class of checkflow/core/errors.py.
        file: that is damaged, and the number of the block; "": it is another error, or the block is not known.
        settled: whether rank 0 has set the damaged version aside, or has found it whole.
    """

    __pydantic_config__ = STRICT
    kind: str
    message: str
    ranks: Many[Rank] = ()
    file: str = ""
    block: Count = 0
    settled: bool = False


@dataclass(frozen=True, slots=True)
class StartReport:
    """What a rank brings to the start.

    Attributes:
        job: what must be the same on all ranks that say something of it, by subject. What follows ``HIDDEN`` is a
            digest: in a value, of what is too long, in a subject, of which ranks mean the same. Empty once it was
            compared, since it stands on the card.
        kept: what dead ranks have left in this machine's host memory, as JSON. The council does not read it: whoever
            puts it on storage does.
        restored: whether the agreed step is restored here.
        replicas: digests of replicated state after the restore, by name of the group that must agree.
        names: digest of the names of the models' tensors: pipeline stages have others.
        lacks: names of the restored step that this rank does not hold, where ranks are stages.
    """

    __pydantic_config__ = STRICT
    job: Named[str, str] = field(default_factory=dict)
    kept: str = ""
    restored: bool = False
    replicas: Named[str, str] = field(default_factory=dict)
    names: str = ""
    lacks: Many[str] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Rank 0's word on the start.

    Attributes:
        stage: reports are awaited, what dead ranks had captured is put on storage, all restore ``step`` (None: begin
            anew), training.
        run_id: of this run, from "reclaim" on.
        dead_run_id: of the run whose captures are put on storage.
        pipelined: whether ranks are pipeline stages, which hold other tensors; from "restore" on.
        best: the best ranked checkpoints on storage, by step and metric, from "restore" on.
    """

    __pydantic_config__ = STRICT
    stage: Literal["reports", "reclaim", "restore", "train"] = "reports"
    step: Step | None = None
    run_id: str = ""
    pipelined: bool = False
    dead_run_id: str = ""
    best: Many[tuple[Step, float]] = ()


@dataclass(frozen=True, slots=True)
class EndAsked:
    """A rank is asked to end, by a signal. ``left_seconds``: of its grace, when this was written."""

    __pydantic_config__ = STRICT
    reason: str
    left_seconds: Seconds


@dataclass(frozen=True, slots=True)
class End:
    """The boundary after which all ranks end together.

    Attributes:
        number: of the proposal; a later one replaces it where a rank was past its boundary.
        at: the last iteration; None: a rank is dead, and nobody tries to reach a boundary.
        agreed: all ranks have acknowledged it, so none goes past it.
    """

    __pydantic_config__ = STRICT
    number: Count
    at: Step | None
    reason: str
    left_seconds: Seconds
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class Uneven:
    """Training has ended on some ranks, at the earliest after this iteration, and goes on past it on others, if any.

    Attributes:
        at: the iteration.
        ended, going: some of these ranks, the lowest.
    """

    __pydantic_config__ = STRICT
    at: Step
    ended: Many[Rank]
    going: Many[Rank] = ()

    def __str__(self) -> str:
        others = name_ranks(self.going) if self.going else "another rank"
        return (
            f"training of {name_ranks(self.ended)} has ended after iteration {self.at}, and {others} went on: "
            "all ranks must make the same number of steps"
        )


@dataclass(frozen=True, slots=True)
class Ack:
    """A rank's answer to a proposal of an end: it will stop there, or is past it."""

    __pydantic_config__ = STRICT
    number: Count
    late: bool


@dataclass(frozen=True, slots=True)
class Card:
    """All that a rank says.

    Attributes:
        passed: the last boundary that training went on from, or waits at.
        captured: boundaries captured and not yet decided, ascending.
        since: boundaries before this one are not in ``captured`` any more.
        posted: the newest attempt whose receipt of this rank is at the meeting place; 0: none.
        persist_seconds: of this rank's last files.
        iteration_seconds: the time of one iteration, lately; 0: not known.
        plan_interval: of the plan that runs here, in iterations; 0: there is none; None: not known yet.
        costs: of this rank's checkpoints, for the report of all ranks; None: it has made none.
        over: the iteration after which training has ended here; None: it goes on.
        goes_on: whether it goes on past the iteration of the board's ``uneven``.
        left: why this rank takes part no longer; "": it does.
    """

    __pydantic_config__ = STRICT
    rank: Rank
    generation: Generation
    serial: Count = field(compare=False)
    passed: Step = 0
    captured: Many[Step] = ()
    since: Step = 0
    posted: Count = 0
    persist_seconds: Seconds = 0.0
    iteration_seconds: Seconds = 0.0
    plan_interval: Count | None = None
    costs: RankCosts | None = None
    start: StartReport | None = None
    refusal: Refusal | None = None
    end_asked: EndAsked | None = None
    ack: Ack | None = None
    over: Step | None = None
    goes_on: bool = False
    left: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """All that rank 0 says to all.

    Attributes:
        scheduled: the last boundaries that rank 0 has chosen to capture; some are to come.
        attempts: the last ones, the newest last.
        silent: ranks whose cards do not change any more, or that have left.
        uneven: None: training goes on on all ranks.
        capture_seconds: by which a capture may be complete on one rank later than on others: as long as the longest
            plan, if that is much.
    """

    __pydantic_config__ = STRICT
    generation: Generation
    serial: Count = field(compare=False)
    world_size: Annotated[int, Field(ge=1)]
    start: Start = Start()
    refusal: Refusal | None = None
    scheduled: Many[Step] = ()
    attempts: Many[Attempt] = ()
    end: End | None = None
    silent: Many[Rank] = ()
    uneven: Uneven | None = None
    capture_seconds: Seconds = 0.0
    left: str = ""

    def with_attempt(self, attempt: Attempt) -> Board:
        """This board with a further attempt, or how one ended. Another open one is a dead process's: it goes."""
        others = (one for one in self.attempts if one.ended and one.number != attempt.number)
        return replace(self, attempts=(*others, attempt)[-_ATTEMPTS:])


def is_of(record: Receipt | Card | Board, generation: str) -> bool:
    """Whether a record is of this start of the job. What a dead run has left, or sends late, is not."""
    return record.generation == generation


CARD: TypeAdapter[Card] = TypeAdapter(Card)
BOARD: TypeAdapter[Board] = TypeAdapter(Board)
RECEIPT: TypeAdapter[Receipt] = TypeAdapter(Receipt)


def dumps(adapter: TypeAdapter[_T], value: _T) -> bytes:
    """A record as JSON."""
    plain: Any = adapter.dump_python(value, mode="json")
    return json.dumps(plain, separators=(",", ":")).encode()


def loads(adapter: TypeAdapter[_T], data: bytes, what: str) -> _T:
    """A record from JSON. Raises StorageError that names ``what`` if it is none."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        raise StorageError(f"{what} is damaged, or of another version of checkflow: {first_fault(error)}") from None


def in_words(error: BaseException) -> str:
    """An error in one line, never empty."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def name_ranks(ranks: tuple[int, ...]) -> str:
    """ "rank 3", "ranks 1, 2 and 4", at most eight of them."""
    named = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        named.append(f"{len(ranks) - 8} more")
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"
