"""Reads and sets the state of NumPy's global generator, fast: NumPy's own calls take 70 µs more a batch.

Delete when NumPy does both in 10 µs, normal numbers included. The state is copied as the bytes that it is: the twister
by the address that NumPy gives for it (``BitGenerator.ctypes``), and whether a second normal number is held by
comparing what lies in the generator's object. Both are tried at import; where they do not lie so, states are asked for
and set as usual.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy

_Bytes = ctypes.Array[ctypes.c_char]
_TWISTER_BYTES = 4 * 624 + 4  # words, and the place among them


class NumPyGenerator:
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
        """The bit generator, and its twister's bytes, or the state that NumPy gives."""
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
        bits, twister = state
        if bits is not self._bits or self._memory.raw != self._blank:
            self._module.set_bit_generator(bits)  # forgets a second normal number
        if not isinstance(twister, bytes):
            self._module.set_state(twister)
            return
        self._look_at(bits)
        assert self._twister is not None  # it was taken from there
        with bits.lock:
            self._twister.raw = twister

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
    twister: Any = one.get_state(legacy=False)["state"]
    words = twister["key"].astype(numpy.uint32).tobytes() + int(twister["pos"]).to_bytes(4, sys.byteorder)
    return same and held and memory.raw == blank and _twister_of(bits).raw == words
