"""Fake tensors in the place of a training step's own, for the time of a trace.

Fake tensors have shapes, strides and storages but no data. While :func:`stand_in` is active, every parameter, buffer
and optimizer state inside the user's own module and optimizer objects is a fake one on the CPU, all in one
FakeTensorMode (a build of torch without CUDA cannot run autograd on fake CUDA tensors). Tensors that the step reaches
in other ways (a list of parameters in a closure, class weights) are replaced as they are used. When it ends, by an
error too, the user's objects hold what they held before.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from checkflow.errors import TraceError
from checkflow.planner.placement import CAPTURED, COPIED, HostMemory
from checkflow.training_step import TrainingStep

CPU = torch.device("cpu")


class StandIns(TorchFunctionMode):
    """The fake tensor of each of the user's tensors; as a mode, puts it in wherever the user's is used.

    The mode also keeps what the step creates on the CPU: a device that the step names is the trace's fake one.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.host = HostMemory(apart=apart)
        # Unbacked symbols for values that only data can tell, so that a mere .item() does not end the trace.
        self._symbols = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        # Without fallback: torch would run an operator that it cannot fake for real, on zeros of full size.
        self.mode = FakeTensorMode(shape_env=self._symbols, allow_fallback_kernels=False)
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id; the original is kept alive with its id
        self._storages: dict[int, torch.Tensor] = {}  # storages of several tensors: one fake base of bytes for each

    def forget_pending_symbols(self) -> None:
        """Symbols of a run without make_fx belong to no graph; the next run must not look for them."""
        self._symbols.pending_fresh_unbacked_symbols.clear()

    def all(self) -> list[torch.Tensor]:
        """Every fake tensor made so far."""
        return [fake for _, fake in self._fakes.values()]

    def of(self, tensor: torch.Tensor, *, captured: bool = False) -> torch.Tensor:
        """The stand-in of a tensor; the tensor itself if it is one of the trace's already.

        Args:
            captured: the tensor is none of the step's models, optimizers or batch: what it reaches in other ways.
        """
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        known = self._fakes.get(id(tensor))
        if known is None:
            shared = tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages
            with torch._C.DisableTorchFunction():
                known = self._fakes[id(tensor)] = (tensor, self._make(tensor))
            on_cpu = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.dim() > 0
            if captured and on_cpu and not shared:
                self.host.mark(known[1], CAPTURED)  # such as a buffer that the step copies into
            self.host.name_device(known[1])
        return known[1]

    def host_scalar(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a one-element tensor in host memory: a fake tensor that knows its value, as eager training
        does when it reads such a counter with ``.item()``. Without data the value is 1."""
        with torch._C.DisableTorchFunction():
            blank = tensor.is_meta or isinstance(tensor, FakeTensor)
            value = torch.ones_like(tensor, device=CPU) if blank else tensor.detach().to(CPU, copy=True)
            fake = self.mode.fake_tensor_converter.from_real_tensor(self.mode, value, make_constant=True)
            self.host.mark(fake, COPIED)
            self.host.name_device(fake)
        self._fakes[id(tensor)] = (tensor, fake)
        return fake

    def in_callbacks(self) -> contextlib.AbstractContextManager[None]:
        """A region in which the mode is active in the user's functions that autograd calls, if it is needed there."""
        return contextlib.nullcontext()

    def active_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the user's that autograd calls, with the mode active in it, if it is needed there."""
        return function

    def replace(self, value: Any) -> Any:
        """A structure (lists, tuples, dictionaries, …) with the stand-ins of its tensors."""
        return pytree.tree_map_only(torch.Tensor, self.of, value)

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor):
            raise TraceError(f"cannot trace a tensor of type {type(tensor).__name__}: pass the plain tensor")
        if tensor.layout is not torch.strided:
            raise TraceError(f"cannot trace a {tensor.layout} tensor: make it dense with .to_dense()")
        with self.mode, torch.no_grad():
            fake = self._memory(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
        for key, value in vars(tensor).items():
            if key not in vars(fake):
                setattr(fake, key, value)
        for hook in (tensor._backward_hooks or {}).values():
            fake.register_hook(self.active_in(hook))  # type: ignore[no-untyped-call]
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            # A hook that steps an optimizer in backward may look the user's own parameter up in a dictionary.
            called = self.active_in(hook)
            fake.register_post_accumulate_grad_hook(lambda _, hook=called: hook(tensor))  # type: ignore[no-untyped-call]
        return fake

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fake memory with the tensor's layout; views of one storage share one fake storage."""
        shape, strides, itemsize = tensor.shape, tensor.stride(), tensor.element_size()
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.numel() * itemsize and storage._cdata not in self._storages:
            whole = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=CPU)
            if whole.untyped_storage().nbytes() == storage.nbytes():
                self._storages[storage._cdata] = whole
                return whole
        base = self._storages.get(storage._cdata)
        if base is None:
            base = self._storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=CPU)
        if base.dtype is not tensor.dtype:
            flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
            base = flat.view(torch.uint8)[: storage.nbytes() // itemsize * itemsize].view(tensor.dtype)
        return base.as_strided(shape, strides, tensor.storage_offset())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return self.of(args[0])
        result = self.call(func, args, keywords)
        if isinstance(keywords.get("device"), torch.device):
            for made in pytree.tree_leaves(result):  # made for the device of other tensors: no host scalar
                if isinstance(made, FakeTensor):
                    made.constant = None
        return result

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Call with stand-ins, and the CPU for every device."""
        named = func is torch.Tensor.to  # the only method that takes a device's name by position
        arguments = [self._argument(value, named) for value in args]
        return func(*arguments, **{key: self._argument(value, key == "device") for key, value in keywords.items()})

    def _argument(self, value: Any, may_name_a_device: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value, captured=True)
        if isinstance(value, torch.device) or (
            may_name_a_device and isinstance(value, str | int) and value is not True
        ):
            return CPU if not isinstance(value, int) or isinstance(value, bool) else value
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            replaced = [self.of(item, captured=True) if isinstance(item, torch.Tensor) else item for item in value]
            return replaced if isinstance(value, list) else tuple(replaced)
        return value


@contextlib.contextmanager
def stand_in(step: TrainingStep, stand_ins: StandIns) -> Iterator[None]:
    """Put fake tensors in the place of all state inside ``step``'s models and optimizers; restore everything after.

    Restored are the attributes of every module, optimizer and stateful object (schedulers, scalers) that the step's
    function closes over, with the contents of their dictionaries and lists, and the random number generators. The
    user's tensors themselves, their ``.grad`` and their hooks are never touched.
    """
    holders = _holders(step)
    snapshots = [_Snapshot(held) for held in holders]
    try:
        with _random_states_kept():
            for held in holders:
                if isinstance(held, nn.Module):
                    _replace_in_module(held, stand_ins)
                elif isinstance(held, torch.optim.Optimizer):
                    _replace_in_optimizer(held, stand_ins)
            yield
    finally:
        for snapshot in reversed(snapshots):
            snapshot.restore()


class _Snapshot:
    """The attributes of an object, and the contents of those that are dictionaries, lists or sets."""

    def __init__(self, held: Any) -> None:
        self._attributes: dict[str, Any] = held if isinstance(held, dict) else vars(held)
        self._saved = dict(self._attributes)
        self._contents = [
            (value, value.copy()) for value in self._saved.values() if isinstance(value, dict | list | set)
        ]

    def restore(self) -> None:
        self._attributes.clear()
        self._attributes.update(self._saved)
        for container, content in self._contents:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


def _holders(step: TrainingStep) -> list[Any]:
    """Every object whose attributes the step may change: modules, optimizers, their groups, the function's own."""
    found: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if id(value) in found or isinstance(value, type | torch.Tensor):
            return
        if isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif isinstance(value, nn.Module):
            found.update((id(module), module) for module in value.modules())
        elif callable(getattr(value, "state_dict", None)) and hasattr(value, "__dict__"):
            found[id(value)] = value
            if isinstance(value, torch.optim.Optimizer):
                found.update((id(group), group) for group in value.param_groups)
            for attribute in list(vars(value).values()):
                visit(attribute)

    for value in (*step.models.values(), *step.optimizers.values(), *_reached_from(step.function)):
        visit(value)
    return list(found.values())


def _reached_from(function: Any) -> Iterator[Any]:
    """What a function can reach by its closure, its defaults, its bound object and the globals that it names."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_reached_from(function.func))
        return
    if (owner := getattr(function, "__self__", None)) is not None:
        yield owner
        yield from vars(owner).values() if hasattr(owner, "__dict__") else ()
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell: the name is not bound yet
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    yield from (scope[name] for name in getattr(code, "co_names", ()) if name in scope)


def _replace_in_module(module: nn.Module, stand_ins: StandIns) -> None:
    """Parameters and buffers; what a module holds elsewhere (nn.LSTM its weights in a list) is replaced in use."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for table in tables:
        for key, tensor in table.items():
            if tensor is not None:
                table[key] = stand_ins.of(tensor)


def _replace_in_optimizer(optimizer: torch.optim.Optimizer, stand_ins: StandIns) -> None:
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if parameter in state:
                optimizer.state[stand_ins.of(parameter)] = {
                    key: _optimizer_value(key, value, parameter, on_device, stand_ins)
                    for key, value in state[parameter].items()
                }
        group.update((key, stand_ins.replace(value)) for key, value in list(group.items()))


def _optimizer_value(key: str, value: Any, parameter: torch.Tensor, on_device: bool, stand_ins: StandIns) -> Any:
    """torch's step counters lie in host memory unless the optimizer is capturable or fused."""
    if not isinstance(value, torch.Tensor):
        return stand_ins.replace(value)
    elsewhere = value.device.type == "cpu" and parameter.device.type != "cpu"
    if value.dim() == 0 and not on_device and (key == "step" or elsewhere):
        return stand_ins.host_scalar(value)
    return stand_ins.of(value)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """A trace draws no number from the generators of torch, Python and numpy."""
    import numpy

    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
