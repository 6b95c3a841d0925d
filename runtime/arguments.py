"""Validates and reads the arguments of Checkpointer, before anything of the job is opened or made."""

from __future__ import annotations

import contextlib
import grp
import itertools
import logging
import operator
import os
import reprlib
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from checkflow.core.errors import CheckflowError, UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.core.plan import Plan
from checkflow.core.planner_api import PlanLimits
from checkflow.core.state import STATE, as_models, as_optimizers, optimizer_parameters, unwrap
from checkflow.core.units import parse_seconds, parse_size
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import OWNER
from checkflow.runtime.interval.algorithm import Asked
from checkflow.runtime.loop.preemption import KNOWN_SIGNALS
from checkflow.runtime.store.retention import Rules
from checkflow.runtime.store.trust import ANYONE

logger = logging.getLogger("checkflow")

CONSENTS = ("ranks", "loader", "length")  # what Checkpointer(accept=) may name
MOST_HOST_BUFFERS = 1000  # each of the size of the state: more is a typing error


@dataclass(frozen=True)
class Arguments:
    """How a job is checkpointed: ``Checkpointer``'s arguments, read. ``raising``: whether a failed checkpoint ends
    training.
    """

    directory: str | os.PathLike[str]
    rules: Rules
    asked: Asked
    plan_limits: PlanLimits
    follow: bool
    resume: str | int
    hyperparameters: str
    host_buffers: int
    audit: int
    raising: bool
    signals: tuple[signal.Signals, ...]
    grace_seconds: float
    trust: str | None
    on_report: Callable[[dict[str, float]], object] | None = None
    accept: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()


def check_arguments(
    *, model: object, optimizer: object, loader: object, directory: object, plan: object, state: object,
    host_buffers: object, resume: object, hyperparameters: object, on_error: object, audit: object,
    on_report: object,
) -> None:  # fmt: skip
    """Refuse what ``Checkpointer`` cannot work with; UnsupportedError for a loader that is not checkflow's."""
    _refuse_no_job(model, optimizer)
    if loader is not None and not isinstance(loader, ResumableLoader):
        raise UnsupportedError(
            f"loader is a {type(loader).__name__}: pass checkflow.resumable(loader), or a checkflow.DataLoader, "
            "or none and iterate checkpointer.steps()"
        )
    _refuse_no_directory(directory)
    _refuse_no_plan(plan)
    _refuse_no_objects(state)
    if not _is_count(host_buffers, 1) or host_buffers > MOST_HOST_BUFFERS:
        raise ValueError(f"host_buffers must be a whole number from 1 to {MOST_HOST_BUFFERS}, not {host_buffers!r}")
    if resume not in ("auto", "never", "must") and not _is_count(resume, 0):
        raise ValueError(f'resume must be "auto", "never", "must" or a step, not {resume!r}')
    if hyperparameters not in ("checkpoint", "script"):
        raise ValueError(f'hyperparameters must be "checkpoint" or "script", not {hyperparameters!r}')
    if on_error not in ("warn", "raise"):
        raise ValueError(f'on_error must be "warn" or "raise", not {on_error!r}')
    if on_report is not None and not callable(on_report):
        raise TypeError(f"on_report must be a function that takes a dictionary, or None, not {on_report!r}")
    if not _is_count(audit, 0):
        raise ValueError(f"audit must be a whole number of at least 0, not {audit!r}")


def refuse_for_ranks(plan: object) -> None:
    """Refuse what several ranks cannot do yet. Raises UnsupportedError."""
    if plan not in (None, "auto"):
        raise UnsupportedError(
            "plan= names one plan, and each rank copies another part of the state: leave it out; each rank makes its "
            "own plan"
        )


def read_asked(overhead: object, every: object, mtbf: object) -> Asked:
    """How often to checkpoint, or what that may cost. Raises ValueError if two contradict each other."""
    share = read_share(overhead)
    if every is not None and mtbf is not None:
        raise ValueError("every says how often already: pass every or mtbf, not both")
    if isinstance(every, str):
        return Asked(share, every_seconds=_read_time("every", every))
    if every is not None and not _is_count(every, 1):
        raise ValueError(
            f'every must be a whole number of iterations, at least 1, text such as "30s", or None, not {every!r}'
        )
    if mtbf is None or isinstance(mtbf, str):
        return Asked(share, every, mtbf_seconds=None if mtbf is None else _read_time("mtbf", mtbf))
    if isinstance(mtbf, bool) or not isinstance(mtbf, int | float) or not 0 < mtbf <= sys.float_info.max:
        raise ValueError(f'mtbf must be seconds, more than 0, text such as "4h", or None, not {reprlib.repr(mtbf)}')
    return Asked(share, every, mtbf_seconds=float(mtbf))


def _read_time(name: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
        if not seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"{name}: {reprlib.repr(text)} is more than {threading.TIMEOUT_MAX:.3g} seconds")
        return seconds
    except CheckflowError as error:
        raise ValueError(f"{name}: {error}") from None


def read_share(overhead: object) -> float:
    """A share of training's time. Raises ValueError."""
    number = isinstance(overhead, int | float) and not isinstance(overhead, bool)
    if not number or not 0 <= overhead <= sys.float_info.max:  # type: ignore[operator]
        raise ValueError(
            f"overhead must be a share of training's time, 0 or more, such as 0.035, not {reprlib.repr(overhead)}"
        )
    return float(overhead)  # type: ignore[arg-type]


def read_size(extra_memory: object) -> int | None:
    """Bytes, from a number or a text such as "2GB". Raises ValueError."""
    if extra_memory is None or _is_count(extra_memory, 0):
        return extra_memory
    if isinstance(extra_memory, str):
        try:
            return parse_size(extra_memory)
        except CheckflowError as error:
            raise ValueError(f"extra_memory: {error}") from None
    raise ValueError(f'extra_memory must be bytes, text such as "2GB", or None, not {extra_memory!r}')


def read_signals(signals: object) -> tuple[signal.Signals, ...]:
    """The signals that end training, given by name. Raises ValueError."""
    names = tuple(signals) if isinstance(signals, tuple | list | set | frozenset) else None
    if names is None or not all(name in KNOWN_SIGNALS for name in names):
        raise ValueError(
            f"signals must be a tuple of some of {', '.join(KNOWN_SIGNALS)} (Ctrl-C is handled, too), or () for "
            f"none, not {signals!r}"
        )
    return tuple(signal.Signals[name] for name in dict.fromkeys(names))


def read_batches(batches: object) -> int:
    """How many batches reached a step. Raises ValueError."""
    try:
        count = -1 if isinstance(batches, bool) else operator.index(batches)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"step() takes how many batches reached it, a whole number of at least 0, not {batches!r}")
    return count


def read_grace(grace_seconds: object) -> float:
    """Seconds from a signal to the end. Raises ValueError."""
    number = isinstance(grace_seconds, int | float) and not isinstance(grace_seconds, bool)
    if not number or not 0 < grace_seconds <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise ValueError(
            f"grace_seconds must be a number of seconds above 0, and at most {threading.TIMEOUT_MAX:.0f}, not "
            f"{reprlib.repr(grace_seconds)}"
        )
    return float(grace_seconds)  # type: ignore[arg-type]


def read_trust(trust: object) -> str | None:
    """Whose checkpoints a job accepts besides its own. Raises ValueError."""
    if trust is None or trust == ANYONE:
        return trust
    if isinstance(trust, str):
        with contextlib.suppress(KeyError, ValueError):  # unknown, or a NUL in it
            return grp.getgrnam(trust).gr_name
    raise ValueError(f'trust must be "anyone", the name of a group of this machine, or None, not {reprlib.repr(trust)}')


def read_accept(accept: object) -> frozenset[str]:
    """Which differences from the checkpoint the job accepts. Raises TypeError, ValueError."""
    named = _names("accept", accept)
    if odd := sorted(named - set(CONSENTS)):
        raise ValueError(f"accept has {odd[0]!r}: it may have {', '.join(map(repr, CONSENTS))}")
    return named


def read_fresh(fresh: object) -> frozenset[str]:
    """The names under ``state`` that may begin anew. Raises TypeError."""
    return _names("fresh", fresh)


def _names(argument: str, value: object) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(one, str) for one in value):
        raise TypeError(f'{argument} must be a tuple of names, such as ("name",), not {reprlib.repr(value)}')
    return frozenset(value)


def _is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refuse_no_job(model: Any, optimizer: Any) -> None:
    """Refuse what is not a model or optimizer, is given twice, or has a name that cannot be a file's."""
    models = as_models(model)
    optimizers = as_optimizers(optimizer, models)
    if not models:
        raise ValueError("there is no model: pass one, or a dict of several by name")
    for name, one in models.items():
        if not isinstance(one, nn.Module):
            hint = "the arguments are (model, optimizer, loader)" if isinstance(one, torch.optim.Optimizer) else (
                "pass the model itself, or a dict of several by name"
            )  # fmt: skip
            raise TypeError(f"model {name!r} is a {type(one).__name__}, not an nn.Module: {hint}")
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            hint = "pass the optimizer itself, or a dict of several by name"
            if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
                hint = 'pass its optimizer, and the scheduler as state={"scheduler": scheduler}'
            raise TypeError(f"optimizer {name!r} is a {type(optimizer).__name__}, not a torch.optim.Optimizer: {hint}")
    for what, names in (("model", models), ("optimizer", optimizers)):
        for name in names:
            if not isinstance(name, str) or not OWNER.fullmatch(name):
                raise ValueError(
                    f"{what} {name!r}: a name is 1 to 100 letters of a to z and A to Z, digits, '_', '.' and '-', with "
                    "no '.' or '-' first, since files are named after it"
                )
    _refuse_twice("model", {name: unwrap(one) for name, one in models.items()})
    _refuse_twice("optimizer", optimizers)
    _warn_of_other_parameters(models, optimizers)


def _refuse_twice(what: str, objects: Mapping[str, object]) -> None:
    for (first, one), (second, other) in itertools.combinations(objects.items(), 2):
        if one is other:
            raise ValueError(f"{what}s {first!r} and {second!r} are one and the same: pass it once")


def _warn_of_other_parameters(models: Mapping[str, nn.Module], optimizers: Mapping[str, Any]) -> None:
    """Warn of parameters that no module has: they are saved, but most often the model was rebuilt since."""
    known = {id(parameter) for model in models.values() for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        own = [parameter for _, parameter in optimizer_parameters(models, optimizer)]
        if own and known.isdisjoint(map(id, own)):
            logger.warning(
                "optimizer %s updates no parameter of the models given: it was made for another model, or before "
                "this one's parameters were replaced; checkpoints hold its state nonetheless", name,
            )  # fmt: skip


def _refuse_no_directory(directory: object) -> None:
    text = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(text, str):
        raise TypeError(f"directory must be a path of a directory for checkpoints, not {reprlib.repr(directory)}")
    if not text or "\0" in text:
        raise ValueError(f"directory must name a directory for checkpoints, and {text!r} names none")
    refuse_url(text)


def _refuse_no_plan(plan: object) -> None:
    """Refuse what is neither a plan nor a file, such as a misspelt "auto"."""
    says = 'plan must be "auto", a plan file\'s path, a Plan, or None'
    if plan is not None and not isinstance(plan, Plan | str | os.PathLike):
        raise TypeError(f"{says}, not {reprlib.repr(plan)}")
    if isinstance(plan, str):
        misspelt = plan != "auto" and plan.strip().lower() == "auto" and not Path(plan).exists()
        if not plan or "\0" in plan or misspelt:
            raise ValueError(f"{says}, not {plan!r}" + (': write plan="auto"' if misspelt else ""))
    if isinstance(plan, str | os.PathLike):
        refuse_url(plan)


def _refuse_no_objects(state: object) -> None:
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(
            f"state is a {type(state).__name__}: pass a dict of objects by name, such as "
            'state={"scheduler": scheduler}'
        )
    for name in state or ():
        if not isinstance(name, str):
            raise TypeError(f"state has the name {reprlib.repr(name)}: pass a dict of objects by name, names of text")


def refuse_objects(objects: Mapping[str, object], take: Callable[[Any, str], Any]) -> None:
    """Refuse objects in ``state=`` that cannot be saved and restored, by their methods and their present state.

    Args:
        take: returns a structure without the tensors that are state tensors.
    """
    for name, value in objects.items():
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UnsupportedError(
                f"state[{name!r}] is a {type(value).__name__}, without state_dict and load_state_dict: pass an object "
                "that has both, such as a scheduler"
            )
        _refuse_unsaved(name, value, take)


def _refuse_unsaved(name: str, value: Any, take: Callable[[Any, str], Any]) -> None:
    """Refuse an object whose state cannot be saved now; otherwise the first checkpoint might fail after hours."""
    try:
        state = value.state_dict()
    except Exception as error:  # noqa: BLE001 - users' code may be ready only in training
        logger.debug("state[%r] has no state yet: %s: %s", name, type(error).__name__, error)
        return
    try:
        codec.encode(take(state, f"{STATE}/{name}"), name=f"state[{name!r}]")
    except UnsupportedError:
        if _has_no_shape_yet(value):
            return
        raise


def _has_no_shape_yet(value: object) -> bool:
    """Whether it is a lazy module, which its first forward completes."""
    return isinstance(value, nn.Module) and any(map(is_lazy, itertools.chain(value.parameters(), value.buffers())))
