"""Compares what a checkpoint has of the objects under ``state=`` with the job's: schedulers by class. Says which of
them begin anew.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from checkflow.core.errors import MismatchError
from checkflow.runtime.state.variables import Variables

logger = logging.getLogger("checkflow")

# Keys that nearly every scheduler's state has, by release of torch: they do not tell its class.
_OF_ANY = {"last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "base_lrs", "verbose"}
# What a class cannot be made without, torch adds or removes in no release.
_REQUIRED = {
    name
    for kind in vars(lr_scheduler).values()
    if inspect.isclass(kind) and issubclass(kind, LRScheduler)
    for name, parameter in inspect.signature(kind).parameters.items()
    if parameter.default is parameter.empty
}


@dataclass(frozen=True)
class Fitted:
    """A comparison says which objects of a job go on from a checkpoint, and which do not.

    Attributes:
        saved: the checkpoint's extra state of the job, without what is dropped or replaced.
        objects: that are restored.
        anew: those that begin anew, by name, with the reason.
        dropped: names that only this checkpoint, or one before it, has.
        gone: those of them that this checkpoint has.
    """

    saved: Mapping[str, Any]
    objects: Mapping[str, Any]
    anew: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def fit(
    saved: Mapping[str, Any], objects: Mapping[str, Any], fresh: Collection[str], before: Collection[str]
) -> Fitted:
    """Compare a job's objects with the saved ones.

    Args:
        saved: the job's extra state in the checkpoint.
        fresh: names of objects that may begin anew, or be dropped.
        before: names that the checkpoint's own job, or one before it, has dropped.

    Raises:
        MismatchError: another object is only in the job or only in the checkpoint, or does not fit.
        ValueError: nobody knows a name of ``fresh``.
    """
    states, said = saved["objects"], saved.get("schedulers", {})
    refuse_unknown(fresh, objects, [*states, *before])
    anew: dict[str, str] = {}
    for name in sorted(objects.keys() | states.keys()):
        try:
            if name not in states:
                raise MismatchError(f"state[{name!r}] is only in the job")
            if name not in objects:
                raise MismatchError(f"state[{name!r}] is only in the checkpoint")
            _refuse_other(name, objects[name], states[name], said.get(name))
        except MismatchError as error:
            if name not in fresh:
                does = "begins it anew" if name in objects else "drops it"
                raise MismatchError(f'{error} (fresh=("{name}",) {does})') from None
            if name in objects:
                anew[name] = str(error)
    kept = {name: one for name, one in objects.items() if name not in anew}
    dropped = tuple(sorted((states.keys() | set(before)) & set(fresh) - objects.keys()))
    left = {**saved, "objects": {name: states[name] for name in kept}}
    return Fitted(left, kept, anew, dropped, tuple(name for name in dropped if name in states))


def refuse_unknown(fresh: Collection[str], objects: Collection[str], saved: Collection[str] = ()) -> None:
    """Refuse a name of ``fresh`` that neither the job nor the checkpoint has. Raises ValueError."""
    known = {*objects, *saved}
    if odd := sorted(set(fresh) - known):
        have = ", ".join(map(repr, sorted(known))) or "nothing"
        raise ValueError(f"fresh has {odd[0]!r}, and neither the job nor the checkpoint has that in state=: {have}")


def log_fresh(fitted: Fitted, rates: Collection[str]) -> None:
    """Log what begins anew and what is dropped. ``rates``: what goes on in the optimizers, in words."""
    lines = [f"{reason}: it begins anew, as fresh= says" for reason in fitted.anew.values()]
    lines += [f"state[{name!r}] is only in the checkpoint: it is dropped, as fresh= says" for name in fitted.gone]
    logger.warning("%s", "; ".join([*lines, *rates]))


def scheduler_in(value: object) -> LRScheduler | None:
    """Return the scheduler of torch's that an object is, or wraps as its ``scheduler``, as Accelerate's does."""
    for one in (value, getattr(value, "scheduler", None)):
        if isinstance(one, LRScheduler):
            return one
    return None


def inner_schedulers(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that one of torch's runs, one after the other or all at once."""
    return [one for one in getattr(scheduler, "_schedulers", ()) if isinstance(one, LRScheduler)]


def describe(objects: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes of the schedulers whose state is saved, by name, for the checkpoint."""
    found = ((name, scheduler_in(value), states[name]) for name, value in objects.items())
    return {name: _describe(one) for name, one, state in found if one is not None and _place(one, state) is not None}


def _describe(scheduler: LRScheduler) -> dict[str, Any]:
    kind = type(scheduler)
    return {
        "class": kind.__name__, "base": _base(kind), "schedulers": list(map(_describe, inner_schedulers(scheduler))),
    }  # fmt: skip


def _base(kind: type) -> str:
    """Return the class of torch's that a scheduler's is or derives from: users rename theirs."""
    return next(one.__name__ for one in kind.__mro__ if one.__module__.partition(".")[0] == "torch")


def _place(scheduler: LRScheduler, state: Any) -> tuple[str, ...] | None:
    """Return the keys to a scheduler's state in that of the object which holds it; None: it is not saved there."""
    own = scheduler.state_dict()
    if not (isinstance(own, Mapping) and isinstance(state, Mapping)):
        return None
    if own.keys() <= state.keys():
        return ()
    inner = ((key, one) for key, one in state.items() if isinstance(one, Mapping))
    return next(((key,) for key, one in inner if own.keys() <= one.keys()), None)


def _refuse_other(name: str, value: Any, state: Any, said: Mapping[str, Any] | None) -> None:
    """Refuse state of another class of scheduler, or of other variables.

    Args:
        said: what :func:`describe` said of it; None: nothing, as in older checkpoints.
    """
    if isinstance(value, Variables):
        value.refuse_mismatch(state)
    scheduler = scheduler_in(value)
    if scheduler is None or (place := _place(scheduler, value.state_dict())) is None:
        return
    for key in place:
        state = state.get(key) if isinstance(state, Mapping) else None
    _refuse_other_scheduler(f"state[{name!r}]", scheduler, state, said)


def _refuse_other_scheduler(what: str, scheduler: LRScheduler, state: Any, said: Mapping[str, Any] | None) -> None:
    have, own, saved = type(scheduler).__name__, scheduler.state_dict(), state if isinstance(state, Mapping) else {}
    want = None if said is None else said["class"]
    if want != have and (said is None or said["base"] == _base(type(scheduler))):
        want = _other_by_keys(own.keys() - _OF_ANY, saved.keys() - _OF_ANY)
    if want not in (None, have):
        raise MismatchError(f"{what} is {want} in the checkpoint, {have} in the job")
    inner, states = inner_schedulers(scheduler), saved.get("_schedulers", ())
    if "_schedulers" not in own:
        return
    if len(inner) != len(states):
        raise MismatchError(f"{what} has {len(states)} schedulers in the checkpoint, {len(inner)} in the job")
    kinds = [None] * len(inner) if said is None else said["schedulers"]
    for number, (one, its, kind) in enumerate(zip(inner, states, kinds, strict=False)):
        _refuse_other_scheduler(f"scheduler {number} in {what}", one, its, kind)


def _other_by_keys(have: Collection[str], want: Collection[str]) -> str | None:
    """Describe a scheduler whose keys are not those of the job's; None: they may be of one class. Another release of
    torch only adds, or only removes, keys of a class.
    """
    more, less = sorted(set(want) - set(have)), sorted(set(have) - set(want))
    telling = any(key.lstrip("_") in _REQUIRED for key in (*more, *less))
    if not telling and not (more and less):
        return None
    return f"one with {', '.join(more[:3])}" if more else f"one without {', '.join(less[:3])}"
