"""Warnings about loops whose training is not saved, or not where the user expects it. Each is logged once in a run."""

from __future__ import annotations

import logging
from typing import NamedTuple

logger = logging.getLogger("checkflow")


class Hint(NamedTuple):
    """Why something is not saved. Of several hints with one reason, the first is logged."""

    reason: str
    message: str


# An epoch has ended with batches that no optimizer's step followed.
LEFT_OVER = Hint(
    "left over",
    "%d batches of epoch %d were handed out after the last optimizer step and belong to the next iteration: "
    "ends of epochs like this one are not saved; call optimizer.step() after an epoch's last batch, too",
)
# Turns of steps() have ended, or an epoch or training, and no optimizer has stepped since this run began.
TURNS_WITHOUT_STEP = Hint(
    "no step",
    "%d turns of steps() have ended, and no optimizer that was passed has stepped: nothing is counted or "
    "saved before one does; pass the optimizer that steps",
)
NO_STEP = Hint(
    "no step",
    "%d batches were used, and no optimizer that was passed has stepped: nothing is saved before one does; "
    "pass the model and the optimizer that are trained, and call optimizer.step()",
)
# An optimizer stepped, or step() was called, and the loader has handed out nothing: in this epoch, or in this run.
EPOCH_FROM_ELSEWHERE = Hint(
    "elsewhere",
    "an optimizer stepped in epoch %d, and the loader handed out no batch: the whole epoch counts as one "
    "iteration, and is not resumed inside; iterate checkpointer.loader",
)
BATCHES_FROM_ELSEWHERE = Hint(
    "elsewhere",
    "an optimizer stepped before the loader handed out any batch: training takes its batches from "
    "elsewhere, and a resume begins its epoch anew; iterate checkpointer.loader",
)
STEP_FROM_ELSEWHERE = Hint(
    "elsewhere",
    "step() was called before the loader handed out any batch: training takes its batches from elsewhere, "
    "and a resume begins its epoch anew; iterate checkpointer.loader, or give libraries loader.as_torch()",
)
TOO_MANY = Hint(
    "too many",
    "step(%d): only %d batches were handed out since those that were counted before; so many are counted",
)
# An epoch has ended in a loop that calls step().
NOT_COUNTED = Hint(
    "not counted",
    "at the end of epoch %d batches (%d) were handed out that no step() has counted: such ends of epochs are "
    "not kept, and a resume in them uses these batches again; if an optimizer has used them, pass their number "
    "to step()",
)
ALL_IN_ONE = Hint(
    "all in one",
    "without an optimizer and a loader nothing shows where an iteration ends, and all that ran counts as one: "
    "iterate checkpointer.steps(), or call checkpointer.step() after each",
)
# Training has ended, and batches that were fetched ahead were never counted.
NEVER_COUNTED = Hint(
    "never counted",
    "no checkpoint was made: batches were handed to a loop that may fetch ahead, where nothing but "
    "checkpointer.step(), after each optimizer step, reports what was used",
)
UNSEEN_END = Hint(
    "unseen end",
    "no checkpoint is made: where an iteration ends is not seen, since no model that was passed runs "
    "forward in uncompiled code; iterate checkpointer.steps(n), or call checkpointer.step() after each",
)
# Training has ended inside of an iteration, and its last boundary was not captured.
ENDED_INSIDE = Hint(
    "ended inside",
    "training went on after step %d and ended inside of the next iteration: its end is not saved; call "
    "optimizer.step() after the last batch, too, and checkpointer.step() if the loop calls it elsewhere",
)
# close() came after an optimizer's step whose iteration nothing has ended.
CLOSED_INSIDE = Hint(
    "closed inside",
    "closed after an optimizer's step and before the end of its iteration, as far as the loop has reported: what "
    "was trained after step %d is not saved; train in a with block, whose end is the end of training, or call "
    "checkpointer.step() after each iteration",
)


class Hints:
    """The hints of one run."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def given(self, hint: Hint) -> bool:
        """Whether a hint of this reason was logged."""
        return hint.reason in self._given

    def give(self, hint: Hint, *values: int) -> None:
        if not self.given(hint):
            self._given.add(hint.reason)
            logger.warning(hint.message, *values)
