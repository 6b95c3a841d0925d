"""transformers' Trainer sees under ``attach`` the samples that it sees without, in their order; also after a resume."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.utils.data import BatchSampler, Sampler, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

import checkflow
from checkflow.core.errors import MismatchError
from checkflow.integrations.torch_order import TorchOrderLoader
from checkflow.integrations.transformers import attach
from checkflow.runtime.data.adapters.resumable import of_map_style, resumable
from checkflow.runtime.data.order import SampleSteps, Share, count_steps
from tests.support.ranks.processes import run_ranks

SAMPLES = 22
DATA = [{"input_ids": [number] * (number % 5 + 1)} for number in range(SAMPLES)]


class Net(nn.Module):
    """With dropout: a number that is drawn once more or less changes every weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Embedding(SAMPLES, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.used: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.used.append(input_ids.tolist())
        return {"loss": self.layers(input_ids).square().mean()}


def first_of_each(features: list[Any]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([one["input_ids"][0] for one in features])}


class Repeating(Sampler[int]):
    """As TRL's: from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=self.generator).tolist()


class Numpys(Repeating):
    """From a generator of NumPy's."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(SAMPLES).tolist())


class Ready(Sampler[list[int]]):
    """Ready batches, drawn from the process's generator."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(20).view(5, 4).tolist())


@dataclass(frozen=True)
class Case:
    """TrainingArguments, and what a subclass replaces."""

    settings: dict[str, Any]
    sampler: Callable[[], Any] | None = None
    loader: Callable[[Any], Any] | None = None


CASES = {
    "shuffled": Case({}),
    "grouped by length": Case({"train_sampling_strategy": "group_by_length"}),
    "balanced": Case({"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2}),
    "sequential": Case({"train_sampling_strategy": "sequential"}),
    "workers": Case({"dataloader_num_workers": 2}),
    "workers that persist": Case(
        {
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
            "train_sampling_strategy": "group_by_length",
        }
    ),
    "a seed of the data": Case({"data_seed": 11}),
    "whole batches": Case({"dataloader_drop_last": True}),
    "accumulated": Case({"gradient_accumulation_steps": 2}),
    "torch's sampler": Case({"accelerator_config": {"use_seedable_sampler": False}}),
    "a sampler with a generator": Case({}, sampler=Repeating),
    "a sampler with NumPy's": Case({}, sampler=Numpys),
    "a weighted sampler": Case({}, sampler=lambda: WeightedRandomSampler([1.0] * 21 + [9.0], SAMPLES)),
    "a loader of its own": Case(
        {}, loader=lambda trainer: TorchDataLoader(DATA, batch_sampler=Ready(), collate_fn=first_of_each)
    ),
    "a loader of its own, prepared": Case(
        {},
        loader=lambda trainer: trainer.accelerator.prepare(
            TorchDataLoader(DATA, 3, sampler=Repeating(), collate_fn=first_of_each)
        ),
    ),
}


class Stop(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


def trained(folder: Path, case: Case, checkpoints: Path | None, stop: int | None = None, seed: int = 3) -> Net:
    """Two epochs, with checkflow if there is a place for checkpoints."""

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *data: Any) -> Any:
            return case.sampler() if case.sampler else super()._get_train_sampler(*data)

        def get_train_dataloader(self) -> Any:
            return case.loader(self) if case.loader else super().get_train_dataloader()

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", num_train_epochs=2,
        per_device_train_batch_size=4, seed=seed, remove_unused_columns=False, learning_rate=0.1, **case.settings,
    )  # fmt: skip
    net = Net()
    trainer = Trainer(net, arguments, train_dataset=DATA, data_collator=first_of_each, callbacks=[Stop(stop)])
    if checkpoints is not None:
        attach(trainer, checkpoints, every=1)
    try:
        trainer.train()
    except InterruptedError:
        assert stop is not None
    return net


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_trainer_trains_as_without_checkflow_and_so_does_the_rest_after_a_cut(name: str, tmp_path: Path) -> None:
    plain = trained(tmp_path, CASES[name], None)
    ours = trained(tmp_path, CASES[name], tmp_path / "whole")
    assert ours.used == plain.used
    assert same_weights(ours, plain)
    trained(tmp_path, CASES[name], tmp_path / "cut", stop=4)
    again = trained(tmp_path, CASES[name], tmp_path / "cut", seed=99)  # which the checkpoint's replaces
    assert 0 < len(again.used) < len(plain.used)
    assert again.used == plain.used[-len(again.used) :]
    assert same_weights(again, plain)


@pytest.mark.parametrize("name", ["shuffled", "torch's sampler", "a seed of the data", "a sampler with a generator"])
def test_a_cut_in_a_later_epoch_goes_on(name: str, tmp_path: Path) -> None:
    """Accelerate's sampler makes its generator in the first epoch, so a new process has none yet."""
    plain = trained(tmp_path, CASES[name], None)
    trained(tmp_path, CASES[name], tmp_path / "cut", stop=9)  # of six steps an epoch
    again = trained(tmp_path, CASES[name], tmp_path / "cut", seed=99)
    assert 0 < len(again.used) <= 4
    assert again.used == plain.used[-len(again.used) :]
    assert same_weights(again, plain)


def test_counters_of_a_subclass_go_on_as_the_page_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/integrations.md").read_text()
    found = re.search(r'```python title="counters"\n(.*?)```', page, re.DOTALL)
    assert found is not None

    class Counting(transformers.Trainer):  # type: ignore[misc]
        _total_train_tokens: int

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self._total_train_tokens = 0

        def compute_loss(self, model: nn.Module, inputs: Any, *rest: Any, **keywords: Any) -> Any:
            self._total_train_tokens += len(inputs["input_ids"])
            return super().compute_loss(model, inputs, *rest, **keywords)

    def live(stop: int | None) -> int:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=6,
            per_device_train_batch_size=4, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Counting(Net(), arguments, train_dataset=DATA, data_collator=first_of_each, callbacks=[Stop(stop)])
        exec(
            found.group(1),
            {"checkflow": checkflow, "attach": attach, "trainer": trainer, "directory": tmp_path / "all"},
        )
        with contextlib.nullcontext() if stop is None else pytest.raises(InterruptedError):
            trainer.train()
        return trainer._total_train_tokens

    assert live(4) == 16
    assert live(None) == SAMPLES


def rank_trains(
    rank: int, ranks: int, folder: Path, name: str, checkpoints: Path | None, stop: int | None, seed: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    case = replace(CASES[name], settings={**CASES[name].settings, "ddp_backend": "gloo"})
    net = trained(folder, case, checkpoints, stop, seed)
    return net.used, [one.detach() for one in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shuffled", "grouped by length", "a sampler with a generator"])
def test_ranks_see_what_they_see_without_checkflow(name: str, tmp_path: Path) -> None:
    """Accelerate fills the last batches with the epoch's first samples."""

    def run(place: str, checkpoints: Path | None, stop: int | None = None, seed: int = 3) -> list[Any]:
        (tmp_path / place).mkdir()
        arguments = tmp_path, name, checkpoints, stop, seed
        return run_ranks(tmp_path / place, 2, rank_trains, *arguments, preloaded=("transformers.trainer",))

    plain, ours = run("plain", None), run("ours", tmp_path / "whole")
    run("cut", tmp_path / "all", 4)
    again = run("again", tmp_path / "all", seed=99)
    for (used, weights), (same, _), (rest, end) in zip(plain, ours, again, strict=True):
        assert same == used
        assert 0 < len(rest) < len(used)
        assert rest == used[-len(rest) :]
        assert all(torch.equal(one, other) for one, other in zip(end, weights, strict=True))
    assert plain[0][0] != plain[1][0]


def test_samples_are_dealt_as_accelerate_deals_them() -> None:
    for samples in range(1, 26):
        for batch in (1, 2, 3, 4):
            for ranks in (2, 3, 4):
                for drop, tail in ((False, "pad"), (True, "drop")):
                    for rank in range(ranks):
                        theirs = BatchSamplerShard(BatchSampler(range(samples), batch, drop), ranks, rank)
                        ours = SampleSteps(range(samples), batch, Share(rank, ranks), tail)  # type: ignore[arg-type]
                        assert [step.indices for step in ours] == list(theirs)
                        assert count_steps(samples, batch, ranks, tail) == len(theirs)  # type: ignore[arg-type]


def test_a_checkpoint_with_the_order_of_an_earlier_checkflow_goes_on_in_it() -> None:
    def loader() -> TorchDataLoader[Any]:
        return TorchDataLoader(list(range(SAMPLES)), 4, shuffle=True)  # type: ignore[arg-type]

    def rest(one: Any, batches: int) -> list[list[int]]:
        iterator = iter(one)
        return [next(iterator).tolist() for _ in range(batches)]

    earlier = resumable(loader())
    iterator = iter(earlier)
    next(iterator)
    state = earlier.state_dict()
    ours = of_map_style(TorchDataLoader(list(range(SAMPLES)), 4, sampler=Repeating()), TorchOrderLoader)  # type: ignore[arg-type]
    ours.before = resumable(loader())
    ours.load_state_dict(state)
    assert rest(ours, 5) == [next(iterator).tolist() for _ in range(5)]
    assert ours.state_dict().keys() == state.keys()


def test_an_earlier_checkflow_refuses_the_order_in_one_line() -> None:
    """A checkflow.DataLoader stands for it: it takes each epoch's order from a seed."""

    def loader() -> TorchDataLoader[Any]:
        return TorchDataLoader(list(range(SAMPLES)), 4, sampler=Repeating())  # type: ignore[arg-type]

    state = of_map_style(loader(), TorchOrderLoader).state_dict()
    with pytest.raises(MismatchError, match="the sampler Repeating, drawing as under torch"):
        resumable(loader()).load_state_dict(state)
