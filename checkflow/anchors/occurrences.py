"""Occurrences: how often an anchor was reached since the boundary. Planning and execution count by the same numbers."""

from __future__ import annotations

from checkflow.core.graph import AnchorKey, AnchorKind

Place = tuple[AnchorKind, str]  # an anchor, whichever occurrence


class Occurrences:
    """Numbers the occurrences of one anchor since the last boundary, and makes each key once."""

    __slots__ = ("_boundary", "_count", "_keys", "_place")

    def __init__(self, place: Place) -> None:
        self._place, self._keys = place, [AnchorKey(*place)]
        self._boundary = self._count = 0

    def reached(self, boundary: int) -> bool:
        """Return whether the anchor was reached after the boundary of this number."""
        return boundary == self._boundary and self._count > 0

    def next(self, boundary: int = 0) -> AnchorKey:
        """Return the key of the occurrence that is reached now, after the boundary of this number."""
        if boundary != self._boundary:
            self._boundary, self._count = boundary, 0
        number = self._count
        self._count = number + 1
        if number == len(self._keys):
            self._keys.append(AnchorKey(*self._place, number))
        return self._keys[number]


class Numbers(dict[Place, Occurrences]):
    """This table has the occurrences of each anchor that a job has reached."""

    def __missing__(self, place: Place) -> Occurrences:
        made = self[place] = Occurrences(place)
        return made
