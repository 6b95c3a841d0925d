"""What one operator of a trace does: the tensors it reads and writes, the bytes it touches of them, its flops.

Most of it comes from schemas. The tables below have the rest: silent updates of running statistics, operators that
overwrite without reading, and those that touch only some rows of a tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from checkflow.core.state import dtype_name
from checkflow.planner.operators import collectives
from checkflow.planner.operators.attention import ATTENTION_FLOPS
from checkflow.planner.operators.convolutions import CONVOLUTION_FLOPS, CONVOLUTIONS, has_fast_algorithm, relaid_bytes
from checkflow.planner.operators.sparse import is_sparse, parts

aten = torch.ops.aten

# Arguments that are written though the schema does not say so, and the argument that decides it (None: always).
HIDDEN_WRITES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "aten::native_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::cudnn_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::miopen_batch_norm": (("running_mean", "running_var"), "training"),
    "aten::batch_norm_update_stats": (("running_mean", "running_var"), None),
    "aten::batch_norm_gather_stats": (("running_mean", "running_var"), None),
    "aten::batch_norm_gather_stats_with_counts": (("running_mean", "running_var"), None),
    **{name: (arguments, None) for name, arguments in collectives.WRITTEN.items()},
}


def _named(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# In-place operators that overwrite ``self`` without reading it.
OVERWRITES = _named(
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ log_normal_ cauchy_ geometric_ "
    "_foreach_copy_ _foreach_zero_"
)
# Operators that read (write) only as much of their first argument as their output (their last tensor) holds.
LOOKUPS = _named("embedding index_select gather index take")
BAGS = _named("_embedding_bag _embedding_bag_forward_only")  # the same, a row for each index
SCATTERS = _named("index_put_ _index_put_impl_ scatter_ scatter_add_ index_add_ index_copy_")
# Operators that allocate without computing.
ALLOCATIONS = _named("empty empty_like empty_strided new_empty new_empty_strided empty_permuted")


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **_keywords: Any) -> int:
    """A two-dimensional matrix is cut into groups, so that each of its rows (columns) meets one matrix."""
    matrices = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * int(matrices * a.shape[-2] * a.shape[-1] * b.shape[-1])


FLOPS: Mapping[OpOverloadPacket, Callable[..., int]] = {
    **ATTENTION_FLOPS,
    **CONVOLUTION_FLOPS,
    aten._grouped_mm: _grouped_flops,
}


@dataclass(frozen=True, slots=True)
class Effects:
    """Tensors that an operator reads and writes, with the bytes that it touches of each."""

    reads: tuple[tuple[torch.Tensor, int], ...]
    writes: tuple[tuple[torch.Tensor, int], ...]  # outputs too
    outputs: tuple[torch.Tensor, ...]
    computes: bool  # False: views, metadata and bare allocations
    winograd: bool = False  # see checkflow.core.graph.Operator
    relaid_bytes: int = 0  # see checkflow.core.graph.Operator


@dataclass(frozen=True, slots=True)
class _Signature:
    """The parts of a schema that say what an overload writes."""

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    overwritten: frozenset[str]
    hidden: tuple[str, ...]
    hidden_if: str | None
    metadata_only: bool
    reads_data: bool  # returns a number that depends on data, such as item()
    rows_only: bool  # may touch only some rows of its first argument
    sends: bool  # to other ranks
    flops: Callable[..., Any] | None  # a formula: torch's, or our own

    def hidden_in(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the arguments that a call writes though the schema does not say so."""
        always = self.hidden_if is None or bool(arguments.get(self.hidden_if))
        return self.hidden if always else ()


@functools.cache
def _signature(func: OpOverload) -> _Signature:
    schema, packet = func._schema, func._overloadpacket
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    overwritten = {a.name for a in schema.arguments if a.is_out}
    if schema.name in OVERWRITES:
        overwritten |= written
    hidden, condition = HIDDEN_WRITES.get(schema.name, ((), None))
    if schema.name in collectives.WRITTEN and schema.name not in collectives.READ_TOO:
        overwritten |= set(hidden)
    return _Signature(
        schema.name,
        tuple(a.name for a in schema.arguments),
        frozenset(written),
        frozenset(overwritten),
        hidden,
        condition,
        torch.Tag.inplace_view in func.tags,
        torch.Tag.data_dependent_output in func.tags,
        schema.name in BAGS | LOOKUPS | SCATTERS or schema.name == "aten::add_",
        collectives.is_collective(func),
        FLOPS.get(packet) or flop_registry.get(packet),
    )


@functools.cache
def target_name(func: OpOverload) -> str:
    """Return a name such as "aten.convolution.default"."""
    return str(func)


def compares_constants(func: Any, args: Sequence[Any]) -> bool:
    """Whether torch.jit's optimizer compares two constants, given as numbers, which the operator itself rejects."""
    return func is aten.equal.default and not all(isinstance(value, torch.Tensor) for value in args)


def compare_constants(args: Sequence[Any]) -> bool:
    """Do the comparison that :func:`compares_constants` found."""
    with _disable_current_modes():
        one, other = (torch.as_tensor(value) for value in args)
        return one.dtype == other.dtype and torch.equal(one, other)


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Whether an operator returns only views of its arguments and leaves them unchanged."""
    returns = func._schema.returns
    if func._schema.name in HIDDEN_WRITES:
        return False
    only_views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    # A composite operator (``to``, ``reshape``) may be a view by its schema and still copy.
    return only_views and not func._schema.is_mutable and not is_composite(func)


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether torch runs other operators in its place, and devices have no kernel of their own for it.

    The fused backward of SiLU and Mish has one, which needs less memory than its parts.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(func._name, "CompositeImplicitAutograd") and not has_kernel(func._name, "CPU"))


def is_host_scalar(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in host memory whatever the target, such as Adam's step counters, so its value is known."""
    return isinstance(tensor, FakeTensor) and tensor.constant is not None


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results, lists included; of sparse ones the parts."""
    if isinstance(values, torch.Tensor):
        yield from parts(values)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """As :func:`tensors_in`, but faster: recording a live job calls it several times per operator."""
    if isinstance(value, torch.Tensor):
        return parts(value)
    return tuple(tensors_in(value)) if isinstance(value, list | tuple) else ()


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory behind a tensor, each counted once: an expanded dimension costs nothing."""
    if not isinstance(tensor, FakeTensor) and tensor.is_contiguous():  # the innermost loop of recording a live job
        return tensor.nbytes
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return min(int(elements) * tensor.element_size(), int(tensor.untyped_storage().nbytes())) if tensor.numel() else 0


def written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    signature = _signature(func)
    if signature.written or signature.hidden:
        bound = {**dict(zip(signature.arguments, args, strict=False)), **kwargs}
        for name in (*signature.written, *signature.hidden_in(bound)):
            yield from tensors_in(bound.get(name))


def effects(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    on_host: Callable[[torch.Tensor], bool] = is_host_scalar,
) -> Effects:
    """Return what ``func(*args, **kwargs)`` did when it gave ``result``. Leaves out tensors in host memory."""
    signature = _signature(func)
    bound = [*zip(signature.arguments, args, strict=False), *kwargs.items()]
    hidden = signature.hidden_in(dict(bound))
    reads: list[tuple[torch.Tensor, int]] = []
    writes: list[tuple[torch.Tensor, int]] = []
    inputs: list[torch.Tensor] = []
    for name, value in bound:
        for tensor in tensors_of(value):
            if on_host(tensor):
                continue
            inputs.append(tensor)
            size = touched_bytes(tensor)
            if name not in signature.overwritten:
                reads.append((tensor, size))
            if name in signature.written or name in hidden:
                writes.append((tensor, size))
    outputs = tuple([tensor for tensor in tensors_of(result) if not on_host(tensor)])
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
    mutates = (bool(writes) and not signature.metadata_only) or signature.sends
    computes = mutates or (bool(fresh) and signature.name not in ALLOCATIONS) or (signature.reads_data and bool(reads))
    writes.extend((tensor, touched_bytes(tensor)) for tensor in fresh)
    if signature.name == collectives.COPY_IN:  # it writes this rank's part, and reads as much
        writes[:] = [(tensor, min(size, sum(part for _, part in reads))) for tensor, size in writes]
    if signature.rows_only:
        added = signature.name == "aten::add_" and any(is_sparse(value) for _, value in bound)
        _restrict_to_rows(signature.name, reads, writes, inputs, scatters=added or signature.name in SCATTERS)
    found = Effects(tuple(reads), tuple(writes), outputs, computes)
    if func._overloadpacket in CONVOLUTIONS:
        fast, relaid = has_fast_algorithm(func, args, kwargs), relaid_bytes(inputs, outputs)
        return replace(found, winograd=fast, relaid_bytes=relaid)
    return found


def _restrict_to_rows(
    name: str,
    reads: list[tuple[torch.Tensor, int]],
    writes: list[tuple[torch.Tensor, int]],
    inputs: list[torch.Tensor],
    *,
    scatters: bool,
) -> None:
    if name in BAGS and len(inputs) > 1:
        weight, indices = inputs[:2]
        rows = indices.numel() * weight.shape[-1] * weight.element_size()
        reads[0] = (weight, min(reads[0][1], rows))
    elif name in LOOKUPS and reads and writes:
        reads[0] = (reads[0][0], min(reads[0][1], writes[-1][1]))
    elif scatters and reads and writes:
        rows = touched_bytes(inputs[-1])
        reads[0] = (reads[0][0], min(reads[0][1], rows))
        writes[0] = (writes[0][0], min(writes[0][1], rows))


def flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Count as ``torch.utils.flop_counter.FlopCounterMode`` does on CUDA: a multiply-add is 2, unknown operators 0.

    Exceptions: the backward of grouped convolutions, which it overcounts; attention with shared keys, unknown to it
    before torch 2.13; and grouped matrix products, unknown to it.
    """
    formula = _signature(func).flops
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def compute_dtype(effect: Effects) -> str:
    """Return the dtype an operator computes in: the first floating one of its results, else of its inputs."""
    first: torch.dtype | None = None
    for tensor, _ in (*effect.writes, *effect.reads):
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            return dtype_name(dtype)
        first = first or dtype
    assert first is not None
    return dtype_name(first)
