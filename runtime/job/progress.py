"""How far training has come: its epoch, the samples that reached a step, and the generators of random numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.state.collect import capture_generators, restore_generators
from checkflow.runtime.system.signals import raised_by_handler

logger = logging.getLogger("checkflow")


class Progress:
    """What a checkpoint says about the loop, and what a resume puts back.

    The position is that of batches which reached a step, not of batches handed out: loops may fetch ahead.
    """

    def __init__(self, loader: ResumableLoader | None) -> None:
        self._loader = loader
        self.epoch = 0  # how many are over
        self.numbers = range(0)  # what the job calls its epochs
        self.position = 0  # samples of this epoch that reached a step
        self.turns = 0  # of steps() up to the last boundary; of other loops, iterations
        self.turn = 0  # that runs in steps(), or comes next
        self._loader_epoch = 0
        # Loader epoch and position after each batch that was handed out and has not reached a step.
        self._handed: list[tuple[int, int]] = []
        # The same of those that were taken for used when a further batch was asked for, and the place before them.
        self._assumed: list[tuple[int, int]] = []
        self._before = 0, 0
        self.hyperparameters: Mapping[str, Any] = {}  # that checkpoints say the script asked for
        self._generators: Mapping[str, Any] | None = None  # to be restored when training goes on

    @property
    def waiting(self) -> int:
        """Batches that were handed out and have not reached a step."""
        return len(self._handed)

    @property
    def number(self) -> int:
        """What the job calls this epoch."""
        return self.numbers.start + self.epoch

    def batch_handed(self) -> None:
        assert self._loader is not None
        self._handed.append((self._loader.epoch, self._loader.position))

    def count(self, batches: int | None = None) -> bool:
        """So many batches reached a step; None: all that were handed out.

        Returns:
            Whether one of the job's epochs ends with them, as far as is known: some loaders find out when they are
            asked for one more.
        """
        count = self.waiting if batches is None else min(batches, self.waiting)
        if not count:
            return False
        assert self._loader is not None
        self._assumed = self._handed[:count] if batches is None else []
        self._before = self._loader_epoch, self.position
        self._loader_epoch, self.position = self._handed[count - 1]
        del self._handed[:count]
        self._loader.used(self._loader_epoch, self.position, marked=batches is not None)
        # Where nobody says that there are epochs, a loop may pass through its data thousands of times.
        return self._loader.epochs_counted_elsewhere and not self._handed and self._is_at_end()

    def _is_at_end(self) -> bool:
        """Whether no batch follows in the epoch of the one that reached a step last, as far as is known."""
        assert self._loader is not None
        if self._loader.epoch > self._loader_epoch:
            return True
        try:
            return self._loader.exhausted
        except Exception as error:  # the user's sampler is asked: the loop gets its error with the next batch, as ever
            if raised_by_handler(error):
                raise
            return False

    def epochs_over(self, *, epoch_end: bool) -> int:
        """How many epochs are over at this boundary.

        Args:
            epoch_end: one of them ends here.
        """
        counted = self._loader is None or self._loader.epochs_counted_elsewhere
        # A loop that marks its steps has not said yet that this epoch is over.
        return (self.epoch if counted else self._loader_epoch) + (epoch_end and self.position > 0)

    def end_iteration(self) -> None:
        """A boundary: turns of ``steps()`` before this one, in which no optimizer stepped, belong to its iteration."""
        self.turns = max(self.turns, self.turn) + 1

    def take_back(self) -> bool:
        """What the last :meth:`count` took to be used waits again: the loop is about to say how much was. Returns
        whether there was such."""
        if not self._assumed:
            return False
        self._loader_epoch, self.position = self._before
        self._handed[:0] = self._assumed
        self._assumed = []
        return True

    def end_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self._handed.clear()
        self._assumed = []

    def capture(self) -> dict[str, Any]:
        """As extra state."""
        loader = None
        if self._loader is not None:
            epoch = self.epoch if self._loader.epochs_counted_elsewhere else self._loader_epoch
            loader = self._loader.state_at(epoch, self.position)
        return {
            "epoch": self.epoch,
            "position": self.position,
            "turns": self.turns,
            "loader": loader,
            "generators": capture_generators(),
            "hyperparameters": self.hyperparameters,
        }

    def resume(self, extra: Mapping[str, Any]) -> None:
        """Go on from what :meth:`capture` gave.

        Raises:
            MismatchError: the loader is another one.
        """
        self.epoch, self.position, self._generators = extra["epoch"], extra["position"], extra["generators"]
        self.turns = self.turn = extra["turns"] if "turns" in extra else extra["iteration"]
        self._loader_epoch = extra["loader"]["epoch"] if extra["loader"] is not None else 0
        if self._loader is not None and extra["loader"] is not None:
            self._loader.load_state_dict(extra["loader"])
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
        self.position = 0  # not to be taken for one in another loader, in this run or a later one

    def begin_anew(self) -> None:
        """There is nothing to go on from."""
        if self._loader is not None:
            self._loader.begin_anew()

    def restore_generators(self) -> None:
        """Training goes on: the numbers drawn from here on are those that would have been drawn; once."""
        if self._generators is not None:
            restore_generators(self._generators)
            self._generators = None
