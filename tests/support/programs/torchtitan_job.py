"""torchtitan's own trainer on the CPU: ``torchtitan_job.py FOLDER MANAGER STEPS [name=value …]``, under torchrun.

What needs a GPU is put away: statistics of its memory, and kernels that only mixtures of experts use. MANAGER is
"checkflow", or "none" to train without. Options: ``every=N``, ``pause=SECONDS``, ``accumulate=N`` batches a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # they need Triton
from torchtitan.tools import utils  # noqa: E402

utils.device_type, utils.device_module = "cpu", torch.cpu
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from checkflow.integrations.torchtitan import CheckpointManager  # noqa: E402

dist_utils.get_local_device, dist_utils.set_pg_timeouts = utils.get_local_device, lambda **_: None
WORDS, LENGTH = 2048, 16
log = Path(f"log-{os.environ['RANK']}").open("a", encoding="utf-8")  # noqa: SIM115


def tell(what: str, **more: Any) -> None:
    log.write(json.dumps({"what": what, "pid": os.getpid(), **more}) + "\n")
    log.flush()


def digest(tensors: list[Any]) -> str:
    """Of this rank's parts, bit for bit."""
    parts = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return xxhash.xxh3_128_hexdigest(b"".join(one.detach().numpy().tobytes() for one in parts))


class Text(IterableDataset[Any]):
    """Numbered samples of this rank, and where it is among them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.next, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        while True:
            number, self.next = self.next, self.next + self.ranks
            words = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))
            yield {"input": words[:-1], "number": torch.tensor(number)}, words[1:]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Net(BaseModel):
    """A few layers with dropout, which draws random numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, *, config: Any, **_: Any) -> None: ...

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(one.numel() for one in model.parameters()), 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(WORDS, 32), nn.Linear(32, 33), nn.Dropout(0.1), nn.Linear(33, WORDS)])

    def forward(self, words: torch.Tensor, **_: Any) -> torch.Tensor:
        for layer in self.layers:
            words = layer(words)
        return words

    def init_weights(self, **_: Any) -> None:
        for layer in self.layers[0], self.layers[1], self.layers[3]:
            layer.reset_parameters()  # type: ignore[operator]

    def verify_module_protocol(self) -> None:
        """Its layers are torch's."""


def shard(model: nn.Module, *, parallel_dims: Any, **_: Any) -> nn.Module:
    mesh = parallel_dims.get_mesh(["fsdp"])
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Text(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Monitor:
    """No device, no memory of one."""

    device_name, device_capacity_gib = "CPU", 0.0

    def get_peak_stats(self) -> Any:
        return SimpleNamespace(**dict.fromkeys(metrics.DeviceMemStats._fields, 0))

    def reset_peak_stats(self) -> None: ...


class TellingTrainer(Trainer):
    """Says which samples each step has used, and how the weights are at the end."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    used: list[int]

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        for inputs, labels in super().batch_generator(data_iterable):
            self.used += inputs.pop("number").tolist()
            yield inputs, labels

    def train_step(self, data_iterator: Any) -> None:
        self.used = []
        super().train_step(data_iterator)
        tell("stepped", step=self.step, used=self.used, lr=self.lr_schedulers.schedulers[0].get_last_lr())
        time.sleep(float(options.get("pause", "0")))


metrics.DeviceMemoryMonitor = metrics.build_device_memory_monitor = lambda *_: Monitor()

if __name__ == "__main__":
    folder, manager, steps, *rest = sys.argv[1:]
    options = dict(one.split("=", 1) for one in rest)
    torch.set_num_threads(1)
    tell("starts")
    checkpoint = CheckpointManager.Config(enable=manager == "checkflow", interval=int(options.get("every", "1")))
    spec = ModelSpec(
        name="net", flavor="small", model=Net.Config(), parallelize_fn=shard, pipelining_fn=None,
        post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip
    accumulate, ranks = int(options.get("accumulate", "1")), int(os.environ["WORLD_SIZE"])
    training = TrainingConfig(
        local_batch_size=2, global_batch_size=2 * accumulate * ranks, seq_len=LENGTH, steps=int(steps),
        disable_cuda_graphs=True, mixed_precision_param="float32",
    )  # fmt: skip
    trainer = TellingTrainer.Config(
        model_spec=spec, dump_folder=folder, tokenizer=Tokenizer.Config(), dataloader=Loader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS), training=training, checkpoint=checkpoint,
        optimizer=default_adamw(lr=1e-3, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), debug=DebugConfig(seed=3),
    ).build()  # fmt: skip
    try:  # as torchtitan's train.py does: what is no Exception, such as Preempted, closes nothing
        trainer.train()
        weights: list[Any] = list(trainer.model_parts[0].parameters())
        states = trainer.optimizers.optimizers[0].state
        weights += [states[one][name] for one in list(weights) for name in sorted(states[one])]
        tell("ended", step=trainer.step, seen=trainer.ntokens_seen, digest=digest(weights))
    except Exception:
        trainer.close()
        raise
    else:
        trainer.close()
        torch.distributed.destroy_process_group()
