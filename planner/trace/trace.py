"""Training step -> TrainingGraph: torch.fx capture of one whole iteration in its steady state.

Runs the step twice on fake tensors, the second time under ``make_fx``; a third run tests numbers that the step reads.
docs/explanation/tracing.md describes it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode, make_fx
from torch.nn.parameter import is_lazy

import checkflow.core.training_step
from checkflow.core.errors import CheckflowError, TraceError
from checkflow.core.graph import AnchorKind, TrainingGraph
from checkflow.core.machine.device import ComputeCapability
from checkflow.core.state import (
    collect_state,
    host_counters,
    optimizer_implementation,
    refuse_closures,
    refuse_hidden_state,
)
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.hooks import deeper
from checkflow.planner.iteration.iteration import WatchedIteration
from checkflow.planner.iteration.optimizers import (
    NEEDS_DATA,
    OptimizerSteps,
    Target,
    foreach_on_fakes,
    fused_kernels_faked,
)
from checkflow.planner.iteration.read_numbers import ADVICE, RECORD, NumberError
from checkflow.planner.operators.attention import cuda_kernels
from checkflow.planner.trace.cuda_autocast import autocast_as_cuda, autocast_on_cpu
from checkflow.planner.trace.fake_device import DeviceStandIns
from checkflow.planner.trace.fake_state import CPU, StandIns, stand_in
from checkflow.planner.trace.op_recorder import OperatorRecorder, TakesFunctionsError
from checkflow.planner.trace.packed_sequences import lengths_faked
from checkflow.planner.trace.real_dispatch import autocast_cache
from checkflow.planner.trace.reducers import Reducers
from checkflow.planner.trace.torch_patches import torch_patched
from checkflow.planner.trace.user_state import UserState


def trace(
    step: TrainingStep, *, name: str, target: Target = "cuda", compute_capability: ComputeCapability | None = None
) -> TrainingGraph:
    """Trace one iteration of a training step.

    Nothing is computed or allocated, whatever device the step's tensors are on (``meta`` too), and the user's objects
    stay as they were. For a GPU, attention and dropout are traced in the kernels that a CUDA build of torch chooses
    (:mod:`checkflow.planner.operators.attention`), other operators in those of torch's CPU dispatch.

    Args:
        step: its models, optimizers and batch; its function is called two or three times.
        name: the user's name for the model.
        target: the kind of device to plan for; optimizers are traced in the implementation that it would choose.
        compute_capability: of that device, for "cuda"; None: unknown, taken for 8.0.

    Raises:
        TraceError: an operator cannot be traced, or the step itself fails; names the operator and the source line.
        UnsupportedError: the state has no dense memory of its own (see :func:`checkflow.core.state.collect_state`).
    """
    import torch._dynamo  # make_fx imports it; under the modes of a trace that import would be traced  # noqa: F401

    refuse_closures(step.optimizers)
    refuse_hidden_state(step.optimizers)
    if not _has_lazy_state(step):  # the first iteration gives it its shape
        collect_state(step.models, step.optimizers, of_a_rank=True)  # refuse state before replacing any
    implementations = tuple(
        (key, optimizer_implementation(optimizer, target)) for key, optimizer in step.optimizers.items()
    )
    stand_ins = DeviceStandIns() if target == "cuda" else StandIns()
    with stand_in(step, stand_ins) as user_state:
        steps = OptimizerSteps(step.optimizers.values(), target, stand_ins.numbers)
        tracing = _Tracing(step, name, stand_ins, steps, user_state)
        kernels = cuda_kernels(compute_capability) if target == "cuda" else contextlib.nullcontext()
        with _environment(stand_ins), kernels, fused_kernels_faked(), lengths_faked(), steps.in_place():
            tracing.run()
        return tracing.graph(implementations)


def _has_lazy_state(step: TrainingStep) -> bool:
    return any(is_lazy(tensor) for model in step.models.values() for tensor in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def _environment(stand_ins: StandIns) -> Iterator[None]:
    """Set up what must hold while the step runs: everything fake and on the CPU, gradients on, no random frees."""
    collecting = gc.isenabled()
    gc.disable()  # a collection would free storages at unpredictable moments
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),  # compiled regions show their operators
            torch._dynamo.config.patch(error_on_nested_fx_trace=False),
            deeper(4),  # make_fx more than doubles the frames of each call
            _quiet(logging.getLogger("torch._subclasses.fake_tensor")),  # it also raises what it logs
            torch_patched(),
            autocast_as_cuda() if isinstance(stand_ins, DeviceStandIns) else autocast_on_cpu(),
            foreach_on_fakes(),
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


class _Tracing:
    """One trace: the two runs of the step, and their results."""

    def __init__(
        self, step: TrainingStep, name: str, stand_ins: StandIns, steps: OptimizerSteps, user_state: UserState
    ) -> None:
        self._step, self._name, self._stand_ins, self._steps = step, name, stand_ins, steps
        self._user_state = user_state
        self._reducers = Reducers(user_state.modules)
        self._batch = stand_ins.replace(step.batch)
        self._iteration = WatchedIteration(
            step.models, step.optimizers, stand_ins.host, on_step=self._record_opaque_step
        )
        self._recorder = OperatorRecorder(self._iteration, stand_ins.host, stand_ins.numbers)

    def run(self) -> None:
        """Run the iteration that makes the steady state, then the traced one."""
        recorder, watched, numbers = self._recorder, self._iteration, self._stand_ins.numbers
        try:
            # A training loop holds what its last iteration returned until the next one returns.
            with watched.where.watching_threads(), self._reducers.watching(), recorder:
                previous = self._step.run(self._batch)
            with recorder:
                self._reducers.conclude()
            self._stand_ins.forget_pending_symbols()
            self._stand_ins.host.conclude()
            for optimizer in self._step.optimizers.values():
                for counter in host_counters(optimizer):
                    self._stand_ins.host.mark_counter(counter)
            steady = self._user_state.remember_plain()
            caching = torch.is_autocast_cache_enabled()
            with _use_lazy_graph_module(True):  # the graph is never run: needs no code

                def iteration() -> None:
                    nonlocal previous
                    proxies = get_proxy_mode()
                    assert isinstance(proxies, ProxyTorchDispatchMode)
                    with torch._C.DisableTorchFunction():
                        recorder.begin(proxies)
                        recorder.add_inputs(
                            watched.begin(self._batch, previous, self._stand_ins.all(self._step.models.values()))
                        )
                        recorder.enter_left_behind()
                    with (
                        watched.ledger.watching_sizes(),
                        watched.where.watching(),
                        self._reducers.watching(),
                        recorder,
                        autocast_cache(caching),
                    ):
                        previous = self._step.run(self._batch)
                    watched.end()

                make_fx(iteration, _allow_fake_constant=True)()
            recorder.end()

            def again() -> None:
                with self._reducers.watching(), recorder:
                    self._step.run(self._batch)

            numbers.try_others(again, steady.restore)
        except NumberError as error:
            raise TraceError(_needs_values(self._name, error.operator, error.place)) from error
        except CheckflowError:
            raise
        except Exception as error:
            watched.refuse_threads(self._name)  # other threads may be why it failed
            raise TraceError(_explain(self._name, error, recorder.culprit(error), numbers.blamed())) from error

    def _refuse_without_step(self) -> None:
        where = self._iteration.where
        stepped = any(anchor.key.kind is AnchorKind.OPTIMIZER_POST for anchor in where.anchors)
        if self._step.optimizers and not (stepped or where.steps_unseen):
            raise TraceError(
                f"cannot plan {self._name}: no optimizer stepped in the iteration that was traced: call "
                "optimizer.step() in the training step, or pass no optimizer"
            )

    def graph(self, implementations: tuple[tuple[str, str], ...]) -> TrainingGraph:
        graph = self._iteration.graph(self._name, self._batch, self._step.micro_batches, implementations)
        self._refuse_without_step()  # only if nothing else is wrong
        return graph

    def _record_opaque_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = self._steps.opaque_parameters(optimizer)
        if parameters is not None:
            self._recorder.record_opaque(optimizer, parameters)


def _explain(name: str, error: Exception, culprit: OpOverload | None, blamed: tuple[Any, str] | None) -> str:
    """Make one line: the operator, the user's source line, the reason, and what to change.

    ``blamed``: operator and place of a made-up number that decided before the error.
    """
    reason = _reason(error)
    line = user_line(error)
    place = f" at {line}" if line else ""
    if isinstance(error, UnsupportedOperatorException) or reason.startswith("There was no fake impl registered"):
        return (
            f"cannot trace {name}: {culprit or reason} has no fake implementation{place}: "
            f"register one with torch.library.register_fake, or {RECORD}"
        )
    if isinstance(error, TakesFunctionsError):
        return (
            f"cannot trace {name}: {reason}{place} takes functions, and runs operators unseen: write it as plain "
            f"Python or with torch.where, or, where it is compiled, {RECORD}"
        )
    if "is not tracked with proxy" in reason:  # torch's words for a size that came from nowhere
        return (
            f"cannot trace {name}: {culprit or 'it'} makes sizes that depend on data, as a jagged tensor does{place}: "
            f"{RECORD}"
        )
    if isinstance(error, NEEDS_DATA):
        because = f" ({reason})"
        return f"cannot trace {name}: {culprit or 'it'} needs the values of tensors{place}: {ADVICE}{because}"
    what, kind = culprit or "the training step", type(error).__name__
    if blamed is not None:
        because = f" (after that {what} raised {kind}{place}: {reason})"
        operator, line = blamed
        place = f" at {line}" if line else ""
        return f"cannot trace {name}: {operator} needs the values of tensors{place}: {ADVICE}{because}"
    return f"cannot trace {name}: {what} raised {kind}{place}: {reason} (where the step itself runs, {RECORD})"


def _needs_values(name: str, operator: Any, line: str) -> str:
    place, because = f" at {line}" if line else "", ""
    return f"cannot trace {name}: {operator} needs the values of tensors{place}: {ADVICE}{because}"


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def user_line(error: Exception) -> str:
    """Return a traceback's innermost source line that is neither torch's nor the planner's."""
    own = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    runner = checkflow.core.training_step.__file__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*own, "<")) and frame.filename != runner:
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return ""
