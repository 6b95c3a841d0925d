"""Saves a job at one boundary and restores it, as a Checkpointer does, in a few milliseconds."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkflow.core.state import as_optimizers
from checkflow.runtime.builder import check_job
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import make_layout, write_headers
from checkflow.runtime.job.job import Job
from checkflow.runtime.snapshot.share import WholeShare
from checkflow.runtime.state.collect import StateWalk, capture_extra
from checkflow.runtime.state.meshes import ALONE
from checkflow.runtime.state.restore import Resumed, resume_from
from checkflow.runtime.store.store import Store
from checkflow.runtime.system.aligned_memory import scratch


def make_job(model: nn.Module, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any] | None = None) -> Job:
    """A job as a Checkpointer makes it, after the refusals of its start."""
    models, optimizers = {"model": model}, as_optimizers(optimizer)
    job = Job(models, optimizers, dict(objects or {}), None, StateWalk(models, optimizers))
    check_job(job, None)
    return job


def save(job: Job, directory: Path, step: int = 1) -> Path:
    """Commit the job as it is now."""
    job.walk.current()
    saved = capture_extra(job.walk, job.optimizers, job.objects)
    encoded = codec.encode({**saved, "iteration": step, "epoch": 0, "generators": None}, marks=None)
    parts = WholeShare(ALONE, job.models, job.optimizers).of(job.walk.captured)
    layout = make_layout(parts.records)
    staging = scratch(layout.buffer_bytes)
    write_headers(layout, staging)
    for one in parts.items:
        begin = layout.tensors[one.name].staging_offset
        staging[begin : begin + one.tensor.nbytes] = ctypes.string_at(one.tensor.data_ptr(), one.tensor.nbytes)
    with Store(directory, run_id=f"run-{step}") as store:
        return store.commit(step, layout, staging, encoded, {}, ties=job.walk.captured.ties)


def restore(job: Job, directory: Path) -> Resumed | None:
    """Restore the newest checkpoint."""
    with Store(directory, run_id="later") as store:
        return resume_from(store, "auto", job.models, job.optimizers, job.objects)
