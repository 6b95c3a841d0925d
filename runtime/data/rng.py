"""Python's, NumPy's and torch's generators, the ones of the process that samples and samplers draw from: seeding them,
and putting them back as they were.

Both are done so often, at each sample and at each batch of the main process, that they must cost microseconds. Asking
Python's generator for its state takes 10 of them and setting it 3, and more where its 625 numbers have left the cache;
NumPy's take 40 to 90 each. So the two twisters are copied as the bytes that they are: NumPy's by the address that NumPy
gives for it (``BitGenerator.ctypes``), Python's where it lies in its object, of which it is all there is. Both are
tried at import; where they do not lie so, states are asked for and set as usual.

What ``numpy.random.default_rng()`` makes belongs to whoever made it, and is not seen here.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

try:
    import numpy
except ImportError:  # torch does without it
    numpy = None  # type: ignore[assignment]

Reseed = Callable[[int], object]
_Bytes = ctypes.Array[ctypes.c_char]
_TWISTER_BYTES = 4 * 624 + 4  # words, and the place among them


class _PythonGenerator:
    """The one behind the functions of ``random``."""

    def __init__(self) -> None:
        self.instance: Any = random._inst
        self._twister = _memory_of(self.instance, _random.Random) if _twister_of_python_is_known() else None

    def state(self) -> tuple[Any, ...]:
        """The twister and the second normal number, or what Python tells of them."""
        if self._twister is None:
            return self.instance.getstate()  # type: ignore[no-any-return]
        return self._twister.raw, self.instance.gauss_next

    def set_state(self, state: tuple[Any, ...]) -> None:
        if self._twister is None:
            self.instance.setstate(state)
        else:
            self._twister.raw, self.instance.gauss_next = state


class _NumPyGenerator:
    """The ``RandomState`` behind the functions of ``numpy.random``."""

    def __init__(self) -> None:
        self._module: Any = numpy.random
        instance = self._module.mtrand._rand
        self._reseed = instance.seed
        self._memory = _memory_of(instance, type(instance))
        self._known = _twister_of_numpy_is_known()
        self._bits: Any = None  # the bit generator that it draws from
        self._twister: _Bytes | None = None  # of that, if it has one
        self._blank: bytes | None = None  # the instance's memory, with these bits and without a second normal number

    def seed(self, seed: int) -> None:
        try:
            self._reseed(seed)
        except TypeError:  # someone has set another bit generator than a twister
            self._module.seed(seed)
            self._module.set_bit_generator(self._module.get_bit_generator())  # forgets a second normal number

    def state(self) -> tuple[Any, Any]:
        """The bit generator, and its twister's bytes, or what NumPy tells of it."""
        if self._twister is not None and self._memory.raw == self._blank:
            return self._bits, self._twister.raw
        bits = self._module.get_bit_generator()
        self._look_at(bits)
        state = self._module.get_state(legacy=False)
        if self._twister is None or state["has_gauss"]:
            return bits, state
        self._blank = self._memory.raw
        return bits, self._twister.raw

    def set_state(self, state: tuple[Any, Any]) -> None:
        bits, told = state
        if bits is not self._bits or self._memory.raw != self._blank:
            self._module.set_bit_generator(bits)  # forgets a second normal number
        if not isinstance(told, bytes):
            self._module.set_state(told)
            return
        self._look_at(bits)
        assert self._twister is not None  # it was taken from there
        with bits.lock:
            self._twister.raw = told

    def _look_at(self, bits: Any) -> None:
        if bits is not self._bits:
            self._bits, self._blank = bits, None
            self._twister = _twister_of(bits) if self._known and type(bits) is self._module.MT19937 else None


def _memory_of(one: Any, kind: type) -> _Bytes:
    """What an object holds in itself as one of this kind, behind the header; valid while it lives."""
    header = object.__basicsize__
    return (ctypes.c_char * (kind.__basicsize__ - header)).from_address(id(one) + header)


def _twister_of(bits: Any) -> _Bytes:
    return (ctypes.c_char * _TWISTER_BYTES).from_address(bits.ctypes.state_address)


def _twister_of_python_is_known() -> bool:
    """Whether it is all that such a generator holds, no pointers beside it, and copying it copies the generator."""
    held = _random.Random.__basicsize__ - object.__basicsize__
    if sys.implementation.name != "cpython" or not _TWISTER_BYTES <= held < _TWISTER_BYTES + 8:
        return False
    one, other = random.Random(1), random.Random(2)
    one.random()
    _memory_of(other, _random.Random).raw = _memory_of(one, _random.Random).raw
    return one.getstate() == other.getstate() and one.random() == other.random()


def _twister_of_numpy_is_known() -> bool:
    """Whether it lies at its address, and a second normal number, and nothing of a draw, is seen in its owner."""
    bits = numpy.random.MT19937(0)
    one = numpy.random.RandomState(bits)
    memory = _memory_of(one, type(one))
    blank = memory.raw
    one.random_sample()
    same = memory.raw == blank
    one.standard_normal()
    held = memory.raw != blank
    one.standard_normal()
    told: Any = one.get_state(legacy=False)["state"]
    words = told["key"].astype(numpy.uint32).tobytes() + int(told["pos"]).to_bytes(4, sys.byteorder)
    return same and held and memory.raw == blank and _twister_of(bits).raw == words


_python = _PythonGenerator()
_seed_python = _random.Random.seed
_torch = torch.default_generator
_numpy = None if numpy is None else _NumPyGenerator()


def seed_generators(seed: int, reseed: Reseed | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, and what ``reseed`` seeds.

    Args:
        seed: of 63 bits, which should be those of a hash: all of them decide what Python's generator gives; torch's
            twister is seeded with the lower 32, as all of torch's are, and NumPy's with the upper 32. So two seeds out
            of ``n`` agree in all that one of these gives with a chance of some n² / 2^33, and in what both give, or
            Python's, with one of some n² / 2^64. Torch's and NumPy's seed a twister in the same way: had both the same
            32 bits, their numbers would be the same.
    """
    python = _python.instance
    _seed_python(python, seed)  # as ``random.seed`` does for a whole number, in a third less time
    python.gauss_next = None
    _torch.manual_seed(seed)
    if _numpy is not None:
        _numpy.seed(seed >> 31 & 0xFFFFFFFF)
    if reseed is not None:
        reseed(seed)


def generator_states() -> tuple[Any, ...]:
    """The generators as they are, in this process: for :func:`set_generator_states`."""
    return _python.state(), _torch.get_state(), None if _numpy is None else _numpy.state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Put them back."""
    python, of_torch, of_numpy = states
    _python.set_state(python)
    _torch.set_state(of_torch)
    if _numpy is not None:
        _numpy.set_state(of_numpy)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """All generators of the process are afterwards as they were before."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)
