"""Tells a script what its job will go on from, before it builds the job. Free of torch; changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from checkflow.core.errors import CorruptCheckpointError, LockedError, StorageError, UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import STAGES, is_own
from checkflow.runtime.memory_tier import recovery
from checkflow.runtime.memory_tier.orphans import mark_names, may_be_here
from checkflow.runtime.store.discovery import find, find_valid, open_verified
from checkflow.runtime.store.files import has_manifest, parse_step, run_of, step_name
from checkflow.runtime.store.reader import Checkpoint
from checkflow.runtime.store.trust import Trust

_Forms = dict[str, tuple[tuple[int, ...], str]]  # by name, shape and dtype


@dataclass(frozen=True)
class Peeked:
    """A record says what a checkpoint holds, in plain values, which can be pickled for other ranks.

    Example: ``len(seen.groups["optimizer"])``, ``seen.shapes["model/0.weight"]``.

    Attributes:
        step: iterations that were finished.
        epoch: epochs that were over; None: it does not say, as a version that ``dcp.save`` or shards wrote.
        ranks: how many processes saved it.
        names: of all tensors: ``<model>/<key>`` and ``<optimizer>/<parameter>.<key>``, under the names that models and
            optimizers have in their dicts, or "model" and "optimizer"; ``job-state/<name>.<place>`` in other objects,
            ``loader-state/<place>`` in the loader.
            Tied tensors are there under each name; of what several ranks hold with values of their own, the lowest
            rank's.
        shapes: whole ones, by the tensor's name.
        dtypes: likewise, such as "float32".
        groups: the parameter groups of each optimizer, in order. ``params`` are names of parameters (after the model's
            name and a dot, if there are several models). Other options are there if they are numbers, texts, flags,
            None, or lists and tuples of these; a tensor of one number is that number.
    """

    step: int
    epoch: int | None
    ranks: int
    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    groups: Mapping[str, tuple[Mapping[str, Any], ...]]


def peek(directory: str | os.PathLike[str], *, step: int | None = None, trust: str | None = None) -> Peeked | None:
    """Return what a ``Checkpointer`` would resume from; None: there is no checkpoint yet.

    A script whose parameters grow, or whose optimizer gets groups later, brings its model and optimizer to this form
    before it makes the Checkpointer. torch is not imported. As at a start, every byte is read and verified, and what a
    killed job left in this machine's memory counts, if it is newer than storage. Nothing is renamed or deleted, and the
    directory is not locked, so a job may run there.

    Args:
        step: of another checkpoint than the newest, for ``Checkpointer(resume=step)``.
        trust: as for :class:`checkflow.Checkpointer`.

    Raises:
        CorruptCheckpointError: no checkpoint is whole; the message is about the newest.
        MismatchError: it has a format that this version does not know.
        StorageError: it cannot be read, another user may have written it, there is none of this step, or ``directory``
            is a checkpoint itself.
        ValueError: ``step`` is no step.
    """
    refuse_url(directory)
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step must be a number of iterations, not {step!r}")
    root = Path(directory)
    if not os.path.exists(root):
        return None
    if parse_step(root.name) is not None and has_manifest(root):
        raise StorageError(f"{root} is a checkpoint: pass the directory that holds it, and its step as step=")
    paths = find(root)
    if (left := _in_memory(root, paths, step)) is not None:
        return left
    if (found := _on_storage(root, paths, step, Trust(root, trust))) is None:
        return None
    with found as checkpoint:
        manifest = checkpoint.manifest
        forms = {name: (one.shape, one.dtype) for name, one in manifest.tensors.items() if not is_own(name)}
        extras = [checkpoint.extra_bytes, *map(checkpoint.rank_extra_bytes, range(1, manifest.world_size))]
        return _peeked(manifest.step, manifest.info, forms, manifest.ties, extras)


def _on_storage(root: Path, paths: Sequence[Path], step: int | None, trust: Trust) -> Checkpoint | None:
    if step is not None:
        path = root / step_name(step)
        if path not in paths:
            raise StorageError(
                f"{root} holds no checkpoint of step {step}: checkflow ls {root} lists those that it has"
            )
        return open_verified(path, trust)
    found = find_valid(root, trust)
    if found is None and (damaged := find(root)):
        return open_verified(damaged[0], trust)  # raises what is wrong with it
    return found


def _in_memory(root: Path, paths: Sequence[Path], step: int | None) -> Peeked | None:
    """Return what the next start here would put on storage, and resume from; None: nothing, or its job lives."""
    stored = recovery.NewestStored()
    if paths and (number := parse_step(paths[0].name)) is not None:
        stored = recovery.NewestStored(number, run_of(paths[0]))
    versions: dict[tuple[int, str, int], dict[int, recovery.Found]] = {}  # by step, run and ranks
    try:
        for part in _parts(root):
            key = part.record.step, part.life.run_id, part.life.ranks
            versions.setdefault(key, {})[part.life.rank] = part
    except LockedError:
        return None
    except OSError as error:
        raise StorageError(f"cannot look for what the run before had in host memory: {error.strerror}") from error
    there = {parse_step(path.name) for path in paths}
    for (number, _, ranks), parts in sorted(versions.items(), reverse=True):
        wanted = number == step if step is not None else number > stored.step
        if not wanted or number in there or parts.keys() != set(range(ranks)):
            continue
        try:
            recovery.refuse_other_life(max((one.life for one in parts.values()), key=lambda one: one.durable), stored)
            return _peeked_parts([parts[rank] for rank in range(ranks)])
        except (CorruptCheckpointError, UnsupportedError, ValidationError, FileNotFoundError):
            continue  # a start says so, and takes an older one; or it has just put this one on storage
    return None


def _parts(root: Path) -> Iterator[recovery.Found]:
    for mark in filter(may_be_here, mark_names(root)):
        if (path := recovery.folder_of(root, mark)) is not None:
            with contextlib.suppress(CorruptCheckpointError, FileNotFoundError):
                yield from recovery.captures_in(path)


def _peeked_parts(parts: Sequence[recovery.Found]) -> Peeked:
    """Describe a version that lies in memory. Raises as :func:`.memory_tier.recovery.load`."""
    forms: _Forms = {}
    ties: list[tuple[str, str]] = []
    extras = []
    for part in parts:
        sources, layout, extra, memory = recovery.load(part)
        memory.close()
        for name, placed in layout.tensors.items():
            source = sources.get(name)
            shape = placed.record.shape if source is None else source.box.shape
            forms.setdefault(name if source is None else source.tensor, (shape, placed.record.dtype))
        ties += part.record.ties
        extras.append(extra)
    return _peeked(parts[0].record.step, parts[0].record.info, forms, ties, extras)


def _peeked(
    step: int, info: Mapping[str, Any], forms: _Forms, ties: Sequence[tuple[str, str]], extras: Sequence[bytes | None]
) -> Peeked:
    """Args: ``extras``: extra state of each rank."""
    forms = forms | {further: forms[name] for further, name in ties if further not in forms}
    names, epoch = tuple(sorted(forms)), info.get("epoch")
    return Peeked(
        step, epoch if isinstance(epoch, int) else None, len(extras), names,
        {name: tuple(forms[name][0]) for name in names}, {name: forms[name][1] for name in names},
        _groups(extras if STAGES in info else extras[:1]),
    )  # fmt: skip


def _groups(extras: Sequence[bytes | None]) -> dict[str, tuple[dict[str, Any], ...]]:
    """Return the groups of all optimizers; each stage of a pipeline has other parameters in them."""
    decoded = [codec.decode(data, without_torch=True) for data in extras if data is not None]
    saved = [one["job"]["optimizers"] for one in decoded if isinstance(one, Mapping) and "job" in one]
    found: dict[str, tuple[dict[str, Any], ...]] = {}
    for owner, first in saved[0].items() if saved else ():
        groups = []
        for number, group in enumerate(first["groups"]):
            of_stages = [one[owner]["groups"][number : number + 1] for one in saved if owner in one]
            names = dict.fromkeys(name for part in of_stages for its in part for name in its["params"])
            options = ((key, _plain(value)) for key, value in group.items() if key != "params")
            groups.append({"params": tuple(names)} | {key: value for key, value in options if _is_plain(value)})
        found[owner] = tuple(groups)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.number() if isinstance(value, codec.OfTorch) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
