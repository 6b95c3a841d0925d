"""Names of state tensors (``<owner>/<key>``), the same for planner and runtime.

The owner is a model or an optimizer; the key is the ``state_dict`` key, or ``<parameter>.<state>``, with ``<model>.``
before it if there are several models. Wrappers' prefixes ("module.", "_orig_mod.") are left out. A tensor made of
several dense ones is that many state tensors, named after whole and part: ``model/adjacency.indices``. A tensor inside
of a list or dictionary is named after its place there: ``optimizer/layer.weight.Q.0``.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from checkflow.core.errors import UnsupportedError
from checkflow.core.graph import StateKind

DEFAULT_MODEL, DEFAULT_OPTIMIZER = "model", "optimizer"
#: Owner of tensors that are neither a model's nor in an optimizer's ``state``: ``job-state/<object>.<place>``.
STATE = "job-state"
#: Owner of a loader's tensors: ``loader-state/<place>``. A start reads them before all others.
LOADER = "loader-state"


@dataclass(frozen=True, slots=True)
class StateTensor:
    name: str
    kind: StateKind
    tensor: torch.Tensor
    module: str = ""  # buffers: "<model>/<path of the owning module>"
    whole: torch.Tensor | None = None  # what the job holds, if ``tensor`` is only a part of it
    inside: bool = False  # of a list or dictionary, which may get more tensors or fewer, or other ones

    @property
    def held(self) -> torch.Tensor:
        """The tensor as models and optimizers know it: with its gradient, and with its identity."""
        return self.tensor if self.whole is None else self.whole


@dataclass(frozen=True)
class TrainingState:
    """All state tensors of a job, each storage region once, in naming order (models first, then optimizers)."""

    tensors: tuple[StateTensor, ...]
    ties: tuple[tuple[str, str], ...]  # (further name, name in ``tensors``)
    base: TrainingState | None = None  # without the last tensors, which ``state_dict()`` of other objects has returned

    @property
    def given(self) -> tuple[StateTensor, ...]:
        """The tensors that ``base`` lacks."""
        return () if self.base is None else self.tensors[len(self.base.tensors) :]


def is_beside(name: str) -> bool:
    """Whether a state tensor is neither a model's nor in an optimizer's ``state``, by its name."""
    return name.startswith((f"{STATE}/", f"{LOADER}/"))


def as_models(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models by name; a single one is called "model"."""
    return dict(model) if isinstance(model, Mapping) else {DEFAULT_MODEL: model}


def as_optimizers(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None, models: Collection[str] = ()
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name, unwrapped; a single one is called "optimizer".

    State and files are named after models or optimizers, so an optimizer named as a model ("G") is called
    "G.optimizer".
    """
    if optimizer is None:
        return {}
    named = dict(optimizer) if isinstance(optimizer, Mapping) else {DEFAULT_OPTIMIZER: optimizer}
    found: dict[str, torch.optim.Optimizer] = {}
    taken = {*models, *(name for name in named if name not in models)}
    for name, one in named.items():
        if name in models:
            while name in taken:
                name = f"{name}.optimizer"
            taken.add(name)
        found[name] = unwrap_optimizer(one)
        if isinstance(one, torch.optim.Optimizer):
            _keepers[found[name]] = weakref.ref(one)
    for one in found.values():
        if isinstance(one, torch.optim.Optimizer):  # others are refused elsewhere
            _have_hooks(one)
    return found


# By optimizer, the wrapper that was passed: it may have a state_dict() of its own.
_keepers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[torch.optim.Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def keeper_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the wrapper that was passed for an optimizer, or the optimizer itself."""
    kept = _keepers.get(optimizer)
    return optimizer if kept is None else kept() or optimizer


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside stateless wrappers, as Accelerate's: torch's hooks know only that."""
    while isinstance(optimizer, torch.optim.Optimizer):  # a scheduler has an ``optimizer``, too
        inner = next(filter(functools.partial(_has_state_of, optimizer), inner_optimizers(optimizer)), None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def _has_state_of(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    return inner.state is optimizer.state and inner.param_groups is optimizer.param_groups


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield those that an optimizer holds, as wrappers do."""
    for value in vars(optimizer).values():
        values = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else (value,)
        yield from (one for one in values if isinstance(one, torch.optim.Optimizer) and one is not optimizer)


def _have_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Make torch's hooks run around this optimizer's step (not its class's) if it skipped ``Optimizer.__init__``."""
    step = optimizer.step
    # Optimizer.__init__ has hooked the class's step, which a user's replacement on this instance may call.
    if getattr(type(optimizer).step, "hooked", False) or getattr(step, "hooked", False):
        return
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hooks not in vars(optimizer):
            setattr(optimizer, hooks, collections.OrderedDict())

    def unhooked(_: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        return step(*arguments, **keywords)

    hooked = torch.optim.Optimizer.profile_hook_step(functools.update_wrapper(unhooked, step))
    vars(hooked)["hooked"] = True
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif "_orig_mod" in (modules := model.__dict__.get("_modules", {})):  # a scripted module's is not a dict
            model = modules["_orig_mod"]
        else:
            return model


def clean_key(key: str) -> str:
    """Return a qualified name without the "_orig_mod" that torch.compile adds for inner modules."""
    if "_orig_mod" not in key:  # nearly all
        return key
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def module_names(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield ("<model>/<module path>", module) for every module, each once, under its first name."""
    seen: set[int] = set()
    for owner, model in models.items():
        for path, module in unwrap(model).named_modules():
            if id(module) not in seen and type(module).__name__ != "OptimizedModule":
                seen.add(id(module))
                yield f"{owner}/{clean_key(path)}", module


class Region(NamedTuple):
    """What makes two tensors the same values in the same memory (real and fake tensors alike)."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    lazy: tuple[bool, bool]  # whether values are the memory's conjugates, or negatives


def region(tensor: torch.Tensor) -> Region:
    return Region(
        tensor.untyped_storage()._cdata,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        (tensor.is_conj(), tensor.is_neg()),
    )


_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds a part."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own: its values lie in other tensors."""
    if type(tensor) in _PLAIN_TYPES:  # nearly all; asked for every tensor of every operator
        return tensor.layout in _SPARSE_PARTS
    return tensor.layout in _SPARSE_PARTS or is_traceable_wrapper_subclass(tensor)


def dense_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors whose memory holds a tensor's values, each with its name's suffix."""
    if is_distributed(tensor):
        yield from dense_parts(tensor._local_tensor)  # type: ignore[attr-defined]
    elif is_traceable_wrapper_subclass(tensor):  # jagged tensors, too
        for attribute, inner in inner_tensors(tensor).items():
            for suffix, part in dense_parts(inner):
                yield f".{attribute}{suffix}", part
    elif tensor.layout in _SPARSE_PARTS:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():  # reading must not be recorded
            parts = [(name, getattr(tensor, name)()) for name in _SPARSE_PARTS[tensor.layout]]
        yield from ((f".{name.removeprefix('_')}", part) for name, part in parts)
    else:
        yield "", tensor


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors inside a subclass, by attribute; it may name other attributes too, as DTensor its mesh."""
    wrapper: Any = tensor
    named = {name: getattr(tensor, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def with_shapes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors whose shapes describe a tensor: of a nested one, which has none, the flat ones inside."""
    if not tensor.is_nested:
        return (tensor,)
    with _disable_current_modes(), torch.no_grad():  # reading must not be recorded
        inside: Any = tensor
        return (inside.values(), inside.offsets()) if tensor.layout is torch.jagged else (inside.values(),)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as files name it: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions in memory order, outermost first, as (0, 2, 3, 1) for channels_last; None if not dense."""
    # Dimensions of size 1 may have any stride, so stand anywhere in the order.
    strides = tensor.stride()
    order = sorted((d for d in range(tensor.dim()) if tensor.shape[d] != 1), key=lambda d: -strides[d])
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None
        expected *= tensor.shape[d]
    if order == sorted(order):
        return tuple(range(tensor.dim()))
    return (*(d for d in range(tensor.dim()) if tensor.shape[d] == 1), *order)


_TABLES = (dict, collections.OrderedDict, collections.defaultdict)
_NO_TENSORS = frozenset((type(None), bool, int, float, str, bytes))
_MOST_DEPTH = 64
_NOBODY: Mapping[int, str] = MappingProxyType({})


def map_leaves(
    value: Any,
    name: str | None,
    visit: Callable[[str, Any], Any],
    parameters: Mapping[int, str] = _NOBODY,
    *,
    leaf: type = torch.Tensor,
    rename: Callable[[Any], Any] = lambda key: key,
    depth: int = 0,
) -> Any:
    """Return a structure of dictionaries, lists, tuples and deques with other values in place of its leaves.

    Parts that stay as they are, are the same objects. What lies under a key that is neither a text, a number nor a
    tuple of them has no name, and stays.

    Args:
        name: of the structure; None: leaves have no names.
        visit: gets each leaf's name (the structure's, and the keys on the way), and the leaf.
        parameters: by ``id``, names of tensors that are keys.
        leaf: the type of what is replaced.
        rename: gets each key of a dictionary, and returns it, or another one.
    """
    kind: Any = type(value)
    if kind in _NO_TENSORS:
        return value
    if isinstance(value, leaf):
        return visit(name or "", value)
    if depth > _MOST_DEPTH:  # or it contains itself: refused where it is encoded
        return value

    def inner(item: Any, key: Any) -> Any:
        if type(item) in _NO_TENSORS:  # nearly all: no name is made for it
            return item
        text = "" if name is None else _key_text(key, parameters)
        if text is None:
            return item
        path = None if name is None else f"{name}.{text}"
        return map_leaves(item, path, visit, parameters, leaf=leaf, rename=rename, depth=depth + 1)

    if kind in _TABLES:
        found = [(rename(key), inner(item, key)) for key, item in value.items()]
        pairs = zip(found, value.items(), strict=True)
        if all(new is item and key is old for (key, new), (old, item) in pairs):
            return value
        return collections.defaultdict(value.default_factory, found) if kind is collections.defaultdict else kind(found)
    if kind in (list, tuple, collections.deque) and not _NO_TENSORS.issuperset(map(type, value)):
        items = [inner(item, number) for number, item in enumerate(value)]
        if any(map(operator.is_not, items, value)):
            return collections.deque(items, value.maxlen) if kind is collections.deque else kind(items)
    return value


def _key_text(key: Any, parameters: Mapping[int, str]) -> str | None:
    if isinstance(key, str | int | float):
        return str(key)
    if isinstance(key, tuple):
        parts = [_key_text(part, parameters) for part in key]
        return None if None in parts else ",".join(map(str, parts))
    return parameters.get(id(key))


def inside_of(value: Any, name: str, parameters: Mapping[int, str] = _NOBODY) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a structure that can be state tensors, each with its name."""
    found: list[tuple[str, torch.Tensor]] = []

    def visit(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if has_own_memory(tensor):
            found.append((path, tensor))
        return tensor

    map_leaves(value, name, visit, parameters)
    return found


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one that fills its memory without a gap, in any order of its dimensions."""
    return (
        (isinstance(tensor, FakeTensor) or (type(tensor) in _PLAIN_TYPES and not tensor.is_meta))
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or is_lazy(tensor))
        and (tensor.is_contiguous() or not tensor.numel() or memory_order(tensor) is not None)
    )


def _model_tensors(owner: str, model: nn.Module) -> Iterator[StateTensor]:
    for path, module in unwrap(model).named_modules(remove_duplicate=False):
        prefix = clean_key(path) + "." if clean_key(path) else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield StateTensor(f"{owner}/{prefix}{key}", "parameter", parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield StateTensor(f"{owner}/{prefix}{key}", "buffer", buffer, f"{owner}/{clean_key(path)}")


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Map ``id(parameter)`` to the name of its optimizer state: the model's key, or "<model>.<key>" for several."""
    names: dict[int, str] = {}
    for owner, model in models.items():
        for found in _model_tensors(owner, model):
            if found.kind == "parameter":
                name = found.name.partition("/")[2]
                names.setdefault(id(found.tensor), name if len(models) == 1 else f"{owner}.{name}")
    return names


def parameter_paths(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Map "<model>/<parameter>" to the parameter, ties under each of their names."""
    return {
        found.name: found.tensor
        for owner, model in models.items()
        for found in _model_tensors(owner, model)
        if found.kind == "parameter"
    }


def optimizer_parameters(
    models: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter) of everything an optimizer updates; parameters of no model are "group<g>.param<i>"."""
    return _named(parameter_names(models), optimizer)


def _named(names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"group{g}.param{i}"), parameter


def _optimizer_tensors(owner: str, models: Mapping[str, nn.Module], optimizer: Any) -> Iterator[StateTensor]:
    known = parameter_names(models)
    taken = set()
    for name, parameter in _named(known, optimizer):
        if id(parameter) not in known:
            yield StateTensor(f"{owner}/{name}", "parameter", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                taken.add(f"{name}.{key}")
                yield StateTensor(f"{owner}/{name}.{key}", "optimizer", value)
    for name, value in nested_in(optimizer, {id(parameter): name for name, parameter in _named(known, optimizer)}):
        while name in taken:  # {"Q": [...], "Q.0": ...}
            name += "'"
        taken.add(name)
        yield StateTensor(f"{owner}/{name}", "optimizer", value, inside=True)


def nested_in(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of what an optimizer's ``state`` has in lists and the like, or under keys of its own.

    Args:
        names: of its parameters, by ``id``.
    """
    for key, table in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            if type(table) not in _NO_TENSORS:
                yield from inside_of(table, str(key), names)
        elif (name := names.get(id(key))) is not None:
            for inner, value in table.items():
                if type(value) not in _NO_TENSORS and not isinstance(value, torch.Tensor):
                    yield from inside_of(value, f"{name}.{inner}", names)


def held_tensors(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Iterator[StateTensor]:
    """Yield every state tensor under each of its names, as held: ties, too, and none in parts."""
    for owner, model in models.items():
        yield from _model_tensors(owner, model)
    for owner, optimizer in optimizers.items():
        yield from _optimizer_tensors(owner, models, optimizer)


def collect_state(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    of_a_rank: bool = False,
    beside: Collection[StateTensor] = (),
) -> TrainingState:
    """Return every state tensor as it is now: persistent buffers and parameters, then optimizer state that exists.

    A tensor inside of a list that overlaps another one without being the same is left out.

    Args:
        of_a_rank: accept DTensors. Their items hold this rank's part (``tensor``), and the DTensor (``whole``).
        beside: further ones.

    Raises:
        UnsupportedError: a tensor has no dense memory of its own (an expanded tensor, one that overlaps another without
            being the same region, one without values).
    """
    held = [*sorted(held_tensors(models, optimizers), key=_is_inside), *beside]
    items = list(itertools.chain.from_iterable(_in_parts(item, of_a_rank=of_a_rank) for item in held))
    storages = [item.tensor.untyped_storage()._cdata for item in items]
    tensors_of = collections.Counter(storages)
    first: dict[Region, str] = {}
    unique, places, ties = [], [], []
    spans = Spans()
    for item, storage in zip(items, storages, strict=True):
        if tensors_of[storage] == 1:  # nearly all: alone in its memory, so no tie and no overlap
            unique.append(item)
            continue
        here = region(item.tensor)
        if here in first and item.tensor.numel():
            if not item.inside:
                ties.append((item.name, first[here]))
        elif not spans.take(here) and item.inside:
            continue  # it is saved by value
        else:
            first[here] = item.name
            unique.append(item)
            places.append((item, here))
    _refuse_overlap(places)
    return TrainingState(tuple(unique), tuple(ties))


_is_inside = operator.attrgetter("inside")


class Spans:
    """Pieces of storages that are taken. None overlaps another."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[list[int], list[int]]] = {}  # by storage, where pieces begin and end

    def take(self, here: Region) -> bool:
        """Take a piece, if it has no memory in common with another one; returns whether it has none."""
        size = here.dtype.itemsize
        begin, end = here.offset * size, (here.offset + math.prod(here.shape)) * size
        begins, ends = self._taken.setdefault(here.storage, ([], []))
        place = bisect.bisect_right(begins, begin)
        if begin == end:
            return True
        if (place and ends[place - 1] > begin) or (place < len(begins) and begins[place] < end):
            return False
        begins.insert(place, begin)
        ends.insert(place, end)
        return True


def _in_parts(item: StateTensor, *, of_a_rank: bool) -> Iterator[StateTensor]:
    """Split a state tensor into the dense tensors that hold it; UnsupportedError if it has none."""
    tensor = item.tensor
    if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested:  # nearly all
        _refuse_memory(item.name, tensor)
        yield item
        return
    if is_lazy(tensor):
        raise UnsupportedError(
            f"state tensor {item.name} has no shape yet: run the model once on a batch first, as lazy modules need"
        )
    if is_distributed(tensor):
        if not of_a_rank:
            raise UnsupportedError(
                f"state tensor {item.name} is a DTensor: load weights before the model is sharded, and make its "
                "Checkpointer after that"
            )
        _refuse_partial(item)
    if tensor.is_nested and not is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(
            f"state tensor {item.name} is a nested tensor of strided layout: make it with layout=torch.jagged"
        )
    if item.kind == "optimizer" and tensor.layout in _SPARSE_PARTS:
        raise UnsupportedError(
            f"state tensor {item.name} is sparse and grows with the rows that gradients touch: choose an optimizer "
            "whose state is dense, such as torch.optim.SparseAdam"
        )
    if not is_composite(tensor):
        _refuse_memory(item.name, tensor)
        yield item
        return
    for suffix, part in dense_parts(tensor):
        _refuse_memory(item.name + suffix, part)
        yield replace(item, name=item.name + suffix, tensor=part, whole=tensor)


def _refuse_partial(item: StateTensor) -> None:
    whole: Any = item.tensor
    for placement in whole.placements:
        if placement.is_partial():
            raise UnsupportedError(
                f"state tensor {item.name} is a DTensor with {placement!r}: its value is a sum over ranks: "
                "redistribute it"
            )


def _refuse_memory(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"state tensor {name} is {tensor.layout}: make it dense with .to_dense()")
    if tensor.is_quantized:
        raise UnsupportedError(
            f"state tensor {name} is quantized ({tensor.dtype}), which no safetensors file can hold: keep its "
            ".int_repr(), scale and zero point instead"
        )
    if not tensor.is_contiguous() and tensor.numel() and memory_order(tensor) is None:
        raise UnsupportedError(f"state tensor {name} is expanded or has gaps in memory: call .contiguous() on it")


def _refuse_overlap(places: list[tuple[StateTensor, Region]]) -> None:
    """Refuse tensors whose ranges within their storages overlap."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for item, place in places:
        if size_bytes := item.tensor.nbytes:
            begin = place.offset * item.tensor.element_size()
            ranges.setdefault(place.storage, []).append((begin, begin + size_bytes, item.name))
    for spans in ranges.values():
        if len(spans) == 1:
            continue
        spans.sort()
        for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise UnsupportedError(
                    f"state tensors {one} and {other} overlap in memory without being the same: make one of them a "
                    ".clone(), or a buffer with persistent=False"
                )


def closures_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to run its closure several times per step, writing parameters in between."""
    return isinstance(optimizer, torch.optim.LBFGS)


def refuse_closures(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse to plan for optimizers that run their closure several times per step, as LBFGS (UnsupportedError)."""
    for name, optimizer in optimizers.items():
        if closures_repeat(optimizer):
            raise UnsupportedError(
                f"optimizer {name} is {type(optimizer).__name__}, which runs forward and backward several times in a "
                "step, so that there is no plan for it: Checkpointer(plan=None) copies all state at the boundaries "
                "that it saves"
            )


def refuse_hidden_state(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse wrappers with state beside an inner optimizer's that was not passed (UnsupportedError): it is unsaved."""
    given = set(map(id, optimizers.values()))
    for name, optimizer in optimizers.items():
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for inner in inner_optimizers(optimizer):
            shared = any(id(parameter) in updated for group in inner.param_groups for parameter in group["params"])
            if shared and inner.state is not optimizer.state and id(inner) not in given:
                raise UnsupportedError(
                    f"optimizer {name} is {type(optimizer).__name__} around {type(inner).__name__}, whose state is in "
                    "no checkpoint: pass that one too, in a dict of both by name, or that one alone where the outer "
                    "one keeps nothing"
                )


def training_device(models: Mapping[str, nn.Module]) -> torch.device:
    """Return the first accelerator that a parameter lies on, else the CPU."""
    devices = (parameter.device for model in models.values() for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def optimizer_implementation(optimizer: torch.optim.Optimizer, device_type: str) -> str:
    """Return class and implementation of an optimizer, such as "Adam foreach": what decides its operators.

    Args:
        device_type: where the parameters lie ("cuda", "cpu"). torch chooses foreach by default on CUDA only, and not
            for a learning rate in a tensor (unless capturable) or a differentiable step.
    """
    kind = type(optimizer).__name__
    names = set()
    for fused, capturable, differentiable, foreach, tensor_rate in implementation_options(optimizer):
        usual = device_type == "cuda" and (capturable or not tensor_rate) and not differentiable and foreach is None
        names.add(("fused" if fused else "foreach" if foreach or usual else "for-loop") + (" capturable" * capturable))
    return " ".join([kind, *sorted(names)])


def foreach_option(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Return a group's foreach; None: torch chooses. Adafactor then takes the loop, whatever the device."""
    option = group.get("foreach", False)
    return False if option is None and isinstance(optimizer, torch.optim.Adafactor) else option


def implementation_options(optimizer: torch.optim.Optimizer) -> list[tuple[bool, bool, bool, bool | None, bool]]:
    """Per group, what :func:`optimizer_implementation` depends on; cheap to compare at each boundary.

    fused, capturable, differentiable, foreach (None: torch chooses), whether the learning rate is a tensor.
    """
    return [
        (
            bool(group.get("fused")), bool(group.get("capturable")), bool(group.get("differentiable")),
            foreach_option(optimizer, group), isinstance(group.get("lr"), torch.Tensor),
        )
        for group in optimizer.param_groups
    ]  # fmt: skip


def host_counters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's zero-dimensional CPU state, such as step counters, which counts as host memory."""
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    yield value
