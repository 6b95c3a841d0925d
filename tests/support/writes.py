"""What an iteration writes, held against memory: it runs for real, and all state is compared around every operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checkflow.core.graph import TrainingGraph
from checkflow.core.state import collect_state
from checkflow.core.training_step import TrainingStep
from checkflow.planner.operators import operators as op

# An operator, and for which time since the boundary it runs, from 0.
Write = tuple[str, int]


class WatchedWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes by which operator each state tensor is first written, and holds every change against what is said of it.

    Args:
        hosts: names of state in host memory, which a trace leaves out.

    Raises:
        AssertionError: an operator changed bytes of a state tensor that the planner's tables do not say it writes.
    """

    def __init__(self, step: TrainingStep, hosts: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = {item.name: item.tensor for item in collect_state(step.models, step.optimizers).tensors}
        self._hosts = {found.pop(name).untyped_storage()._cdata for name in hosts}
        self._state = found
        self._before = {name: bits(tensor) for name, tensor in self._state.items()}
        self._addresses = {name: tensor.data_ptr() for name, tensor in found.items()}
        self._runs: Counter[str] = Counter()
        self.first: dict[str, Write] = {}  # by state tensor: the first operator that is said to write it
        self.changed: set[str] = set()  # tensors that were seen to change
        self.moved: set[str] = set()  # tensors that were given other memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        effect = op.effects(func, args, kwargs or {}, result, lambda t: t.untyped_storage()._cdata in self._hosts)
        if effect.computes or effect.writes:
            written = {tensor.untyped_storage()._cdata for tensor, _ in effect.writes}
            place = (str(func), self._runs[str(func)])
            self._runs[str(func)] += effect.computes
            for name, tensor in self._state.items():
                said = tensor.untyped_storage()._cdata in written
                if said:
                    self.first.setdefault(name, place)
                here, now = tensor.data_ptr(), bits(tensor)
                if here != self._addresses[name]:  # ``.data`` was assigned: no operator did that
                    self._addresses[name], self._before[name] = here, now
                    self.moved.add(name)
                if now != self._before[name]:
                    assert said, f"{func} writes {name}, and nothing says so"
                    self._before[name] = now
                    self.changed.add(name)
        return result


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in logical order."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return bytes(flat.tolist())


def assert_writes_are_those_of_reality(graph: TrainingGraph, step: TrainingStep) -> None:
    """The traced step's state is first written by the operators that write it in the second real iteration.

    Args:
        graph: the same step, traced for the CPU.
        step: its first iteration runs here, and makes its state.
    """
    step.run(step.batch)
    held = collect_state(step.models, step.optimizers)
    addresses = {item.name: item.tensor.data_ptr() for item in held.tensors}
    with WatchedWrites(step, [entry.name for entry in graph.state if entry.placement == "host"]) as watched:
        step.run(step.batch)
    after = {item.name: item.tensor for item in collect_state(step.models, step.optimizers).tensors}
    replaced = {item.name for item in held.tensors if after[item.name] is not item.tensor}
    replaced |= {item.name for item in held.tensors if after[item.name].data_ptr() != addresses[item.name]}
    assert watched.changed or replaced
    for entry in graph.state:
        if entry.placement == "host":
            continue
        if entry.name in replaced:  # due before its successor is made
            assert entry.first_write is not None, entry.name
            continue
        real = watched.first.get(entry.name)
        if entry.first_write is None:
            assert real is None, f"{entry.name} is written by {real}"
        else:
            target = graph.operators[entry.first_write].target
            times = sum(operator.target == target for operator in graph.operators[: entry.first_write])
            assert real == (target, times), f"{entry.name}: {real}, traced {target} #{times}"
