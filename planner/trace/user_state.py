"""Finds what a training step may change of the user's, and restores it.

Starts from the step's function: objects that it closes over, names as globals or is bound to, the user's further
functions among them, and the contents of lists, dictionaries and sets. Tensors are left to the stand-ins.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from checkflow.core.training_step import TrainingStep
from checkflow.planner.trace.sharded_modules import sharding_objects

_CONTAINERS = (dict, list, set, collections.deque)
_MANY = 1000  # a longer list is data: restored, but not searched
_TOO_MANY = 1_000_000  # a longer one is left alone


class UserState:
    """The objects, variables and containers that a training step reaches."""

    def __init__(self, step: TrainingStep) -> None:
        self._objects: dict[int, Any] = {}
        self._containers: dict[int, Any] = {}
        self._variables: list[tuple[Any, str]] = []  # a cell, or the dictionary of globals and the name
        self._functions: set[int] = set()
        for value in (*step.models.values(), *step.optimizers.values()):
            self._visit(value)
        self._visit_function(step.function)
        self._objects.update((id(held), held) for held in list(sharding_objects(self.modules)))

    @property
    def objects(self) -> list[Any]:
        """Modules, optimizers, their groups, and other objects of the user's."""
        return list(self._objects.values())

    @property
    def modules(self) -> list[nn.Module]:
        return [value for value in self._objects.values() if isinstance(value, nn.Module)]

    def remember(self) -> SavedValues:
        return SavedValues(self.objects, list(self._containers.values()), self._variables)

    def remember_plain(self) -> SavedValues:
        """Return numbers, truths and texts as they are now (counters, flags), which keep no tensor alive."""
        return SavedValues(self.objects, list(self._containers.values()), self._variables, only=_PLAIN)

    def _visit(self, value: Any, *, deep: bool = True) -> None:
        if id(value) in self._objects or isinstance(value, type | torch.Tensor | types.ModuleType):
            return
        if isinstance(value, list | tuple | dict | set | collections.deque):
            self._visit_container(value)
        elif isinstance(value, nn.Module):
            self._objects.update((id(module), module) for module in value.modules())
        elif isinstance(value, functools.partial) or hasattr(value, "__code__") or hasattr(value, "__func__"):
            self._visit_function(value)
        elif hasattr(value, "__dict__"):
            self._objects[id(value)] = value
            if isinstance(value, torch.optim.Optimizer):
                self._objects.update((id(group), group) for group in value.param_groups)
            if deep or callable(getattr(value, "state_dict", None)):
                for attribute in list(vars(value).values()):
                    self._visit(attribute, deep=False)

    def _visit_container(self, value: Any) -> None:
        if id(value) in self._containers:
            return
        if isinstance(value, _CONTAINERS) and len(value) <= _TOO_MANY:
            self._containers[id(value)] = value
        if len(value) <= _MANY:
            for item in list(value.values()) if isinstance(value, dict) else list(value):
                self._visit(item)

    def _visit_function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values(), function.func):
                self._visit(value)
            return
        if (original := getattr(function, "_torchdynamo_orig_callable", None)) is not None:  # torch.compile made it
            self._visit_function(original)
            return
        if (owner := getattr(function, "__self__", None)) is not None:
            self._visit(owner)
        function = getattr(function, "__func__", function)
        module = str(getattr(function, "__module__", ""))
        if id(function) in self._functions or module.partition(".")[0] in ("torch", "checkflow"):
            return
        self._functions.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            self._variables.append((cell, ""))
            self._visit(_content(cell))
        for value in getattr(function, "__defaults__", None) or ():
            self._visit(value)
        scope = getattr(function, "__globals__", {})
        for name in _names(getattr(function, "__code__", None)):
            if name in scope:
                self._variables.append((scope, name))
                self._visit(scope[name])


class SavedValues:
    """What objects, containers and variables hold; ``only``: ignore values of other types, and lists with any."""

    def __init__(
        self,
        objects: list[Any],
        containers: list[Any],
        variables: list[tuple[Any, str]],
        *,
        only: tuple[type, ...] = (object,),
    ) -> None:
        self._whole = only == (object,)
        self._attributes = [
            (held, {key: value for key, value in held.items() if isinstance(value, only)})
            for held in (value if isinstance(value, dict) else vars(value) for value in objects)
        ]
        self._classes = [(value, type(value)) for value in objects if isinstance(value, nn.Module)]
        # torch.jit's modules keep their tensors outside of dictionaries.
        modules = [value for value in objects if self._whole and isinstance(value, torch.jit.ScriptModule)]
        tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
        self._scripted = [(table, list(table.items())) for table in tables]
        inner = [value for held, _ in self._attributes for value in held.values() if isinstance(value, _CONTAINERS)]
        self._contents = [
            (container, container.copy())
            for container in (*containers, *inner)
            if all(isinstance(v, only) for v in (container.values() if isinstance(container, dict) else container))
        ]
        now = [(place, name, place.get(name, _EMPTY) if name else _content(place)) for place, name in variables]
        self._variables = [(place, name, value) for place, name, value in now if isinstance(value, only)]

    def restore(self) -> None:
        """Restore everything, whatever has happened to it since."""
        for module, kind in self._classes:
            if type(module) is not kind:  # lazy modules change their class
                module.__class__ = kind
        for held, saved in reversed(self._attributes):
            if self._whole:
                held.clear()
            held.update(saved)
        for table, items in self._scripted:
            for key, value in items:
                table[key] = value
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, list | collections.deque) else container.update)(content)
        for place, name, value in self._variables:
            if name and value is not _EMPTY:
                place[name] = value
            elif value is not _EMPTY:
                place.cell_contents = value


_PLAIN = (int, float, str, bytes, type(None))
_EMPTY = object()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _EMPTY


def _names(code: types.CodeType | None) -> Iterator[str]:
    """Yield the globals (and attributes) that a function names, functions inside of it included."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names(constant)
