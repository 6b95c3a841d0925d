"""Another number of ranks goes on where all that was saved means the same to it, and is refused where some is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkflow
from checkflow.core.errors import CheckflowError
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.timeout(600)
SIZE, USED = 24, 3
Made = tuple[nn.Module, torch.optim.Optimizer, Any]


class Strided:
    """A sampler that deals by itself."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), SIZE, dist.get_world_size()))


class Own:
    """A loader with a state, which deals by itself."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._at, SIZE // dist.get_world_size()):
            self._at += 1
            yield torch.ones(2, 4)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Kept:
    """An object under ``state=``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Slices(torch.optim.Optimizer):
    """Each rank has a part of each momentum, as ZeRO has it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows = len(parameter) // dist.get_world_size()
            self.state[parameter].setdefault("momentum", torch.zeros(rows, *parameter.shape[1:]))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 6)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alike(loader: Callable[[], Any]) -> Made:
    model = DistributedDataParallel(plain())
    return model, momentum(model), loader()


def data() -> Any:
    return torch.utils.data.TensorDataset(torch.ones(SIZE, 4))


def deal() -> Iterator[torch.Tensor]:
    yield from [torch.ones(2, 4)] * (SIZE // dist.get_world_size())


def statistics() -> Made:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    return model, momentum(model), checkflow.DataLoader(data(), batch_size=2, seed=1)


def by_hand() -> Made:
    model = plain()
    return model, momentum(model), checkflow.DataLoader(data(), batch_size=2, seed=1)


def sliced() -> Made:
    model = plain()
    return model, Slices(model.parameters()), None


def with_state(make: Callable[[int], Any]) -> Made:
    model = DistributedDataParallel(plain())
    return model, momentum(model), {"kept": make(dist.get_rank())}  # in the place of a loader


# What is refused, with the words for it; each rank's values differ where "local" is in the name.
REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "a generator": (lambda: alike(lambda: checkflow.resumable(deal)), "the loader (deal) deals to the ranks by itself"),
    "a sampler": (
        lambda: alike(lambda: checkflow.DataLoader(data(), sampler=Strided(), rank=0, world_size=1)),
        "the loader (its Strided, under rank=0, world_size=1) deals",
    ),
    "a state": (lambda: alike(lambda: checkflow.resumable(Own())), "the loader (Own) deals to the ranks by itself"),
    "local values": (by_hand, "model/bias of rank 1 has other values than that of a rank before it"),
    "local moments": (by_hand, "optimizer/bias.momentum_buffer of rank 1 has other values"),
    "slices": (sliced, "optimizer/bias.momentum has the shape [3] on each rank, as a part of its parameter of [6]"),
    "an object's tensors": (
        lambda: with_state(lambda rank: Kept({"x": torch.full((3,), float(rank))})),
        "job-state/kept.x of rank 1 has other values than that of a rank before it",
    ),
    "a tensor that rank 0 has not": (
        lambda: with_state(lambda rank: Kept({"x": [torch.ones(2)] * (1 + rank)} if rank else {"x": []})),
        "rank 1 has job-state/kept.x.0, and rank 0 has not",
    ),
}
EXACT: dict[str, tuple[Callable[[], Made], str]] = {
    "dealt": (lambda: alike(lambda: checkflow.DataLoader(data(), batch_size=2, shuffle=True, seed=1)), ""),
    "dealt by a sampler": (
        lambda: alike(lambda: checkflow.DataLoader(data(), sampler=torch.utils.data.SequentialSampler(data()))),
        "",
    ),
    "the same by hand": (by_hand, ""),
    "statistics local": (statistics, "ranks have batch-norm statistics of their own"),
    "an object's numbers": (
        lambda: with_state(lambda rank: Kept({"rank": rank})),
        "state['kept'] of rank 1 has other values than that of rank 0: each rank keeps its own",
    ),
    "a generator in an object": (
        lambda: with_state(lambda rank: checkflow.Variables(g=torch.Generator().manual_seed(rank))),
        "ranks have random generators of their own in job-state/kept.g",
    ),
    "a whole epoch": (lambda: alike(lambda: checkflow.resumable(deal)), ""),
}


def train(checkpointer: checkflow.Checkpointer, made: Made, what: str) -> None:
    model, optimizer, loader = made
    loader = None if isinstance(loader, dict) else loader
    for epoch in checkpointer.epochs(1) if loader is not None else (None,):
        for step, _ in enumerate(checkpointer.loader if loader is not None else checkpointer.steps(USED)):
            scale = 1.0 + dist.get_rank() if "local" in what else 1.0
            optimizer.zero_grad()
            model(scale * torch.arange(8.0).view(2, 4)).square().mean().backward()
            if what == "local moments":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.grad.zero_() if dist.get_rank() and parameter.grad is not None else None
            optimizer.step()
            if what == "local moments":
                with torch.no_grad():
                    [parameter.fill_(1) for parameter in model.parameters()]
            if step + 1 == USED and epoch is not None and what != "a whole epoch":
                return


def run(rank: int, world_size: int, folder: Path, accept: tuple[str, ...], *, trains: bool) -> dict[str, Any]:
    """How each job starts, and what it says."""
    found: dict[str, Any] = {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("checkflow").addHandler(handler)
    logging.getLogger("checkflow").setLevel(logging.INFO)
    for number, (what, (make, _)) in enumerate((REFUSED | EXACT).items()):
        lines.clear()
        made = make()
        before = [parameter.detach().clone() for parameter in made[0].parameters()]
        try:
            state = made[2] if isinstance(made[2], dict) else None
            parts = made if state is None else made[:2]
            checkpointer = checkflow.Checkpointer(
                *parts, state=state, directory=folder / str(number), every=1, accept=accept
            )
        except CheckflowError as error:
            assert all(map(torch.equal, before, made[0].parameters()))
            found[what] = f"{type(error).__name__}: {error}"
        else:
            with checkpointer:
                if trains:
                    train(checkpointer, made, what)
            found[what] = (checkpointer.resumed_from, "\n".join(lines))
        dist.barrier()
    return found


def begin(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    return run(rank, world_size, folder, (), trains=True)


def go_on(rank: int, world_size: int, folder: Path, accept: tuple[str, ...] = ()) -> dict[str, Any]:
    return run(rank, world_size, folder, accept, trains=False)


def test_other_ranks_are_refused_where_something_would_be_lost(tmp_path: Path) -> None:
    places = [tmp_path / f"processes {number}" for number in range(5)]
    for place in places:
        place.mkdir()
    directory = tmp_path / "all"
    run_ranks(places[0], 2, begin, directory)
    for place, ranks in ((places[1], 1), (places[2], 3)):
        for rank, found in enumerate(run_ranks(place, ranks, go_on, directory)):
            for what, (_, words) in REFUSED.items():
                assert found[what].startswith("MismatchError"), (what, found[what])
                assert f": 2 ranks saved it, and {ranks} would go on: {words}" in found[what]
                assert 'start with 2 as before, or accept that loss with Checkpointer(accept=("ranks",))' in found[what]
            for what, (_, words) in EXACT.items():
                assert len(found[what]) == 2, found[what]
                step, said = found[what]
                assert step, what
                assert said.count(words) == 1 if words and not rank else "batch-norm" not in said
    (accepted,) = run_ranks(places[3], 1, go_on, directory, ("ranks",))
    for what, (_, words) in REFUSED.items():
        step, said = accepted[what]
        assert f"step {step} goes on with 1 rank in place of 2, as accepted: {words}" in said
        assert said.count("what rank 1 had alone is dropped") == 1
        assert "nothing is lost" not in said
    for found in run_ranks(places[4], 2, go_on, directory):
        assert all(step for step, _ in found.values()), found
