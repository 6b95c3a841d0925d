"""The process's own generators (Python's, NumPy's, torch's): seed them, keep them, put them back.

Both are done at each batch of the main process, and seeding at each sample: they must cost microseconds. What
``numpy.random.default_rng()`` makes belongs to whoever made it, and is not seen here.
"""

from __future__ import annotations

import _random
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

try:
    from checkflow.runtime.data.numpy_twister import NumPyGenerator
except ImportError:  # torch does without it
    NumPyGenerator = None  # type: ignore[assignment, misc]

Reseed = Callable[[int], object]
_python: Any = random._inst  # behind the functions of ``random``
_seed_python = _random.Random.seed
_torch = torch.default_generator
_numpy = None if NumPyGenerator is None else NumPyGenerator()


def seed_generators(seed: int, reseed: Reseed | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, and what ``reseed`` seeds.

    Args:
        seed: of 63 bits, which should be those of a hash: all of them decide what Python's generator gives; torch's
            twister is seeded with the lower 32, as all of torch's are, and NumPy's with the upper 32. So two seeds out
            of ``n`` agree in all that one of these gives with a chance of some n² / 2^33, and in what both give, or
            Python's, with one of some n² / 2^64. Torch's and NumPy's seed a twister in the same way: had both the same
            32 bits, their numbers would be the same.
    """
    _seed_python(_python, seed)  # as ``random.seed`` does for a whole number, in a third less time
    _python.gauss_next = None
    _torch.manual_seed(seed)
    if _numpy is not None:
        _numpy.seed(seed >> 31 & 0xFFFFFFFF)
    if reseed is not None:
        reseed(seed)


def generator_states() -> tuple[Any, ...]:
    """The generators as they are, in this process: for :func:`set_generator_states`."""
    return _python.getstate(), _torch.get_state(), None if _numpy is None else _numpy.state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Put them back."""
    python, of_torch, of_numpy = states
    _python.setstate(python)
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
