"""Variables of a training script as state, for what has no ``state_dict`` of its own."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Mapping, MutableMapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from checkflow.core.errors import MismatchError
from checkflow.core.generators import generator_state, is_generator, set_generator_state


class Variables:
    """Some variables of a job, saved with each checkpoint and set again when it resumes.

    By name, of a script, an object or a dictionary: ``state={"loop": checkflow.Variables(globals(), "best", "x")}``. Or
    as its own attributes, for variables of a function: ``kept = checkflow.Variables(hidden=None, best=0.0)``, then use
    ``kept.hidden`` and ``kept.best``, and pass ``state={"kept": kept}``.

    Values may be numbers, strings, containers, arrays and tensors. Tensors, also in containers, are copied as the plan
    of a job says that has recorded them; what its recorded iteration did not write, at the boundary. A tensor comes
    back as a new one in its order in memory, on the device of the one it replaces. Of a random generator (Python's,
    NumPy's, torch's) the state is saved, and restored into the generator that is there.

    Args:
        namespace: where the variables are: ``globals()`` of a script, ``vars(trainer)`` of an object, or a dictionary.
            Not a function's ``locals()``, which cannot be set.
        names: of the variables; each must have a value already.
        values: variables of its own, with their first values.

    Raises:
        TypeError: the namespace is not a mapping, a name is not a string, or there are both a namespace and values.
        ValueError: a variable has no value, none is named, the namespace is a function's ``locals()``, or a value has
            the name of a method.
    """

    __slots__ = ("__dict__", "__weakref__", "_names", "_namespace")
    _namespace: MutableMapping[str, Any]
    _names: tuple[str, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, namespace: MutableMapping[str, Any] | None = None, /, *names: str, **values: Any) -> None:
        if namespace is None and values and not names:
            if odd := [name for name in values if hasattr(Variables, name)]:
                raise ValueError(f"Variables has a method {odd[0]!r} already: give the variable another name")
            vars(self).update(values)
            self._namespace, self._names = vars(self), tuple(values)
            return
        if values:
            raise TypeError(
                'Variables takes a namespace and names, as in Variables(globals(), "best"), or values, as in '
                "Variables(best=0.0), not both"
            )
        if not isinstance(namespace, MutableMapping):
            raise TypeError(
                "Variables takes first where the variables are: globals(), vars(trainer) or a dictionary, then their "
                f"names; not {_short(namespace)}"
            )
        if not names:
            raise ValueError('Variables saves those that it names, and no name was given: Variables(globals(), "best")')
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f'Variables takes the variables\' names, such as "best", not {_short(wrong[0])}')
        for name in names:
            if name not in namespace:
                raise ValueError(f"there is no variable {name!r}: give it its first value before this")
        if _is_snapshot(namespace, sys._getframe(1)):
            raise ValueError(
                "Variables cannot use locals(): it is a copy, in which no later value is seen and none can be set; "
                "let Variables hold them: kept = checkflow.Variables(best=0.0), and kept.best in the loop"
            )
        self._namespace, self._names = namespace, names

    def state_dict(self) -> dict[str, Any]:
        """The values as they are now, by name."""
        values = zip(self._names, self.held(), strict=True)
        return {name: generator_state(value) if is_generator(value) else value for name, value in values}

    def held(self) -> tuple[Any, ...]:
        """The values as they are now."""
        return tuple(self._namespace[name] for name in self._names)

    def refuse_mismatch(self, state: Mapping[str, Any]) -> None:
        """Compare what ``state_dict`` returned with these variables; nothing is set.

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
            if is_generator(present):
                set_generator_state(present, value)
                continue
            on_device = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            self._namespace[name] = value.to(present.device) if on_device else value


def _short(value: object) -> str:
    return f"{reprlib.repr(value)}, of type {type(value).__name__}"


def _is_snapshot(namespace: Mapping[str, Any], frame: FrameType) -> bool:
    """Whether this is ``locals()`` of a function's frame: the same names with the same objects. Until Python 3.12 a
    frame has one such dictionary, later each call makes one.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's or class's namespace is live
        return False
    there = frame.f_locals
    return namespace.keys() == there.keys() and all(namespace[name] is value for name, value in there.items())
