"""Which tensors of a trace lie in host memory, and which operators use the link between device and host.

All tensors are fake CPU ones, so what the step asks for decides; docs/explanation/tracing.md ("host memory") has the
rules.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

from checkflow.core.state import is_composite
from checkflow.planner.operators.operators import is_host_scalar, tensors_in, written

# Why a tensor lies in host memory. The first two are certain; the others may turn out to mean the device.
Reason = Literal["copied", "pinned", "cpu", "default", "captured"]
Place = frozenset[Reason]  # all reasons why it lies in host memory; empty: it lies on the device
DEVICE: Final[Place] = frozenset()
COPIED: Final[Place] = frozenset(("copied",))
PINNED: Final[Place] = frozenset(("pinned",))
NAMED: Final[Place] = frozenset(("cpu",))
DEFAULT: Final[Place] = frozenset(("default",))
CAPTURED: Final[Place] = frozenset(("captured",))

_COPIES = frozenset(("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"))
# Operators that mix both places on a GPU, too: copies, and those with indices or lengths in host memory.
_BOTH_PLACES = _COPIES | frozenset(
    f"aten::{name}"
    for name in (
        *("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "_ctc_loss"),
        *("_pack_padded_sequence", "_pack_padded_sequence_backward", "_cudnn_rnn", "_cudnn_rnn_backward"),
    )
)


@dataclass(frozen=True, slots=True)
class Crossing:
    """What an operator moves over the link."""

    to_host_bytes: int = 0
    waited_bytes: int = 0  # in either direction, by copies for which training waits


NO_CROSSING = Crossing()


def crossing(
    func: OpOverload,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    result: Any,
    on_host: Callable[[torch.Tensor], bool],
    waits: Callable[[torch.Tensor, torch.Tensor, bool], bool],
) -> Crossing:
    """Return what an operator moves over the link. ``waits``: for source, target and non_blocking, whether training
    waits.

    torch converts before a copy to the host and after one from it: a value crosses in the source's dtype to the host,
    in the destination's to the device.
    """
    if func._schema.name not in _COPIES:
        return NO_CROSSING
    bound = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **keywords}
    single = func._schema.name == "aten::_to_copy"
    sources = list(tensors_in(bound["self"] if single else bound["src"]))
    targets = list(tensors_in(result if single else bound["self"]))
    to_host = waited = 0
    for source, target in zip(sources, targets, strict=True):
        outwards = on_host(target)
        if on_host(source) == outwards:
            continue
        size = target.numel() * (source if outwards else target).element_size()
        to_host += size if outwards else 0
        waited += size if waits(source, target, bool(bound.get("non_blocking"))) else 0
    return Crossing(to_host, waited)


def _default_is_cpu() -> bool:
    try:
        return torch.get_default_device().type == "cpu"
    except (AssertionError, RuntimeError):  # set to a device that this machine lacks
        return False


class HostMemory:
    """The storages of a trace that lie in host memory.

    Without ``apart`` (a target that is not a GPU) only counters of known value count as such.
    """

    def __init__(self, *, apart: bool) -> None:
        self.apart = apart
        self._places: dict[int, Place] = {}  # by the address of the storage
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Storages on the device whose value is known, by address.
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._disproved: Place = DEVICE if _default_is_cpu() else DEFAULT
        self._concluded = False
        self._allocating: Place | None = None
        # torch.device objects compare by name; these are distinguished by identity.
        self._names: dict[Place, torch.device] = {}

    def conclude(self) -> None:
        """End the iteration that shows what the step means by its names."""
        self._concluded = True

    def place(self, tensor: torch.Tensor) -> Place:
        if is_composite(tensor):
            return self._common_place(list(tensors_in(tensor)))
        place = self._proved(self._places.get(tensor.untyped_storage()._cdata, DEVICE))
        counts = not place and is_host_scalar(tensor) and tensor.untyped_storage()._cdata not in self._known
        return COPIED if counts else place

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.place(tensor) != DEVICE

    def holds_storage(self, storage: torch.UntypedStorage) -> bool:
        return self._proved(self._places.get(storage._cdata, DEVICE)) != DEVICE

    def mark(self, tensor: torch.Tensor, place: Place) -> None:
        """Note where a tensor's storage lies, unless on the device."""
        if self.apart and place:
            self._note(tensor, place)

    def mark_counter(self, tensor: torch.Tensor) -> None:
        """Count a zero-dimensional tensor as host memory if the target has no separate one."""
        if not self.apart:
            self._note(tensor, COPIED)

    def mark_known(self, tensor: torch.Tensor) -> None:
        """Note that a tensor lies on the device although its value is known."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._known[address] = weakref.ref(storage, lambda _: self._known.pop(address, None))

    def name_device(self, tensor: torch.Tensor) -> None:
        """Make ``tensor.device`` say where the tensor lies, although all are fake CPU tensors."""
        if self.apart and isinstance(tensor, FakeTensor):
            tensor.fake_device = self._names.setdefault(self.place(tensor), torch.device("cpu"))

    def meant_by(self, device: Any) -> Place | None:
        """Return where a device that the step gives is; None: it says nothing."""
        if device is None or isinstance(device, bool):
            return None
        for place, name in self._names.items():
            if device is name:
                return self._proved(place)
        if isinstance(device, int) or torch.device(device).type != "cpu":
            return DEVICE
        # Once disproved, a string means nothing: torch makes its own counters for "cpu".
        return self._proved(NAMED) or (DEVICE if isinstance(device, torch.device) else None)

    def asked_by(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Place | None:
        """Return where a call wants what it allocates; remove ``pin_memory``, which fakes lack, from its arguments."""
        device = keywords.get("device")
        pinned = keywords.pop("pin_memory", None)
        place = self.meant_by(device)
        if func in _device_constructors():
            # save_on_cpu passes pin_memory as the planning machine can; False means host memory, too.
            if pinned is not None and (device is None or place == NAMED):
                return PINNED
            if device is None and not any(True for value in args for _ in tensors_in(value)):
                return DEFAULT
        return place

    @contextlib.contextmanager
    def allocating(self, place: Place | None) -> Iterator[None]:
        """Place what operators allocate in this region; None: where their inputs lie."""
        before, self._allocating = self._allocating, place
        try:
            yield
        finally:
            self._allocating = before

    def settle(self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> None:
        """Note where the results of an operator lie that has just run."""
        inputs = [tensor for value in (*args, *keywords.values()) for tensor in tensors_in(value)]
        self._settle_known(func, args, keywords, inputs, result)
        if not self.apart:
            return
        self._learn(func, inputs)
        place = self._common_place(inputs) if self._allocating is None else self._allocating
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        for made in tensors_in(result):
            if made.untyped_storage()._cdata not in known:
                self._settle(made, place)
            self.name_device(made)

    def crossing(self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> Crossing:
        """Return what an operator moves over the link; its results are settled already."""
        if not self.apart:
            return NO_CROSSING

        def waits(_source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> bool:
            # Whether a copy into pinned memory waits may depend on the planning machine (save_on_cpu).
            return not non_blocking and self.place(target) != PINNED

        return crossing(func, args, keywords, result, self.holds, waits)

    def _proved(self, place: Place) -> Place:
        return DEVICE if place & self._disproved else place

    def _settle_known(
        self, func: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any], inputs: Sequence[Any], result: Any
    ) -> None:
        """What is computed from known values on the device alone is known, too, and lies on the device.

        torch forgets the known value of a written tensor, except those in lists and hidden writes.
        """
        if any(tensor.untyped_storage()._cdata in self._known for tensor in inputs):
            for made in tensors_in(result):
                if is_host_scalar(made) and not self._allocating:
                    self.mark_known(made)
        if not all(is_host_scalar(tensor) for tensor in inputs):
            for tensor in written(func, args, keywords):
                if isinstance(tensor, FakeTensor) and tensor.constant is not None:
                    tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)

    def _settle(self, made: torch.Tensor, place: Place) -> None:
        if self._allocating == DEVICE and isinstance(made, FakeTensor):
            made.constant = None  # a known value must not make this a host scalar
        # torch makes its own counters without a device; what they meet proves nothing.
        self.mark(made, COPIED if place == DEFAULT and made.dim() == 0 else place)

    def _common_place(self, inputs: Sequence[torch.Tensor]) -> Place:
        """Return host memory if all inputs lie there."""
        places = [self.place(tensor) for tensor in inputs]
        return DEVICE.union(*places) if all(places) else DEVICE

    def _learn(self, func: OpOverload, inputs: Sequence[torch.Tensor]) -> None:
        """An operator that computes with both places shows that the step's names mean one device."""
        if self._concluded or func._schema.name in _BOTH_PLACES:
            return
        places = {self.place(tensor) for tensor in inputs if tensor.dim()}
        if len(places) > 1 and DEVICE in places:
            self._disproved = self._disproved.union(*places) - COPIED - PINNED

    def _note(self, tensor: torch.Tensor, place: Place) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._places[address] = place
        self._watches[address] = weakref.ref(storage, lambda _: self._forget(address))

    def _forget(self, address: int) -> None:
        del self._places[address], self._watches[address]
