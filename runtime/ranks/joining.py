"""How a rank comes to its council: by torch's store where there is one, by files in the directory otherwise; or alone.

The generation, a name that this start of the job has and no other, is agreed there. Launchers do not give one: torchrun
counts restarts after failures, and not those after a change of its nodes, and its store outlives both.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from checkflow.core.errors import MissingShardsError, StorageError
from checkflow.runtime.ranks.chair import Overview
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.file_meeting import FileMeeting
from checkflow.runtime.ranks.identity import Identity
from checkflow.runtime.ranks.meeting import MeetingPlace, wait_until
from checkflow.runtime.ranks.member import View
from checkflow.runtime.ranks.receipts import Coverage
from checkflow.runtime.ranks.records import Attempt, Receipt, name_ranks
from checkflow.runtime.ranks.rounds import Event

ANSWER_SECONDS = 10.0  # for one answer of the store
_counted = itertools.count()  # of this process's councils: all ranks make them in the same order


class Alone(Council):
    """This council is of one process that trains alone: it has no thread and no meeting place, and nobody hears it."""

    alone = True

    def __init__(self) -> None:
        self.rank, self.world_size, self.generation, self.view, self.overview = 0, 1, "", View(), Overview()

    def _note(self, event: Event) -> None:
        pass

    _tell = _note

    def leave_boundary(self, step: int, *, captured: bool) -> None:
        """Nobody waits for it: not even an event is made, at each boundary."""

    def open_attempt(self, step: int, patience_seconds: float | None = None) -> Attempt:
        return Attempt(0, step)

    def post_receipt(self, receipt: Receipt) -> None:
        self._receipt = receipt

    def collect(
        self, attempt: Attempt, coverage: Coverage, patience_seconds: float | None = None
    ) -> tuple[Receipt, ...]:
        return (self._receipt,)

    def refuse(self, error: BaseException) -> BaseException:
        return error

    def await_end(self, step: int, *, captured: bool, wait_seconds: float) -> bool:
        return True

    def close(self, reason: str = "done") -> None:
        """Nothing is open."""


def join(
    identity: Identity | None, directory: Path, *, silent_seconds: float = 15.0, start_seconds: float = 60.0
) -> Council:
    """Take this rank's seat. All ranks call it, in the same order where they call it more than once.

    Args:
        identity: None: this process trains alone.
        directory: of the checkpoints, where ranks meet that have no TCP store.
        silent_seconds: after which a rank that says nothing counts as dead.
        start_seconds: within which all ranks call this, and within which they come to the start.

    Raises:
        MissingShardsError: a rank did not come in time; ``ranks`` names it, or rank 0.
        StorageError: the store cannot be reached.
    """
    if identity is None:
        return Alone()
    from checkflow.runtime.ranks.torch_meeting import TorchMeeting, store_address

    address = store_address()

    def open_place(name: str) -> MeetingPlace:
        if address is None:
            return FileMeeting(directory, name, identity.rank)
        return TorchMeeting(*address, name, ANSWER_SECONDS)

    name = f"starts-{identity.launch}-{next(_counted)}"
    place, agreed = _open_within(lambda: open_place(name), start_seconds), False
    try:
        generation = agree_generation(place, identity.rank, identity.world_size, start_seconds)
        agreed = True
    finally:
        place.close(last=agreed and identity.rank == 0)  # it has the word of all others that they know the generation
    return Council(
        identity.rank, identity.world_size, generation, lambda: open_place(generation),
        silent_seconds=silent_seconds, start_seconds=start_seconds,
    )  # fmt: skip


def agree_generation(place: MeetingPlace, rank: int, world_size: int, wait_seconds: float) -> str:
    """Return a name that rank 0 draws. What earlier starts have left at the place is not taken for an answer.

    Each other rank says a number drawn at random; rank 0 answers with the name and all numbers, and has the answer of a
    rank when that has seen its own number in it.

    Raises:
        MissingShardsError: a rank did not come in time.
    """
    if rank:
        number = secrets.token_hex(8)
        place.put(f"hello/{rank}", number.encode())

        def answered() -> str | None:
            answer = json.loads(place.get(["answer"]).get("answer", b"{}"))
            return answer["name"] if answer.get("hellos", {}).get(str(rank)) == number else None

        name = wait_until(answered, wait_seconds)
        if name is None:
            raise MissingShardsError(
                f"rank 0 of {world_size} did not come to the start within {wait_seconds:g} s", (0,)
            )
        place.put(f"joined/{name}/{rank}", b"1")
        return name
    drawn = secrets.token_hex(8)
    others = range(1, world_size)
    joined: dict[str, bytes] = {}

    def all_joined() -> bool | None:
        hellos = place.get([f"hello/{other}" for other in others])
        said = {key.removeprefix("hello/"): value.decode() for key, value in hellos.items()}
        place.put("answer", json.dumps({"name": drawn, "hellos": said}).encode())
        joined.update(place.get([f"joined/{drawn}/{other}" for other in others]))
        return True if len(joined) == len(others) else None

    if wait_until(all_joined, wait_seconds) is None:
        missing = tuple(other for other in others if f"joined/{drawn}/{other}" not in joined)
        raise MissingShardsError(
            f"{name_ranks(missing)} of {world_size} did not come to the start within {wait_seconds:g} s", missing
        )
    return drawn


def _open_within(open_place: Callable[[], MeetingPlace], wait_seconds: float) -> MeetingPlace:
    """Rank 0 may not have made the place yet."""
    error: list[StorageError] = []

    def opened() -> MeetingPlace | None:
        try:
            return open_place()
        except StorageError as fault:
            error[:] = [fault]
            return None

    place = wait_until(opened, wait_seconds)
    if place is None:
        raise error[0]
    return place
