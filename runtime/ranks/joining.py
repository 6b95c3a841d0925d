"""How a rank comes to its council: by torch's store where there is one, by files in the directory otherwise."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path

from checkflow.core.errors import UnsupportedError
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.file_meeting import FileMeeting
from checkflow.runtime.ranks.identity import Identity
from checkflow.runtime.ranks.meeting import wait

ANSWER_SECONDS = 10.0  # for one answer of the store
_counted = itertools.count()  # of this process's councils: all ranks make them in the same order


def join(identity: Identity, directory: Path, *, silent_seconds: float = 15.0, start_seconds: float = 60.0) -> Council:
    """Take this rank's seat. All ranks call it, in the same order where they call it more than once.

    Raises:
        MissingShardsError: rank 0 has not agreed a generation in time.
        StorageError: the store cannot be reached.
        UnsupportedError: there is neither a store nor a name of this start of the job.
    """
    from checkflow.runtime.ranks.torch_meeting import TorchMeeting, store_address

    number, address = next(_counted), store_address()
    if address is None:
        if not identity.generation:
            raise UnsupportedError(
                "the ranks of this job have no TCP store to meet at, and no name of this start: start it by torchrun"
            )
        generation = f"{identity.generation}.{number}"
        return Council(
            identity.rank, identity.world_size, generation, lambda: FileMeeting(directory, generation, identity.rank),
            silent_seconds=silent_seconds, start_seconds=start_seconds,
        )  # fmt: skip
    host, port = address
    base = identity.generation or _agree(host, port, identity.rank, number, start_seconds)
    generation = f"{base}.{number}"
    return Council(
        identity.rank, identity.world_size, generation, lambda: TorchMeeting(host, port, generation, ANSWER_SECONDS),
        silent_seconds=silent_seconds, start_seconds=start_seconds,
    )  # fmt: skip


def _agree(host: str, port: int, rank: int, number: int, wait_seconds: float) -> str:
    """A name of this start of the job, that rank 0 draws."""
    from checkflow.runtime.ranks.torch_meeting import TorchMeeting

    key = f"generation/{number}"
    place = TorchMeeting(host, port, "starts", ANSWER_SECONDS)
    try:
        if rank == 0:
            place.put(key, secrets.token_hex(8).encode())
        return wait(place, {0: key}, wait_seconds, "name of this start of the job")[0].decode()
    finally:
        place.close()
