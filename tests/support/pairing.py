"""Cases for tests of several factors: of any two, each value meets each value of the other, and few cases do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pytest

Factor = Collection[Any] | Mapping[str, Any]  # its values, or those by what a case is called after


def pairs(**factors: Factor) -> tuple[str, list[Any]]:
    """What ``pytest.mark.parametrize`` takes, in place of one mark a factor: each pair of values is in some case.

    There are hardly more cases than the two longest factors have pairs.
    """
    named = [
        list(values.items() if isinstance(values, Mapping) else ((_name(value), value) for value in values))
        for values in factors.values()
    ]
    sizes = [len(values) for values in named]
    order = sorted(range(len(sizes)), key=lambda factor: -sizes[factor])
    missing = {
        frozenset(((one, value), (other, another))): None  # in order
        for one, other in itertools.combinations(order, 2)
        for value, another in itertools.product(range(sizes[one]), range(sizes[other]))
    }
    used: Counter[tuple[int, int]] = Counter()
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for factor in order:
            if factor not in case:
                met = [
                    (sum(frozenset((one, (factor, value))) in missing for one in case.items()), -used[factor, value])
                    for value in range(sizes[factor])
                ]
                case[factor] = met.index(max(met))
        used.update(case.items())
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        chosen = [named[factor][case[factor]] for factor in range(len(named))]
        cases.append(pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen)))
    return ",".join(factors), cases


def _name(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "__name__", repr(value)))
