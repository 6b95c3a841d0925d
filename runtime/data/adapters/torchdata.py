"""Which states of other libraries do not hold all that is needed, and what is done instead.

After a resume torchdata 0.11 counts the batches that it fetches again twice, where iterable-style data have no state,
so that the next resume loses batches or fails. So the loader begins the epoch anew, and checkflow throws those batches
away.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import SequentialSampler

from checkflow.core.errors import MismatchError
from checkflow.runtime.data.repeat.own_state import has_state, walk

_SNAPSHOT, _SINCE, _STEP, _LAST, _MAIN = (
    "_snapshot", "_steps_since_snapshot", "_snapshot_step", "_last_yielded_worker_id", "_main_snapshot",
)  # fmt: skip
_YIELDED, _FINISHED = "_num_yielded", "_iterator_finished"


def loses_state(loader: Any) -> bool:
    """Whether its state, if it has one, leaves out what its next batches follow from, and beginning its epoch anew does
    not.

    - A shuffle buffer of Hugging Face datasets: the state of the data set is that behind the buffer, whose samples
      would never be used.
    - A sampler without a state in torchdata's nodes: its order is drawn anew, from other numbers.
    """
    for _, part in walk({"loader": loader, "dataset": getattr(loader, "dataset", None)}):
        kind = type(part)
        room, _, _ = kind.__module__.partition(".")
        if room == "datasets" and kind.__name__ == "BufferShuffledExamplesIterable":
            return True
        if room == "torchdata" and kind.__name__ == "SamplerWrapper":
            sampler = part.sampler
            if not (has_state(sampler) or hasattr(sampler, "set_epoch") or type(sampler) is SequentialSampler):
                return True
    return False


def is_torchdatas(loader: object) -> bool:
    """Whether it is a ``StatefulDataLoader``, or of a class made of that."""
    return any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(loader).__mro__)


class Again(NamedTuple):
    """How many batches are to be fetched and thrown away, and which worker's the ``seen``-th of them is."""

    batches: int = 0
    seen: int = 0
    worker: int | None = None

    def refuse_other_data(self, iterator: Iterator[Any], fetched: int) -> None:
        """The check that torchdata makes there.

        Raises:
            MismatchError: another worker's is the one.
        """
        if fetched == self.seen and self.worker not in (None, getattr(iterator, _LAST, self.worker)):
            raise MismatchError(
                f"batch {fetched} of the epoch comes from another worker than when the checkpoint was made: the data "
                "has changed"
            )


def begin_anew(loader: Any, state: Any, calls: int | None) -> tuple[Any, Again]:
    """A state to load into a loader in the place of this one, and what is to be fetched and thrown away after that.

    That of any other loader, of one that hands out in a way of its own what torchdata's does, and any that says where
    its data is, is given back as it is.

    Args:
        calls: how often the loader was asked for a batch; None: as the state says, which leaves out those that failed.
    """
    if not _iterates_as_torchdata(loader) or state[_FINISHED]:  # at its end a new epoch begins
        return state, Again()
    if _SNAPSHOT in state:  # with workers
        snapshot = state[_SNAPSHOT]
        workers = [one for one in snapshot["_worker_snapshots"].values() if one is not None]
        if not workers or not all(map(_is_silent, workers)):
            return state, Again()
        last = snapshot[_MAIN]["_num_workers"] - 1  # as if a round had just ended
        begun = {**state, _SNAPSHOT: {**snapshot, _STEP: 0, _LAST: last}, _SINCE: 0}
        handed = snapshot[_STEP] + state[_SINCE]
        if calls is None or calls == handed:
            return begun, Again(handed, snapshot[_STEP], snapshot[_LAST])
        return begun, Again(calls)  # some failed
    if not _is_silent(state):
        return state, Again()
    return {**state, _YIELDED: 0}, Again(state[_YIELDED] if calls is None else calls)


def _iterates_as_torchdata(loader: Any) -> bool:
    module = sys.modules.get("torchdata.stateful_dataloader")
    own = getattr(module, "StatefulDataLoader", None)
    return own is not None and isinstance(loader, own) and type(loader).__iter__ is own.__iter__


def _is_silent(state: Mapping[str, Any]) -> bool:
    """Whether neither the data set nor its iterator has a state; map-style data has no iterator."""
    fetcher = state.get("fetcher_state")
    return state.get("dataset_state") is None and fetcher is not None and fetcher.get("dataset_iter_state") is None
