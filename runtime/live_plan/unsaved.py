"""Warns once of what the next iteration needs and no checkpoint holds, with the line to add."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from checkflow.core.planner_api import Carried
from checkflow.runtime.job.job import Job
from checkflow.runtime.state import own_keys
from checkflow.runtime.state.collect import modules_with_extra_state
from checkflow.runtime.state.variables import Variables

logger = logging.getLogger("checkflow")

_MOST_LINES: Final = 3
_MOST_OBJECTS: Final = 100_000  # visited at most: a loader may hold millions of samples
# Not followed: what leads to everything, and modules, of which only the state is saved.
_NO_HOLDERS: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType, nn.Module)


def saved_identities(job: Job) -> frozenset[int]:
    """What is reachable from ``state=``, the loader, modules with extra state and optimizers, by
    :attr:`Carried.identity`.
    """
    return frozenset(identities(list(_holders(job))))


def identities(root: Any) -> set[int]:
    """All that is reachable from an object, by :attr:`Carried.identity`."""
    found: set[int] = set()
    waiting, seen = [root], set[int]()
    for one in waiting:  # grows during the loop
        kind = type(one)  # isinstance would wake lazy objects of other libraries
        if id(one) in seen or issubclass(kind, _NO_HOLDERS) or len(seen) >= _MOST_OBJECTS:
            continue
        seen.add(id(one))
        if issubclass(kind, torch.Tensor):
            if one.layout is torch.strided and not one.is_meta:
                found.add(one.untyped_storage()._cdata)
        else:
            found.add(id(one))
            waiting += gc.get_referents(one)
    return found


def _holders(job: Job) -> Iterator[Any]:
    for one in job.objects.values():
        if isinstance(one, Variables):  # not all of its namespace
            yield from one.held()
        else:
            yield from (one, one.state_dict())
    yield job.loader
    for optimizer in job.optimizers.values():
        yield from (optimizer.state, optimizer.param_groups)
    yield from own_keys.state_dicts(job.optimizers).values()
    for _, module in modules_with_extra_state(job.models):
        yield vars(module)


def warn_unsaved(carried: Sequence[Carried], saved: frozenset[int]) -> bool:
    """Warn of unsaved objects that one iteration carries to the next; returns whether there are any."""
    found: dict[tuple[str, str], Carried] = {}
    for one in carried:
        if one.identity not in saved:
            found.setdefault((one.place, one.advice), one)
    for one in list(found.values())[:_MOST_LINES]:
        place = f", at {one.place}," if one.place else ""
        logger.warning(
            "the job carries %s from one iteration to the next%s and no checkpoint holds it: a resumed run begins with "
            "the script's first value. To save it, %s", one.what, place, one.advice,
        )  # fmt: skip
    if (more := len(found) - _MOST_LINES) > 0:
        logger.warning("the job carries %d more such values", more)
    return bool(found)
