"""Stands in for the C++ parts of DistributedDataParallel in a trace: its buckets, their all-reduces, its broadcasts.

Buckets are torch's own: made by size, after the first iteration in the order in which gradients were ready.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from checkflow.core.errors import TraceError
from checkflow.planner.model_file.several_ranks import UNSEEN

_FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
_split: Callable[..., Any] = torch.split
_assign: Callable[..., Any] = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]


@dataclass
class _Bucket:
    """The gradients that are reduced together."""

    parameters: list[torch.Tensor]
    flat: torch.Tensor
    views: list[torch.Tensor]
    missing: int = 0  # gradients that are not ready yet


@dataclass
class _Reducer:
    """One wrapped module, with fakes for its tensors."""

    wrapper: Any
    buckets: list[_Bucket] = field(default_factory=list)
    place: dict[int, tuple[_Bucket, int]] = field(default_factory=dict)  # by the parameter's id
    ready: list[torch.Tensor] = field(default_factory=list)  # parameters, in the order of their gradients
    reduces: bool = False  # in the backward that comes next
    reduced: bool = False  # a bucket, in this backward

    def parameters(self) -> list[torch.Tensor]:
        ignored = set(self.wrapper.parameters_to_ignore)
        named = self.wrapper.module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]

    def before_forward(self) -> None:
        wrapper = self.wrapper
        if wrapper.broadcast_buffers and wrapper.require_forward_param_sync:
            self._broadcast_buffers()

    def around_forward(self) -> Iterator[Any]:
        """Follow the module itself, where the step knows of no wrapper; yield the hooks."""
        yield self.wrapper.module.register_forward_pre_hook(lambda *_: self.before_forward())
        yield self.wrapper.module.register_forward_hook(lambda *_: self.after_forward())

    def after_forward(self) -> None:
        self.reduces = torch.is_grad_enabled() and self.wrapper.require_backward_grad_sync
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    @torch.no_grad()
    def gradient_ready(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self.reduces:
            return
        if gradient.layout is not torch.strided:
            raise TraceError(
                "DistributedDataParallel with sparse gradients is not planned: make the embedding with sparse=False"
            )
        if not self.buckets:
            self.ready.append(parameter)
            return
        bucket, index = self.place[id(parameter)]
        view = bucket.views[index]
        if gradient.untyped_storage()._cdata != view.untyped_storage()._cdata:
            torch.mul(gradient, 1 / self.wrapper.process_group.size(), out=view)
            if self.wrapper.gradient_as_bucket_view:
                parameter.grad = view
        bucket.missing -= 1
        if not bucket.missing:
            dist.all_reduce(bucket.flat, group=self.wrapper.process_group)
        if not self.reduced:
            self.reduced = True
            Variable._execution_engine.queue_callback(self._after_backward)

    @torch.no_grad()
    def make_buckets(self) -> None:
        """Make the buckets at the end of the first iteration."""
        if self.buckets:
            return
        wrapper = self.wrapper
        cap = wrapper.bucket_bytes_cap
        first = _FIRST_BUCKET_BYTES if wrapper.bucket_bytes_cap_default else cap
        limits = list(getattr(wrapper, "bucket_bytes_cap_list", ())) or [first, cap]
        rebuilt = wrapper.static_graph or not wrapper.find_unused_parameters
        ordered = self.ready if rebuilt else self.parameters()
        indices = _assign(ordered, limits, [False] * len(ordered))[0] if ordered else []
        for members in indices if rebuilt else reversed(indices):
            parameters = [ordered[index] for index in members]
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
            parts = zip(_split(flat, sizes), parameters, strict=True)
            bucket = _Bucket(parameters, flat, [part.view(parameter.shape) for part, parameter in parts])
            self.buckets.append(bucket)
            self.place.update((id(parameter), (bucket, index)) for index, parameter in enumerate(parameters))

    @torch.no_grad()
    def _after_backward(self) -> None:
        self.reduced = False
        if self.wrapper.gradient_as_bucket_view:
            return
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """As torch does: for each dtype one flat tensor, which is copied back on every rank."""
        ignored = set(self.wrapper.parameters_to_ignore)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for name, buffer in self.wrapper.module.named_buffers():
            if name not in ignored and buffer.numel():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, group=self.wrapper.process_group, group_src=0)
            for buffer, part in zip(buffers, _split(flat, [buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


class Reducers:
    """All DistributedDataParallel wrappers that a training step reaches."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
        for wrapper in wrappers:
            _refuse(wrapper)
        self._of = {id(wrapper): _Reducer(wrapper) for wrapper in wrappers}
        # A step that was written for the module inside calls that, though it is to be planned as if it were wrapped.
        self._unseen = {id(wrapper) for wrapper in wrappers if getattr(wrapper, UNSEEN, False)}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow one iteration; enter it after the anchors' hooks, which torch's reducer comes after."""
        if not self._of:
            yield
            return
        with contextlib.ExitStack() as handles:
            for reducer in self._of.values():
                for parameter in reducer.parameters():
                    handle = parameter.register_post_accumulate_grad_hook(reducer.gradient_ready)  # type: ignore[no-untyped-call]
                    handles.callback(handle.remove)
                if id(reducer.wrapper) in self._unseen:
                    for hook in reducer.around_forward():
                        handles.callback(hook.remove)
            handles.enter_context(_method(DistributedDataParallel, "_pre_forward", self._before_forward))
            handles.enter_context(_method(DistributedDataParallel, "_post_forward", self._after_forward))
            yield

    def conclude(self) -> None:
        """End the first iteration, which shows the order of gradients."""
        for reducer in self._of.values():
            reducer.make_buckets()

    def _before_forward(self, wrapper: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        self._of[id(wrapper)].before_forward()
        return inputs, keywords

    def _after_forward(self, wrapper: nn.Module, output: Any) -> Any:
        self._of[id(wrapper)].after_forward()
        return output


def _refuse(wrapper: Any) -> None:
    """Refuse what is not followed here, rather than plan it wrong."""
    if wrapper.mixed_precision is not None:  # which registers a hook too
        raise TraceError(
            "DistributedDataParallel with mixed_precision= is not planned: use torch.autocast, or fully_shard with "
            "MixedPrecisionPolicy"
        )
    if wrapper._comm_hooks:
        raise TraceError("DistributedDataParallel with a communication hook is not planned: register it after planning")


@contextlib.contextmanager
def _method(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method; the function gets the object as its first argument."""
    before = getattr(owner, name)
    setattr(owner, name, lambda self, *arguments, **keywords: function(self, *arguments, **keywords))
    try:
        yield
    finally:
        setattr(owner, name, before)
