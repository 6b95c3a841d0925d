"""Training step -> TrainingGraph: torch.fx capture of one whole iteration in its steady state.

The step runs twice on fake tensors. The first run is not traced: it makes what is made lazily (optimizer state) and
leaves the gradients that every later iteration finds. The second runs under ``make_fx``, with parameters, buffers,
optimizer state and those gradients as inputs of the graph; a dispatch mode above it notes for every operator what it
reads and writes, and for every storage when eager training frees it (:mod:`checkflow.planner.lifetimes`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode, make_fx, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import checkflow.training_step
from checkflow.errors import CheckflowError, TraceError
from checkflow.graph import AnchorKey, AnchorKind, Operator, StateEntry, TrainingGraph
from checkflow.planner import operators as op
from checkflow.planner.faking import CPU, StandIns, stand_in
from checkflow.planner.hooks import Whereabouts
from checkflow.planner.lifetimes import StorageLedger
from checkflow.planner.optimizers import NEEDS_DATA, OptimizerSteps, Target
from checkflow.state import StateTensor, TrainingState, collect_state, optimizer_implementation
from checkflow.training_step import TrainingStep

# Calls that reach a dispatch mode but are no operators of the model.
_NO_OPERATORS = frozenset(("prim", "profiler", "debugprims"))


def trace(step: TrainingStep, *, name: str, target: Target = "cuda") -> TrainingGraph:
    """Trace one iteration of a training step.

    Nothing is computed or allocated, whatever device the step's tensors are on (``meta`` too), and the user's objects
    are as before afterwards. Sizes and flops are those of the operators that torch's CPU dispatch chooses.

    Args:
        step: its models, optimizers and batch; its function is called twice.
        name: what the user calls the model.
        target: the kind of device to plan for; optimizers are traced in the implementation that it would choose.

    Raises:
        TraceError: an operator cannot be traced, or the step itself fails; names the operator and the source line.
        UnsupportedError: the state has no dense memory of its own (see :func:`checkflow.state.collect_state`).
    """
    import torch._dynamo  # make_fx imports it; under the modes of a trace that import would be traced  # noqa: F401

    implementations = tuple(
        (key, optimizer_implementation(optimizer, target)) for key, optimizer in step.optimizers.items()
    )
    with stand_in(step) as stand_ins:
        steps = OptimizerSteps(step.optimizers.values(), target)
        session = _Session(step, name, stand_ins, steps)
        with _environment(stand_ins), steps.in_place():
            session.run()
        return session.graph(implementations)


@contextlib.contextmanager
def _environment(stand_ins: StandIns) -> Iterator[None]:
    """What must hold while the step runs: everything fake and on the CPU, gradients on, nothing freed at random."""
    collecting = gc.isenabled()
    gc.disable()  # a collection would free storages at a moment that depends on what ran before
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.inference_mode(False),
            torch.enable_grad(),
            stand_ins.mode,
            CPU,
            stand_ins,
        ):
            yield
    finally:
        if collecting:
            gc.enable()


class _Session:
    """One trace: the two runs of the step, and what they showed."""

    def __init__(self, step: TrainingStep, name: str, stand_ins: StandIns, steps: OptimizerSteps) -> None:
        self._step, self._name, self._stand_ins, self._steps = step, name, stand_ins, steps
        self._batch = stand_ins.replace(step.batch)
        self._operators: list[Operator] = []
        self._ledger = StorageLedger(self._position)
        self._where = Whereabouts(
            step.models,
            step.optimizers,
            operators=self._position,
            on_gradient=self._name_gradient,
            on_step=self._record_opaque_step,
        )
        self._recorder = _Recorder(self._operators, self._ledger, self._where)
        self._before = self._after = TrainingState((), ())

    def run(self) -> None:
        """Run the iteration that makes the steady state, then the one that is traced."""
        recorder = self._recorder
        try:
            # A training loop holds what its last iteration returned until the next one returns.
            previous = self._step.run(self._batch)
            self._before = collect_state(self._step.models, self._step.optimizers)
            with _use_lazy_graph_module(True):  # the graph is read, never run: no code need be made of it

                def iteration() -> None:
                    nonlocal previous
                    proxies = get_proxy_mode()
                    assert isinstance(proxies, ProxyTorchDispatchMode)
                    with torch._C.DisableTorchFunction():
                        recorder.begin(proxies)
                        self._declare_inputs(previous)
                    with self._where.watching(), recorder:
                        previous = self._step.run(self._batch)
                    self._ledger.close()

                make_fx(iteration, _allow_fake_constant=True)()
            self._after = collect_state(self._step.models, self._step.optimizers)
        except CheckflowError:
            raise
        except Exception as error:
            raise TraceError(_explain(self._name, error, recorder.failed)) from error

    def graph(self, implementations: tuple[tuple[str, str], ...]) -> TrainingGraph:
        """Everything that was seen, as plain data."""
        storages, places = self._ledger.storages()
        operators = tuple(_renumbered(operator, places) for operator in self._operators)
        parameters = sum(item.tensor.numel() for item in self._before.tensors if item.kind == "parameter")
        batch = tuple(
            (tuple(leaf.shape), _dtype(leaf))
            for leaf in pytree.tree_leaves(self._batch)
            if isinstance(leaf, torch.Tensor)
        )
        return TrainingGraph(
            model=self._name,
            batch=batch,
            micro_batches=self._step.micro_batches,
            optimizers=implementations,
            autocast=self._where.autocast,
            operators=operators,
            storages=storages,
            state=self._state_entries(places),
            anchors=tuple(self._where.anchors),
            ties=self._before.ties,
            parameters=parameters,
        )

    def _position(self) -> int:
        return len(self._operators)

    def _declare_inputs(self, previous: Any) -> None:
        """Make everything that lives at the boundary an input of the graph, and enter its storage."""
        for item in self._before.tensors:
            self._declare(item.tensor, item.name, item.kind)
            if item.kind == "parameter" and item.tensor.grad is not None:
                self._declare(item.tensor.grad, f"gradient of {item.name}", "gradient")
        for number, leaf in enumerate(pytree.tree_leaves(self._batch)):
            self._declare(leaf, f"batch.{number}", "input")
        for tensor in self._stand_ins.all():
            self._declare(tensor, "captured", "input")
            self._declare(tensor.grad, "gradient of a captured tensor", "gradient")
        for number, leaf in enumerate(pytree.tree_leaves(previous)):
            self._declare(leaf, f"result.{number}", "activation")

    def _declare(self, value: Any, name: str, kind: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._recorder.add_input(value, name)
            if not op.is_host_scalar(value):
                self._ledger.enter(value, name, kind, -1)

    def _name_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._ledger.rename(parameter.grad, f"gradient of {name}", "gradient")

    def _record_opaque_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = self._steps.opaque_parameters(optimizer)
        if parameters is not None:
            self._recorder.record_opaque(optimizer, parameters)

    def _state_entries(self, places: Mapping[int, int]) -> tuple[StateEntry, ...]:
        if [item.name for item in self._before.tensors] != [item.name for item in self._after.tensors]:
            odd = {item.name for item in self._before.tensors} ^ {item.name for item in self._after.tensors}
            raise TraceError(f"cannot trace {self._name}: its second iteration changes the set of state: {min(odd)}")
        first = {anchor.key for anchor in self._where.anchors}
        return tuple(
            self._state_entry(item, after.tensor, places, first)
            for item, after in zip(self._before.tensors, self._after.tensors, strict=True)
        )

    def _state_entry(
        self, item: StateTensor, after: torch.Tensor, places: Mapping[int, int], anchors: set[AnchorKey]
    ) -> StateEntry:
        tensor = item.tensor
        host = op.is_host_scalar(tensor)
        index = None if host else self._ledger.find(tensor)
        written = None if index is None else self._ledger.first_write(index)
        replaced = None if host else self._ledger.find(after)
        if index is not None and replaced is not None and replaced != index:  # another tensor took its place
            created = self._ledger.created(replaced)
            written = created if written is None else min(written, created)
        barrier = AnchorKey(AnchorKind.FORWARD, item.module)
        guarded = item.kind == "buffer" and written is None and barrier in anchors
        return StateEntry(
            name=item.name,
            kind=item.kind,
            shape=tuple(tensor.shape),
            dtype=_dtype(tensor),
            size_bytes=tensor.numel() * tensor.element_size(),
            placement="host" if host else "device",
            storage=None if index is None else places[index],
            first_write=written,
            barrier=barrier if guarded else None,
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator of the traced run. Works above make_fx's mode, whose graph names the operators."""

    def __init__(self, operators: list[Operator], ledger: StorageLedger, where: Whereabouts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._ledger, self._where = operators, ledger, where
        self._tracer: Any = None
        self._last: Node | None = None
        self.failed: OpOverload | None = None  # the operator that raised

    def begin(self, proxies: ProxyTorchDispatchMode) -> None:
        """The traced run begins: every operator stays in the graph, used or not, since eager training runs it."""
        self._tracer = proxies.tracer
        self._tracer.graph.eliminate_dead_code = lambda *_arguments, **_keywords: False

    def add_input(self, tensor: torch.Tensor, name: str) -> None:
        """Make a tensor an input of the graph, but no argument of the traced function, which would keep it alive."""
        target = self._tracer.graph._graph_namespace.create_name("".join(c if c.isalnum() else "_" for c in name), None)
        proxy = self._tracer.create_proxy("placeholder", target, (), {})
        track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)
        self._claim_nodes()

    def record_opaque(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """A step that cannot be traced: one operator reads gradients, and writes parameters and their state."""
        written = [*parameters]
        for parameter in parameters:
            written.extend(v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))
        updates = tuple((t, op.touched_bytes(t)) for t in written if not op.is_host_scalar(t))
        gradients = tuple((p.grad, op.touched_bytes(p.grad)) for p in parameters if p.grad is not None)
        kind = type(optimizer).__name__
        node = self._tracer.create_node(
            "call_function", torch.optim.Optimizer.step, (), {}, name=f"{kind.lower()}_step"
        )
        effect = op.Effects(reads=(*updates, *gradients), writes=updates, outputs=(), computes=True)
        if updates:
            self._append(node.name, f"{kind}.step", effect, 0)
        self._claim_nodes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        with torch._C.DisableTorchFunction():  # stand-ins are for the user's calls, not for what torch does below them
            if func.namespace in _NO_OPERATORS:
                return func(*args, **keywords)
            if op.is_composite(func):
                with self:
                    result = func.decompose(*args, **keywords)
                if result is not NotImplemented:
                    return result
            try:
                result = func(*args, **keywords)
                self._record(self._claim_nodes(func), func, args, keywords, result)
            except Exception:
                self.failed = self.failed or func
                raise
            return result

    def _record(self, node: str, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        effect = op.effects(func, args, keywords, result)
        if func is torch.ops.aten.lift_fresh.default or not (effect.reads or effect.writes):
            return
        self._where.note_forward()
        if effect.computes:
            self._append(node, str(func), effect, op.flops(func, args, keywords, result))
        else:
            for tensor, _ in effect.writes:
                self._ledger.enter(tensor, node, "activation", len(self._operators))

    def _append(self, name: str, target: str, effect: op.Effects, flops: int) -> None:
        index = len(self._operators)
        # A storage that was never seen before and is read now lived at the boundary: a value that the user keeps.
        reads = dict.fromkeys(self._ledger.enter(t, f"{name}.input", "input", -1) for t, _ in effect.reads)
        writes = dict.fromkeys(self._ledger.enter(t, name, "activation", index) for t, _ in effect.writes)
        for storage in reads:
            self._ledger.use(storage, index, writes=False)
        for storage in writes:
            self._ledger.use(storage, index, writes=True)
        self._operators.append(
            Operator(
                name=name,
                target=target,
                phase=self._where.phase,
                module=self._where.module(),
                dtype=op.compute_dtype(effect),
                flops=flops,
                read_bytes=sum(size for _, size in effect.reads),
                written_bytes=sum(size for _, size in effect.writes),
                reads=tuple(reads),
                writes=tuple(writes),
            )
        )

    def _claim_nodes(self, func: Any = None) -> str:
        """The name of the node that ``func`` made. The nodes lose their example values, which keep storages alive."""
        name, newest = "", None
        for node in reversed(self._tracer.graph.nodes):
            if node is self._last:
                break
            newest = newest or node
            name = node.name if node.target is func else name or node.name
            node.meta.clear()
        self._last = newest or self._last
        return name


def _renumbered(operator: Operator, places: Mapping[int, int]) -> Operator:
    """An operator with the final indices of its storages."""
    return Operator(
        **{
            **{field: getattr(operator, field) for field in Operator.__slots__},
            "reads": tuple(places[i] for i in operator.reads if i in places),
            "writes": tuple(places[i] for i in operator.writes if i in places),
        }
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _explain(name: str, error: Exception, failed: OpOverload | None) -> str:
    """One line: the operator, the user's source line, the reason, and what to change."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    line = _user_line(error)
    place = f" at {line}" if line else ""
    if isinstance(error, NEEDS_DATA):
        what = f"{failed} needs" if failed is not None else "it needs"
        return (
            f"cannot trace {name}: {what} the values of tensors{place}: move what depends on data (if, while, "
            f"data-dependent sizes) out of the training step, or compute it with torch.where ({reason})"
        )
    subject = f"{failed} raised" if failed is not None else "the training step raised"
    return f"cannot trace {name}: {subject} {type(error).__name__}{place}: {reason}"


def _user_line(error: Exception) -> str:
    """The innermost source line of a traceback that is neither torch's nor the planner's."""
    own = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__)), os.path.dirname(__file__))
    runner = checkflow.training_step.__file__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*own, "<")) and frame.filename != runner:
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return ""
