"""Accelerate with checkflow: ``checkpointer_of(accelerator, loader, directory="checkpoints")`` after ``prepare``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from checkflow.api import Checkpointer
from checkflow.core.errors import UnsupportedError
from checkflow.integrations.missing import missing
from checkflow.integrations.numbered import numbered
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.state.collect import Stateful

try:
    from accelerate import Accelerator, DistributedType
except ImportError as error:
    raise missing("accelerate", error) from None

_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def checkpointer_of(
    accelerator: Accelerator,
    loader: ResumableLoader | None = None,
    *,
    directory: str | os.PathLike[str],
    state: Mapping[str, Stateful] | None = None,
    **options: Any,
) -> Checkpointer:
    """The Checkpointer of all that an Accelerator has prepared: models, optimizers, schedulers and its scaler; and of
    what ``register_for_checkpointing`` was given.

    Args:
        loader: a ``checkflow.DataLoader`` or the result of ``checkflow.resumable``; it deals the samples to the
            processes, and gives batches on the CPU. ``prepare`` returns it as it is.
        directory: where checkpoints go, on storage that all processes see.
        state: further objects, by name.
        options: of :class:`checkflow.Checkpointer`.

    Raises:
        UnsupportedError: nothing was prepared, or what cannot resume exactly; the message says what to change.
    """
    if accelerator.distributed_type not in _KNOWN:
        raise UnsupportedError(
            f"checkflow does not save what {accelerator.distributed_type.value} holds: use DDP or fully_shard (FSDP 2)"
        )
    refuse_parallelism(accelerator)
    if not accelerator._models:
        raise UnsupportedError("this Accelerator has prepared no model: call accelerator.prepare first")
    if isinstance(loader, TorchDataLoader):
        raise UnsupportedError(
            f"the loader is a {type(loader).__name__}, which Accelerate has prepared or takes apart: make it "
            "resumable first, loader = checkflow.resumable(loader), and prepare that"
        )
    objects: dict[str, Stateful] = numbered("scheduler", accelerator._schedulers)
    objects |= numbered("custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    return Checkpointer(
        numbered("model", accelerator._models), numbered("optimizer", accelerator._optimizers), loader,
        directory=directory, state=objects | dict(state or {}), **options,
    )  # fmt: skip


def refuse_parallelism(accelerator: Accelerator) -> None:
    """Refuse FSDP 1, and ranks that share samples: a loader deals to each rank its own.

    Raises:
        UnsupportedError: the Accelerator has one of these.
    """
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedError("checkflow does not save what FSDP 1 holds: set fsdp_version to 2")
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise UnsupportedError(
            "tensor, context and sequence parallelism by Accelerate: their ranks share samples, and checkflow deals "
            "other samples to each; use DDP or fully_shard (FSDP 2)"
        )
