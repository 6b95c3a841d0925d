"""The dispatch mode that notes every operator of a trace: what it reads, writes and costs, and where it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from checkflow.planner.iteration.iteration import WatchedIteration
from checkflow.planner.iteration.placement import NO_CROSSING, HostMemory
from checkflow.planner.iteration.read_numbers import ReadNumbers
from checkflow.planner.operators import operators as op
from checkflow.planner.operators import sparse
from checkflow.planner.operators.collectives import collective, waits_only
from checkflow.planner.trace.real_dispatch import size_as_real

# Calls that reach a dispatch mode but are not the model's operators.
_NO_OPERATORS = frozenset(("prim", "profiler", "debugprims"))


class TakesFunctionsError(Exception):
    """An operator that takes functions (``torch.cond``) was called, and runs others unseen."""


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator of the traced run, above make_fx's mode, whose graph names the operators.

    Before :meth:`begin` it only watches which storages the first run leaves behind.
    """

    supports_higher_order_operators = True  # to refuse them with our own message

    def __init__(self, iteration: WatchedIteration, host: HostMemory, numbers: ReadNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._iteration, self._host, self._numbers = iteration, host, numbers
        self._tracer: Any = None
        self._last: Node | None = None
        self._left: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address: the newest seen there
        self._failure: tuple[Exception, OpOverload] | None = None  # the last error that an operator raised

    def culprit(self, error: BaseException) -> OpOverload | None:
        link: BaseException | None = error
        while link is not None:
            if self._failure is not None and link is self._failure[0]:
                return self._failure[1]
            link = link.__cause__ or link.__context__
        return None

    def begin(self, proxies: ProxyTorchDispatchMode) -> None:
        """Begin the traced run. Operators that make_fx later removes as dead code count, too."""
        self._tracer = proxies.tracer
        self._numbers.begin_traced(self._iteration.state)
        self._failure = None  # the frames of an optimizer's error hold gradients

    def end(self) -> None:
        self._tracer = None

    def add_inputs(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make tensors inputs of the graph, but not arguments of the traced function, which would keep them alive."""
        for name, tensor in named:
            plain = "".join(c if c.isalnum() else "_" for c in name)
            target = self._tracer.graph._graph_namespace.create_name(plain, None)
            proxy = self._tracer.create_proxy("placeholder", target, (), {})
            track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)
            self._claim_nodes()

    def enter_left_behind(self) -> None:
        """Enter what the first run made and something still holds, such as a module's attribute."""
        for reference in self._left.values():
            storage = reference()
            if storage is not None and storage.nbytes() and not self._host.holds_storage(storage):
                self._iteration.ledger.enter_storage(storage, "kept", "activation", -1)
        self._left.clear()

    def record_opaque(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Record an untraceable step as one operator, which reads gradients and writes parameters and their state."""
        updates: list[tuple[torch.Tensor, int]] = []
        gradients: list[tuple[torch.Tensor, int]] = []
        for parameter in parameters:
            state = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
            held = [(part, op.touched_bytes(part)) for part in op.tensors_in(parameter.grad)]
            gradients += held
            # With a sparse gradient, a step touches as many bytes as the gradient's values, its last part, have.
            most = held[-1][1] if len(held) > 1 else None
            for tensor in (parameter, *state):
                if not self._host.holds(tensor):
                    size = op.touched_bytes(tensor)
                    updates.append((tensor, size if most is None else min(size, most)))
        kind = type(optimizer).__name__
        node = self._tracer.create_node(
            "call_function", torch.optim.Optimizer.step, (), {}, name=f"{kind.lower()}_step"
        )
        effect = op.Effects(reads=(*updates, *gradients), writes=tuple(updates), outputs=(), computes=True)
        if updates:
            self._iteration.append(node.name, f"{kind}.step", effect, 0, NO_CROSSING)
        self._claim_nodes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise TakesFunctionsError(str(func))
        keywords = dict(kwargs or {})
        if op.compares_constants(func, args):
            return op.compare_constants(args)
        with torch._C.DisableTorchFunction():  # stand-ins are for the user's calls, not torch's own
            if func.namespace in _NO_OPERATORS:
                return func(*args, **keywords)
            if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
                return NotImplemented  # the subclass calls other operators, which arrive here
            if op.is_composite(func):
                with self:
                    result = func.decompose(*args, **keywords)
                if result is not NotImplemented:
                    return result
            try:
                call = self._call(func, args, keywords)
                result = call.result
                self._numbers.note_operator(call.ran, args, result)
                size_as_real(call.func, call.args, result)
                self._host.settle(call.func, call.args, keywords, result)
                if self._tracer is None:
                    self._watch(result)
                else:
                    self._record(self._claim_nodes(call.ran), call.func, call.args, keywords, result)
            except Exception as error:
                if self._failure is None or self._failure[0] is not error:  # keep the innermost call's
                    self._failure = (error, func)
                raise
            return result

    def _call(self, func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> sparse.Call:
        """Run an operator on fake tensors; one that reads a number gets an ordinary one."""
        if self._numbers.reads(func, args):
            if self._tracer is not None:
                self._tracer.create_node("call_function", func, (), {})
            return sparse.Call(func, func, args, self._numbers.read(func, args))
        if waits_only(func):
            return sparse.Call(func, func, args, args[0])
        call = sparse.run(func, args, keywords)
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._numbers.know(args[1], 0.0)  # no gradient is infinite: the optimizer steps
        return call

    def _watch(self, result: Any) -> None:
        for tensor in op.tensors_in(result):
            if not op.is_host_scalar(tensor):
                storage = tensor.untyped_storage()
                self._left.pop(storage._cdata, None)  # so that the order is that of the newest, not of addresses
                self._left[storage._cdata] = weakref.ref(storage)

    def _record(self, node: str, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        effect = op.effects(func, args, keywords, result, self._host.holds)
        crossing = self._host.crossing(func, args, keywords, result)
        if func is torch.ops.aten.lift_fresh.default or not (effect.reads or effect.writes):
            return
        self._iteration.where.note_forward()
        if effect.computes or crossing.to_host_bytes:
            flops, moved = op.flops(func, args, keywords, result), collective(func, args, keywords, result)
            self._iteration.append(node, op.target_name(func), effect, flops, crossing, collective=moved)
        else:
            self._iteration.allocate(effect, node)

    def _claim_nodes(self, func: Any = None) -> str:
        """Name the node that ``func`` made, and drop the nodes' example values, which keep storages alive."""
        name, newest = "", None
        for node in reversed(self._tracer.graph.nodes):
            if node is self._last:
                break
            newest = newest or node
            name = node.name if node.target is func else name or node.name
            node.meta.clear()
        self._last = newest or self._last
        return name
