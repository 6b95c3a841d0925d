"""Which tensors may stay in live memory after the first iteration of a capture.

A plan over several iterations spreads *never written* tensors, such as frozen weights, over all of them. The loop may
still write them, so only *settled* ones are trusted: docs/explanation/consistency.md, "Tensors that are never written".
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from checkflow.core.errors import ConsistencyError
from checkflow.core.graph import AnchorKind
from checkflow.core.plan import Plan
from checkflow.core.state import StateTensor
from checkflow.runtime.format.digest import Digest, Digests
from checkflow.runtime.state.collect import version_of

logger = logging.getLogger("checkflow")


class WrittenError(ConsistencyError):
    """A settled tensor was written while a checkpoint still had to read it. Only that checkpoint is void."""

    def __init__(self, step: int, name: str) -> None:
        super().__init__(f"the checkpoint of step {step} is torn: {name}, never written before, was written")
        self.name = name


class SettledTensors:
    """What is known about tensors that a plan reads in live memory after an optimizer's step."""

    def __init__(self, plan: Plan) -> None:
        self._late = frozenset(_read_late(plan))
        self._known: dict[str, tuple[int, Digest]] = {}  # version and digest at the last audited boundary
        self._settled: set[str] = set()
        self._written: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._settled

    @property
    def undecided(self) -> bool:
        """Whether one more audited capture would decide: some tensor has one known digest, not two."""
        return not self._known.keys() <= self._settled | self._written

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Tensors (None: all) were replaced: forget all of them but which ones are written."""
        for name in [*self._known] if names is None else names:
            self._known.pop(name, None)
            self._settled.discard(name)

    def drop(self, names: Collection[str]) -> None:
        """Never trust these again: they are written."""
        if new := sorted(set(names) - self._written):
            logger.warning(
                "training writes %d state tensors that the plan expects to stay unchanged, %s is the first: from now "
                "on they are copied in a checkpoint's first iteration, which may pause training",
                len(new), new[0],
            )  # fmt: skip
        self._written.update(names)
        self._settled.difference_update(names)

    def look(self, tensors: Mapping[str, StateTensor], digests: Digests | None) -> dict[str, Digest]:
        """At a boundary: learn what has settled from the live tensors and, if audited, from their digests.

        Returns:
            The digest that each settled tensor must have when it is staged.
        """
        changed = []
        watched = sorted((self._late - self._written) & tensors.keys())
        values = digests.wait() if digests is not None and watched else None
        for name in watched:
            now = (version_of(tensors[name]), None if values is None else values[name])
            version, digest = self._known.get(name, now)
            if now[0] != version or now[1] not in (None, digest):
                changed.append(name)
            elif name in self._known and now[1] is not None:
                self._settled.add(name)
            elif digest is not None:
                self._known[name] = version, digest
        self.drop(changed)
        return {name: self._known[name][1] for name in sorted(self._settled)}


def _read_late(plan: Plan) -> set[str]:
    if plan.interval == 1:
        return set()
    first = min(
        (
            index
            for index, step in enumerate(plan.timeline.steps)
            if step.anchor is not None and step.anchor.kind is AnchorKind.OPTIMIZER_POST
        ),
        default=len(plan.timeline.steps),
    )
    return {
        chunk.tensor
        for chunk in plan.chunks
        if plan.deadlines[chunk.tensor] is None
        and (chunk.offload_step if chunk.snapshot_step is None else chunk.snapshot_step) >= first
    }
