"""Metrics of a job's states (``checkpointer.metric``) on their way into checkpoints.

A metric goes into its checkpoint's manifest with the commit. If that is over, the writer's thread exchanges the
checkpoint for one with the metric (:meth:`.store.store.Store.annotate`). A state that is no checkpoint loses its
metrics when a later one is recorded.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

from checkflow.core.errors import CheckflowError
from checkflow.runtime.store import retention
from checkflow.runtime.store.retention import Known
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store

logger = logging.getLogger("checkflow")


class Metrics:
    """Recorded by the training thread, used by the writer's.

    Args:
        ranked: of several ranks: the best checkpoints at the start. All ranks judge states by these and by what is
            recorded since, which is the same on all, and so they capture the same boundaries.
    """

    def __init__(self, store: Store | SharedStore, ranked: Sequence[Known] | None = None) -> None:
        self._store, self._ranked = store, ranked
        self._mutex = threading.Lock()
        self._recorded: dict[int, dict[str, float]] = {}  # by step
        self._late: set[int] = set()  # steps whose manifests may lack metrics
        self._under_way: dict[int, bool] = {}  # captures on their way, by step; whether complete
        self._names: set[str] = set()
        self._unranked_said = False

    @property
    def rules(self) -> retention.Rules:
        return self._store.rules

    def record(self, step: int, name: str, value: float, *, late: bool) -> None:
        """Record a metric of this boundary; ``late``: it has passed already."""
        with self._mutex:
            wanted = {step, *self._under_way, *self._late}
            for old in self._recorded.keys() - wanted:
                del self._recorded[old]
            self._recorded.setdefault(step, {})[name] = value
            self._names.add(name)
            if late:
                self._late.add(step)
        if name == self.rules.monitor and not math.isfinite(value) and not self._unranked_said:
            self._unranked_said = True
            logger.warning("the metric %s of step %d is %s: such a state has no rank", name, step, value)

    def ranks(self, step: int) -> bool:
        """Whether the state of this boundary is one of the ``keep_best`` best so far."""
        rules = self.rules
        if not rules.keep_best or not (recorded := self._of(step)):
            return False
        known = self._others(step) if self._ranked is None else self._ranked
        judged = [*(one for one in known if one.step != step), Known(step, False, recorded)]
        best = retention.best(rules, judged)[: rules.keep_best]
        if known is self._ranked:
            self._ranked = [one for one in judged if one.step in best]
        return step in best

    def is_there(self, step: int) -> bool:
        """Whether this boundary has a checkpoint, or a capture that will become one."""
        with self._mutex:
            coming = step in self._under_way
        return coming or any(one.step == step for one in self._store.known())

    def gives_way(self, waiting: int, newer: int, *, epoch_ends: tuple[bool, bool]) -> bool:
        """Whether storage may skip a waiting capture for a newer one; both by step."""
        first, second = (
            Known(step, end, self._of(step)) for step, end in zip((waiting, newer), epoch_ends, strict=True)
        )
        return retention.gives_way(self.rules, self._store.known(), first, second)

    @property
    def best_step(self) -> int | None:
        """The best ranked checkpoint that this run has seen or made. Callable from any thread."""
        return next(iter(retention.best(self.rules, self._store.known())), None)

    def warn_missing(self) -> None:
        """At the end of training, warn if the metric that ranks checkpoints was never recorded."""
        rules = self.rules
        if self._store.commits and rules.keep_best and rules.monitor not in self._names:
            recorded = f", but {', '.join(sorted(self._names))}" if self._names else ""
            logger.warning("keep_best=%d: no metric %s was recorded%s", rules.keep_best, rules.monitor, recorded)

    def _of(self, step: int) -> dict[str, float]:
        with self._mutex:
            return dict(self._recorded.get(step, {}))

    def _others(self, step: int) -> list[Known]:
        """Checkpoints, and captures that will become some."""
        with self._mutex:
            coming = [Known(one, False, dict(self._recorded.get(one, {}))) for one in self._under_way if one != step]
        steps = {step, *(one.step for one in coming)}
        return [*coming, *(one for one in self._store.known() if one.step not in steps)]

    # The way of a capture

    def begun(self, step: int) -> None:
        with self._mutex:
            self._under_way[step] = False

    def submitted(self, step: int) -> None:
        """This capture is complete. Captures come in order, so missing earlier ones were dropped."""
        with self._mutex:
            for lost in [one for one, complete in self._under_way.items() if one < step and not complete]:
                del self._under_way[lost]
            self._under_way[step] = True

    def info(self, step: int) -> dict[str, Any]:
        """Metrics for the manifest that is about to be written."""
        with self._mutex:
            self._late.discard(step)
        return self.known(step)

    def known(self, step: int) -> dict[str, Any]:
        """Metrics of a step so far, in a manifest's form."""
        recorded = self._of(step)
        metrics = {retention.METRICS: retention.write_metrics(recorded)} if recorded else {}
        return metrics | retention.write_rules(self.rules)

    def ended(self, step: int) -> None:
        """This capture is committed, or never will be."""
        with self._mutex:
            self._under_way.pop(step, None)

    def write_late(self) -> None:
        """Add late metrics to their checkpoints: on the thread that commits, or when it has ended."""
        with self._mutex:
            due = {step: dict(self._recorded[step]) for step in self._late - self._under_way.keys()}
            self._late.difference_update(due)
        for step, metrics in due.items():
            try:
                self._store.annotate(step, metrics)
            except CheckflowError as error:
                logger.warning("metrics of step %d are known to this run alone: %s", step, error)
            except Exception:  # a bug must not end the writer's thread
                logger.exception("metrics of step %d are not kept", step)
