"""Which tensors may lie in place after the first iteration of a capture, and leave from there.

A plan over several iterations spreads what is *never written* over all of them: frozen weights above all. No operator
was seen to write these tensors, but the loop itself may (an average of the weights, a target network, clamps), where no
anchor tells, as soon as an optimizer has stepped. Therefore, consistency first:

1. By itself no such tensor is trusted: what of it has not left is due when the first optimizer of the first iteration
   has stepped, whatever the plan says. Training is held for it.
2. A tensor has *settled* when the digests of two audited captures say that its bytes were the same at both boundaries,
   and its version counter has not moved between them. Only then does it leave when the plan says. The capture after
   the first one, or after tensors were replaced, is audited for it, and runs as planned.
3. A settled tensor is watched. Before its owner steps with a gradient for it, and before its module's forward if it is
   a buffer, it is copied (:mod:`.job.compatibility`), in every iteration of a capture. Its version counter is looked at
   whenever some of it is released. Before commit, what was staged is held against the digest that is known, which finds
   most writes that move no counter (through ``.data``, NumPy).
4. One that was written after all is never trusted again. The checkpoint under way is void if the write came before the
   last byte had left; and where only the digest tells, so are those begun before the writer has come to compare it.

What this does not find: bytes that are changed before a boundary whose capture is not audited and changed back before
they leave, moving no counter either time. That checkpoint holds the bytes from before and after, not the boundary's.

Plans for one iteration have no such tensors: rule 1 is all there is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from checkflow.core.errors import ConsistencyError
from checkflow.core.graph import AnchorKind
from checkflow.core.plan import Plan
from checkflow.runtime.format.digest import Digest, Digests
from checkflow.runtime.state.collect import version_of

logger = logging.getLogger("checkflow")


class WrittenError(ConsistencyError):
    """A settled tensor was written while a checkpoint still had to read it: that checkpoint is void, no other."""

    def __init__(self, step: int, name: str) -> None:
        super().__init__(f"the checkpoint of step {step} is torn: {name}, never written before, was written")
        self.name = name


class SettledTensors:
    """What is known about the tensors that a plan reads after an optimizer's step in their live memory."""

    def __init__(self, plan: Plan) -> None:
        self._late = frozenset(_read_late(plan))
        self._known: dict[str, tuple[int, Digest]] = {}  # version counter and digest at the last audited boundary
        self._settled: set[str] = set()
        self._written: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._settled

    @property
    def undecided(self) -> bool:
        """Whether one more audited capture would tell more: of some tensor one digest is known, and not two."""
        return not self._known.keys() <= self._settled | self._written

    def forget(self) -> None:
        """Tensors were replaced: nothing is known any more, except which ones are written."""
        self._known.clear()
        self._settled.clear()

    def drop(self, names: Collection[str]) -> None:
        """These are written after all."""
        if new := sorted(set(names) - self._written):
            logger.warning(
                "the plan takes %d state tensors for never written, and they are, %s is the first: from now on they "
                "are copied in a checkpoint's first iteration, which may hold training",
                len(new), new[0],
            )  # fmt: skip
        self._written.update(names)
        self._settled.difference_update(names)

    def look(self, tensors: Mapping[str, torch.Tensor], digests: Digests | None) -> dict[str, Digest]:
        """At a capture's boundary: learn what has settled, and what no longer is.

        Args:
            tensors: the live tensors of the plan, those without a deadline at least.
            digests: of every tensor now, if this capture is audited.

        Returns:
            The digest that each settled tensor must have when it has been staged.
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
