"""What a loader's samplers and data hold that decides what they give next: random generators, and counts of passes."""

from __future__ import annotations

import functools
import logging
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from checkflow.core.errors import MismatchError
from checkflow.core.generators import generator_state, is_generator, set_generator_state

#: Objects that are looked at from the roots on, and entries of one container: beyond that lie the samples themselves.
MOST_OBJECTS, MOST_ENTRIES = 4096, 64

logger = logging.getLogger("checkflow")
_PLAIN = {
    int, float, complex, bool, str, bytes, type(None), type, torch.Tensor, np.ndarray,
    ModuleType, FunctionType, BuiltinFunctionType,
}  # fmt: skip


class OwnState:
    """The generators and counts that are found in attributes, in containers of them, and so on.

    A count is a whole number that has grown by one with each epoch: whoever counts passes may give others by it. Other
    numbers are left alone, since a new process need not have what they mean.

    Args:
        roots: what decides, by names for paths such as "sampler.rng".
        but: objects that are left out, with all that only they hold. The process's own generators always are.
    """

    def __init__(self, roots: Mapping[str, Any], but: Iterable[object] = ()) -> None:
        self._roots = {name: root for name, root in roots.items() if root is not None}
        self._but = tuple(but)
        self._counts = dict(self._numbers())  # before the first pass
        self._found = self._generators()

    def at(self, epoch: int) -> dict[str, Any]:
        """As this epoch is about to begin, for :meth:`put_back`; empty where there is nothing."""
        self._found = self._generators()
        state = self.now()
        grown = {path: first + epoch for path, first in self._counts.items()} if epoch else {}
        if counts := {path: number for path, number in self._numbers() if grown.get(path) == number}:
            state["counts"] = counts
        return state

    def now(self) -> dict[str, Any]:
        """The generators that were found last, as they are: in microseconds."""
        state: dict[str, Any] = {}
        if self._found:
            state["generators"] = {path: generator_state(generator) for path, generator in self._found.items()}
        return state

    def put_back(self, state: Mapping[str, Any], *, below: str = "", accepted: bool = False) -> None:
        """Set what :meth:`at` or :meth:`now` gave; of it, the generators below this path.

        Raises:
            MismatchError: there is no such generator here, and that is not ``accepted``.
        """
        here = self._found = self._generators()
        for path, saved in state.get("generators", {}).items():
            if path in here and path.startswith(below):
                set_generator_state(here[path], saved)
            elif path not in here:
                said = f"the checkpoint's loader has a random generator {path}, and this one has none there"
                if not accepted:
                    raise MismatchError(
                        f'{said}: other samples would follow; make the loader as it was, or pass accept=("loader",)'
                    )
                logger.warning("%s: other samples follow, which accept= allows", said)
        if not below and "counts" in state:
            for holder, name, path in list(self._holders()):
                if path in state["counts"]:
                    holder[name] = state["counts"][path]

    def _generators(self) -> dict[str, Any]:
        return {path: value for path, value in self._walk() if is_generator(value)}

    def _numbers(self) -> Iterator[tuple[str, int]]:
        return ((path, holder[name]) for holder, name, path in self._holders())

    def _holders(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Where a whole number lies: the attributes, its name there, and its path."""
        for path, value in self._walk():
            attributes = _attributes(value)
            for name, entry in attributes.items():
                if type(entry) is int:
                    yield attributes, name, f"{path}.{name}"

    def _walk(self) -> Iterator[tuple[str, Any]]:
        return walk(self._roots, [*self._but, *_generators_of_the_process()])


def walk(roots: Mapping[str, Any], but: Iterable[object] = ()) -> Iterator[tuple[str, Any]]:
    """Objects in attributes and containers with their paths, those next to the roots first, without those left out."""
    waiting = deque(roots.items())
    seen = {id(one): one for one in but}
    while waiting and len(seen) < MOST_OBJECTS:
        path, value = waiting.popleft()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        waiting.extend((f"{path}{step}", inner) for step, inner in _inside(value))


def has_state(thing: object) -> bool:
    """Whether it has a state of its own."""
    return all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict"))


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    kind = type(value)
    if is_generator(value):
        return
    container: Any = next((one for one in (list, tuple, deque, dict) if issubclass(kind, one)), None)
    if container is not None and container.__len__(value) <= MOST_ENTRIES:
        entries = dict.items(value) if container is dict else enumerate(container.__iter__(value))
        yield from ((f"[{key!r}]", inner) for key, inner in entries)
    elif kind is functools.partial:
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif kind is MethodType:
        yield ".__self__", value.__self__
    yield from ((f".{name}", inner) for name, inner in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    """Those it holds itself: asking it would wake lazy objects of other libraries."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}  # that of a class is another


def _generators_of_the_process() -> Iterator[object]:
    """What checkpoints hold in any case."""
    yield random._inst
    yield torch.default_generator
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield from torch.cuda.default_generators
    if (module := sys.modules.get("numpy.random.mtrand")) is not None:
        yield module._rand
