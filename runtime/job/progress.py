"""How far training has come: its epoch, the samples that reached a step, and the random generators."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.repeat.used import Comparison, Mark, Used, tell_uncompared
from checkflow.runtime.state.collect import capture_generators, restore_generators
from checkflow.runtime.system.signals import raised_by_handler

logger = logging.getLogger("checkflow")


class Progress:
    """What a checkpoint says about the loop: batches that reached a step, since loops may fetch more ahead.

    Args:
        accepted: differences of the loader that the user accepts.
    """

    def __init__(self, loader: ResumableLoader | None, accepted: frozenset[str] = frozenset()) -> None:
        self._loader, self._accepted = loader, accepted
        self.epoch = 0  # finished epochs
        self.numbers = range(0)  # the job's own numbers of its epochs
        self.position = 0  # samples of this epoch that reached a step
        self.turns = 0  # turns of steps() up to the last boundary; in other loops, iterations
        self.turn = 0  # the current or next turn of steps()
        self._loader_epoch = 0
        # Loader epoch and position after each batch that was handed out but has not reached a step, and its mark.
        self._handed: list[tuple[int, int, Mark | None]] = []
        # The same for batches assumed used when the next one was fetched, and the position before them.
        self._assumed: list[tuple[int, int, Mark | None]] = []
        self._used = Used()  # batches that reached a step
        self._before = 0, 0, self._used
        self.hyperparameters: Mapping[str, Any] = {}  # what checkpoints store of the script's wishes
        self.dropped: tuple[str, ...] = ()  # names of ``fresh=`` that earlier checkpoints had, and the job has not
        self._generators: Mapping[str, Any] | None = None  # to restore when training continues

    @property
    def waiting(self) -> int:
        """Batches that were handed out but have not reached a step."""
        return len(self._handed)

    @property
    def number(self) -> int:
        return self.numbers.start + self.epoch

    def batch_handed(self) -> None:
        assert self._loader is not None
        self._handed.append((self._loader.epoch, self._loader.position, self._loader.mark))

    def count(self, batches: int | None = None) -> bool:
        """Count batches that reached a step, or all that were handed out; returns whether an epoch is known to end with
        them.
        """
        count = self.waiting if batches is None else min(batches, self.waiting)
        if not count:
            return False
        assert self._loader is not None
        self._assumed = self._handed[:count] if batches is None else []
        self._before = self._loader_epoch, self.position, self._used
        for epoch, _, mark in self._handed[:count]:
            self._used = self._used.then(epoch, mark)
        self._loader_epoch, self.position, _ = self._handed[count - 1]
        del self._handed[:count]
        self._loader.used(self._loader_epoch, self.position, marked=batches is not None)
        # Without epochs(), a loop may pass through its data thousands of times.
        return self._loader.epochs_counted_elsewhere and not self._handed and self._is_at_end()

    def _is_at_end(self) -> bool:
        """Whether the last used batch is known to be the last one of its epoch."""
        assert self._loader is not None
        if self._loader.epoch > self._loader_epoch:
            return True
        try:
            return self._loader.exhausted
        except Exception as error:  # of the user's sampler: the loop will get it with the next batch
            if raised_by_handler(error):
                raise
            return False

    def epochs_over(self, *, epoch_end: bool) -> int:
        """How many epochs are over at this boundary, at which one may end."""
        counted = self._loader is None or self._loader.epochs_counted_elsewhere
        # A loop that calls step() has not reported the end of this epoch yet.
        return (self.epoch if counted else self._loader_epoch) + (epoch_end and self.position > 0)

    def end_iteration(self) -> None:
        """Pass a boundary: earlier turns of ``steps()`` without an optimizer step belong to this iteration."""
        self.turns = max(self.turns, self.turn) + 1

    def take_back(self) -> bool:
        """Undo the last :meth:`count`'s assumption, as the loop will say how much was used; False: there was none."""
        if not self._assumed:
            return False
        self._loader_epoch, self.position, self._used = self._before
        self._handed[:0] = self._assumed
        self._assumed = []
        return True

    def end_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self._handed.clear()
        self._assumed = []

    def capture(self) -> dict[str, Any]:
        """The extra state."""
        loader = None
        if self._loader is not None:
            epoch = self.epoch if self._loader.epochs_counted_elsewhere else self._loader_epoch
            loader = self._loader.state_at(epoch, self.position)
        return {
            "epoch": self.epoch,
            "position": self.position,
            "turns": self.turns,
            "loader": loader,
            "used": self._used.state(),
            "generators": capture_generators(),
            "hyperparameters": self.hyperparameters,
            "dropped": list(self.dropped),
        }

    def resume(self, extra: Mapping[str, Any]) -> None:
        """Continue from what :meth:`capture` returned. Raises MismatchError if the loader is another one."""
        self.epoch, self.position, self._generators = extra["epoch"], extra["position"], extra["generators"]
        self.turns = self.turn = extra["turns"] if "turns" in extra else extra["iteration"]
        self._loader_epoch = extra["loader"]["epoch"] if extra["loader"] is not None else 0
        if self._loader is not None and extra["loader"] is not None:
            self._loader.accepted = self._accepted
            self._loader.load_state_dict(extra["loader"])
            self._loader_epoch, self.position = self._loader.epoch, self._loader.position
            self._compare_with(extra)
            return
        self.begin_anew()
        if extra["loader"] is not None:
            logger.warning(
                "the checkpoint was made with a loader, at position %d of epoch %d, and this Checkpointer has none: "
                "that place is dropped; pass the loader, too, to go on from it",
                self.position, self._loader_epoch,
            )  # fmt: skip
        elif self._loader is not None:
            logger.warning(
                "the checkpoint was made without a loader, and this Checkpointer has one: nothing says what of it was "
                "used, and it begins an epoch anew"
            )
        self.position = 0  # must not be taken for a position in another loader

    def _compare_with(self, extra: Mapping[str, Any]) -> None:
        """Have the loader hold batches that come again against those that were used."""
        assert self._loader is not None
        self._used = Used.read(extra.get("used"))
        self._loader.comparison = Comparison(self._used, accepted="loader" in self._accepted)
        if self.position and self._used.last is None:
            if "used" not in extra:
                why = "the checkpoint is of an earlier release"
            elif extra["used"] is not None:
                why = "there were other ranks"
            else:
                why = "it goes on by its own state, or its batches do not lie in the host's memory"
            tell_uncompared(why)

    def begin_anew(self) -> None:
        """Start without a checkpoint."""
        self._used = Used()
        if self._loader is not None:
            self._loader.begin_anew()

    def restore_generators(self) -> None:
        """Training continues: restore the generators, once, as if it had not been interrupted."""
        if self._generators is not None:
            restore_generators(self._generators)
            self._generators = None
