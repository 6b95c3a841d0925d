"""Imports weights as a checkpoint by the store's own commit, one tensor in memory at a time.

The checkpoint holds one model and is marked (``imported`` in its extra state): everything else of a job starts anew.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkflow.core.errors import MismatchError, StorageError
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import OWNER, STORED_TYPES, FileLayout, TensorRecord, make_layout
from checkflow.runtime.store.files import parse_step, step_name
from checkflow.runtime.store.store import Store
from checkflow.runtime.store.trust import ANYONE
from checkflow.runtime.weights.weights import EXTRA_STATE, Weights

_PATIENCE_SECONDS = 1.0  # for a job that is ending


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made. ``left_out``: what else the source holds; ``newest``: the directory's newest step."""

    source: str
    form: str
    path: Path
    step: int
    tensors: int
    size_bytes: int
    ties: int
    left_out: tuple[str, ...]
    newest: int


def import_weights(
    weights: Weights,
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    model: str = "model",
    progress: Callable[[str], None] = lambda name: None,
) -> Imported:
    """Write weights as a checkpoint, with one tensor in memory at a time; no checkpoint is replaced or deleted.

    Args:
        model: the job's name for the model.
        progress: called with the name of each tensor before it is read.

    Raises:
        CorruptCheckpointError: the source is damaged; nothing was written.
        LockedError: a job writes to the directory.
        StorageError: it cannot be written, or has a checkpoint of that step.
        MismatchError: this cannot be a model's name.
        UnsupportedError: a name or a module's extra state cannot be stored.
    """
    if not OWNER.fullmatch(model):
        raise MismatchError(f"a model's name is 1 to 100 letters, digits, '_', '.' and '-', not {model!r}")
    layout = make_layout([_record(f"{model}/{name}", weights, name) for name in weights.tensors])
    imported = {"source": weights.where, "format": weights.form}
    extra = codec.encode({
        "iteration": step, "epoch": 0, "position": 0, "loader": None, "generators": None,
        "job": {"modules": _modules(model, weights.extras), "optimizers": {}, "objects": {}},
        "imported": imported,
    })  # fmt: skip
    weights.verify()
    with Store(
        directory,
        run_id=uuid.uuid4().hex[:16],
        keep_latest=sys.maxsize,
        lock_wait_seconds=_PATIENCE_SECONDS,
        trust=ANYONE,  # nothing there is read
    ) as store:
        if any(path.name == step_name(step) for path in store.checkpoints()):
            raise StorageError(f"{store.directory} has a checkpoint of step {step} already: choose another step")
        path = store.commit(
            step, layout, lambda file: _image(file, weights, model, progress), extra,
            {"epoch": 0, "epoch_end": False, "created": round(time.time(), 3), "imported": imported},
            ties=[(f"{model}/{further}", f"{model}/{name}") for further, name in weights.ties.items()],
        )  # fmt: skip
        newest = parse_step(store.checkpoints()[0].name)
    assert newest is not None
    return Imported(
        weights.where, weights.form, path, step, len(weights.tensors), weights.size_bytes, len(weights.ties),
        weights.left_out, newest,
    )  # fmt: skip


def _record(name: str, weights: Weights, key: str) -> TensorRecord:
    described = weights.tensors[key]
    width = STORED_TYPES[described.dtype].element_bytes
    return TensorRecord(name, described.dtype, described.shape, described.size_bytes, width)


def _modules(model: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Extra state by "<model>/<module>", as a job saves it."""
    return {f"{model}/{name.removesuffix(EXTRA_STATE).removesuffix('.')}": value for name, value in extras.items()}


def _image(file: FileLayout, weights: Weights, model: str, progress: Callable[[str], None]) -> Iterator[memoryview]:
    yield memoryview(file.header)
    for placed in file.tensors:
        name = placed.record.name.removeprefix(f"{model}/")
        progress(name)
        yield memoryview(weights.read(name))
