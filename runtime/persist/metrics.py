"""What a job tells of its states (``checkpointer.metric``), on its way into their checkpoints.

A metric describes the state as it is when it is told: :mod:`.loop.training_loop` says which boundary that is. If its
capture has not been committed yet, the metric goes into its manifest with the commit; if it has, the checkpoint is
exchanged for one of the same files and a manifest that has it too (:meth:`.store.store.Store.annotate`), on the
writer's thread. A state that is no checkpoint loses its metrics when a later one is told of.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

from checkflow.core.errors import CheckflowError
from checkflow.runtime.store import retention
from checkflow.runtime.store.retention import Known
from checkflow.runtime.store.store import Store

logger = logging.getLogger("checkflow")


class Metrics:
    """Told by the training thread, taken by the writer's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._told: dict[int, dict[str, float]] = {}  # by step
        self._late: set[int] = set()  # steps with metrics that their manifests may not have
        self._under_way: dict[int, bool] = {}  # captures by step, neither committed nor given up; whether complete
        self._names: set[str] = set()
        self._unranked_said = False

    @property
    def rules(self) -> retention.Rules:
        return self._store.rules

    def tell(self, step: int, name: str, value: float, *, late: bool) -> None:
        """Take note.

        Args:
            step: the boundary that is described.
            late: whether it has been passed already.
        """
        with self._mutex:
            wanted = {step, *self._under_way, *self._late}
            for old in self._told.keys() - wanted:
                del self._told[old]
            self._told.setdefault(step, {})[name] = value
            self._names.add(name)
            if late:
                self._late.add(step)
        if name == self.rules.monitor and not math.isfinite(value) and not self._unranked_said:
            self._unranked_said = True
            logger.warning("the metric %s of step %d is %s: such a state has no rank", name, step, value)

    def ranks(self, step: int) -> bool:
        """Whether the state of this boundary is one of the ``keep_best`` best, as far as it was told."""
        rules = self.rules
        if not rules.keep_best or not (told := self._of(step)):
            return False
        return step in retention.best(rules, [*self._others(step), Known(step, False, told)])[: rules.keep_best]

    def is_there(self, step: int) -> bool:
        """Whether this boundary has a checkpoint, or a capture that is to become one."""
        with self._mutex:
            coming = step in self._under_way
        return coming or any(one.step == step for one in self._store.known())

    def gives_way(self, waiting: int, newer: int, *, epoch_ends: tuple[bool, bool]) -> bool:
        """Whether storage may leave out a capture that waits for it, for a newer one; both by step."""
        first, second = (
            Known(step, end, self._of(step)) for step, end in zip((waiting, newer), epoch_ends, strict=True)
        )
        return retention.gives_way(self.rules, self._store.known(), first, second)

    @property
    def best_step(self) -> int | None:
        """The best of the checkpoints that this run has seen or made, if any has a rank. From any thread."""
        return next(iter(retention.best(self.rules, self._store.known())), None)

    def warn_missing(self) -> None:
        """Training has ended: say it if what ranks checkpoints was never told."""
        rules = self.rules
        if rules.keep_best and rules.monitor not in self._names:
            told = f", but {', '.join(sorted(self._names))}" if self._names else ""
            logger.warning("keep_best=%d: no metric %s was told%s", rules.keep_best, rules.monitor, told)

    def _of(self, step: int) -> dict[str, float]:
        with self._mutex:
            return dict(self._told.get(step, {}))

    def _others(self, step: int) -> list[Known]:
        """Checkpoints, and captures that are to become some."""
        with self._mutex:
            coming = [Known(one, False, dict(self._told.get(one, {}))) for one in self._under_way if one != step]
        steps = {step, *(one.step for one in coming)}
        return [*coming, *(one for one in self._store.known() if one.step not in steps)]

    # The way of a capture

    def begun(self, step: int) -> None:
        with self._mutex:
            self._under_way[step] = False

    def submitted(self, step: int) -> None:
        """It is complete. Captures come in order: those before it that did not come have been given up."""
        with self._mutex:
            for lost in [one for one, complete in self._under_way.items() if one < step and not complete]:
                del self._under_way[lost]
            self._under_way[step] = True

    def info(self, step: int) -> dict[str, Any]:
        """For the manifest that is about to be written."""
        with self._mutex:
            self._late.discard(step)
        return self.known(step)

    def known(self, step: int) -> dict[str, Any]:
        """What is known of a step so far, as a manifest has it."""
        told = self._of(step)
        metrics = {retention.METRICS: retention.write_metrics(told)} if told else {}
        return metrics | retention.write_rules(self.rules)

    def ended(self, step: int) -> None:
        """It is committed, or will never be."""
        with self._mutex:
            self._under_way.pop(step, None)

    def write_late(self) -> None:
        """Bring what was told after a commit to its checkpoint. On the thread that commits, or when it has ended."""
        with self._mutex:
            due = {step: dict(self._told[step]) for step in self._late - self._under_way.keys()}
            self._late.difference_update(due)
        for step, metrics in due.items():
            try:
                self._store.annotate(step, metrics)
            except CheckflowError as error:
                logger.warning("metrics of step %d are known to this run alone: %s", step, error)
            except Exception:  # a fault of ours must not end the writer's thread; the traceback goes to the log
                logger.exception("metrics of step %d are not kept", step)
