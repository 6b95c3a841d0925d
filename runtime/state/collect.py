"""The live job's state, looked up at each boundary; and its extra state (all but tensors), gathered and put back."""

from __future__ import annotations

import array
import math
import operator
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash
from torch import nn
from torch.utils import _pytree as pytree

from checkflow.core.errors import MismatchError
from checkflow.core.state import (
    LOADER,
    STATE,
    Region,
    StateTensor,
    TrainingState,
    collect_state,
    dense_parts,
    held_tensors,
    inside_of,
    is_composite,
    is_distributed,
    module_names,
    optimizer_parameters,
    region,
    training_device,
)
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import TensorEntry
from checkflow.runtime.state import own_keys
from checkflow.runtime.state.gathering import EARLY_BYTES, Gathering, Restless, make_tensor, put_back
from checkflow.runtime.state.objects import describe

_PLAIN = frozenset((type(None), bool, int, float, str))
# State that torch's optimizers make in the parameter's shape; users add other keys to it.
_SHAPED = frozenset((
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum", "variance",
))  # fmt: skip
#: The way out of a mismatch in shapes, names or groups, for the end of a message.
GROWN = " (a job that grows or unfreezes takes the checkpoint's form first: checkflow.peek(directory) tells it)"
Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]
# Mapped over all tensors at once: this runs at each boundary.
_FORM: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.data_ptr, operator.attrgetter("dtype"), operator.attrgetter("shape"), torch.Tensor.stride,
    torch.Tensor.is_conj, torch.Tensor.is_neg,
)  # fmt: skip


class Stateful(Protocol):
    """What ``state=`` accepts: schedulers, scalers, and objects of the user's."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StateWalk:
    """All state tensors of a job as they are now. The walk over modules is repeated only when something changed.

    Each call checks by identity: the optimizers' containers (``load_state_dict`` makes new ones), what they hold, and
    each tensor's address, under each of its names (a tied tensor may get its own memory). A whole look compares types,
    shapes and strides, too: a ``.data`` that became a view of itself has the address that it had.
    """

    def __init__(self, models: Models, optimizers: Optimizers, *, of_a_rank: bool = False) -> None:
        self._models, self._optimizers = models, optimizers
        self.of_a_rank = of_a_rank  # accept DTensors: see collect_state
        self._fsdp: list[Any] = _fsdp_modules(models) if of_a_rank else []
        self._state: TrainingState | None = None
        self._slots: list[tuple[Mapping[Any, Any] | _ScriptedTable, Any, Any]] = []
        self._owners: list[tuple[Any, Any, Any]] = []
        self._numbers: list[tuple[dict[Any, Any], Any]] = []  # entries of optimizer state that are not tensors
        self._members: list[int] = []
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._lists: list[tuple[Mapping[Any, Any], Any]] = []  # entries of optimizer state that may hold tensors
        self._inside: list[tuple[int, str, int]] = []  # the tensors there
        self._by_identity: dict[int, str] = {}
        self._by_storage: dict[int, dict[Region, str]] | None = None  # made when it is asked for
        self._alone: frozenset[str] = frozenset()
        self._restless = Restless()
        self._captured: TrainingState | None = None
        self._dense: list[torch.Tensor] = []
        self._composites: list[torch.Tensor] = []
        self._forms: list[list[Any]] = []
        #: As of the last call of ``current``: by optimizer, ``id(parameter)`` to its name; and modules by name.
        self.names: dict[str, dict[int, str]] = {}
        self.parameters: dict[int, codec.Named] = {}
        self.parameter_names: dict[int, str] = {}
        #: Another object whenever a tensor has changed that lies in no list.
        self.outer = object()
        self.modules_with_extra_state: dict[str, nn.Module] = {}

    @property
    def latest(self) -> TrainingState:
        """The state of the last call of ``current``, without checking for changes."""
        return self.current() if self._state is None else self._state

    @property
    def captured(self) -> TrainingState:
        """The same, with the tensors that were gathered since."""
        latest, captured = self.latest, self._captured
        return captured if captured is not None and captured.base is latest else latest

    def gather(self, *, looks: bool = True) -> Gathering:
        """Begin to gather what lies beside this state; :meth:`gathered` ends it. ``looks``: see :class:`Gathering`."""
        return Gathering(self, self._restless, looks=looks)

    def gathered(self, gathering: Gathering) -> None:
        """Add tensors to the state. It is the same object as before exactly if no memory and no form changed."""
        latest, given = self.latest, gathering.given
        before = self._captured
        if before is None or before.base is not latest or not _alike(before.given, given):
            self._captured = TrainingState((*latest.tensors, *given), latest.ties, latest) if given else None

    @property
    def device(self) -> torch.device:
        """What state is copied from, beside host memory."""
        return training_device(self._models)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that models or optimizers hold."""
        return self._by_identity.get(id(tensor))

    def in_storage(self, storage: int) -> Mapping[Region, str]:
        """The state tensors that lie in a storage."""
        if self._by_storage is None:
            self._by_storage = {}
            for item in self.latest.tensors:
                place = region(item.tensor)
                self._by_storage.setdefault(place.storage, {})[place] = item.name
        return self._by_storage.get(storage, {})

    def is_inside(self, name: str) -> bool:
        """Whether a state tensor lies in a list or the like."""
        return name in self._alone

    def current(self, *, whole: bool = True) -> TrainingState:
        """The state: the same object as at the last call exactly if no tensor, and no memory of one, changed.

        Args:
            whole: compare types, shapes and strides, too, which takes most of the time; otherwise the next call does.
        """
        for module in self._fsdp:
            module.reshard()  # it keeps whole parameters after a forward pass that no backward pass has followed
        looks = _FORM if whole else _FORM[:1]
        if self._state is None or not (self._unchanged() and self._same_forms(looks)):
            self.outer = object()
        elif self._same_inside():
            return self._state
        self._state = collect_state(self._models, self._optimizers, of_a_rank=self.of_a_rank)
        self._remember()
        return self._state

    def _unchanged(self) -> bool:
        assert self._state is not None
        return (
            all(owner.state is state and owner.param_groups is groups for owner, state, groups in self._owners)
            and [len(container) for container in self._containers] == self._sizes
            and all(container.get(key) is value for container, key, value in self._slots)
            and self._now_members() == self._members
            and not any(torch.is_tensor(table.get(key)) for table, key in self._numbers)
        )

    def _same_inside(self) -> bool:
        """Whether lists in optimizers' state hold what they held. Some optimizers replace it every few steps."""
        return self._now_inside() == self._inside

    def _now_inside(self) -> list[tuple[int, str, int]]:
        return [
            (number, path, id(tensor))
            for number, (table, key) in enumerate(self._lists)
            if type(value := table.get(key)) not in _PLAIN
            for path, tensor in inside_of(value, "", self.parameter_names)
        ]

    def _now_members(self) -> list[int]:
        """The parameters of each optimizer: their groups' lists may have changed."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        return [id(parameter) for group in groups for parameter in group["params"]]

    def _same_forms(self, looks: Iterable[Callable[[torch.Tensor], Any]]) -> bool:
        """Whether each tensor's region of memory is the one that was remembered.

        Nothing found is kept: many new tuples at once would set off Python's garbage collection at each checkpoint.
        """
        tensors = self._now_dense()
        return len(tensors) == len(self._forms[0]) and all(
            all(map(operator.eq, map(look, tensors), form)) for look, form in zip(looks, self._forms, strict=False)
        )

    def _now_dense(self) -> list[torch.Tensor]:
        parts = [part for tensor in self._composites for _, part in dense_parts(tensor)]
        return self._dense + parts if parts else self._dense

    def _remember(self) -> None:
        assert self._state is not None
        self._containers, self._slots, self._numbers, self._lists = [], [], [], []
        for model in self._models.values():
            for module in model.modules():
                for entries in (module._modules, module._parameters, module._buffers):
                    table = entries if isinstance(entries, dict) else _ScriptedTable(entries)
                    self._containers.append(table)
                    self._slots += [(table, key, value) for key, value in entries.items()]
        self._owners = [(owner, owner.state, owner.param_groups) for owner in self._optimizers.values()]
        for optimizer in self._optimizers.values():
            self._containers += [optimizer.param_groups, optimizer.state]
            for parameter, table in optimizer.state.items():
                self._slots.append((optimizer.state, parameter, table))
                if isinstance(table, dict):
                    self._containers.append(table)
                    for key, value in table.items():
                        if torch.is_tensor(value):
                            self._slots.append((table, key, value))
                        else:
                            self._numbers.append((table, key))
                else:
                    self._lists.append((optimizer.state, parameter))
        self._lists += self._numbers
        self._sizes = [len(container) for container in self._containers]
        self._members = self._now_members()
        everything = list(held_tensors(self._models, self._optimizers))
        state = {item.name for item in self._state.tensors}
        self._alone = frozenset(item.name for item in self._state.tensors if item.inside)
        self._by_identity = {id(item.tensor): item.name for item in everything if not item.inside or item.name in state}
        self._by_storage = None
        held = {id(item.tensor): item.tensor for item in everything}
        self._composites = [tensor for tensor in held.values() if is_composite(tensor)]
        self._dense = [tensor for tensor in held.values() if not is_composite(tensor)]
        tensors = self._now_dense()
        self._forms = [list(map(look, tensors)) for look in _FORM]
        self.names = {
            owner: {id(parameter): name for name, parameter in optimizer_parameters(self._models, optimizer)}
            for owner, optimizer in self._optimizers.items()
        }
        self.parameters = {
            number: codec.Named(owner, name) for owner, names in self.names.items() for number, name in names.items()
        }
        self.parameter_names = {number: of.parameter for number, of in self.parameters.items()}
        self._inside = self._now_inside()
        self.modules_with_extra_state = dict(modules_with_extra_state(self._models))


def _alike(before: Sequence[StateTensor], now: Sequence[StateTensor]) -> bool:
    return len(before) == len(now) and all(
        old.name == new.name and region(old.tensor) == region(new.tensor) for old, new in zip(before, now, strict=True)
    )


def _fsdp_modules(models: Models) -> list[nn.Module]:
    modules = (module for model in models.values() for module in model.modules())
    return [module for module in modules if isinstance(getattr(module, "_get_fsdp_state", None), types.MethodType)]


class _ScriptedTable:
    """Gives a table of a torch.jit module the methods of a dictionary that a walk needs."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> Any:
        return self._held[key] if key in self._held else None  # noqa: SIM401 — it has no ``get``


def version_of(item: StateTensor) -> int:
    """A tensor's version counter; 0 for an inference tensor, which has none.

    Of a DTensor, operators move the counter of the whole, and optimizers none.
    """
    return _counted(item.tensor) + (0 if item.whole is None else _counted(item.whole))


def _counted(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions_of(items: Iterable[StateTensor]) -> list[int]:
    """:func:`version_of` for many tensors, faster if all have a counter."""
    listed = list(items)
    try:
        return [one.tensor._version + (0 if one.whole is None else one.whole._version) for one in listed]
    except RuntimeError:
        return list(map(version_of, listed))


def capture_generators() -> dict[str, Any]:
    """The states of all generators that the main process may draw from; :func:`compact_generators` makes them
    smaller.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": words, "gauss": gauss},
        "torch": torch.default_generator.get_state(),
    }
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def compact_generators(states: Mapping[str, Any]) -> dict[str, Any]:
    """The same states as fewer objects."""
    python = states["python"]
    return {**states, "python": {**python, "words": array.array("I", python["words"]).tobytes()}}


def derived_generators(states: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """States for a rank that is new, from those of rank 0: others than any rank has, and the same each time."""
    words = xxhash.xxh3_64_intdigest(f"{rank} {sorted(states)}".encode() + bytes(states["torch"].numpy()))
    seed = words >> 1
    version, numbers, gauss = random.Random(seed).getstate()
    found: dict[str, Any] = {
        **states,
        "python": {"version": version, "words": array.array("I", numbers).tobytes(), "gauss": gauss},
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "numpy" in states:
        import numpy

        found["numpy"] = numpy.random.RandomState(seed % 2**32).get_state()
    if "cuda" in states and torch.cuda.is_available():
        found["cuda"] = [
            torch.Generator(f"cuda:{index}").manual_seed(seed).get_state() for index in range(torch.cuda.device_count())
        ]
    return found


def restore_generators(states: Mapping[str, Any]) -> None:
    """Restore what :func:`capture_generators` or :func:`compact_generators` returned."""
    python = states["python"]
    random.setstate((python["version"], tuple(array.array("I", python["words"])), python["gauss"]))
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):  # maybe fewer GPUs now
            torch.cuda.set_rng_state(state, index)


def capture_extra(
    walk: StateWalk,
    optimizers: Optimizers,
    objects: Mapping[str, Stateful],
    capture_loop: Callable[[], Mapping[str, Any]] = dict,
) -> dict[str, Any]:
    """Extra state at this instant, right after ``current``: encode it before training continues, as it may share
    memory. Its tensors are in ``walk.captured`` from now on.

    Args:
        capture_loop: gives the place in the loop, and under "loader" the loader's state.
    """
    if full := own_keys.state_dicts(optimizers):
        walk.current()  # they, or torch's hooks, may have changed it
    gathering = walk.gather()
    take = gathering.take
    states = {name: value.state_dict() for name, value in objects.items()}
    job = {
        "modules": {
            name: take(module.get_extra_state(), f"{STATE}/{name}/_extra_state")
            for name, module in walk.modules_with_extra_state.items()
        },
        "optimizers": {
            name: _capture_optimizer(name, optimizer, walk.names[name], take) for name, optimizer in optimizers.items()
        },
        "objects": {name: take(state, f"{STATE}/{name}") for name, state in states.items()},
        "schedulers": describe(objects, states),
    }
    for name, one in full.items():
        if (own := own_keys.take_own(name, optimizers[name], one, take)) is not None:
            job["optimizers"][name]["own"] = own
    loop = capture_loop()
    if loader := loop.get("loader"):
        loop = {**loop, "loader": _without_tensors(loader, LOADER + "/", take)}
    walk.gathered(gathering)
    return {**loop, "job": job}


def _without_tensors(loader: Mapping[str, Any], prefix: str, take: Callable[..., Any]) -> dict[str, Any]:
    """A loader's state; that of a loader inside is taken entry by entry, since some may change in shape."""
    return {
        key: _without_tensors(value, f"{prefix}{key}.", take)
        if key == "inner" and isinstance(value, Mapping)
        else take(value, f"{prefix}{key}", least_bytes=EARLY_BYTES)
        for key, value in loader.items()
    }


def refuse_unsaved(walk: StateWalk, optimizers: Optimizers) -> None:
    """Refuse optimizers of which something cannot be saved now, or not be handed back. Raises UnsupportedError."""
    full = own_keys.state_dicts(optimizers)
    walk.current()
    take = walk.gather(looks=False).take
    for name, optimizer in optimizers.items():
        codec.encode(_capture_optimizer(name, optimizer, walk.names[name], take), name=f"optimizer {name!r}")
        if name in full:
            own_keys.refuse_unsaved(name, optimizer, full[name], take)


def refuse_extra_mismatch(extra: Mapping[str, Any], models: Models, optimizers: Optimizers) -> None:
    """Compare what :func:`capture_extra` returned, but for the further objects, with the job, before anything is
    restored. Raises MismatchError.
    """
    for what, have, saved in (
        ("the extra state of module {!r}", dict(modules_with_extra_state(models)), extra["modules"]),
        ("optimizer {!r}", optimizers, extra["optimizers"]),
    ):
        if odd := sorted(set(have) ^ set(saved)):
            where = "the checkpoint" if odd[0] in saved else "the job"
            raise MismatchError(f"{what.format(odd[0])} is only in {where}")
    for name, optimizer in optimizers.items():
        names = {id(parameter): path for path, parameter in optimizer_parameters(models, optimizer)}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        refuse_other_class(name, optimizer, extra["optimizers"][name])
        own_keys.refuse_mismatch(name, optimizer, extra["optimizers"][name])
        _refuse_other_groups(name, groups, [group["params"] for group in extra["optimizers"][name]["groups"]])


# Keys of groups that do not identify the optimizer's class: how it computes, and what schedulers add.
ANY_CLASS_S = {"foreach", "fused", "capturable", "differentiable", "maximize", "params", "param_names", "initial_lr"}
SCHEDULERS_OWN = {"max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}


def refuse_other_class(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse state of another optimizer class. Checkpoints that name no class are refused if both sides have options
    that the other lacks: another release of torch only adds, or only removes, options.
    """
    have, want = type(optimizer).__name__, saved.get("class")
    if want is None:
        options = {option for group in saved["groups"] for option in group} - ANY_CLASS_S - SCHEDULERS_OWN
        known = {option for group in optimizer.param_groups for option in group}
        odd = sorted(options - known)
        if odd and set(optimizer.defaults) - options - ANY_CLASS_S:
            want = f"one with the options {', '.join(odd)}"
    if want not in (None, have):
        raise MismatchError(f"optimizer {name!r} is {want} in the checkpoint, {have} in the job")


def _refuse_other_groups(name: str, job: list[list[str]], saved: list[list[str]]) -> None:
    if len(job) != len(saved):
        raise MismatchError(
            f"optimizer {name!r} has other parameter groups: {len(saved)} in the checkpoint, {len(job)} in the job"
            f"{GROWN}"
        )
    for number, (here, there) in enumerate(zip(job, saved, strict=True)):
        what = f"group {number} of optimizer {name!r} has"
        if odd := sorted(set(here) ^ set(there)):
            raise MismatchError(
                f"{what} the parameter {odd[0]} only in {'the checkpoint' if odd[0] in there else 'the job'}{GROWN}"
            )
        if here != there:
            raise MismatchError(f"{what} its parameters in another order in the checkpoint than in the job")


def with_tensors(
    extra: Mapping[str, Any], models: Models, optimizers: Optimizers, tensors: Mapping[str, torch.Tensor]
) -> Any:
    """Extra state with its tensors: those of models and optimizers, and further ones by name."""
    held: dict[str, torch.Tensor] = {}
    for item in held_tensors(models, optimizers):
        if not item.inside:
            held[item.name] = item.tensor
            if is_composite(item.tensor):
                for suffix, part in dense_parts(item.tensor):
                    held.setdefault(item.name + suffix, part)
    found = {**held, **tensors}
    parameters = {name: dict(optimizer_parameters(models, one)) for name, one in optimizers.items()}

    def find(name: str) -> torch.Tensor:
        if name not in found:
            raise MismatchError(f"the checkpoint has values that refer to {name}, which is not in the job")
        return found[name]

    def parameter(key: codec.Named) -> torch.Tensor:
        one = parameters.get(key.optimizer, {}).get(key.parameter)
        if one is None:
            raise MismatchError(f"the checkpoint has values by {key.parameter}, no parameter of {key.optimizer} here")
        return one

    return put_back(extra, find, parameter)


def restore_optimizers(extra: Mapping[str, Any], models: Models, optimizers: Optimizers) -> None:
    """Restore groups and values of what :func:`capture_extra` returned, with its tensors."""
    for name, optimizer in optimizers.items():
        _restore_optimizer(models, optimizer, extra["optimizers"][name])


def restore_extra(extra: Mapping[str, Any], models: Models, objects: Mapping[str, Stateful]) -> None:
    """Restore all else of what :func:`capture_extra` returned, and :func:`refuse_extra_mismatch` accepted."""
    for name, module in modules_with_extra_state(models):
        module.set_extra_state(extra["modules"][name])
    for name, value in objects.items():
        value.load_state_dict(extra["objects"][name])


def modules_with_extra_state(models: Models) -> Iterator[tuple[str, nn.Module]]:
    """("<model>/<module path>", module) of every module that has state besides tensors."""
    for name, module in module_names(models):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _capture_optimizer(
    owner: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], take: Callable[..., Any]
) -> dict[str, Any]:
    """Its class, its groups with parameters by name, and state of parameters that is not tensors."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        options = take(options, f"{STATE}/{owner}.param_groups.{number}", least_bytes=EARLY_BYTES)
        groups.append({**options, "params": [names[id(parameter)] for parameter in group["params"]]})
    values: dict[str, dict[Any, Any]] = {}
    others: dict[Any, Any] = {}
    for parameter, table in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            others[parameter] = take(table, f"{owner}/{parameter}")  # values of the optimizer, not of a parameter
        elif isinstance(table, dict) and (name := names.get(id(parameter))) is not None:
            numbers = {
                key: value if type(value) in _PLAIN else take(value, f"{owner}/{name}.{key}")
                for key, value in table.items()
                if not isinstance(value, torch.Tensor)
            }
            if numbers:
                values[name] = numbers
    return {
        "class": type(optimizer).__name__, "groups": groups, "values": values, "values_apart": _apart(values),
        "others": others, "others_apart": _apart(others),
    }  # fmt: skip


def _apart(values: Any) -> list[int]:
    """Indices of the leaves that are tensors outside of host memory."""
    leaves = enumerate(pytree.tree_leaves(values))
    return [number for number, leaf in leaves if torch.is_tensor(leaf) and leaf.device.type != "cpu"]


def _put_back(saved: Any, apart: Iterable[int], device: torch.device) -> Any:
    """Saved values, with these leaves moved to the device."""
    leaves, structure = pytree.tree_flatten(saved)
    for number in apart:
        leaves[number] = leaves[number].to(device)
    return pytree.tree_unflatten(leaves, structure)


def _restore_optimizer(models: Models, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if key == "params":
                continue
            if torch.is_tensor(group.get(key)) and torch.is_tensor(value):
                group[key].copy_(value)  # CUDA graphs hold the address of a tensor learning rate
            else:
                group[key] = value
    device = training_device(models)
    parameters = dict(optimizer_parameters(models, optimizer))
    _drop_values(optimizer, parameters, saved)
    if saved["values"]:
        for name, values in _put_back(saved["values"], saved.get("values_apart", ()), device).items():
            if values:
                optimizer.state[parameters[name]].update(values)
    optimizer.state.update(_put_back(saved["others"], saved.get("others_apart", ()), device))


def _drop_values(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> None:
    """Remove what the checkpoint lacks and is no tensor: :func:`drop_state` has removed tensors."""
    for name, parameter in parameters.items():
        table, kept = optimizer.state.get(parameter), saved["values"].get(name, {})
        if isinstance(table, dict):
            for key in [key for key, value in table.items() if key not in kept and not torch.is_tensor(value)]:
                del table[key]
    for key in [key for key in optimizer.state if not torch.is_tensor(key) and key not in saved["others"]]:
        del optimizer.state[key]


def fits(shape: Collection[int], parameter: Collection[int]) -> bool:
    """Whether optimizer state of this shape may be of a whole parameter: a number, a tensor of its shape, or one that
    is reduced in some dimensions, as Adafactor's.
    """
    return math.prod(shape) == 1 or (
        len(shape) == len(parameter) and all(here in (1, there) for here, there in zip(shape, parameter, strict=True))
    )


def refuse_unfit_state(
    name: str, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> None:
    """Refuse state that one of torch's optimizers makes in its parameter's shape and that has another, such as a part
    of it. Raises MismatchError.
    """
    path, _, key = name.partition("/")[2].rpartition(".")
    parameter = parameters.get(path)
    if parameter is None or key not in _SHAPED or not type(optimizer).__module__.startswith("torch.optim."):
        return  # of other classes only they know the shapes
    if not fits(shape, parameter.shape):
        raise MismatchError(
            f"{name} is {list(shape)} in the checkpoint, and its parameter is {list(parameter.shape)}: "
            f"{type(optimizer).__name__} makes it in the parameter's shape"
        )


def make_lazy_state(
    name: str,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    entry: TensorEntry,
    *,
    on_host: bool | None,
    as_parameter: bool,
) -> torch.Tensor:
    """Create an optimizer state tensor that the optimizer would create at its first step, and return it.

    Args:
        on_host: whether in host memory, wherever its parameter is; None: as torch does for step counters.
        as_parameter: whether it lies in memory as its parameter, if it has the same shape.
    """
    shape, dtype = tuple(entry.shape), getattr(torch, entry.dtype)
    parameter, key = _place_of(name, parameters)
    if on_host is None:
        (group,) = (g for g in optimizer.param_groups if any(one is parameter for one in g["params"]))
        on_host = not shape and not (group.get("capturable") or group.get("fused"))  # as for torch's step counters
    if tuple(parameter.shape) == shape and not on_host and (as_parameter or is_distributed(parameter)):
        tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    else:
        tensor = make_tensor(entry, torch.device("cpu") if on_host else parameter.device)
    optimizer.state[parameter][key] = tensor
    return tensor


def share_lazy_state(
    name: str, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], tensor: torch.Tensor
) -> None:
    """:func:`make_lazy_state` with an existing tensor that several parameters share, such as a step counter."""
    parameter, key = _place_of(name, parameters)
    optimizer.state[parameter][key] = tensor


def _place_of(name: str, parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
    """The parameter that a state tensor belongs to, and its key there."""
    owner, _, rest = name.partition("/")
    path, _, key = rest.rpartition(".")
    parameter = parameters.get(path)
    if parameter is None:
        raise MismatchError(f"the checkpoint has {name}, but optimizer {owner} has no parameter {path!r}")
    return parameter, key


def make_state_by_stepping(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create all its state (8-bit moments), by a step with zero gradients, before it is restored."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if torch.is_tensor(rate) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def drop_state(names: set[str], models: Models, optimizers: Optimizers) -> None:
    """Remove optimizer state that the checkpoint calls absent."""
    if not names:
        return
    for owner, optimizer in optimizers.items():
        for path, parameter in optimizer_parameters(models, optimizer):
            table = optimizer.state.get(parameter)
            if not table:
                continue
            for key, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    parts = [f"{owner}/{path}.{key}{suffix}" for suffix, _ in dense_parts(value)]
                    if not names.isdisjoint(parts):
                        del table[key]
            if not table:
                del optimizer.state[parameter]
