"""Says why what a loop does is not saved, where nothing would fail and no checkpoint, or one of another place, be made.

Each is said once in a run.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("checkflow")

TURNS = 100  # of steps() without an optimizer's step, before that is said: batches may be accumulated, steps skipped


class Unsaved:
    """What the loop has shown of itself, and what was said of it."""

    def __init__(self) -> None:
        self.batches = 0  # handed out in this run
        self._turns = 0
        self._said: set[str] = set()

    def left_over(self, batches: int, epoch: int) -> None:
        """An epoch has ended with batches that no optimizer's step followed."""
        self._say(
            "left over",
            "%d batches of epoch %d were handed out after the last optimizer step and belong to the next iteration: "
            "ends of epochs like this one are not saved; call optimizer.step() after an epoch's last batch, too",
            batches, epoch,
        )  # fmt: skip

    def no_step(self) -> None:
        """An epoch, or training, has ended, and no optimizer has stepped since this run began."""
        if self._turns:
            self._say(
                "no step",
                "%d turns of steps() have ended, and no optimizer that was passed has stepped: nothing is counted or "
                "saved before one does; pass the optimizer that steps",
                self._turns,
            )
        elif self.batches and "left over" not in self._said:
            self._say(
                "no step",
                "%d batches were used, and no optimizer that was passed has stepped: nothing is saved before one does; "
                "pass the model and the optimizer that are trained, and call optimizer.step()",
                self.batches,
            )  # fmt: skip

    def turn_without_step(self) -> None:
        """A turn of ``steps()`` has ended, and no optimizer has stepped since this run began."""
        self._turns += 1
        if self._turns == TURNS:
            self.no_step()

    def epoch_from_elsewhere(self, epoch: int) -> None:
        """An optimizer stepped in an epoch of which the loader handed out nothing."""
        self._say(
            "elsewhere",
            "an optimizer stepped in epoch %d, and the loader handed out no batch: the whole epoch counts as one "
            "iteration, and is not resumed inside; iterate checkpointer.loader",
            epoch,
        )  # fmt: skip

    def batches_from_elsewhere(self) -> None:
        """An iteration has ended, and the loader has handed out nothing in this run."""
        if not self.batches:
            self._say(
                "elsewhere",
                "an optimizer stepped before the loader handed out any batch: training takes its batches from "
                "elsewhere, and a resume begins its epoch anew; iterate checkpointer.loader",
            )

    def step_from_elsewhere(self) -> None:
        """``step()`` is called, and counts batches."""
        if not self.batches:
            self._say(
                "elsewhere",
                "step() was called before the loader handed out any batch: training takes its batches from elsewhere, "
                "and a resume begins its epoch anew; iterate checkpointer.loader, or give libraries loader.as_torch()",
            )

    def too_many(self, batches: int, waiting: int) -> None:
        """``step(batches)`` was called, and fewer are waiting."""
        if self.batches:
            self._say(
                "too many",
                "step(%d): only %d batches were handed out since those that were counted before; so many are counted",
                batches, waiting,
            )  # fmt: skip

    def not_counted(self, batches: int, epoch: int) -> None:
        """An epoch has ended in a loop that calls ``step()``."""
        self._say(
            "not counted",
            "at the end of epoch %d batches (%d) were handed out that no step() has counted: such ends of epochs are "
            "not kept, and a resume in them uses these batches again; if an optimizer has used them, pass their number "
            "to step()",
            epoch, batches,
        )  # fmt: skip

    def all_in_one(self) -> None:
        """Training has ended without an optimizer, a loader and a loop that tells of iterations."""
        self._say(
            "all in one",
            "without an optimizer and a loader nothing tells where an iteration ends, and all that ran counts as one: "
            "iterate checkpointer.steps(), or call checkpointer.step() after each",
        )

    def never_told(self) -> None:
        """Training has ended, and batches that were fetched ahead were never counted."""
        self._say(
            "never told",
            "no checkpoint was made: batches were handed to a loop that may fetch ahead, where nothing but "
            "checkpointer.step(), after each optimizer step, tells what was used",
        )

    def end(self, iteration: int) -> None:
        """Training has ended inside of an iteration, and its last boundary was not captured."""
        self._say(
            "end",
            "training went on after step %d and ended inside of the next iteration: its end is not saved; call "
            "optimizer.step() after the last batch, too, and checkpointer.step() if the loop calls it elsewhere",
            iteration,
        )  # fmt: skip

    def closed(self, iteration: int) -> None:
        """close() came after an optimizer's step whose iteration nothing has ended."""
        self._say(
            "closed",
            "closed after an optimizer's step and before the end of its iteration, as far as the loop has told: what "
            "was trained after step %d is not saved; train in a with block, whose end is the end of training, or call "
            "checkpointer.step() after each iteration",
            iteration,
        )  # fmt: skip

    def _say(self, what: str, message: str, *values: int) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *values)
