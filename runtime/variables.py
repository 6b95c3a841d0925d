"""Variables of a training script as state: for what a resume needs that has no ``state_dict`` of its own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from checkflow.errors import MismatchError


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
        ValueError: a variable has no value.
    """

    def __init__(self, namespace: MutableMapping[str, Any], *names: str) -> None:
        for name in names:
            if name not in namespace:
                raise ValueError(f"there is no variable {name!r}: give it its first value before this")
        self._namespace, self._names = namespace, names

    def state_dict(self) -> dict[str, Any]:
        """The values as they are now, by name."""
        return {name: self._namespace[name] for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the variables.

        Raises:
            MismatchError: the values are of other variables; none was set.
        """
        if odd := sorted(set(self._names) ^ set(state)):
            where = "the checkpoint" if odd[0] in state else "the job"
            raise MismatchError(f"variable {odd[0]!r} is only in {where}")
        for name, value in state.items():
            present = self._namespace[name]
            on_device = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            self._namespace[name] = value.to(present.device) if on_device else value
