"""Numbers that a training step reads from its tensors (``loss.item()``), which fake tensors cannot give.

A trace hands out ordinary numbers and tests, by another run with others, that they do not decide which operators run:
docs/explanation/tracing.md ("numbers read from tensors").
"""

from __future__ import annotations

import collections
import contextlib
import linecache
import logging
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from checkflow.core.errors import TraceError
from checkflow.core.state import dtype_name
from checkflow.planner.operators.operators import is_host_scalar, tensors_in

aten = torch.ops.aten
logger = logging.getLogger("checkflow")

# Methods that give the user's code a tensor's values. (float() and int() do, too, but only as plain numbers.)
NUMBER_METHODS: Final[frozenset[Any]] = frozenset(
    (
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero),
        *(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose),
    )
)
ARRAYS: Final[frozenset[Any]] = frozenset((torch.Tensor.numpy, torch.Tensor.__array__))
RECORD: Final = "let checkflow record a real iteration instead (Checkpointer(plan=None))"
ADVICE: Final = (
    "move what depends on data (if, while, data-dependent sizes) out of the training step, metrics and logging too, "
    f"compute it with torch.where, or {RECORD}"
)
# Neither 0.7, its logarithm nor 1 minus it is zero.
_USUAL: Final[Mapping[type, Any]] = {bool: False, float: 0.7, int: 1}
_PATIENCE = 10_000  # most reads or comparisons of one line: a loop that waits for a number never ends
_TORCH = os.path.dirname(torch.__file__) + os.sep
_WINGS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# Models are the user's, too.
_OURS = tuple(os.path.join(_WINGS, wing, "") for wing in ("planner", "runtime", "anchors", "core"))
# Torch's files that the user's calls pass on their way to a tensor.
_PASSAGES = frozenset(_TORCH + name for name in ("_tensor.py", "overrides.py", "_ops.py", "_compile.py"))


class NumberError(TraceError):
    """A number that depends on data decides which operators run; names the operator that gives it, and the place."""

    def __init__(self, operator: Any, place: str) -> None:
        super().__init__(f"{operator} needs the values of tensors at {place}")
        self.operator, self.place = operator, place


class UndecidedError(Exception):
    """A user's own optimizer decides upon a number that depends on data."""


class ReadNumbers:
    """The numbers that the step reads in one trace, and whether they matter."""

    def __init__(self) -> None:
        self.count = 0  # numbers handed out
        self.plain = False  # some of them as plain numbers, whose comparisons are not seen
        self.whole = False  # some of them as whole numbers
        self._other: Mapping[type, Any] = {}  # instead of the usual ones, in that iteration
        self._turned = False  # in the iteration that tries other numbers
        self._traced: list[tuple[Any, ...]] | None = None  # operators of the traced iteration, on which tensors
        self._state: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
        self._storages = _StorageNames(())
        self._tried = 0  # operators of the other one so far
        self._last: tuple[Any, str] | None = None  # operator and place of the newest number or decision
        self._odd: tuple[Any, str] | None = None  # where the iterations first differed
        self._decided: tuple[Any, str] | None = None  # operator and place of the newest decision of the user's
        self._in_step = False
        self._patience: collections.Counter[str] = collections.Counter()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], float]] = {}  # by address of the storage
        self._random: Any = None

    # The iterations of a trace

    def begin_traced(self, state: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Begin the traced iteration; ``state`` gives the current state tensors by name."""
        self._state = state
        self._forget_iteration()
        self._traced = []
        self._random = random.getstate()

    def try_others(self, iteration: Callable[[], Any], rewind: Callable[[], None]) -> None:
        """Run the iteration again with other numbers, if it read some.

        Raises NumberError, with the operator that gave the number and the place, if other operators ran. ``rewind``
        restores the user's numbers, flags and texts from before the traced iteration.
        """
        if not self.count:
            return
        others = [(0.001, 2), *([(100.0, 2)] if self.plain else ()), *([(0.001, 0)] if self.whole else ())]
        for real, whole in others:
            self._other = {bool: True, float: real, int: whole}
            rewind()
            random.setstate(self._random)
            self._forget_iteration()
            self._turned = True
            try:
                iteration()
            except NumberError:
                raise
            except Exception as error:  # noqa: BLE001 - an iteration that ends training; what ran before it counts
                logger.debug("the iteration with other numbers raised %s: %s", type(error).__name__, error)
            else:
                if self._odd is None and self._traced is not None and self._tried < len(self._traced):
                    self._odd = self._last
            finally:
                self._turned = False
            if self._odd is not None:
                raise NumberError(*self._odd)

    def note_operator(self, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Note an operator; in the iteration with other numbers it must be the traced one's."""
        if torch.Tag.data_dependent_output not in func.tags:  # reading a number changes nothing
            self.note(func, args, result)

    def note(self, what: object, args: Any, result: Any = None) -> None:
        """As :meth:`note_operator`, for anything done to a structure of tensors."""
        if self._traced is None:
            return
        place = self._tried if self._turned else len(self._traced)
        ran = (what, *self._storages.on(args, (place, "argument")), *self._storages.on(result, (place, "result")))
        if not self._turned:
            self._traced.append(ran)
        elif self._odd is None:
            if self._tried == len(self._traced) or self._traced[self._tried] != ran:
                self._odd = self._last
            self._tried += 1

    def blamed(self) -> tuple[Any, str] | None:
        """Operator and place of the newest made-up number that decided in the user's code: blame it for errors."""
        return self._decided

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Run an optimizer's step; UndecidedError if code outside torch decides upon numbers in it."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    # Reads

    def know(self, tensor: torch.Tensor, value: float) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._known[address] = (weakref.ref(storage, lambda _: self._known.pop(address, None)), value)

    def reads(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether an operator gives a number that fake tensors cannot."""
        if torch.Tag.data_dependent_output not in func.tags or func.namespace != "aten":
            return False
        kinds = {str(returned.type) for returned in func._schema.returns}
        return kinds <= {"Scalar", "number", "bool"} and not all(is_host_scalar(t) for t in tensors_in(list(args)))

    def read(self, func: OpOverload, args: tuple[Any, ...]) -> bool | int | float | complex:
        """Return an ordinary number for the one that the operator reads."""
        if func is not aten._local_scalar_dense.default:
            self._note(func)
            return False
        tensor: torch.Tensor = args[0]
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None:
            return known[1]
        self._note(func)
        return self._ordinary(tensor.dtype)

    def wrapped(self, value: Any) -> Any:
        """Wrap the numbers that a tensor's method gives, so that the user's comparisons of them are noticed."""
        if isinstance(value, list):
            return [self.wrapped(item) for item in value]
        if type(value) is bool:
            return self.decide(False)  # which is turned around there
        return _made(value, _USUAL.get(type(value)), self)

    def array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's values as an array without memory: one number everywhere."""
        import numpy

        kind = numpy.dtype(dtype_name(tensor.dtype))  # a TypeError for dtypes that numpy lacks, as in torch
        self._note(aten._local_scalar_dense.default)
        self.plain = True
        return numpy.broadcast_to(numpy.array(self._ordinary(tensor.dtype), dtype=kind), tuple(tensor.shape))

    def decide(self, outcome: bool) -> bool:
        """Return the truth of a comparison of a number that was read."""
        place, torchs = user_place()
        if torchs:
            return outcome
        if self._in_step:
            raise UndecidedError(place)
        self._note(self._last[0] if self._last is not None else aten._local_scalar_dense.default, place)
        self._decided = self._last
        return outcome is not self._turned

    def _ordinary(self, dtype: torch.dtype) -> bool | int | float | complex:
        numbers = self._other if self._turned else _USUAL
        if dtype.is_complex:
            return complex(numbers[float])
        kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
        self.whole |= kind is int
        return numbers[kind]  # type: ignore[no-any-return]

    def _note(self, func: Any, place: str | None = None) -> None:
        place = place or user_place()[0]
        self.count += 1
        self._last = (func, place)
        self._patience[place] += 1
        if self._patience[place] > _PATIENCE:
            raise NumberError(func, place)

    def _forget_iteration(self) -> None:
        self._patience.clear()
        self._tried = 0
        self._last = self._odd = None
        self._decided = None
        self._storages = _StorageNames(self._state())


class _StorageNames:
    """Names storages alike in each iteration: state by its name, others by where they first appear."""

    def __init__(self, state: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.UntypedStorage], Any]] = {}  # by address
        for name, tensor in state:
            for part in tensors_in(tensor):
                self._name(part.untyped_storage(), name)

    def on(self, structure: Any, place: tuple[int, str]) -> Iterator[tuple[Any, ...]]:
        """Yield shapes and storage names of tensors; new storages are numbered from this place."""
        tensors = (leaf for leaf in pytree.tree_leaves(structure) if torch.is_tensor(leaf))
        for number, tensor in enumerate(tensors):
            yield (
                tuple(tensor.shape),
                *(self._name(part.untyped_storage(), (*place, number)) for part in tensors_in(tensor)),
            )

    def _name(self, storage: torch.UntypedStorage, name: Any) -> Any:
        names, address = self._names, storage._cdata
        if address not in names:
            names[address] = weakref.ref(storage, lambda _: names.pop(address, None)), name
        return names[address][1]


def format_number(tensor: torch.Tensor, specification: str) -> str:
    """Format as torch does a tensor of one number."""
    return format(tensor.item() if tensor.dim() == 0 and specification else tensor, specification)


def user_place() -> tuple[str, bool]:
    """Return the user's innermost running source line, and whether torch's code runs for it."""
    torchs = False
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            torchs = torchs or file not in _PASSAGES
        elif not file.startswith((*_OURS, "<")):
            return f"{file}:{frame.f_lineno} ({linecache.getline(file, frame.f_lineno).strip()})", torchs
        frame = frame.f_back  # type: ignore[assignment]
    return "", torchs


class _MadeUp:
    """A number that a trace made up. Numbers computed from it are made up, too; comparisons are noted."""

    traced: Any  # its value in the traced iteration, whose comparisons are turned around
    reads: ReadNumbers


class _Real(float, _MadeUp):
    pass


class _Whole(int, _MadeUp):
    pass


def _made(value: Any, traced: Any, reads: ReadNumbers) -> Any:
    kind = {float: _Real, int: _Whole}.get(type(value))
    if kind is None:
        return value
    number: _MadeUp = kind(value)
    number.traced, number.reads = traced, reads
    return number


def _traced(value: Any) -> Any:
    return value.traced if isinstance(value, _MadeUp) else value


def _computed(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _MadeUp, *others: Any) -> Any:
        value = plain(self, *others)
        return value if value is NotImplemented else _made(value, _again(plain, self, others), self.reads)

    return method


def _compared(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _MadeUp, *others: Any) -> Any:
        outcome = _again(plain, self, others)
        return outcome if outcome is NotImplemented else self.reads.decide(outcome)

    return method


def _again(plain: Callable[..., Any], number: _MadeUp, others: tuple[Any, ...]) -> Any:
    """Repeat the operation as in the traced iteration, where the kind of number may differ."""
    operands = [type(number).__bases__[0](_traced(number)), *(_traced(other) for other in others)]
    return plain(*operands)


_COMPARISONS = ("__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__", "__bool__")
_TWOFOLD = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_ARITHMETIC = (
    *(f"__{reflected}{name}__" for name in _TWOFOLD for reflected in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__round__", "__trunc__", "__floor__", "__ceil__"),
)
_METHODS: Mapping[type, type] = {_Real: float, _Whole: int}
for _kind, _base in _METHODS.items():
    for _name in _COMPARISONS:
        setattr(_kind, _name, _compared(getattr(_base, _name)))
    for _name in _ARITHMETIC:
        setattr(_kind, _name, _computed(getattr(_base, _name)))
    _kind.__name__ = _kind.__qualname__ = _base.__name__  # for Python's messages
    _kind.__hash__ = _base.__hash__  # type: ignore[method-assign]
