"""torchtitan's trainer with checkflow: ``Trainer.Config(…, checkpoint=CheckpointManager.Config(enable=True))``.

``load`` resumes the job and ``save`` marks a boundary; copies hide in training, whatever the step. torchtitan's
``Trainer``, its model and its data loader stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any

from torch import nn

from checkflow.api import Checkpointer
from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.integrations.missing import missing
from checkflow.runtime.state.collect import Stateful

try:
    import tyro
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.components.checkpointer.dcp import CheckpointManager as TitansManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
except ImportError as error:
    raise missing("torchtitan", error) from None

logger = logging.getLogger("checkflow")
# Settings that decide something here; the last one is always as if it were False.
_TAKEN = frozenset(("enable", "folder", "interval", "keep_latest_k", "load_step", "async_mode", "options"))
_TAKEN |= {"initial_load_path", "initial_load_model_only", "initial_load_in_hf", "initial_load_in_hf_quantized"}
_TAKEN |= {"last_save_model_only"}
_REFUSED = {
    "last_save_in_hf": "run checkflow export when training has ended",
    "export_dtype": "checkpoints keep the dtype of the model; convert what checkflow export writes",
    "exclude_from_loading": "a resume restores all that a checkpoint holds",
    "create_seed_checkpoint": "a job goes on from a checkpoint of any number of ranks",
    "enable_first_step_checkpoint": "set checkpoint.interval, or the option every",
    "load_only": "turn checkpoint.enable off, or let the job save",
}  # and what to do instead
_NOTHING_BEHIND: dict[str, Any] = {"keep_latest_k": 0, "async_mode": "disabled"}  # no thread, no process group
_UNKNOWN = "this version does not know the setting; leave it at its default"


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan has no types
    """Checkpoints of a torchtitan job in ``{dump_folder}/{folder}``, on a file system that all ranks see.

    Each holds the model, the optimizers and their state, learning rates, the data loader's place, the trainer's
    counters and random numbers: the job goes on bit for bit. The last one is no exception; ``checkflow export`` makes
    a file of weights of it.

    Args:
        config: ``interval`` is in steps, and every such step is saved; ``keep_latest_k`` of them stay, 0: all.
        dataloader, model_parts, optimizers, lr_schedulers, states, base_folder: as the trainer has them.
        sd_adapter: of the model's weights in Hugging Face's form, for ``initial_load_in_hf``.

    Raises:
        UnsupportedError: several model parts on one rank, or a setting of ``config`` that checkflow has not.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitansManager.Config):  # type: ignore[misc]
        """torchtitan's settings, and checkflow's."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Options of ``checkflow.Checkpointer``; ``{"every": None}``: as often as is almost free, not ``interval``."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        self._checkpointer: Checkpointer | None = None
        if not config.enable:
            return
        _refuse(config)
        if config.initial_load_in_hf and not hasattr(sd_adapter, "get_hf_storage_reader"):
            raise UnsupportedError(
                "checkpoint.initial_load_in_hf needs the state_dict_adapter of torchtitan's model, and it has none: "
                "run checkflow import"
            )
        if config.async_mode != "disabled":
            logger.info("checkpoint.async_mode=%r: checkflow copies while training goes on, in any mode",
                        config.async_mode)  # fmt: skip
        if len(model_parts) != 1:
            raise UnsupportedError(
                f"{len(model_parts)} parts of the model on one rank: choose a pipeline schedule with one stage a rank"
            )
        self._model, made = model_parts[0], list(optimizers)
        self._optimizers = made[0] if len(made) == 1 else {f"optimizer{at}": one for at, one in enumerate(made)}
        self._state: dict[str, Stateful] = {"lr_schedulers": lr_schedulers, **states}
        if dataloader is not None:
            self._state["dataloader"] = _Place(dataloader)
        kept = {"keep_latest": config.keep_latest_k} if config.keep_latest_k else {"keep_every": 1}
        # What torchtitan itself would load where it finds no checkpoint.
        self._initial: dict[str, Any] | None = None
        if config.initial_load_path or config.initial_load_in_hf:
            self._initial = {
                "config": replace(config, **_NOTHING_BEHIND), "dataloader": dataloader,
                "model_parts": model_parts, "optimizers": optimizers, "lr_schedulers": lr_schedulers,
                "states": dict(states), "sd_adapter": sd_adapter, "base_folder": base_folder,
            }  # fmt: skip
        refuse_url(config.folder)  # which joined to another path would be a folder in it
        directory = os.path.join(base_folder, config.folder)
        self._options = {"directory": directory, "every": config.interval, **kept, **config.options}

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The job's, once it is loaded."""
        return self._checkpointer

    def _load(self, step: int = -1) -> bool:
        resume = self._options.get("resume", "auto") if step < 0 else step
        options = {**self._options, "resume": resume, "state": {**self._state, **self._options.get("state", {})}}
        self._checkpointer = Checkpointer(self._model, self._optimizers, **options)
        if self._checkpointer.resumed_from is not None:
            return True
        if self._initial is None:
            return False
        return bool(TitansManager(**self._initial).load())

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Mark a boundary, which is saved if it is due; the last one is saved by ``close``."""
        if self._checkpointer is None:
            raise UnsupportedError("load() comes before save(): it resumes the job, or begins it")
        self._checkpointer.step()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Before the optimizer's step: by its plan the checkpointer itself waits there, for what is still to copy."""

    def _wait_for_saving(self) -> None:
        """No future is handed out."""

    def _close(self) -> None:
        """Save the last step, unless an exception ends training, and wait until it is durable."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _refuse(config: Any) -> None:
    """What is set and not taken. Of what another version of torchtitan adds, nothing is taken."""
    for one in fields(config):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.name not in _TAKEN and getattr(config, one.name) != default:
            raise UnsupportedError(f"checkpoint.{one.name} is not for checkflow: {_REFUSED.get(one.name, _UNKNOWN)}")
    if config.initial_load_path and not config.initial_load_model_only:
        raise UnsupportedError(
            "checkpoint.initial_load_model_only=False would go on in the middle of torchtitan's own run: run checkflow "
            "import, or load its model only"
        )


class _Place:
    """A rank's place in its data: the loader's state without the pickled bytes in which torchtitan wraps it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._dealt = isinstance(loader, ParallelAwareDataloader)

    @property
    def _share(self) -> str:
        return f"rank {self._loader.dp_rank} of {self._loader.dp_world_size}" if self._dealt else ""

    def state_dict(self) -> dict[str, Any]:
        state = StatefulDataLoader.state_dict(self._loader) if self._dealt else self._loader.state_dict()
        return {"share": self._share, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["share"] != self._share:
            raise MismatchError(
                f"the checkpoint's place in the data is that of data-parallel {state['share']}, and this is "
                f"{self._share}: torchtitan's loaders go on with as many ranks as before"
            )
        load = StatefulDataLoader.load_state_dict if self._dealt else type(self._loader).load_state_dict
        load(self._loader, state["state"])
