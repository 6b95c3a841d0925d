"""Batches come from workers as torch sends them: what is shared stays shared, and nothing is copied without need."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from checkflow.runtime.data.loader import DataLoader


class Sharing:
    """Memory that its user shares with the workers."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1).share_memory_()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.flag


def test_what_a_data_set_shares_is_shared_with_the_main_process() -> None:
    data = Sharing()
    for flag in DataLoader(data, batch_size=None, num_workers=1):
        flag += 1
    assert data.flag.item() == 2


class Ring(list[Any]):
    """A type of the user's, collated as its user has it."""


class Rings(Sharing):
    def __getitem__(self, index: int) -> Any:
        return Ring([self.flag])


def test_what_a_users_way_to_collate_shares_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Ring, _first)
    data = Rings()
    for flag in DataLoader(data, num_workers=1):
        flag += 1
    assert data.flag.item() == 2


def _first(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return batch[0][0]


class Episodes:
    """Each sample is made of what another loader gives."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[Any]:
        inner = DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), 4)
        return [(x + index, y) for x, y in inner]


@pytest.mark.parametrize("kind", [DataLoader, TorchDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_within_a_worker_gives_batches(kind: Any, workers: int) -> None:
    for index, episode in enumerate(kind(Episodes(), batch_size=None, num_workers=workers)):
        assert [x.tolist() for x, _ in episode] == [[index + i for i in range(4)], [index + 4, index + 5]]


def test_in_the_main_process_nothing_is_copied() -> None:
    kept = torch.arange(3)
    (batch,) = DataLoader([0], batch_size=None, collate_fn=functools.partial(_same, kept))
    assert batch is kept


def _same(kept: torch.Tensor, sample: int) -> torch.Tensor:
    return kept
