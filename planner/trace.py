"""Training step -> TrainingGraph: torch.fx capture of one whole iteration in its steady state.

The step runs twice on fake tensors. The first run is not traced: it makes what is made lazily (optimizer state) and
leaves the gradients that every later iteration finds. The second runs under ``make_fx``, with parameters, buffers,
optimizer state and those gradients as inputs of the graph; a dispatch mode above it notes for every operator what it
reads and writes, and for every storage when eager training frees it (:mod:`checkflow.planner.lifetimes`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

import checkflow.training_step
from checkflow.errors import CheckflowError, TraceError
from checkflow.graph import AnchorKey, AnchorKind, Operator, StateEntry, TrainingGraph
from checkflow.planner import operators as op
from checkflow.planner.faking import CPU, StandIns, autocast_on_cpu, stand_in
from checkflow.planner.hooks import Whereabouts
from checkflow.planner.lifetimes import StorageLedger
from checkflow.planner.moving import DeviceStandIns
from checkflow.planner.optimizers import NEEDS_DATA, OptimizerSteps, Target, fused_kernels_faked
from checkflow.planner.recording import OperatorRecorder
from checkflow.state import StateTensor, TrainingState, collect_state, optimizer_implementation
from checkflow.training_step import TrainingStep


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
    stand_ins = DeviceStandIns() if target == "cuda" else StandIns()
    with stand_in(step, stand_ins):
        steps = OptimizerSteps(step.optimizers.values(), target)
        session = _Session(step, name, stand_ins, steps)
        with _environment(stand_ins), fused_kernels_faked(), steps.in_place():
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
            torch.compiler.set_stance("force_eager"),  # compiled regions show their operators
            torch._dynamo.config.patch(error_on_nested_fx_trace=False),
            _quiet(logging.getLogger("torch._subclasses.fake_tensor")),  # what it logs, it raises
            autocast_on_cpu(),
            stand_ins.mode,
            CPU,
            stand_ins.in_callbacks(),
            stand_ins,
        ):
            yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


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
        self._host = stand_ins.host
        self._recorder = OperatorRecorder(self._operators, self._ledger, self._where, self._host)
        self._before = self._after = TrainingState((), ())

    def run(self) -> None:
        """Run the iteration that makes the steady state, then the one that is traced."""
        recorder = self._recorder
        try:
            # A training loop holds what its last iteration returned until the next one returns.
            with recorder:
                previous = self._step.run(self._batch)
            self._before = collect_state(self._step.models, self._step.optimizers)
            self._stand_ins.forget_pending_symbols()
            self._host.conclude()
            with _use_lazy_graph_module(True):  # the graph is read, never run: no code need be made of it

                def iteration() -> None:
                    nonlocal previous
                    proxies = get_proxy_mode()
                    assert isinstance(proxies, ProxyTorchDispatchMode)
                    with torch._C.DisableTorchFunction():
                        recorder.begin(proxies)
                        self._declare_inputs(previous)
                        recorder.enter_left_behind()
                    with self._where.watching(), recorder:
                        previous = self._step.run(self._batch)
                    self._ledger.close()

                make_fx(iteration, _allow_fake_constant=True)()
            self._after = collect_state(self._step.models, self._step.optimizers)
        except CheckflowError:
            raise
        except Exception as error:
            raise TraceError(_explain(self._name, error, recorder.culprit(error))) from error

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
        for number, leaf in enumerate(pytree.tree_leaves(self._batch)):
            self._declare(leaf, f"batch.{number}", "input")
        for item in self._before.tensors:  # after the batch, whose indices a sparse gradient may hold
            if item.kind == "parameter":
                self._declare(item.tensor.grad, f"gradient of {item.name}", "gradient")
        for tensor in self._stand_ins.all():
            self._declare(tensor, "captured", "input")
            self._declare(tensor.grad, "gradient of a captured tensor", "gradient")
        for number, leaf in enumerate(pytree.tree_leaves(previous)):
            self._declare(leaf, f"result.{number}", "activation")

    def _declare(self, value: Any, name: str, kind: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._recorder.add_input(value, name)
            for part in op.tensors_in(value):
                if not self._host.holds(part):
                    self._ledger.enter(part, name, kind, -1)

    def _name_gradient(self, name: str, parameter: torch.Tensor) -> None:
        for part in op.tensors_in(parameter.grad):
            self._ledger.rename(part, f"gradient of {name}", "gradient")

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
        host = self._host.holds(tensor)
        index = None if host else self._ledger.find(tensor)
        written = None if index is None else self._first_write(index, after)
        # A module may write its buffers without being seen, so none passes its forward, which the runtime guards.
        barrier = AnchorKey(AnchorKind.FORWARD, item.module)
        guarded = item.kind == "buffer" and not host and barrier in anchors
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

    def _first_write(self, index: int, after: torch.Tensor) -> int | None:
        """The first write to a state tensor's storage, or to the one that has taken its place when the iteration ends.

        One that lived at the boundary already (statistics with two buffers, which are exchanged) is written as any
        other; one that is made in the iteration is written when it is made, by the last operator at the latest.
        """
        writes = [self._ledger.first_write(index)]
        successor = self._ledger.find(after)
        if successor is not None and successor != index:
            created = self._ledger.created(successor)
            last = len(self._operators) - 1
            writes.append(min(created, last) if created >= 0 else self._ledger.first_write(successor))
        return min((write for write in writes if write is not None and write >= 0), default=None)


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


def _explain(name: str, error: Exception, culprit: OpOverload | None) -> str:
    """One line: the operator, the user's source line, the reason, and what to change."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    line = _user_line(error)
    place = f" at {line}" if line else ""
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"cannot trace {name}: {culprit or reason} has no fake implementation{place}: "
            "register one with torch.library.register_fake"
        )
    if isinstance(error, NEEDS_DATA):
        return (
            f"cannot trace {name}: {culprit or 'it'} needs the values of tensors{place}: move what depends on data "
            f"(if, while, data-dependent sizes) out of the training step, or compute it with torch.where ({reason})"
        )
    return f"cannot trace {name}: {culprit or 'the training step'} raised {type(error).__name__}{place}: {reason}"


def _user_line(error: Exception) -> str:
    """The innermost source line of a traceback that is neither torch's nor the planner's."""
    own = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    runner = checkflow.training_step.__file__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*own, "<")) and frame.filename != runner:
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return ""
