"""Random generators that a job made for itself (Python's, NumPy's, torch's), and their states as values."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def is_generator(value: Any) -> bool:
    """Whether it is a random generator whose state can be saved: not the system's."""
    kind = type(value)  # isinstance would wake lazy objects of other libraries
    return issubclass(kind, _kinds()) and not issubclass(kind, random.SystemRandom)


def generator_types() -> set[type]:
    """Every type whose objects :func:`is_generator` may accept."""
    found, left = set[type](), list(_kinds())
    while left:
        if (kind := left.pop()) not in found:
            found.add(kind)
            left += kind.__subclasses__()
    return found


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")  # a job without numpy has none of its generators
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (random.Random, torch.Generator, *kinds)


def generator_state(generator: Any) -> Any:
    """Return the state, as numbers, strings, containers, arrays and tensors."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def make_generator(state: Any) -> Any:
    """A generator of the process's memory with this state; None: it is of another kind."""
    generator: Any = None
    if isinstance(state, tuple):
        generator = random.Random()
    elif isinstance(state, torch.Tensor):
        generator = torch.Generator()
        if state.shape != generator.get_state().shape:  # a device's
            return None
    elif (numpy := sys.modules.get("numpy")) is not None:
        if (kind := getattr(numpy.random, state["bit_generator"], None)) is None:
            return None
        generator = (numpy.random.RandomState if "has_gauss" in state else numpy.random.Generator)(kind())
    if generator is not None:
        set_generator_state(generator, state)
    return generator
