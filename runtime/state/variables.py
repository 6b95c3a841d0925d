"""Variables of a training script as state: for what a resume needs that has no ``state_dict`` of its own."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Mapping, MutableMapping
from types import FrameType
from typing import Any

import torch

from checkflow.core.errors import MismatchError


class Variables:
    """Some variables of a job, saved with each checkpoint and set again when it resumes.

    ``state={"loop": checkflow.Variables(globals(), "best_loss", "x", "y")}``: a best value so far, a batch that was
    fetched ahead. What may be saved is what any extra state may be: numbers, strings, containers, arrays, tensors. A
    tensor comes back as a new one, on the device of the one that it replaces; what lies on a GPU is copied to the host
    at each boundary that is captured, while training waits: keep large tensors in buffers of a module.

    Args:
        namespace: where the variables are: ``globals()`` of a script, ``vars(trainer)`` of an object, or a dictionary.
            Not ``locals()`` of a function: nothing can set those.
        names: which of them; each has a value already.

    Raises:
        TypeError: what comes first is no namespace, or a name no text.
        ValueError: a variable has no value, none is named, or the namespace is a function's ``locals()``.
    """

    def __init__(self, namespace: MutableMapping[str, Any], *names: str) -> None:
        if not isinstance(namespace, MutableMapping):
            raise TypeError(
                "Variables takes first where the variables are: globals(), vars(trainer) or a dictionary, then their "
                f"names; not {_short(namespace)}"
            )
        if not names:
            raise ValueError('Variables saves those that it names, and no name was given: Variables(globals(), "best")')
        if odd := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f'Variables takes the variables\' names, such as "best", not {_short(odd[0])}')
        for name in names:
            if name not in namespace:
                raise ValueError(f"there is no variable {name!r}: give it its first value before this")
        if _is_snapshot(namespace, sys._getframe(1)):
            raise ValueError(
                "Variables cannot use locals(): it is a copy, in which no later value is seen and none can be set; "
                "keep these variables in a dictionary, or in an object and pass vars(object)"
            )
        self._namespace, self._names = namespace, names

    def state_dict(self) -> dict[str, Any]:
        """The values as they are now, by name."""
        return {name: self._namespace[name] for name in self._names}

    def refuse_mismatch(self, state: Mapping[str, Any]) -> None:
        """Hold what ``state_dict`` gave against these variables; nothing is set.

        Raises:
            MismatchError: the values are of other variables.
        """
        if odd := sorted(set(self._names) ^ set(state)):
            where = "the checkpoint" if odd[0] in state else "the job"
            raise MismatchError(f"Variables: the variable {odd[0]!r} is only in {where}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the variables.

        Raises:
            MismatchError: the values are of other variables; none was set.
        """
        self.refuse_mismatch(state)
        for name, value in state.items():
            present = self._namespace[name]
            on_device = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            self._namespace[name] = value.to(present.device) if on_device else value


def _short(value: object) -> str:
    return f"{reprlib.repr(value)}, of type {type(value).__name__}"


def _is_snapshot(namespace: Mapping[str, Any], frame: FrameType) -> bool:
    """Whether it is what ``locals()`` gives in this frame of a function: the names of all its variables with a value,
    and the very objects. (Python keeps one such dictionary for a frame until 3.12, and makes one at each call later.)
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's, a class's: these are live
        return False
    there = frame.f_locals
    return namespace.keys() == there.keys() and all(namespace[name] is value for name, value in there.items())
