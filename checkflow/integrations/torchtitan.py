"""torchtitan with checkflow: ``torchrun … -m checkflow.integrations.torchtitan`` in place of ``-m torchtitan.train``.

Its ``[checkpoint]`` settings count: enable, folder, interval, keep_latest_k, load_step. A boundary is where the trainer
calls ``save``, after each step. Each rank saves the place in its own data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from checkflow.api import Checkpointer
from checkflow.core.errors import MismatchError, UnsupportedError
from checkflow.integrations.missing import missing
from checkflow.runtime.state.collect import Stateful

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components import checkpoint as titan
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import Checkpoint
except ModuleNotFoundError as error:
    raise missing("torchtitan", error) from None

# What a [checkpoint] section may ask for that checkflow does not do, with what to do instead.
_REFUSED = {
    "initial_load_path": "run checkflow import, which makes the first checkpoint of it",
    "initial_load_in_hf": "run checkflow import, which makes the first checkpoint of the safetensors files",
    "last_save_in_hf": "run checkflow export when training has ended",
    "exclude_from_loading": "a resume restores all that a checkpoint holds",
    "create_seed_checkpoint": "start the job on any number of ranks from any other's checkpoint",
}


class CheckpointManager(titan.CheckpointManager):  # type: ignore[misc]
    """In the place of torchtitan's class of this name, with its arguments and methods.

    Args:
        options: of :class:`checkflow.Checkpointer`, beside what ``checkpoint_config`` says.

    Raises:
        UnsupportedError: a setting that checkflow has not; the message says what to do instead.
    """

    def __init__(
        self,
        dataloader: BaseDataLoader | None,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        states: dict[str, Any],
        checkpoint_config: Checkpoint,
        sd_adapter: object = None,
        base_folder: str = "",
        ft_manager: Any = None,
        **options: Any,
    ) -> None:
        self.enable = checkpoint_config.enable
        self._checkpointer: Checkpointer | None = None
        if not self.enable:
            return
        _refuse(checkpoint_config, model_parts, optimizers, ft_manager)
        self._model, self._optimizer = model_parts[0], optimizers.optimizers[0]
        self._state: dict[str, Stateful] = {"lr_schedulers": lr_schedulers, **states}
        if dataloader is not None:
            self._state["dataloader"] = _Place(dataloader)
        self._options = {
            "directory": os.path.join(base_folder, checkpoint_config.folder),
            "every": checkpoint_config.interval,
            **({"keep_latest": kept} if (kept := checkpoint_config.keep_latest_k) else {"keep_every": 1}),  # 0: all
            **options,
        }

    def load(self, step: int = -1) -> bool:
        """Begin: go on from the newest checkpoint, or that of a step; returns whether there was one."""
        if not self.enable:
            return False
        resume = "auto" if step == -1 else step
        options = {**self._options, "state": {**self._state, **self._options.get("state", {})}, "resume": resume}
        self._checkpointer = Checkpointer(self._model, self._optimizer, **options)
        return self._checkpointer.resumed_from is not None

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """A step has ended; what is due is saved while the next ones are computed."""
        if self._checkpointer is not None:
            self._checkpointer.step()

    def maybe_wait_for_staging(self) -> None:
        """Nothing: checkflow's anchors wait where a tensor is about to be written."""

    def close(self) -> None:
        """Save the last step, and wait until it is durable."""
        if (checkpointer := getattr(self, "_checkpointer", None)) is not None:
            checkpointer.close()


class _Place:
    """A rank's place in its data: the loader's state without the pickled bytes in which torchtitan wraps it."""

    def __init__(self, dataloader: BaseDataLoader) -> None:
        self._loader = dataloader
        self._wrapped = isinstance(dataloader, ParallelAwareDataloader)

    @property
    def _share(self) -> str:
        return f"rank {self._loader.dp_rank} of {self._loader.dp_world_size}" if self._wrapped else ""

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        state = StatefulDataLoader.state_dict(loader) if self._wrapped else loader.state_dict()
        return {"share": self._share, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["share"] != self._share:
            raise MismatchError(
                f"the checkpoint's place in the data is that of data-parallel {state['share']}, and this is "
                f"{self._share}: torchtitan's loaders go on with as many ranks as before"
            )
        if self._wrapped:
            StatefulDataLoader.load_state_dict(self._loader, state["state"])
        else:
            self._loader.load_state_dict(state["state"])


def _refuse(config: Checkpoint, model_parts: list[nn.Module], optimizers: OptimizersContainer, ft_manager: Any) -> None:
    for setting, instead in _REFUSED.items():
        if getattr(config, setting):
            raise UnsupportedError(f"checkpoint.{setting} is not for checkflow: {instead}")
    if len(model_parts) > 1 or len(optimizers.optimizers) > 1:
        raise UnsupportedError(
            f"a rank has {len(model_parts)} model parts and {len(optimizers.optimizers)} optimizers, and checkflow "
            "saves one of each: choose a pipeline schedule of one stage a rank, and no optimizer in backward"
        )
    if ft_manager is not None and ft_manager.enabled:
        raise UnsupportedError("torchft's replicas save themselves: turn fault_tolerance off, or checkpoint.enable")


def main() -> None:
    """torchtitan's own command with checkflow's checkpoints."""
    from torchtitan import train

    train.CheckpointManager = CheckpointManager
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
