"""One rank of a job that tests/integration/test_elastic.py starts by torchrun: it goes on with every scenario, each for
some steps.

``elastic_worker.py BEFORE AFTER STEPS``: from what was saved in the folder BEFORE, if it is there, to what is saved in
AFTER; STEPS is how many steps of the epoch are taken, 0: all that are left, and another epoch.
"""

from __future__ import annotations

import datetime
import itertools
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.order import TAILS
from checkflow.runtime.format import codec

BATCH_SIZE = 2
STOPPED = 18  # samples that one step each of 4, 2 and 3 ranks take


class Images:
    """Each carries its index and what all three generators gave for it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        return index, torch.rand(2).numpy().tobytes() + np.random.rand(1).tobytes() + random.randbytes(8)


def as_they_are(samples: list[tuple[int, bytes]]) -> list[tuple[int, str]]:
    return [(index, drawn.hex()) for index, drawn in samples]


@dataclass(frozen=True)
class Scenario:
    """A job's loader."""

    size: int
    tail: str = "even"
    seed: int | None = 7
    order: str = "shuffled"
    workers: int = 0

    @property
    def name(self) -> str:
        return f"{self.size} {self.tail} seed {self.seed} {self.order} {self.workers}"

    def loader(self, **ranks: int) -> DataLoader:
        data = Images(self.size)
        order: dict[str, Any] = {"batch_size": BATCH_SIZE, "tail": self.tail}
        if self.order == "shuffled":
            order |= {"shuffle": True}
        elif self.order == "weighted":
            weights = [1.0 + index for index in range(self.size)]
            order |= {"sampler": WeightedRandomSampler(weights, self.size)}
        elif self.order == "ready batches":
            order = {"batch_sampler": BatchSampler(RandomSampler(data), BATCH_SIZE, False), "tail": self.tail}
        elif self.order == "DistributedSampler":
            sampler = DistributedSampler(data, ranks.get("world_size"), ranks.get("rank"))  # type: ignore[arg-type]
            order |= {"sampler": sampler}
        return DataLoader(data, seed=self.seed, collate_fn=as_they_are, num_workers=self.workers, **order, **ranks)


# Exactly full, one over, one under; what is left goes round with one sample a rank, and is less; one step in all and
# one more; as many as ranks, fewer, none.
SIZES = (STOPPED + 8, STOPPED + 9, STOPPED + 7, STOPPED + 4, STOPPED + 3, 9, 8, 4, 3, 0)
SCENARIOS = [
    *(Scenario(*case) for case in itertools.product(SIZES, TAILS)),
    *(Scenario(size, tail, None) for size in (STOPPED + 9, 3) for tail in TAILS),
    Scenario(STOPPED + 9, workers=1),
    Scenario(STOPPED + 9, order="sequential"),
    *(Scenario(STOPPED + 9, tail, order="ready batches") for tail in TAILS),
    *(Scenario(STOPPED + 9, seed=seed, order="weighted") for seed in (7, None)),
    Scenario(STOPPED + 9, order="DistributedSampler"),
]


def run(scenario: Scenario, before: Path, after: Path, steps: int) -> dict[str, Any]:
    """What this rank sees."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loader = scenario.loader()
    torch.manual_seed(100 + rank)  # ranks draw other numbers: for dropout
    if (saved := before / scenario.name).exists():
        state = codec.decode(saved.read_bytes())
        loader.load_state_dict(state["loader"])
        if rank == 0:
            torch.set_rng_state(state["generator"])
    rows: list[Any] = []
    left: list[Any] = []
    for _ in range(1 if steps else 2):
        epoch: list[Any] = []
        for batch in itertools.islice(loader, steps or None):
            # As gradients are: all ranks take part in each step, or it never ends.
            count = torch.tensor([len(batch), 1, loader.position])
            torch.distributed.all_reduce(count)
            assert count[1] == ranks
            assert count[2] == ranks * loader.position
            epoch.append(batch)
        rows.append(epoch)
        left.append((loader.dropped, loader.repeated))
    state = loader.state_dict()
    if rank == 0:
        (after / scenario.name).write_bytes(codec.encode({"loader": state, "generator": torch.get_rng_state()}))
    return {"epochs": rows, "left": left, "state": codec.encode(state).hex(), "batches": len(loader)}


def main(before: Path, after: Path, steps: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    seen: dict[str, Any] = {scenario.name: run(scenario, before, after, steps) for scenario in SCENARIOS}
    (after / f"rank {torch.distributed.get_rank()}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
