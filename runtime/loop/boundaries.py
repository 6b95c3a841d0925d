"""Where the boundaries of a training loop are: events in, a :class:`Boundary` or None out. No torch, no clock.

docs/explanation/boundaries.md says which event ends an iteration in which kind of loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """The end of an iteration.

    Attributes:
        epoch_end: an epoch ends here, too.
        last: so does training.
        explicit: ``step()`` marks the boundaries of this loop.
        micro_batches: of the iteration, where ``step()`` has said that.
    """

    epoch_end: bool = False
    last: bool = False
    explicit: bool = False
    micro_batches: int | None = None


class Boundaries:
    """Finds the boundaries of one run. An iteration whose end was found goes on until :meth:`passed` is called.

    Args:
        optimizers: by name. Where there are none, an iteration is what runs forward in training mode.
        loader: whether there is a loader, which reports each batch.

    Attributes:
        stepped: optimizers, in the iteration that goes on.
        began: whether a model has run forward in training mode in it.
        explicit: ``step()`` marks the boundaries.
        any_passed: whether an iteration has ended in this run.
    """

    def __init__(self, optimizers: Collection[str], *, loader: bool) -> None:
        self._optimizers, self._loader = frozenset(optimizers), loader
        self.stepped: set[str] = set()
        self.began = self.explicit = self.any_passed = self.closed = False
        self.looping: bool | None = None  # whether epochs() or steps() goes on; None: neither was called
        self._in_steps = self._left_at_epoch_end = False

    # What is known of the iteration that goes on

    @property
    def iterated(self) -> bool:
        """Whether the iteration can end: an optimizer has stepped, or there is none and a model has run."""
        return not self.closed and bool(self.stepped or (self.began and not self._optimizers))

    @property
    def under_way(self) -> bool:
        """Whether an iteration has begun since the last boundary."""
        return self.began or bool(self.stepped)

    @property
    def never_stepped(self) -> bool:
        """Whether there are optimizers, and none has stepped in this run."""
        return bool(self._optimizers) and not (self.any_passed or self.stepped or self.closed)

    @property
    def ends_at_forward(self) -> bool:
        """Whether all optimizers have stepped, and only the next forward can show that the iteration has ended."""
        implicit = not (self._loader or self.explicit or self._in_steps)
        return implicit and bool(self._optimizers) and self.stepped >= self._optimizers

    @property
    def ends_with_epoch(self) -> bool:
        """Whether the end of training ends an epoch, too: the loop over epochs was left after the last batch of one."""
        return self._left_at_epoch_end and not self.explicit

    def is_expected(self, *, waiting: int) -> bool:
        """Whether the loop that goes on will come to a boundary, as far as it has shown.

        Args:
            waiting: batches that were drawn and have not reached a step.
        """
        return self.looping if self.looping is not None else self.began or waiting > 0 or self.any_passed

    # Events

    def loop_begins(self, *, in_steps: bool = False) -> None:
        """The first turn of ``epochs()`` or ``steps()``."""
        self.looping, self._in_steps = True, in_steps

    def loop_left(self, *, early: bool, at_epoch_end: bool = False) -> None:
        """The loop is over.

        Args:
            early: it was left with ``break``.
            at_epoch_end: after the last batch of an epoch.
        """
        self.looping, self._in_steps, self._left_at_epoch_end = False, self._in_steps and early, at_epoch_end

    def model_ran(self) -> None:
        """A model has run forward in training mode, or a part of one."""
        self.began = True

    def optimizer_stepped(self, *names: str) -> None:
        self.stepped.update(names)

    def marking_begins(self) -> None:
        """From here on ``step()`` marks the boundaries: the loop may fetch batches ahead of using them."""
        self.explicit = True

    def batch_requested(self) -> Boundary | None:
        """The loop asks for a batch that the loader has."""
        return self._end()

    def forward(self) -> Boundary | None:
        """A whole model is about to run forward in training mode."""
        return self._end() if self.ends_at_forward else None

    def epoch_ended(self, *, last: bool) -> Boundary | None:
        return self._end(epoch_end=True, last=last)

    def turn_ended(self, *, last: bool) -> Boundary | None:
        """A turn of ``steps()`` is over; without an optimizer's step it belongs to the next iteration."""
        self.began = self.began or not (self._optimizers or self.explicit)
        return self._end(last=last)

    def marked(self, *, micro_batches: int, epoch_end: bool, ran: bool) -> Boundary | None:
        """``step()`` is called.

        Args:
            ran: whether something was trained since the last boundary, where there are no optimizers to show it.
        """
        self.explicit = True
        self.began = self.began or (ran and not self._optimizers)
        return self._end(epoch_end=epoch_end, micro_batches=micro_batches, marked=True)

    def training_ended(self) -> Boundary | None:
        """The ``with`` block is over."""
        return self._end()

    def passed(self) -> None:
        """The boundary that was found is behind, and the next iteration begins."""
        self.stepped.clear()
        self.began, self.any_passed = False, True

    def close(self) -> None:
        """No iteration ends from here on."""
        self.closed, self.looping = True, False

    def _end(
        self, *, epoch_end: bool = False, last: bool = False, micro_batches: int | None = None, marked: bool = False
    ) -> Boundary | None:
        ends = self.iterated and (marked or not self.explicit)
        return Boundary(epoch_end, last, self.explicit, micro_batches) if ends else None
