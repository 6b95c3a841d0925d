"""When a version exists: every rank's receipt names the same generation, attempt and step, and all is covered.

Safety rests on this module alone. What ranks agree on beforehand only makes it likely that versions get so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from checkflow.core.errors import MismatchError, StorageError
from checkflow.runtime.ranks import records
from checkflow.runtime.ranks.records import Receipt

LEAST_WAIT_SECONDS = 30.0
PERSIST_TIMES = 4
Coverage = Callable[[Sequence[Receipt]], None]  # raises CheckflowError unless each tensor is there exactly once


def wait_seconds(persist_seconds: float) -> float:
    """How long to wait for the other ranks' receipts, from the own one on."""
    return max(LEAST_WAIT_SECONDS, PERSIST_TIMES * persist_seconds)


def check_version(
    receipts: Mapping[int, Receipt], generation: str, attempt: int, step: int, world_size: int, coverage: Coverage
) -> tuple[Receipt, ...]:
    """The receipts by rank, if they make a version: called last before its manifest is written.

    Raises:
        StorageError: a rank has written nothing, or something else.
        MismatchError: ranks contradict each other; and what ``coverage`` raises.
    """
    for rank, receipt in sorted(receipts.items()):
        if receipt.failure:
            raise StorageError(f"rank {rank}: {receipt.failure}")
    if missing := [rank for rank in range(world_size) if rank not in receipts]:
        raise StorageError(f"no receipt of rank {missing[0]} for step {step}")
    ordered = tuple(receipts[rank] for rank in range(world_size))
    for rank, receipt in enumerate(ordered):
        named = receipt.rank == rank and records.is_of(receipt, generation)
        if not named or (receipt.attempt, receipt.step) != (attempt, step):
            raise StorageError(
                f"the receipt of rank {rank} is of rank {receipt.rank}, attempt {receipt.attempt} and step "
                f"{receipt.step} of {receipt.generation}, not of attempt {attempt} and step {step} of {generation}"
            )
        if receipt.world_size != world_size:
            raise MismatchError(f"rank {rank} counts {receipt.world_size} ranks, rank 0 counts {world_size}")
    coverage(ordered)
    return ordered
