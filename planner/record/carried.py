"""Finds what an iteration carries on from the one before, outside of batch and state: what a resume would lack.

docs/explanation/tracing.md ("the record") says what counts as carried.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from checkflow.core.generators import generator_state, generator_types, is_generator
from checkflow.core.planner_api import Carried
from checkflow.core.state import dtype_name, module_names
from checkflow.planner.iteration.read_numbers import user_place
from checkflow.planner.operators import operators as op
from checkflow.planner.record.live_objects import find_objects

_OWN: Final = (
    "hold it in kept = checkflow.Variables(hidden=…), use kept.hidden in its place, and pass "
    'Checkpointer(…, state={"kept": kept})'
)
_OWNER: Final = 'pass Checkpointer(…, state={"rng": checkflow.Variables(vars(owner), "rng")}), where owner.rng is it'


@dataclass(slots=True)
class _Read:
    what: str
    place: str
    handed_on: bool = False


class CarriedWatch:
    """Watches one iteration, which begins with ``alive`` tensors on its device.

    ``known`` are the addresses of storages that hold state, gradients or the batch.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], alive: Collection[torch.Tensor], known: Collection[int]
    ) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._read: dict[int, _Read] = {}
        for tensor in alive:
            storage = tensor.untyped_storage()
            if (address := storage._cdata) not in known:
                self._storages[address] = weakref.ref(storage, functools.partial(self._drop, address))
        self._advice: dict[int, str] = {}
        # Python's collector does not track torch.Generator: only named ones are seen.
        generators = {id(one): one for one in find_objects(generator_types()) if is_generator(one)}
        for held, advice in _held_by_name(models):
            for leaf in pytree.tree_leaves(held) if type(held) in (list, tuple, dict) else (held,):
                if is_generator(leaf):
                    generators[id(leaf)] = leaf
                dense = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
                self._advice.setdefault(leaf.untyped_storage()._cdata if dense else id(leaf), advice)
        self._generators = [
            (one, _comparable(generator_state(one))) for one in generators.values() if not _is_saved_anyway(one)
        ]

    def note(self, effect: op.Effects) -> None:
        """Note an operator that writes something."""
        for tensor, _ in effect.reads:
            address = tensor.untyped_storage()._cdata
            if address in self._storages and address not in self._read:
                what = f"a tensor {dtype_name(tensor.dtype)}{list(tensor.shape)}"
                self._read[address] = _Read(what, user_place()[0])
        for tensor, _ in effect.writes:
            address = tensor.untyped_storage()._cdata
            if address in self._read:
                self._read[address].handed_on = True
            else:  # overwritten before it was read
                self._storages.pop(address, None)

    def stop(self) -> None:
        self._storages.clear()

    def carried(self) -> tuple[Carried, ...]:
        """Return what was carried on, in the order of its use; call it once, after ``stop``."""
        tensors = [
            Carried(read.what, read.place, self._advice.get(address, _OWN), address)
            for address, read in self._read.items()
            if read.handed_on
        ]
        generators, self._generators = self._generators, []
        moved = [one for one, before in generators if _comparable(generator_state(one)) != before]
        return (*tensors, *(self._generator(one) for one in moved))

    def _generator(self, one: Any) -> Carried:
        kind = type(one)
        what = f"a random generator of {kind.__module__.partition('.')[0]} ({kind.__qualname__})"
        return Carried(what, "", self._advice.get(id(one), _OWNER), id(one))

    def _drop(self, address: int, _storage: object) -> None:
        if self._storages.pop(address, None) is not None and address in self._read:
            self._read[address].handed_on = True


def _is_saved_anyway(generator: Any) -> bool:
    """Whether it is one of those in each checkpoint: behind ``random``, ``numpy.random`` and ``torch``."""
    numpy = sys.modules.get("numpy")
    own = [random._inst, torch.default_generator, *getattr(torch.cuda, "default_generators", ())]
    if numpy is not None:
        own.append(numpy.random.mtrand._rand)
    return any(generator is one for one in own)


def _comparable(state: Any) -> Any:
    """Convert a generator's state so that ``==`` compares it."""
    if isinstance(state, Mapping):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if hasattr(state, "tobytes") else state


def _held_by_name(models: Mapping[str, nn.Module]) -> Iterator[tuple[Any, str]]:
    """Yield plain attributes of modules, a script's variables and their attributes, each with how to save it."""
    for _, module in module_names(models):
        for name, value in vars(module).items():
            if not name.startswith("_"):
                yield value, f'make it a buffer: self.register_buffer("{name}", …) in {type(module).__name__}'
    for name, value in list(vars(sys.modules["__main__"]).items()):
        yield value, f'pass Checkpointer(…, state={{"{name}": checkflow.Variables(globals(), "{name}")}})'
        kind = type(value)  # isinstance would wake lazy objects of other libraries
        if kind.__dictoffset__ and not issubclass(kind, type | ModuleType | nn.Module):
            for attribute, part in list(vars(value).items()):
                saved = f'{{"{attribute}": checkflow.Variables(vars({name}), "{attribute}")}}'
                yield part, f"pass Checkpointer(…, state={saved})"
