"""Imports weights, and their optimizer's state, as a checkpoint by the store's own commit, one tensor at a time.

The checkpoint is marked (``imported`` in its extra state): what it does not hold of a job starts anew.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkflow.core.errors import MismatchError, StorageError
from checkflow.core.paths import refuse_url
from checkflow.core.state import DEFAULT_MODEL, DEFAULT_OPTIMIZER
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import OWNER, STORED_TYPES, FileLayout, TensorRecord, make_layout
from checkflow.runtime.store.files import parse_step, step_name
from checkflow.runtime.store.store import Store
from checkflow.runtime.store.trust import ANYONE
from checkflow.runtime.weights.weights import EXTRA_STATE, Described, SavedOptimizer, Weights

_PATIENCE_SECONDS = 1.0  # for a job that is ending


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made. ``tensors``, ``size_bytes``: of model and optimizer; ``optimizer_tensors``: of these, the
    optimizer's; ``left_out``: what else the source holds; ``newest``: the directory's newest step.
    """

    source: str
    form: str
    path: Path
    step: int
    tensors: int
    optimizer_tensors: int
    size_bytes: int
    ties: int
    left_out: tuple[str, ...]
    newest: int


def import_weights(
    weights: Weights,
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    model: str = DEFAULT_MODEL,
    optimizer: str = DEFAULT_OPTIMIZER,
    progress: Callable[[str, float, float | None], None] = lambda part, done, total: None,
) -> Imported:
    """Write weights as a checkpoint, with one tensor in memory at a time; no checkpoint is replaced or deleted.

    Args:
        model: the job's name for the model.
        optimizer: the job's name for the optimizer, if the weights come with its state.
        progress: called with the name of each tensor before it is read, and how many of how many bytes were read.

    Raises:
        CorruptCheckpointError: the source is damaged; nothing was written.
        LockedError: a job writes to the directory.
        StorageError: it cannot be written, or has a checkpoint of that step.
        MismatchError: these cannot be names of a model and an optimizer; or state of the optimizer has no names.
        UnsupportedError: a name or a module's extra state cannot be stored.
    """
    refuse_url(directory)
    for name in (model, optimizer):
        if not OWNER.fullmatch(name):
            raise MismatchError(f"a name is 1 to 100 letters, digits, '_', '.' and '-', not {name!r}")
    if model == optimizer:
        raise MismatchError(f"model and optimizer cannot both be named {model!r}")
    sources = dict(_sources(weights, model, optimizer))
    layout = make_layout([_record(name, one.described) for name, one in sources.items()])
    imported = {"source": weights.where, "format": weights.form}
    optimizers = {} if weights.optimizer is None else {optimizer: _optimizer(weights.optimizer)}
    extra = codec.encode({
        "iteration": step, "epoch": 0, "position": 0, "loader": None, "generators": None,
        "job": {"modules": _modules(model, weights.extras), "optimizers": optimizers, "objects": {}},
        "imported": imported,
    })  # fmt: skip
    progress("verifying the source", 0, None)
    weights.verify()
    if weights.optimizer is not None:
        weights.optimizer.verify()
    read_bytes, whole_bytes = 0, sum(one.described.size_bytes for one in sources.values())

    def read(name: str, source: _Source) -> memoryview:
        nonlocal read_bytes
        progress(name, read_bytes, whole_bytes)
        read_bytes += source.described.size_bytes
        return source.read()

    with Store(
        directory,
        run_id=uuid.uuid4().hex[:16],
        keep_latest=sys.maxsize,
        lock_wait_seconds=_PATIENCE_SECONDS,
        trust=ANYONE,  # nothing there is read
    ) as store:
        if any(path.name == step_name(step) for path in store.checkpoints()):
            raise StorageError(
                f"{store.directory} has a checkpoint of step {step} already: choose another step (--step)"
            )
        path = store.commit(
            step, layout, lambda file: _image(file, sources, read), extra,
            {"epoch": 0, "epoch_end": False, "created": round(time.time(), 3), "imported": imported},
            ties=[(f"{model}/{further}", f"{model}/{name}") for further, name in weights.ties.items()],
        )  # fmt: skip
        newest = parse_step(store.checkpoints()[0].name)
    assert newest is not None
    return Imported(
        weights.where, weights.form, path, step, len(sources), len(sources) - len(weights.tensors),
        whole_bytes, len(weights.ties), weights.left_out, newest,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the source, and what fills a buffer with its bytes."""

    described: Described
    read_into: Callable[[memoryview], None]

    def read(self) -> memoryview:
        data = memoryview(bytearray(self.described.size_bytes))
        self.read_into(data)
        return data


def _sources(weights: Weights, model: str, optimizer: str) -> Iterator[tuple[str, _Source]]:
    """All tensors, by the names that a job gives them."""
    for name, described in weights.tensors.items():
        yield f"{model}/{name}", _Source(described, functools.partial(weights.read_into, name))
    if (saved := weights.optimizer) is None:
        return
    for (of, key), described in saved.tensors.items():
        if "." in key:
            raise MismatchError(
                f"{weights.where}: {saved.place} has state of {of} in a dictionary of its own ({key}), which only its "
                "optimizer can restore: import with --weights-only"
            )
        yield f"{optimizer}/{of}.{key}", _Source(described, functools.partial(saved.read_into, (of, key)))


def _record(name: str, described: Described) -> TensorRecord:
    width = STORED_TYPES[described.dtype].element_bytes
    return TensorRecord(name, described.dtype, described.shape, described.size_bytes, width)


def _optimizer(saved: SavedOptimizer) -> dict[str, Any]:
    """An optimizer's extra state, as a job saves it; its class is not known."""
    return {
        "groups": saved.read_groups(), "values": dict(saved.values), "values_apart": [],
        "others": {}, "others_apart": [],
    }  # fmt: skip


def _modules(model: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Extra state by "<model>/<module>", as a job saves it."""
    return {f"{model}/{name.removesuffix(EXTRA_STATE).removesuffix('.')}": value for name, value in extras.items()}


def _image(
    file: FileLayout, sources: Mapping[str, _Source], read: Callable[[str, _Source], memoryview]
) -> Iterator[memoryview]:
    yield memoryview(file.header)
    for placed in file.tensors:
        name = placed.record.name
        yield read(name.partition("/")[2], sources[name])  # held by no variable while the next one is read
