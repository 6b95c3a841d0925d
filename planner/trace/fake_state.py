"""Replaces a training step's tensors by fake ones during a trace, and restores the user's objects afterwards.

All fakes lie on the CPU in one FakeTensorMode: a torch build without CUDA cannot run autograd on fake CUDA tensors.
State is replaced in the user's modules and optimizers, other tensors (a closure's, class weights) as they are used.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from checkflow.core.errors import TraceError
from checkflow.core.state import inner_tensors, is_composite
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.placement import CAPTURED, COPIED, HostMemory
from checkflow.planner.iteration.read_numbers import ARRAYS, NUMBER_METHODS, RECORD, ReadNumbers, format_number
from checkflow.planner.iteration.structures import with_tensors
from checkflow.planner.trace.lazy_modules import without_shape
from checkflow.planner.trace.packed_sequences import replacement
from checkflow.planner.trace.sharded_modules import on_parts, replace_sharded
from checkflow.planner.trace.user_state import UserState

CPU = torch.device("cpu")
_COUNTERS = frozenset(("step", "mu_product"))  # kept in host memory by torch's optimizers, per parameter
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # what ``tensor.data = other`` calls


class StandIns(TorchFunctionMode):
    """The fake tensor of each of the user's tensors; as a mode, substitutes it wherever the user's is used.

    The mode also keeps on the CPU what the step creates: a device that the step names is the trace's fake one.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.host = HostMemory(apart=apart)
        self.numbers = ReadNumbers()
        # Unbacked symbols for sizes that depend on data, so that a mere .nonzero() does not end the trace.
        self._symbols = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        # No fallback: torch would run an operator that it cannot fake on real zeros of full size.
        self.mode = FakeTensorMode(shape_env=self._symbols, allow_fallback_kernels=False)
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id; keeps the original alive, and so its id
        self._buffers: set[int] = set()  # ids of the originals
        self._storages: dict[int, torch.Tensor] = {}  # shared storages: one fake base of bytes for each

    def forget_pending_symbols(self) -> None:
        """Drop the symbols of a run without make_fx, so that the next run does not look for them in its graph."""
        self._symbols.pending_fresh_unbacked_symbols.clear()

    def all(self, models: Iterable[nn.Module]) -> list[torch.Tensor]:
        """Return every fake tensor made so far, but not buffers that their models have replaced."""
        held = {id(buffer) for model in models for buffer in model.buffers()}
        found = [fake for key, (_, fake) in self._fakes.items() if key not in self._buffers or id(fake) in held]
        return [fake for fake in found if not is_lazy(fake)]

    def of(self, tensor: torch.Tensor, *, captured: bool = False) -> torch.Tensor:
        """Return the stand-in of a tensor, or the tensor itself if it belongs to the trace already.

        ``captured``: it belongs to none of the step's models, optimizers or batch.
        """
        if self._is_stand_in(tensor):
            return tensor
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # a tensor of the trace, wrapped by torch.func
            return tensor
        known = self._fakes.get(id(tensor))
        if known is None:
            if is_lazy(tensor):
                return self._without_shape(tensor)
            shared = not is_composite(tensor) and tensor.untyped_storage()._cdata in self._storages
            with torch._C.DisableTorchFunction():
                known = self._fakes[id(tensor)] = (tensor, self._make(tensor))
            on_cpu = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.dim() > 0
            if captured and on_cpu and not shared:
                self.host.mark(known[1], CAPTURED)  # such as a buffer that the step copies into
            self.host.name_device(known[1])
        return known[1]

    def host_scalar(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a one-element tensor in host memory, whose value (1 without data) is known."""
        with torch._C.DisableTorchFunction():
            one = torch.ones(tensor.shape, dtype=tensor.dtype, device=CPU)
            fake = self.knowing(one if _is_blank(tensor) else tensor)
        self._fakes[id(tensor)] = (tensor, fake)
        return fake

    def knowing(self, value: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor in host memory whose values are known."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            fake = self._knowing(value)
            self.host.mark(fake, COPIED)
            self.host.name_device(fake)
        return fake

    def _lengths(self, values: Sequence[int]) -> torch.Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self.knowing(torch.tensor(values, device=CPU))

    def _knowing(self, value: torch.Tensor) -> torch.Tensor:
        copied = value.detach().to(CPU, copy=True)
        return self.mode.fake_tensor_converter.from_real_tensor(self.mode, copied, make_constant=True)

    def _counter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a one-element buffer on the device: known, from 0, while only known values go into it.

        Steps decide upon such (``n_averaged`` of AveragedModel, "initialised").
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            zero = torch.zeros(tensor.shape, dtype=tensor.dtype, device=CPU)
            fake = self._knowing(zero if _is_blank(tensor) else tensor)
            self.host.mark_known(fake)
            self.host.name_device(fake)
        for key, value in vars(tensor).items():
            if key not in vars(fake):
                setattr(fake, key, value)
        self._fakes[id(tensor)] = (tensor, fake)
        return fake

    def of_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        self._buffers.add(id(tensor))
        plain = type(tensor) in (torch.Tensor, nn.Buffer, FakeTensor) and tensor.layout is torch.strided
        if id(tensor) in self._fakes or not plain or tensor.numel() != 1 or tensor.requires_grad:
            return self.of(tensor)
        alone = tensor.untyped_storage().nbytes() == tensor.element_size()
        return self._counter(tensor) if alone else self.of(tensor)

    def in_callbacks(self) -> contextlib.AbstractContextManager[None]:
        """Keep the mode active in the user's functions that autograd calls, if needed."""
        return contextlib.nullcontext()

    def active_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the user's that autograd calls, so that the mode is active in it, if needed."""
        return function

    def _is_stand_in(self, tensor: torch.Tensor) -> bool:
        if type(tensor) in _PLAIN:
            return False
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self.mode
        if not is_traceable_wrapper_subclass(tensor):
            return False
        return all(self._is_stand_in(part) for part in inner_tensors(tensor).values())

    def replace(self, value: Any) -> Any:
        """Return a structure (lists, tuples, dictionaries, dataclasses, …) with the stand-ins of its tensors."""
        for leaf in pytree.tree_leaves(value, is_leaf=lambda node: isinstance(node, PackedSequence)):
            if isinstance(leaf, PackedSequence) and not _is_blank(leaf.batch_sizes):
                self._fakes[id(leaf.batch_sizes)] = (leaf.batch_sizes, self.knowing(leaf.batch_sizes))
        return with_tensors(value, self.of)

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode, torch.no_grad():
            fake = self._values(tensor)
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
            # A hook that steps an optimizer in backward may look up the user's own parameter.
            called = self.active_in(hook)
            fake.register_post_accumulate_grad_hook(lambda _, hook=called: hook(tensor))  # type: ignore[no-untyped-call]
        return fake

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for a tensor's values; if it consists of others, fakes for those."""
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            parts |= {name: self.of(part) for name, part in inner_tensors(tensor).items()}
            whole: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
            return whole
        if tensor.layout is torch.sparse_coo:
            with _disable_current_modes():
                indices, values = tensor._indices(), tensor._values()
            return torch.sparse_coo_tensor(self.of(indices), self.of(values), tensor.shape, check_invariants=False)
        kind = type(tensor)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            what = tensor.dtype if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
            raise TraceError(f"cannot trace a {what} tensor, which torch cannot fake: {RECORD}")
        if kind.__torch_dispatch__ is not _NO_DISPATCH and not isinstance(tensor, FakeTensor):
            raise TraceError(
                f"cannot trace a {kind.__name__}, which does operators in its own way: give its class "
                f"__tensor_flatten__ and __tensor_unflatten__, or {RECORD}"
            )
        fake = self._memory(tensor)
        fake = fake.conj() if tensor.is_conj() else fake
        return torch._neg_view(fake) if tensor.is_neg() else fake

    def _without_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a lazy module's tensor, which its first forward gives a shape."""
        with torch._C.DisableTorchFunction(), self.mode, torch.no_grad():
            fake = without_shape(tensor)
        self._fakes[id(tensor)] = (tensor, fake)
        return fake

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return fake memory with the tensor's layout; views of one storage share one fake storage."""
        shape, strides, itemsize = tensor.shape, tensor.stride(), tensor.element_size()
        if tensor.numel() * itemsize > sys.maxsize:  # torch would let the size overflow
            raise TraceError(f"a tensor of shape {list(shape)} has more bytes than memory has addresses")
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
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return self.of(args[0])
        keywords.pop("pin_memory", None)  # fakes have no pinned memory
        result = self.call(func, args, keywords)
        if isinstance(keywords.get("device"), torch.device):
            for made in pytree.tree_leaves(result):  # made like other tensors: no host scalar
                if isinstance(made, FakeTensor):
                    made.constant = None
        return result

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Call with stand-ins, and the CPU for every device."""
        if func is torch._C._nn._parse_to:  # _parse_to reads the arguments of nn.Module.to
            return func(*(_device(value) for value in args), **{key: _device(value) for key, value in keywords.items()})
        named = func is torch.Tensor.to  # the only method with a device as a positional argument
        arguments = [self._argument(value, named) for value in args]
        if func in ARRAYS:
            return self._as_array(arguments[0], force=bool(keywords.get("force")))
        if func is torch.Tensor.__format__:
            return format_number(arguments[0], arguments[1])
        given = {key: self._argument(value, key == "device") for key, value in keywords.items()}
        arguments = on_parts(func, arguments) or arguments
        function = replacement(func, tuple(arguments), self._lengths) or func
        read = self.numbers.count
        result = function(*arguments, **given)
        if func == _SET_DATA and isinstance(arguments[0], FakeTensor):
            arguments[0].constant = getattr(arguments[1], "constant", None)  # its old value is no longer known
        if self.numbers.count == read:
            return result
        if func in NUMBER_METHODS:
            return self.numbers.wrapped(result)
        self.numbers.plain = True
        return result

    def _as_array(self, tensor: torch.Tensor, *, force: bool) -> Any:
        if tensor.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.numbers.array(tensor)

    def _argument(self, value: Any, may_name_a_device: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value, captured=True)
        names_a_device = may_name_a_device and isinstance(value, str | int) and not isinstance(value, bool)
        if isinstance(value, torch.device) or names_a_device:
            return CPU
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            replaced = [self.of(item, captured=True) if isinstance(item, torch.Tensor) else item for item in value]
            return replaced if isinstance(value, list) else tuple(replaced)
        return value


def _device(value: Any) -> Any:
    """Convert a device; a number names an accelerator, whether it exists or not."""
    return torch.device("cuda", value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_blank(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def stand_in(step: TrainingStep, stand_ins: StandIns) -> Iterator[UserState]:
    """Replace all state inside ``step``'s models and optimizers by fake tensors; restore everything afterwards.

    Restores all that :class:`~checkflow.planner.trace.user_state.UserState` finds (which is yielded), and the random
    number generators. The user's tensors, their ``.grad`` and their hooks are never touched.
    """
    user_state = UserState(step)
    before = user_state.remember()
    try:
        with _random_states_kept():
            for held in user_state.objects:
                if isinstance(held, nn.Module):
                    _replace_in_module(held, stand_ins)
                elif isinstance(held, torch.optim.Optimizer):
                    _replace_in_optimizer(held, stand_ins)
            replace_sharded(user_state.modules, stand_ins.of)
            yield user_state
    finally:
        before.restore()


def _replace_in_module(module: nn.Module, stand_ins: StandIns) -> None:
    """Replace parameters and buffers; what a module holds elsewhere (nn.LSTM's list of weights) is replaced in use."""
    tables: tuple[tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]], ...] = (
        (module._parameters, stand_ins.of),
        (module._buffers, stand_ins.of_buffer),
    )
    for table, of in tables:
        for key, tensor in table.items():
            if tensor is not None:
                table[key] = of(tensor)


def _replace_in_optimizer(optimizer: torch.optim.Optimizer, stand_ins: StandIns) -> None:
    state = dict(optimizer.state)
    optimizer.state.clear()
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for owner, values in state.items():
        if id(owner) not in updated:  # kept for all parameters, under the optimizer's own key
            optimizer.state[owner] = stand_ins.replace(values)
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
    """Replace a value; torch's step counters lie in host memory unless the optimizer is capturable or fused."""
    if not isinstance(value, torch.Tensor):
        return stand_ins.replace(value)
    elsewhere = value.device.type == "cpu" and parameter.device.type != "cpu"
    if value.dim() == 0 and not on_device and (key in _COUNTERS or elsewhere):
        return stand_ins.host_scalar(value)
    return stand_ins.of(value)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the generators of torch, Python and numpy: a trace must not advance them."""
    import numpy

    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
