"""What Checkpointer is made for: models, optimizers, further objects, a directory, a plan; refused if it is none such.

What is wrong in an argument is said before anything of the job is looked at, opened or made.
"""

from __future__ import annotations

import itertools
import logging
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from checkflow.core.errors import UnsupportedError
from checkflow.core.plan import Plan
from checkflow.core.state import as_models, as_optimizers, optimizer_parameters, unwrap
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import OWNER

logger = logging.getLogger("checkflow")


def refuse_no_job(model: Any, optimizer: Any) -> None:
    """Refuse what is no model, and no optimizer.

    Raises:
        TypeError: one of them is of another kind.
        ValueError: there is no model, one is given twice, or one has a name that no file can have.
    """
    models, optimizers = as_models(model), as_optimizers(optimizer)
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
    """It may be meant: parameters that no module has are saved as well. More often the model was made anew since."""
    known = {id(parameter) for model in models.values() for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        own = [parameter for _, parameter in optimizer_parameters(models, optimizer)]
        if own and known.isdisjoint(map(id, own)):
            logger.warning(
                "optimizer %s updates no parameter of the models given: it was made for another model, or before "
                "this one's parameters were replaced; checkpoints hold them all the same", name,
            )  # fmt: skip


def refuse_no_directory(directory: object) -> None:
    """Refuse what names no directory.

    Raises:
        TypeError, ValueError: it is of another type; it names nothing.
    """
    text = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(text, str):
        raise TypeError(f"directory must be a path of a directory for checkpoints, not {reprlib.repr(directory)}")
    if not text or "\0" in text:
        raise ValueError(f"directory must name a directory for checkpoints, and {text!r} names none")


def refuse_no_plan(plan: object) -> None:
    """Refuse what is no plan, and no file.

    Raises:
        TypeError, ValueError: it is of another type; it is the text "auto", misspelt.
    """
    says = 'plan must be "auto", a plan file\'s path, a Plan, or None'
    if plan is not None and not isinstance(plan, Plan | str | os.PathLike):
        raise TypeError(f"{says}, not {reprlib.repr(plan)}")
    if isinstance(plan, str):
        misspelt = plan != "auto" and plan.strip().lower() == "auto" and not Path(plan).exists()
        if not plan or "\0" in plan or misspelt:
            raise ValueError(f"{says}, not {plan!r}" + (': write plan="auto"' if misspelt else ""))


def refuse_no_objects(state: object) -> None:
    """Refuse what is no dictionary of further objects by name.

    Raises:
        TypeError: it is of another type, or a name is no text.
    """
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(
            f"state is a {type(state).__name__}: pass a dict of objects by name, such as "
            'state={"scheduler": scheduler}'
        )
    for name in state or ():
        if not isinstance(name, str):
            raise TypeError(f"state has the name {reprlib.repr(name)}: pass a dict of objects by name, names of text")


def refuse_objects(objects: Mapping[str, object]) -> None:
    """Refuse what cannot be saved and put back as ``state=``: by its methods, and by what it would save now.

    Raises:
        UnsupportedError: there is such; it is named.
    """
    for name, value in objects.items():
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UnsupportedError(
                f"state[{name!r}] is a {type(value).__name__}, without state_dict and load_state_dict: pass an object "
                "that has both, such as a scheduler"
            )
        _refuse_unsaved(name, value)


def _refuse_unsaved(name: str, value: Any) -> None:
    """Refuse an object whose state cannot be saved as it is now: the first checkpoint would find it out after hours.

    Raises:
        UnsupportedError: something in the state is of no known type; it is named as in ``state['loop']['best'][3]``.
    """
    try:
        state = value.state_dict()
    except Exception as error:  # noqa: BLE001 - whatever users' code raises: it may be ready in training only
        logger.debug("state[%r] has no state yet: %s: %s", name, type(error).__name__, error)
        return
    try:
        codec.encode(state, name=f"state[{name!r}]")
    except UnsupportedError:
        if _has_no_shape_yet(value):
            return
        raise


def _has_no_shape_yet(value: object) -> bool:
    """Whether it is a module that its first forward completes."""
    return isinstance(value, nn.Module) and any(map(is_lazy, itertools.chain(value.parameters(), value.buffers())))
