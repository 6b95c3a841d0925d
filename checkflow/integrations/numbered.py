"""Names for what other libraries keep in lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def numbered(name: str, objects: Sequence[T]) -> dict[str, T]:
    """The only one by the name itself; several as "scheduler0", "scheduler1"."""
    return {name: objects[0]} if len(objects) == 1 else {f"{name}{number}": one for number, one in enumerate(objects)}
