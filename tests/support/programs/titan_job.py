"""A job of torchtitan's own Trainer, of a small Llama on random tokens: ``titan_job FOLDER SEED CUT SIGNAL STEPS``.

torchtitan expects a GPU. Here a device that reports its memory is replaced, and what gloo cannot do, and nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

import tests.support.titan_on_cpu  # noqa: F401

# isort: split
from torchtitan import train
from torchtitan.components import metrics
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec

from checkflow.integrations.torchtitan import CheckpointManager

VOCABULARY, LENGTH = 64, 16


class Tokens(IterableDataset[Any]):
    """Endless; the place is in its state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.number += 1
            generator = torch.Generator().manual_seed(1000 * self.rank + self.number)
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
            yield {"input": tokens[:-1], "number": torch.tensor(self.number)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Trainer(train.Trainer):  # type: ignore[misc]
    """Writes down what each step used, and is cut after an optimizer's step."""

    folder, cut, number, steps = "", 0, 0, 0

    def train_step(self, batches: Any) -> None:
        used: list[int] = []

        def noted() -> Iterator[Any]:
            for inputs, labels in batches:
                used.extend(inputs.pop("number").tolist())
                yield inputs, labels

        super().train_step(noted())
        Trainer.steps += 1
        with open(f"{self.folder}.used{os.environ['RANK']}", "a") as file:
            file.write(f"{self.step - 1} {' '.join(map(str, used))}\n")
        if Trainer.steps == self.cut:
            os.kill(os.getpid(), self.number)


def _loader(dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> ParallelAwareDataloader:
    return ParallelAwareDataloader(
        Tokens(dp_rank), dp_rank, dp_world_size, batch_size=job_config.training.local_batch_size
    )


def _parallelize(model: torch.nn.Module, *arguments: Any) -> torch.nn.Module:
    """As torchtitan's; gloo has no collective that sums and scales at once, which this asks for on a GPU."""
    model = llama3.parallelize_llama(model, *arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def run(folder: str, seed: int, cut: int, number: int, steps: int) -> None:
    """One life of the job; leaves the final state at ``<folder>.final<rank>``."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 2000))
    ranks = int(os.environ["WORLD_SIZE"])
    memory = types.SimpleNamespace(
        device_name="cpu",
        get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    metrics.build_device_memory_monitor = lambda: memory
    torch.cpu.set_device, torch.cpu.current_device = lambda device: None, lambda: 0
    spec = llama3.get_train_spec()
    small = llama3.TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=VOCABULARY, max_seq_len=LENGTH)
    own = {"build_tokenizer_fn": None, "build_dataloader_fn": _loader, "parallelize_fn": _parallelize}
    register_train_spec("small", replace(spec, model_args={"small": small}, **own))
    config = JobConfig()
    config.model.name, config.model.flavor = "small", "small"
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, LENGTH, 2
    config.training.global_batch_size = 4 * ranks  # two micro-batches a step
    config.debug.seed = seed
    config.job.dump_folder = os.path.dirname(folder)
    config.checkpoint.enable, config.checkpoint.folder = True, os.path.basename(folder)
    config.checkpoint.interval = 1
    Trainer.folder, Trainer.cut, Trainer.number = folder, cut, number
    train.CheckpointManager = CheckpointManager
    trainer = Trainer(config)
    trainer.train()
    trainer.close()
    state = {**trainer.model_parts[0].state_dict(), "step": trainer.step, "tokens": trainer.ntokens_seen}
    for index, values in trainer.optimizers.optimizers[0].state_dict()["state"].items():
        state |= {f"{index}.{name}": value for name, value in values.items()}
    local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    torch.save(local, f"{folder}.final{os.environ['RANK']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), signal.Signals[sys.argv[4]], int(sys.argv[5]))
