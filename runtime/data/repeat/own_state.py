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
from checkflow.core.generators import generator_state, is_generator, make_generator, set_generator_state

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
    numbers are left alone, since a new process need not have what they mean; nor has it the threads and tasks that
    objects of the standard library count.

    Args:
        roots: what decides, by names for paths such as "sampler.rng".
        but: objects that are left out, with all that only they hold. The process's own generators always are.
    """

    def __init__(self, roots: Mapping[str, Any], but: Iterable[object] = ()) -> None:
        self._roots = {name: root for name, root in roots.items() if root is not None}
        self._but = tuple(but)
        parts = dict(self._walk())
        self._counts = {path: holder[name] for holder, name, path in _numbers(parts)}  # before the first pass
        self._found = _generators(parts)
        # Where a generator may be made once it is needed.
        self._later = {path for holder, name, path in _attributes_in(parts) if holder.get(name, ...) is None}

    def at(self, epoch: int) -> dict[str, Any]:
        """As this epoch is about to begin, for :meth:`put_back`; empty where there is nothing."""
        parts = dict(self._walk())
        self._found = _generators(parts)
        state = self.now()
        # What is 1 in epoch 1 may say that something was opened in epoch 0: a new process has not.
        opened = self._opened(parts) if epoch == 1 else ()
        grown = {path: first + epoch for path, first in self._counts.items() if _holder(path) not in opened}
        now = {path: holder[name] for holder, name, path in _numbers(parts)} if epoch else {}
        if counts := {path: number for path, number in now.items() if grown.get(path) == number}:
            state["counts"] = counts
        return state

    def look(self) -> None:
        """Find generators that were made, or replaced, since."""
        self._found = _generators(dict(self._walk()))

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
        parts = dict(self._walk())
        here = self._found = _generators(parts)
        generators = state.get("generators", {})
        for path in [
            path for path in here if path in self._later and path not in generators and path.startswith(below)
        ]:
            of, _, name = path.rpartition(".")  # made since: so it is made once more
            _attributes(parts[of])[name] = None
            del here[path]
        for path, saved in generators.items():
            if not path.startswith(below):
                continue
            if path in here:
                set_generator_state(here[path], saved)
            elif (made := _made(path, saved, parts)) is not None:
                here[path] = made
            else:
                said = f"the checkpoint's loader has a random generator {path}, and this one has none there"
                if not accepted:
                    raise MismatchError(
                        f'{said}: other samples would follow; make the loader as it was, or pass accept=("loader",)'
                    )
                logger.warning("%s: other samples follow, which accept= allows", said)
        if not below and "counts" in state:
            for holder, name, path in list(_numbers(parts)):
                if path in state["counts"]:
                    holder[name] = state["counts"][path]

    def _opened(self, parts: Mapping[str, Any]) -> set[str]:
        """What has got something else than a generator where nothing was."""
        entries = ((path, holder.get(name)) for holder, name, path in _attributes_in(parts) if path in self._later)
        return {_holder(path) for path, entry in entries if entry is not None and not is_generator(entry)}

    def _walk(self) -> Iterator[tuple[str, Any]]:
        return walk(self._roots, [*self._but, *_generators_of_the_process()])


def _generators(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in parts.items() if is_generator(value)}


def _holder(path: str) -> str:
    return path.rpartition(".")[0]


def _attributes_in(parts: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """All attributes: where one lies, its name there, and its path."""
    for path, value in parts.items():
        attributes = _attributes(value)
        yield from ((attributes, name, f"{path}.{name}") for name in list(attributes))


def _numbers(parts: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Of these the whole numbers, but for what the standard library counts."""
    library = sys.stdlib_module_names
    own = {path: value for path, value in parts.items() if type(value).__module__.partition(".")[0] not in library}
    return (one for one in _attributes_in(own) if type(one[0].get(one[1])) is int)


def _made(path: str, saved: Any, parts: Mapping[str, Any]) -> Any:
    """The generator that a loader makes only when it is used, made in its place; None: it has something else there."""
    of, _, name = path.rpartition(".")
    attributes = _attributes(parts.get(of))
    if not hasattr(parts.get(of), "__dict__") or not name.isidentifier() or attributes.get(name) is not None:
        return None
    if (generator := make_generator(saved)) is not None:
        attributes[name] = generator
    return generator


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
        # As a list at once: other threads may change it.
        entries = list(dict.items(value)) if container is dict else enumerate(list(container.__iter__(value)))
        yield from ((f"[{key!r}]", inner) for key, inner in entries)
    elif kind is functools.partial:
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif kind is MethodType:
        yield ".__self__", value.__self__
    yield from ((f".{name}", inner) for name, inner in list(_attributes(value).items()))


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
