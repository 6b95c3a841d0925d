"""Python's, NumPy's and torch's generators, the ones of the process that samples and samplers draw from: seeding them,
and putting them back as they were.

Both are done so often, at each sample and at each batch of the main process, that they must cost microseconds. Asking
Python's generator for its state costs 12 of them, NumPy's 40 to 90, and the same again to set it. So their memory is
looked at: Python's is asked only if it has changed since it was put back, and NumPy's twister is copied by the address
that NumPy gives for it (``BitGenerator.ctypes``). Memory is only read, but for that copy. Where it does not lie as
CPython and NumPy lay it today, which is tried at import, states are asked for as usual.

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
_TWISTER_BYTES = 4 * 624 + 4  # words, and the place among them


class _PythonGenerator:
    """The one behind the functions of ``random``, or another."""

    def __init__(self, instance: random.Random | None = None) -> None:
        self._instance: random.Random = instance or random.seed.__self__  # type: ignore[attr-defined]
        self._memory = _memory_of(self._instance)
        self._known: tuple[bytes, tuple[Any, ...]] | None = None  # a state, and the memory that goes with it

    def seed(self, seed: int) -> None:
        """As ``random.seed`` does for a whole number, in a third less time."""
        _random.Random.seed(self._instance, seed)
        self._instance.gauss_next = None  # type: ignore[attr-defined]

    def state(self) -> tuple[Any, ...]:
        if self._known is None or self._memory.raw != self._known[0]:
            state = self._instance.getstate()
            if _MEMORY_TELLS_OF_PYTHON:
                self._known = self._memory.raw, state
            return state
        version, words, gauss_next = self._known[1]
        now = self._instance.gauss_next  # type: ignore[attr-defined]
        return self._known[1] if now is gauss_next else (version, words, now)

    def set_state(self, state: tuple[Any, ...]) -> None:
        self._instance.setstate(state)
        if _MEMORY_TELLS_OF_PYTHON:
            self._known = self._memory.raw, state


class _NumPyGenerator:
    """The ``RandomState`` behind the functions of ``numpy.random``."""

    def __init__(self) -> None:
        self._module: Any = numpy.random
        self._state = self._module.set_state.__self__
        self._reseed = self._state.seed
        self._memory = _memory_of(self._state)
        self._bits: Any = None  # the bit generator that it draws from
        self._blank: bytes | None = None  # its own memory, when it held no second normal number

    def seed(self, seed: int) -> None:
        try:
            self._reseed(seed)
        except TypeError:  # someone has set another bit generator than a twister
            self._module.seed(seed)
            self._module.set_bit_generator(self._module.get_bit_generator())  # forgets a second normal number

    def state(self) -> tuple[Any, Any]:
        """The bit generator, and its twister's bytes, or what NumPy tells of it."""
        bits = self._module.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._blank = bits, None
        if self._blank is not None and self._memory.raw == self._blank:
            return bits, _twister(bits).raw
        state = self._module.get_state(legacy=False)
        if _MEMORY_TELLS_OF_NUMPY and type(bits) is self._module.MT19937 and not state["has_gauss"]:
            self._blank = self._memory.raw
        return bits, state

    def set_state(self, state: tuple[Any, Any]) -> None:
        bits, told = state
        self._module.set_bit_generator(bits)  # forgets a second normal number
        if isinstance(told, bytes):
            with bits.lock:
                ctypes.memmove(bits.ctypes.state_address, told, _TWISTER_BYTES)
        else:
            self._module.set_state(told)


def _memory_of(one: Any) -> ctypes.Array[ctypes.c_char]:
    """What lies in an object itself, behind the header; valid while the object lives."""
    header = object.__basicsize__
    return (ctypes.c_char * (type(one).__basicsize__ - header)).from_address(id(one) + header)


def _twister(bits: Any) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _TWISTER_BYTES).from_address(bits.ctypes.state_address)


def _memory_tells_of_python() -> bool:
    """Whether a draw is seen in the memory of Python's generators."""
    one = random.Random(0)
    memory = _memory_of(one)
    before = memory.raw
    same = memory.raw == before
    one.random()
    return same and memory.raw != before


def _memory_tells_of_numpy() -> bool:
    """Whether a second normal number is seen in the memory of NumPy's generators, and the twister is at its address."""
    if numpy is None:
        return False
    bits = numpy.random.MT19937(0)
    one = numpy.random.RandomState(bits)
    memory = _memory_of(one)
    blank = memory.raw
    one.random_sample()
    same = memory.raw == blank
    one.standard_normal()
    held = memory.raw != blank
    one.standard_normal()
    told: Any = one.get_state(legacy=False)
    words = told["state"]["key"].astype("uint32").tobytes() + int(told["state"]["pos"]).to_bytes(4, sys.byteorder)
    return same and held and memory.raw == blank and _twister(bits).raw == words


_MEMORY_TELLS_OF_PYTHON = _memory_tells_of_python()
_MEMORY_TELLS_OF_NUMPY = _memory_tells_of_numpy()
_python = _PythonGenerator()
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
    _python.seed(seed)
    torch.default_generator.manual_seed(seed)
    if _numpy is not None:
        _numpy.seed(seed >> 31 & 0xFFFFFFFF)
    if reseed is not None:
        reseed(seed)


def generator_states() -> tuple[Any, ...]:
    """The generators as they are, in this process: for :func:`set_generator_states`."""
    return _python.state(), torch.default_generator.get_state(), None if _numpy is None else _numpy.state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Put them back."""
    python, of_torch, of_numpy = states
    _python.set_state(python)
    torch.default_generator.set_state(of_torch)
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
