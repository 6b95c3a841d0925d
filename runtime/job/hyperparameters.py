"""Logs hyperparameters that the script changed since the checkpoint, and chooses whose values continue.

Each checkpoint stores what its script asked for, because the state itself does not say: schedulers change it.
"""

from __future__ import annotations

import copy
import logging
import math
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from checkflow.core.errors import MismatchError
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.job.job import Job
from checkflow.runtime.state.collect import SCHEDULERS_OWN
from checkflow.runtime.state.objects import Fitted, inner_schedulers, scheduler_in

logger = logging.getLogger("checkflow")

#: By whose it is, its name, and the parameter group's number (-1: of no group).
Key = tuple[str, str, int]
Asked = dict[Key, Any]

ENTRY = "hyperparameters"  # key in the extra state; older checkpoints lack it
_RANDOM: Key = "torch", "seed", -1
_ORDER: Key = "the loader", "seed", -1
_BATCH: Key = "the loader", "batch_size", -1
# Without manual_seed torch draws a seed of 64 bits, another one in each process.
_DRAWN = 1 << 32
_NOT_OF_GROUPS = {"params", "param_names", "initial_lr"}
_CYCLED = ("momentum", "betas")  # some schedules set these, too
_OF_SCHEDULES = ("lr", "initial_lr", *sorted(SCHEDULERS_OWN), *_CYCLED)
# Keys of a scheduler's state that hold its progress, or follow from the optimizer's rates.
_PROGRESS = {
    "last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "base_lrs", "_schedulers",
    "lr_lambdas",
}  # fmt: skip


def ask(job: Job) -> Asked:
    """What the script asks for, before anything is restored: plain values of the optimizers' groups and of torch's
    schedulers, torch's seed, the loader's seed and batch size.
    """
    asked = _of_state(job)
    if (seed := torch.initial_seed()) < _DRAWN:
        asked[_RANDOM] = seed
    if isinstance(job.loader, DataLoader):
        asked[_ORDER] = job.loader.seed
    for one in (job.loader, getattr(job.loader, "batch_sampler", None), getattr(job.loader, "loader", None)):
        if isinstance(size := getattr(one, "batch_size", None), int):
            asked[_BATCH] = size
    return asked


def placed(job: Job, asked: Asked, extra: Mapping[str, Any], *, script: bool) -> Mapping[str, Any]:
    """A checkpoint's extra state; if ``script``, with the script's seeds for what has not begun. Raises MismatchError
    if the loader's seed differs without ``script``, or an epoch's position counts batches of another size.
    """
    then, loader = _then(extra), extra["loader"] or {}
    if loader.get("way") == "skip" and loader["position"] and not loader["over"] and _changed(_BATCH, asked, then):
        raise MismatchError(
            f"the checkpoint's loader stopped after {loader['position']} batches of {then[_BATCH]} in an epoch, and "
            f"batches of {asked[_BATCH]} may not end there: finish the epoch with batch_size={then[_BATCH]}"
        )
    if _changed(_ORDER, asked, then):
        if not script:
            raise MismatchError(
                f"the checkpoint's loader has seed={then[_ORDER]}, this one seed={asked[_ORDER]} "
                '(hyperparameters="script" takes this one, from the next epoch on)'
            )
        extra = {**extra, "loader": job.loader.reseeded(extra["loader"])}  # type: ignore[union-attr]
    if script and _changed(_RANDOM, asked, then):
        kept = {kind: state for kind, state in extra["generators"].items() if kind not in ("torch", "cuda")}
        extra = {**extra, "generators": kept}
    return extra


def settle(job: Job, asked: Asked, extra: Mapping[str, Any], *, script: bool) -> Asked:
    """Log what the script asks for now and did not ask for then, and let one of the two continue.

    Args:
        asked: by :func:`ask`, before the job was restored; now it is.
        script: whether the script's values continue; only changed ones are set.
    """
    if ENTRY not in extra:
        logger.info(
            "the checkpoint does not say which hyperparameters its script asked for: the checkpoint's values are "
            "kept, and later changes of the script are logged"
        )
        return asked
    then, live = _then(extra), _of_state(job)
    lines: dict[tuple[str, str, int], list[int]] = {}
    goes_on = dict(asked)
    for key, now in asked.items():
        # Values that the state has already are no change: a new Checkpointer may get objects that have trained.
        if not _changed(key, asked, then) or (key in live and live[key] == now):
            continue
        owner, name, group = key
        moved = key in live and live[key] != then[key]
        level = logging.INFO
        if key == _BATCH:
            runs = f"taking {now} from this place in the epoch, whatever hyperparameters= says"
        else:
            runs = _set(job, key, now, then[key], moved=moved) if script else ""
        if not runs:
            level, goes_on[key] = logging.WARNING, then[key]
            runs = f'keeping {_text(then[key])} (hyperparameters="script" takes the script\'s)'
            if script:
                runs = f"keeping {_text(live[key])}, which the scheduler has reached"
        words = f"the script asks for {_text(now)}, the checkpoint was made with {_text(then[key])}: {runs}"
        lines.setdefault((f"{name.lstrip('_')} of {owner}", words, level), []).append(group)
    for (what, words, level), groups in lines.items():
        logger.log(level, "%s%s: %s", what, _numbers(groups), words)
    return goes_on


def values_of_schedules(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Return what schedulers set in the groups of each optimizer as they were made: before the job is restored."""
    return {
        name: [
            {key: copy.deepcopy(group[key]) for key in _OF_SCHEDULES if key in group}
            for group in optimizer.param_groups
        ]
        for name, optimizer in job.optimizers.items()
    }


def begin_schedules(job: Job, made: Mapping[str, list[dict[str, Any]]], fitted: Fitted) -> list[str]:
    """Have an optimizer whose schedulers all begin anew take their rates, since a schedule counts from its own. Returns
    whose rates continue, in words, where the script's differ from the checkpoint's.

    Args:
        made: by :func:`values_of_schedules`; now the job is restored.
        fitted: which objects began anew, or were dropped.
    """
    lines = []
    for (name, optimizer), words in zip(job.optimizers.items(), _optimizers(job), strict=True):
        groups = optimizer.param_groups
        driving = {
            of: one
            for of, value in job.objects.items()
            # Compare groups: Accelerate wraps the optimizer.
            if (one := scheduler_in(value)) is not None and one.optimizer.param_groups is groups
        }
        restored, script = (_text([dict(_plain(group)).get("lr") for group in one]) for one in (groups, made[name]))
        if driving.keys() <= fitted.anew.keys() and any(map(_sets_rates, driving.values())):
            for group, values in zip(groups, made[name], strict=True):
                kept = () if "max_momentum" in {*group, *values} else _CYCLED
                for key in SCHEDULERS_OWN & group.keys() - values.keys():
                    del group[key]  # the last schedule's
                for key, value in values.items():
                    if key not in kept:
                        _put(group, key, value)
            runs = f"begins at {script} as the script's schedule does, after {restored} in the checkpoint"
        else:
            runs = f"stays {restored} as in the checkpoint, where the script has {script}"
        if restored != script and (driving.keys() & fitted.anew.keys() or (fitted.gone and not driving)):
            lines.append(f"lr of {words} {runs}")
    return lines


def _sets_rates(scheduler: LRScheduler) -> bool:
    """Whether a scheduler has rates of its own, as ReduceLROnPlateau has not."""
    return hasattr(scheduler, "base_lrs") or any(map(_sets_rates, inner_schedulers(scheduler)))


def record(asked: Asked) -> dict[str, dict[int, dict[str, Any]]]:
    """The form in checkpoints: few keys, which are cheap to encode."""
    nested: dict[str, dict[int, dict[str, Any]]] = {}
    for (owner, name, number), value in asked.items():
        nested.setdefault(owner, {}).setdefault(number, {})[name] = value
    return nested


def _then(extra: Mapping[str, Any]) -> Asked:
    """What the script asked for when this checkpoint was made, if it says."""
    then: Asked = {
        (owner, name, number): value
        for owner, groups in extra.get(ENTRY, {}).items()
        for number, values in groups.items()
        for name, value in values.items()
    }
    if extra.get("loader") and "seed" in extra["loader"]:
        then[_ORDER] = extra["loader"]["seed"]
    return then


def _changed(key: Key, asked: Asked, then: Asked) -> bool:
    return key in asked and key in then and asked[key] != then[key]


def _optimizers(job: Job) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by their names in messages."""
    return {
        name if name == "optimizer" else f"optimizer {name!r}": optimizer for name, optimizer in job.optimizers.items()
    }


def _schedulers(job: Job) -> dict[str, LRScheduler]:
    """Schedulers by their names in messages: torch's, those nested in them, and those that Accelerate wraps."""
    found: dict[str, LRScheduler] = {}

    def add(owner: str, one: LRScheduler) -> None:
        found[owner] = one
        for number, inner in enumerate(inner_schedulers(one)):
            add(f"scheduler {number} in {owner}", inner)

    for name, one in job.objects.items():
        if (scheduler := scheduler_in(one)) is not None:
            add(f"state[{name!r}]", scheduler)
    return found


def _of_state(job: Job) -> Asked:
    asked: Asked = {}
    for owner, optimizer in _optimizers(job).items():
        for number, group in enumerate(optimizer.param_groups):
            # A scheduler changes the rate as soon as it is made.
            values = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group
            asked |= {(owner, name, number): value for name, value in _plain(values) if name not in _NOT_OF_GROUPS}
    for owner, scheduler in _schedulers(job).items():
        values = scheduler.state_dict()
        asked |= {(owner, name, -1): value for name, value in _plain(values) if name not in _PROGRESS}
    return asked


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that can be compared: numbers, strings, and lists and tables of them; one-element tensors as numbers."""
    for name, value in values.items():
        if isinstance(value, np.generic) or (torch.is_tensor(value) and value.numel() == 1):
            value = value.item() if value.dtype.itemsize > 4 else _short(value.item())
        elif isinstance(value, Counter):  # milestones of MultiStepLR
            value = sorted(value.elements())
        if _is_plain(value):
            yield name, copy.deepcopy(value)


def _short(value: Any) -> Any:
    """Drop digits that 32 bits do not hold: 0.1, not 0.10000000149."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str)


def _set(job: Job, key: Key, now: Any, then: Any, *, moved: bool) -> str:
    """Let the script's value continue, and describe that; "": the checkpoint's continues. ``moved``: by a scheduler."""
    owner, name, number = key
    if key in (_RANDOM, _ORDER):
        return f"taking {now}; an epoch that has begun keeps its order"
    if (scheduler := _schedulers(job).get(owner)) is not None:
        if moved:
            return ""
        setattr(scheduler, name, Counter(now) if isinstance(getattr(scheduler, name), Counter) else now)
    elif name == "lr":
        rate = _set_rate(job, _optimizers(job)[owner], number, now, then)
        if not math.isclose(rate, now, rel_tol=1e-6):
            return f"taking {_text(now)}, which the schedule has brought to {rate:.6g}"
    else:
        _put(_optimizers(job)[owner].param_groups[number], name, now)
    return f"taking {_text(now)}"


def _set_rate(job: Job, optimizer: torch.optim.Optimizer, number: int, now: float, then: float) -> float:
    """Set the rate, scaled by new/old if a scheduler has moved it; an old rate of 0 is replaced."""

    def scaled(value: Any) -> float:
        return now if not then or float(value) == then else float(value) * (now / then)

    group = optimizer.param_groups[number]
    for scheduler in _schedulers(job).values():
        # Compare groups: Accelerate wraps the optimizer.
        if scheduler.optimizer.param_groups is optimizer.param_groups:
            for rates in (getattr(scheduler, "base_lrs", []), getattr(scheduler, "_last_lr", [])):
                if number < len(rates):
                    rate = scaled(rates[number])
                    rates[number] = torch.full_like(rates[number], rate) if torch.is_tensor(rates[number]) else rate
    _put(group, "lr", scaled(group["lr"]))
    if "initial_lr" in group:
        _put(group, "initial_lr", now)
    return float(group["lr"])


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if torch.is_tensor(group.get(name)):
        group[name].fill_(value)  # CUDA graphs hold its address
    else:
        group[name] = value


def _text(value: Any) -> str:
    return reprlib.repr(value)


def _numbers(groups: list[int]) -> str:
    """Text such as ", group 0", ", groups 0 to 11", ", groups 0, 2 and 5"; "" for no groups."""
    if groups == [-1]:
        return ""
    if len(groups) == 1:
        return f", group {groups[0]}"
    if groups == list(range(groups[0], groups[-1] + 1)) and len(groups) > 2:
        return f", groups {groups[0]} to {groups[-1]}"
    return f", groups {', '.join(map(str, groups[:-1]))} and {groups[-1]}"
