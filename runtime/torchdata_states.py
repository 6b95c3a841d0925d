"""States of torchdata's ``StatefulDataLoader`` over iterable-style data that has none itself.

After such a resume torchdata fetches as many batches as had been handed out and throws them away, and counts them
twice: the next state says more than there was, and a resume from that one loses batches, or ends with "the dataset may
have changed" (torchdata 0.11, both of its iterators). So it is told to begin the epoch anew, and they are thrown away
by who told it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SNAPSHOT, _SINCE, _STEP, _LAST, _MAIN = (
    "_snapshot", "_steps_since_snapshot", "_snapshot_step", "_last_yielded_worker_id", "_main_snapshot",
)  # fmt: skip
_YIELDED, _FINISHED = "_num_yielded", "_iterator_finished"


def begin_anew(state: Any) -> tuple[Any, int]:
    """A state to load in the place of this one, and how many batches are to be fetched and thrown away after that.

    Any other loader's, and any that tells where its data is, is given back as it is, with 0.
    """
    if not isinstance(state, Mapping) or state.get(_FINISHED) is not False:  # at its end a new epoch begins
        return state, 0
    if _SNAPSHOT in state:  # with workers
        snapshot = state[_SNAPSHOT]
        workers = [one for one in snapshot["_worker_snapshots"].values() if one is not None]
        if not workers or not _is_silent(workers[0]):
            return state, 0
        last = snapshot[_MAIN]["_num_workers"] - 1  # as if a round had just ended
        begun = {**snapshot, _STEP: 0, _LAST: last}
        return {**state, _SNAPSHOT: begun, _SINCE: 0}, snapshot[_STEP] + state[_SINCE]
    if not _is_silent(state):
        return state, 0
    return {**state, _YIELDED: 0}, state[_YIELDED]


def _is_silent(state: Mapping[str, Any]) -> bool:
    """Whether neither the data set nor its iterator has a state; map-style data has no iterator."""
    fetcher = state.get("fetcher_state")
    return state.get("dataset_state") is None and fetcher is not None and fetcher.get("dataset_iter_state") is None
