"""Runs optimizers as the target would, while their tensors are fake and on the CPU.

CUDA's default is foreach, the CPU's the for-loop: hundreds of operators differ. An optimizer whose step needs data
(SparseAdam, a user's own) becomes one opaque operator; eager training has no anchor inside of it anyway.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from checkflow.anchors.hooks import with_closure
from checkflow.core.errors import TraceError
from checkflow.core.state import foreach_option
from checkflow.planner.iteration.read_numbers import RECORD, ReadNumbers, UndecidedError
from checkflow.planner.operators.operators import is_host_scalar

Target = Literal["cuda", "cpu"]
# What a fake tensor raises where the next operator depends on data.
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    UndecidedError,
)


FUSED_STEPS = (
    torch.ops.aten._fused_sgd_,
    torch.ops.aten._fused_adam_,
    torch.ops.aten._fused_adamw_,
    torch.ops.aten._fused_adagrad_,
)


_STEADY = 2  # steps that a new optimizer has begun when the traced iteration runs


class OptimizerSteps:
    """The steps of a trace's optimizers; the untraced iteration shows which of them are opaque."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], target: Target, numbers: ReadNumbers) -> None:
        self._optimizers = list(optimizers)
        self._target, self._numbers = target, numbers
        self._opaque: set[int] = set()
        self._asgd_steps = {id(o): _steps_done(o) for o in self._optimizers if isinstance(o, torch.optim.ASGD)}
        self._stepping: list[torch.Tensor] | None = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Choose the target's implementation and wrap ``step``. The caller restores the attributes."""
        for optimizer in self._optimizers:
            if self._target == "cuda":
                _prefer_foreach(optimizer)
            optimizer.step = self._guarded(optimizer)  # type: ignore[method-assign]
        yield

    def opaque_parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
        """Return the parameters that the opaque step about to run updates; None for a traced optimizer."""
        return self._stepping if id(optimizer) in self._opaque else None

    def _guarded(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        own = optimizer.step
        kind = type(optimizer).__name__

        @functools.wraps(own)
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            if (evaluated := with_closure(arguments, keywords, _evaluated)) is not None:
                arguments, keywords = evaluated
            step = functools.partial(own, *arguments, **keywords)
            if id(optimizer) in self._opaque:
                return self._run_opaque(optimizer, step)
            try:
                self._know_averages(optimizer)
                with _capturable(optimizer, self._target), self._numbers.in_step():
                    return step()
            except NEEDS_DATA as error:
                if not _make_state(optimizer, step):
                    reason = str(error).partition("\n")[0]
                    raise TraceError(
                        f"cannot trace {kind}: its state is not known before it has run ({reason}): {RECORD}"
                    ) from error
                self._opaque.add(id(optimizer))
                return None

        return guarded

    def _know_averages(self, optimizer: torch.optim.Optimizer) -> None:
        """Declare ``mu`` known: ASGD's loop asks if it averages yet; it is one until step ``t0``, the millionth."""
        for group in optimizer.param_groups if id(optimizer) in self._asgd_steps else ():
            if self._asgd_steps[id(optimizer)] <= group["t0"]:
                for parameter in group["params"]:
                    if parameter in optimizer.state:
                        self._numbers.know(optimizer.state[parameter]["mu"], 1.0)

    def _run_opaque(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Any:
        """Run a step with nothing to update: only the hooks fire, and the pre-hook records the opaque operator."""
        lists = [group["params"] for group in optimizer.param_groups]
        self._stepping = [parameter for parameters in lists for parameter in parameters if parameter.grad is not None]
        self._numbers.note("step", self._stepping)
        try:
            for group in optimizer.param_groups:
                group["params"] = []
            return step()
        finally:
            self._stepping = None
            for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = parameters


def _evaluated(closure: Callable[..., Any]) -> Callable[..., Any]:
    """Run a step's closure now: its forward and backward are traced as usual."""
    with torch.enable_grad():
        result = closure()
    return lambda: result


def _steps_done(optimizer: torch.optim.Optimizer) -> int:
    counters = (state["step"] for state in optimizer.state.values())
    return max((int(counter.constant) for counter in counters if is_host_scalar(counter)), default=_STEADY)


@contextlib.contextmanager
def fused_kernels_faked() -> Iterator[None]:
    """Add fake kernels for fused steps that torch lacks; they work in place, so there is nothing to fake."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for packet in FUSED_STEPS:
            for overload in packet.overloads():  # type: ignore[no-untyped-call]
                func = getattr(packet, overload)
                updates_in_place = func._schema.is_mutable and not func._schema.returns
                if updates_in_place and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):
                    library.impl(func, lambda *_arguments, **_keywords: None, "Meta")
        yield


@contextlib.contextmanager
def foreach_on_fakes() -> Iterator[None]:
    """Let gradients be clipped by foreach operators, as plain tensors are: fake ones stand for them."""
    plain: list[type] = torch.utils._foreach_utils._foreach_supported_types  # type: ignore[assignment]
    plain.append(FakeTensor)
    try:
        yield
    finally:
        plain.remove(FakeTensor)


def _prefer_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Apply torch's default on CUDA (``_default_to_fused_or_foreach``), which looks at devices that are fake here."""
    for group in optimizer.param_groups:
        open_choice = foreach_option(optimizer, group) is None
        tensor_rate = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
        if open_choice and not (group.get("fused") or group.get("differentiable") or tensor_rate):
            group["foreach"] = True


@contextlib.contextmanager
def _capturable(optimizer: torch.optim.Optimizer, target: Target) -> Iterator[None]:
    """Allow capturable parameters on the CPU, where fakes are: torch accepts them only while compiling."""
    if target == "cuda" and any(group.get("capturable") for group in optimizer.param_groups):
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before
    else:
        yield


def _make_state(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> bool:
    """Make a step that fails create the state of every parameter, one by one; return whether it did."""

    def has_state(parameter: torch.Tensor) -> bool:
        return any(isinstance(value, torch.Tensor) for value in optimizer.state.get(parameter, {}).values())

    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    missing = [
        (group, parameter)
        for group, parameters in zip(groups, lists, strict=True)
        for parameter in parameters
        if parameter.grad is not None and not has_state(parameter)
    ]
    try:
        for group in groups:
            group["params"] = []
        for group, parameter in missing:
            group["params"] = [parameter]
            with contextlib.suppress(*NEEDS_DATA):
                step()
            group["params"] = []
    finally:
        for group, parameters in zip(groups, lists, strict=True):
            group["params"] = parameters
    return all(has_state(parameter) for _, parameter in missing)
