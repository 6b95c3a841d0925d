"""What checkflow.DataLoader is called with: read, and refused where it contradicts itself, as torch refuses it."""

from __future__ import annotations

import operator
from typing import Any

from checkflow.runtime.order import TAILS, Share
from checkflow.runtime.sampling import with_inner


def read_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(f"seed must be a whole number of 64 bits, or None, not {seed!r}")
    return number


def refuse_dealing(order: Any) -> None:
    """A sampler that gives each rank its own, where this loader would deal that to the ranks again."""
    for one in with_inner(order):
        if isinstance(ranks := getattr(one, "num_replicas", 1), int) and ranks > 1:
            raise ValueError(
                f"{type(one).__name__} deals to the ranks already, and this loader would deal its part again: pass a "
                "sampler of the whole order, or, where it is to deal, rank=0, world_size=1"
            )


def given_share(rank: int | None, world_size: int | None) -> Share:
    if rank is None or world_size is None:
        raise ValueError("rank and world_size belong together")
    return Share(rank, world_size)


def refuse_contradictions(
    batch_size: int | None, shuffle: bool | None, sampler: Any, batch_sampler: Any, *, drop_last: bool,
    tail: str | None, timeout: float, workers: int,
) -> None:  # fmt: skip
    """As torch refuses them, and those of what torch has not."""
    if timeout and not workers:
        raise ValueError(f"timeout={timeout!r} is for batches of workers, and num_workers is 0")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be a whole number of at least 1, or None, not {batch_size!r}")
    if tail is not None and tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {tail!r}")
    if drop_last and tail not in (None, "drop"):
        raise ValueError(f"drop_last=True and tail={tail!r} exclude each other")
    if sampler is not None and shuffle:
        raise ValueError("sampler and shuffle exclude each other")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
    if batch_size is None and batch_sampler is None and drop_last:
        raise ValueError("batch_size=None and drop_last exclude each other")
