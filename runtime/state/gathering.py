"""Takes tensors out of what lies beside models and optimizers' tables, so that they are state tensors, and puts them
back.

What ``state_dict()`` returns is a structure. Its tensors are copied and stored as others are, and the structure keeps a
:class:`.codec.Stored` for each. A tensor that a model or an optimizer holds, too, is one with that.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from checkflow.core.errors import UnsupportedError
from checkflow.core.state import Region, Spans, StateTensor, dtype_name, has_own_memory, map_leaves, region
from checkflow.runtime.format.codec import Named, Stored
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.format.manifest import TensorEntry

logger = logging.getLogger("checkflow")

_Form = tuple[tuple[str, torch.dtype, torch.Size, tuple[int, ...]], ...]
_MOST_CHANGES = 3
#: Smaller tensors of a loader and of parameter groups stay in ``state.msgpack``: they are looked at before all state.
EARLY_BYTES = 1 << 16


class Held(Protocol):
    """What models and optimizers hold now."""

    @property
    def device(self) -> torch.device: ...  # what state is copied from, beside host memory
    @property
    def parameters(self) -> Mapping[int, Named]: ...  # of optimizers, by ``id``
    @property
    def parameter_names(self) -> Mapping[int, str]: ...  # likewise
    def name_of(self, tensor: torch.Tensor) -> str | None: ...
    def in_storage(self, storage: int) -> Mapping[Region, str]: ...
    def is_inside(self, name: str) -> bool: ...


class Restless:
    """Remembers sources whose tensors change in number or shape, and tensors that overlap.

    Each such change makes new files' headers, and maybe larger staging buffers. So after a few the tensors of that
    source are saved by value, in ``state.msgpack``: a shuffle buffer's, a growing list's. A source is an entry of what
    ``state_dict()`` returns, or all of it if its entries come and go.
    """

    def __init__(self) -> None:
        self._forms: dict[str, dict[str, _Form]] = {}
        self._changes: collections.Counter[str] = collections.Counter()
        self._overlapping: set[str] = set()

    def overlaps(self, path: str) -> None:
        """Say once that a tensor is saved by value, though a write to it is one to other state."""
        if path not in self._overlapping:
            self._overlapping.add(path)
            logger.warning(
                "%s shares memory with other state, and is not all of it: after a resume it has its values, and memory "
                "of its own; have load_state_dict() make it anew from the other", path,
            )  # fmt: skip

    def __contains__(self, source: str) -> bool:
        return self._changes[source] > _MOST_CHANGES

    def look(self, name: str, items: Iterable[tuple[str, StateTensor]]) -> None:
        """Remember the tensors under a name at this boundary, each with its source."""
        now: dict[str, _Form] = {}
        for source, one in items:
            form = one.name, one.tensor.dtype, one.tensor.shape, one.tensor.stride()
            now[source] = (*now.get(source, ()), form)
        before = self._forms.get(name, now)
        if now or before:  # nearly all have none
            self._forms[name] = now
        changed = {source for source in now.keys() | before.keys() if now.get(source) != before.get(source)}
        self._changes.update(changed)
        self._changes[name] += any(one not in self for one in changed & (now.keys() ^ before.keys()))


class Gathering:
    """The tensors beside models and optimizers' tables at one boundary.

    Args:
        looks: whether this is a boundary that is saved, at which changes count.
    """

    def __init__(self, held: Held, restless: Restless, *, looks: bool = True) -> None:
        self._held, self._restless, self._looks = held, restless, looks
        self._given: dict[str, StateTensor] = {}
        self._places: dict[int, dict[Region, str]] = {}  # of ``given``, by storage
        self._spans = Spans()  # of all state

    @property
    def given(self) -> tuple[StateTensor, ...]:
        """The tensors that nothing else holds."""
        return tuple(self._given.values())

    def take(self, value: Any, name: str, *, least_bytes: int = 0) -> Any:
        """Return a structure with a :class:`Stored` for each tensor that can be a state tensor, named after its place.

        Args:
            least_bytes: tensors in host memory that have less stay, and so do single numbers.

        Raises UnsupportedError for a dictionary by tensors that are no parameters, or by the ``id`` of parameters.
        """
        before, by_value, has_entries = len(self._given), name in self._restless, isinstance(value, dict)

        def source(path: str) -> str:
            return f"{name}.{path[len(name) + 1 :].partition('.')[0]}" if has_entries else name

        def visit(path: str, tensor: torch.Tensor) -> Any:
            stays = by_value or source(path) in self._restless
            return self._stored(path, tensor, by_value=stays, least_bytes=least_bytes)

        def rename(key: Any) -> Any:
            return self._key(key, name) if isinstance(key, torch.Tensor | int) else key

        found = map_leaves(value, name, visit, self._held.parameter_names, rename=rename)
        if self._looks and not by_value:
            given = itertools.islice(self._given.items(), before, None)
            self._restless.look(name, [(source(path), one) for path, one in given])
        return found

    def _key(self, key: Any, name: str) -> Any:
        if isinstance(key, int):
            if (of := self._held.parameters.get(key)) is not None:
                raise UnsupportedError(
                    f"{name} has a key that is the id() of parameter {of.parameter}, which is another one after a "
                    "restart: name parameters there, or number them"
                )
            return key
        if (of := self._held.parameters.get(id(key))) is None:
            raise UnsupportedError(
                f"{name} has a tensor as a key that is no parameter of an optimizer, so that it cannot be named: have "
                "state_dict() use names or numbers"
            )
        return of

    def _stored(self, path: str, tensor: torch.Tensor, *, by_value: bool, least_bytes: int) -> Any:
        held = self._held
        if least_bytes and tensor.numel() == 1:
            return tensor
        if (name := held.name_of(tensor)) is not None:
            return _stored(name, tensor, alone=held.is_inside(name))
        stored = STORED_TYPES.get(dtype_name(tensor.dtype))
        if stored is None or (stored.packed and not tensor.dim()) or not has_own_memory(tensor):
            return tensor
        if tensor.device.type != "cpu" and tensor.device != held.device:
            return tensor
        if tensor.is_cpu and tensor.nbytes < least_bytes:
            return tensor
        here, storage = region(tensor), tensor.untyped_storage()._cdata
        others = held.in_storage(storage)
        if storage not in self._places:
            self._places[storage] = {}
            for other in others:
                self._spans.take(other)
        mine = self._places[storage]
        if tensor.numel():
            if (known := others.get(here)) is not None:
                return _stored(known, tensor, alone=held.is_inside(known))
            if (known := mine.get(here)) is not None:
                return _stored(known, tensor, alone=True)
        if by_value:
            return tensor
        if not self._spans.take(here):
            self._restless.overlaps(path)
            return tensor
        while path in self._given:  # {"a.b": …, "a": {"b": …}}
            path += "'"
        mine[here] = path
        self._given[path] = StateTensor(path, "buffer", tensor, inside=True)
        return _stored(path, tensor, alone=True)


def _stored(name: str, tensor: torch.Tensor, *, alone: bool) -> Stored:
    return Stored(name, alone, isinstance(tensor, nn.Parameter), tensor.requires_grad, tensor.device.type != "cpu")


# ------------------------------------------------------------------------------------------------------------- restore


def make_tensor(entry: TensorEntry, device: torch.device) -> torch.Tensor:
    """Make a tensor without values, in its order in memory."""
    order = entry.permutation or range(len(entry.shape))
    strides, stride = [0] * len(entry.shape), 1
    for d in reversed(order):
        strides[d] = stride
        stride *= max(1, entry.shape[d])
    return torch.empty_strided(entry.shape, strides, dtype=getattr(torch, entry.dtype), device=device)


def stored_in(*structures: Any) -> dict[str, Stored]:
    """What stands in structures for tensors that nothing else holds, by name."""
    found: dict[str, Stored] = {}

    def visit(_: str, one: Stored) -> Stored:
        if one.alone:
            found.setdefault(one.name, one)
        return one

    for structure in structures:
        map_leaves(structure, None, visit, leaf=Stored)
    return found


def put_back(
    structure: Any, find: Callable[[str], torch.Tensor], parameter: Callable[[Named], Any] = lambda named: named
) -> Any:
    """Return a structure with its tensors. ``parameter`` finds what a key was."""
    made: dict[Stored, torch.Tensor] = {}

    def visit(_: str, one: Stored) -> torch.Tensor:
        if one not in made:
            made[one] = _as_it_was(find(one.name), one)
        return made[one]

    return map_leaves(
        structure, None, visit, leaf=Stored, rename=lambda key: parameter(key) if isinstance(key, Named) else key
    )


def _as_it_was(tensor: torch.Tensor, one: Stored) -> torch.Tensor:
    """The same memory, as a parameter or with a gradient if it was that."""
    if isinstance(tensor, nn.Parameter) == one.parameter and tensor.requires_grad == one.requires_grad:
        return tensor
    if one.parameter:
        return nn.Parameter(tensor.detach(), requires_grad=one.requires_grad)
    plain = tensor.detach()
    return plain.requires_grad_() if one.requires_grad else plain
