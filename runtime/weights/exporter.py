"""Exports checkpoints for other tools: a file of ``torch.save``, safetensors, or torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch

from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MismatchError, StorageError, UnsupportedError
from checkflow.core.state import is_beside
from checkflow.core.units import format_size
from checkflow.runtime.format import codec
from checkflow.runtime.state import stages
from checkflow.runtime.state.gathering import make_tensor, put_back, stored_in
from checkflow.runtime.store.filling import fill_all
from checkflow.runtime.store.reader import Checkpoint

DCP = "dcp"  # what versions of checkflow.integrations.dcp have under this owner and key
Format = Literal["torch", "safetensors", "dcp"]
Progress = Callable[[str, float, float | None], None]
_READ_BYTES = 256 << 20  # at a time, between two reports of progress
_SUFFIXES: Mapping[str, Format] = {
    ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch", ".safetensors": "safetensors", "": "dcp",
}  # fmt: skip


def format_of(path: Path) -> Format | None:
    """The format by a name: ``.pt``, ``.pth``, ``.bin``, ``.ckpt``; ``.safetensors``; a folder for DCP; None:
    unknown.
    """
    return _SUFFIXES.get(path.suffix)


def state_dicts(checkpoint: Checkpoint, progress: Progress = lambda part, done, total: None) -> dict[str, Any]:
    """Everything in a checkpoint, as a script without checkflow would load it.

    Each model's and optimizer's ``state_dict()`` by name ("model" and "optimizer" for one of each); ``"state"``: those
    of the job's further objects by name; ``"iteration"``, ``"epoch"``; ``"parameters"``: values of parameters that
    belong to no model, if any. Of a version that ``dcp.save`` made: what it was given.

    Raises:
        UnsupportedError: an optimizer's state is part of a tensor subclass, which only its job can rebuild; or the
            checkpoint was saved by shards.
        CorruptCheckpointError, StorageError: it is damaged, or cannot be read.
    """
    extra = codec.decode(checkpoint.extra_bytes)
    if isinstance(extra, dict) and DCP in extra:
        return _nested(checkpoint, extra[DCP], progress)
    if not isinstance(extra, dict) or "job" not in extra:
        raise UnsupportedError(
            f"{checkpoint.path} was saved by shards, which checkflow.shards reads (docs/how-to/shards.md)"
        )
    job = stages.job_of_all(checkpoint, extra["job"])
    alone = stored_in(job)
    tensors = _read_all(checkpoint, progress, in_order=alone)
    tensors |= {name: tensors[of] for name, of in checkpoint.ties}
    job = put_back(job, tensors.__getitem__, lambda key: key.parameter)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in alone and not is_beside(name)}
    optimizers = job["optimizers"]
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        owner, _, key = name.partition("/")
        if owner not in optimizers:
            found.setdefault(owner, {})[key] = tensor
    for path, value in job["modules"].items():
        owner, _, module = path.partition("/")
        found.setdefault(owner, {})[f"{module}._extra_state" if module else "_extra_state"] = value
    parameters: dict[str, torch.Tensor] = {}
    for owner, saved in optimizers.items():
        own = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{owner}/")}
        found[owner] = optimizer_state(owner, saved, own, parameters)
    found |= {"state": job["objects"], "iteration": extra["iteration"], "epoch": extra["epoch"]}
    return found | ({"parameters": parameters} if parameters else {})


def _read_all(checkpoint: Checkpoint, progress: Progress, in_order: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """All tensors, row-major; those that are named ``in_order`` as they were in memory."""
    cpu = torch.device("cpu")
    tensors = {
        name: make_tensor(entry if name in in_order else dataclasses.replace(entry, permutation=None), cpu)
        for name, entry in checkpoint.tensors.items()
    }
    whole_bytes = sum(tensor.nbytes for tensor in tensors.values())
    read_bytes, some, some_bytes = 0, [], 0
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        some.append((name, tensor, None))
        some_bytes += tensor.nbytes
        if some_bytes >= _READ_BYTES or number == len(tensors):
            progress(f"reading {format_size(whole_bytes)}", read_bytes, whole_bytes)
            fill_all(checkpoint, some)
            read_bytes, some, some_bytes = read_bytes + some_bytes, [], 0
    return tensors


def _nested(checkpoint: Checkpoint, saved: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """The state dict that was given to ``dcp.save``."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    tensors = {name.removeprefix(f"{DCP}/"): tensor for name, tensor in _read_all(checkpoint, progress).items()}
    flat = {**tensors, **saved["values"]}
    return unflatten_state_dict(flat, saved["paths"]) if saved["paths"] is not None else flat


def optimizer_state(
    owner: str, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], parameters: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The form of ``Optimizer.state_dict()``, with parameters numbered over the groups."""
    numbers: dict[str, int] = {}
    groups = []
    for group in saved["groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    state: dict[Any, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name in numbers:
            parameters[f"{owner}/{name}"] = tensor
            continue
        path = _parameter_of(name, numbers)
        key = name[len(path) + 1 :]
        if "." in key:
            raise UnsupportedError(f"{owner}/{name} is a part of a tensor, which only its job can put together again")
        state.setdefault(numbers[path], {})[key] = tensor
    for name, values in saved["values"].items():
        if values:
            state.setdefault(numbers[name], {}).update(values)
    own = saved.get("own") or {"keys": {}, "without": []}
    found: dict[str, Any] = {"state": {**dict(sorted(state.items())), **saved["others"]}, "param_groups": groups}
    return {**{key: value for key, value in found.items() if key not in own["without"]}, **own["keys"]}


def _parameter_of(name: str, numbers: Mapping[str, int]) -> str:
    """The parameter that a state tensor belongs to: the longest matching prefix of its name."""
    path = name
    while path not in numbers:
        path, dot, _ = path.rpartition(".")
        if not dot:
            raise CorruptCheckpointError(f"{name} belongs to no parameter of the checkpoint's optimizer")
    return path


def flat_state(checkpoint: Checkpoint, found: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`state_dicts` under the names that torchtitan saves: those of models' keys without a prefix, and of
    optimizers ``<optimizer>.state.<parameter>.exp_avg``, ``<optimizer>.param_groups.<parameter>.lr``.

    Raises MismatchError if two models have a name in common.
    """
    extra = codec.decode(checkpoint.extra_bytes)
    if DCP in extra:  # has the names that its job chose
        return dict(found)
    optimizers = stages.job_of_all(checkpoint, extra["job"])["optimizers"]
    models = {name.partition("/")[0] for name in checkpoint.tensors if not is_beside(name)} - optimizers.keys()
    flat = {name: value for name, value in found.items() if name not in models}
    for owner, saved in optimizers.items():
        state = dict(found[owner]["state"])
        names = list(dict.fromkeys(name for group in saved["groups"] for name in group["params"]))
        mine = {f"state.{name}.{key}": v for n, name in enumerate(names) for key, v in state.pop(n, {}).items()}
        for group in saved["groups"]:
            options = {key: value for key, value in group.items() if key != "params"}
            mine |= {f"param_groups.{name}.{key}": v for name in group["params"] for key, v in options.items()}
        flat[owner] = {**mine, **{f"state.{key}": value for key, value in state.items()}}
    for owner in sorted(models):
        if taken := flat.keys() & found[owner].keys():
            raise MismatchError(f"{min(taken)!r} would be there twice without the prefix {owner!r}: leave out --flat")
        flat |= found[owner]
    return flat


def export(
    checkpoint: Checkpoint,
    target: Path,
    form: Format,
    *,
    model: str | None = None,
    replace: bool = False,
    flat: bool = False,
    progress: Progress = lambda part, done, total: None,
) -> None:
    """Write a checkpoint in another format, whole or not at all. Raises MismatchError if the model is unclear,
    StorageError if the target exists.

    Args:
        form: "torch": all of :func:`state_dicts`, for ``torch.load(target, weights_only=True)``. "safetensors": one
            model under its state dict's keys, tied tensors under each name. "dcp": tensors and numbers of
            :func:`state_dicts` as a folder of ``torch.distributed.checkpoint``.
        model: which, for safetensors; None: the only one.
        replace: whether to replace an existing target.
        flat: for "dcp": the names of :func:`flat_state`.
        progress: called with what is done, and how many of how many bytes; None: not known.
    """
    if target.exists() and not replace:
        raise StorageError(f"{target} exists already: pass --force to replace it")
    found = state_dicts(checkpoint, progress)
    progress("writing", 0, None)
    writers: Mapping[Format, Callable[[Path], None]] = {
        "torch": lambda path: torch.save(found, path),
        "safetensors": lambda path: _save_model(checkpoint, found, model, path),
        "dcp": lambda path: _save_distributed(flat_state(checkpoint, found) if flat else found, path),
    }
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            writers[form](temporary)
            _make_durable(temporary)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(temporary, target)
            _sync(target.absolute().parent)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            if isinstance(error, CheckflowError):
                raise
            raise StorageError(f"cannot write {target}: {' '.join(str(error).split())}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _save_model(checkpoint: Checkpoint, found: Mapping[str, Any], model: str | None, path: Path) -> None:
    owners = dict.fromkeys(name.partition("/")[0] for name in checkpoint.tensors if not is_beside(name))
    named = [name for name, value in found.items() if isinstance(value, Mapping)] if DCP in owners else [*owners]
    models = [name for name in named if "param_groups" not in found[name] and _holds_tensors(found[name])]
    if not models:
        raise MismatchError(f"{checkpoint.path} holds no model under a name of its own")
    if model is None and len(models) != 1:
        raise MismatchError(f"the checkpoint has the models {', '.join(models)}: pass --model")
    if model is not None and model not in models:
        raise MismatchError(f"the checkpoint has no model {model!r}, but {', '.join(models)}")
    tensors = {key: value for key, value in found[model or models[0]].items() if isinstance(value, torch.Tensor)}
    seen: set[int] = set()
    for key, value in tensors.items():
        if id(value) in seen:
            tensors[key] = value.clone()  # safetensors has no shared memory
        seen.add(id(value))
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # the umask's: safetensors makes files for their owner alone
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)


def _holds_tensors(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in state.values())


def _save_distributed(found: Mapping[str, Any], path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    quiet = logging.getLogger("torch.distributed.checkpoint")
    before = quiet.level
    try:
        quiet.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "running in one process", which is intended
            save(dict(found), checkpoint_id=path, no_dist=True)
    finally:
        quiet.setLevel(before)


def _make_durable(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _make_durable(inner)
    _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
