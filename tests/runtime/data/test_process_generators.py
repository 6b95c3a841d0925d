"""The process's generators: put back exactly as they were, seeded so that nothing of before is left, streams apart."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from checkflow.runtime.data import numpy_twister, process_generators, seeded_dataset
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.process_generators import (
    generator_states,
    generators_kept,
    seed_generators,
    set_generator_states,
)
from checkflow.runtime.data.seeded_dataset import derived_seed, draws_nothing
from tests.runtime.data.test_loader import rows

DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "bits": lambda: random.getrandbits(77),
    "gauss": lambda: random.gauss(0, 1),  # keeps a second number
    "seed of python": lambda: random.seed("a word"),
    "rand": np.random.rand,
    "randn": np.random.randn,  # keeps a second number
    "normals": lambda: np.random.standard_normal(3),
    "binomial": lambda: np.random.binomial(10, 0.3),  # keeps what it reckoned
    "seed of numpy": lambda: np.random.seed(3),
    "other bits": lambda: np.random.set_bit_generator(np.random.PCG64(5)),
    "another twister": lambda: np.random.set_bit_generator(np.random.MT19937(6)),
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),  # keeps a second number
    "torch double normal": lambda: torch.randn((), dtype=torch.float64).item(),
    "seed of torch": lambda: torch.manual_seed(4),
    "many": lambda: (random.randbytes(2600), np.random.rand(700), torch.rand(700)),
}
draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=6)


def draw(names: list[str]) -> None:
    for name in names:
        DRAWS[name]()


def everything() -> tuple[Any, ...]:
    """All three generators, as their own libraries give them."""
    told: Any = np.random.get_state(legacy=False)
    return random.getstate(), repr(told), torch.get_rng_state().tolist(), torch.initial_seed()


def drawn() -> list[object]:
    return [DRAWS[name]() for name in ("gauss", "randn", "torch normal", "torch double normal", "random", "torch")]


@pytest.fixture(params=["copied", "asked for"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's twister copied as bytes, and states asked for, where their place is not known."""
    if request.param == "asked for":
        monkeypatch.setattr(numpy_twister, "_twister_of_numpy_is_known", bool)
    monkeypatch.setattr(process_generators, "_numpy", numpy_twister.NumPyGenerator())


@contextlib.contextmanager
def own_bits() -> Iterator[None]:
    """NumPy's bit generator is afterwards the one of before: Hypothesis asks for its state, too."""
    bits = np.random.get_bit_generator()
    try:
        yield
    finally:
        np.random.set_bit_generator(bits)


fixture_once = settings(
    max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.usefixtures("ways")
@fixture_once
@given(rounds=st.lists(st.tuples(draws, draws), min_size=1, max_size=5))
@own_bits()
def test_generators_are_put_back_exactly(rounds: list[tuple[list[str], list[str]]]) -> None:
    for outside, inside in rounds:
        draw(outside)
        before = everything()
        with generators_kept():
            draw(inside)
        assert everything() == before


@pytest.mark.usefixtures("ways")
@fixture_once
@given(before=draws, between=draws)
@own_bits()
def test_states_can_be_set_again_and_in_any_order(before: list[str], between: list[str]) -> None:
    first, told = generator_states(), everything()
    draw(before)
    second, told_later = generator_states(), everything()
    draw(between)
    for _ in range(2):
        set_generator_states(first)
        assert everything() == told
        draw(between)
        set_generator_states(second)
        assert everything() == told_later


@pytest.mark.usefixtures("ways")
@fixture_once
@given(before=draws, seed=st.integers(0, 2**63 - 1))
@example(before=["other bits", "randn"], seed=0)
@example(before=["other bits", "randn", "gauss", "torch normal", "torch double normal"], seed=2**63 - 1)
@own_bits()
def test_seeding_leaves_nothing_of_before(before: list[str], seed: int) -> None:
    draw(before)
    kind = type(np.random.get_bit_generator())
    seed_generators(seed)
    found = drawn()
    np.random.set_bit_generator(kind())
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed >> 31 & 0xFFFFFFFF)
    assert drawn() == found


def first_draws(seed: int) -> tuple[float, float, float, int, int]:
    seed_generators(seed)
    numbers = random.random(), float(np.random.random_sample()), torch.rand((), dtype=torch.float64).item()
    seed_generators(seed)
    words = int(np.random.randint(2**32, dtype=np.uint32)) % 2**24, int(torch.randint(2**24, ()).item())
    return *numbers, *words


def test_neighbours_draw_apart_from_each_other_and_each_generator_from_the_others() -> None:
    places = [(seed, epoch, index) for seed in range(-2, 4) for epoch in range(10) for index in range(50)]
    found = [first_draws(derived_seed(*place)) for place in places]
    for one in list(zip(*found, strict=True))[:3]:
        assert len(set(one)) == len(places)
        assert abs(float(np.mean(one)) - 0.5) < 4 * 12**-0.5 / len(places) ** 0.5
    assert all(numpy_word != torch_word for *_, numpy_word, torch_word in found)
    columns = np.array([row[:3] for row in found])
    aligned = np.hstack([columns[1:], columns[:-1]])  # each beside its neighbour's
    correlations = np.corrcoef(aligned, rowvar=False) - np.eye(6)
    assert np.abs(correlations).max() < 4 / len(places) ** 0.5


def test_no_numpy() -> None:
    code = """if True:
        import random, sys
        sys.modules["numpy"] = None
        import torch
        from checkflow.runtime.data.process_generators import generators_kept, seed_generators
        from checkflow.runtime.data.seeded_dataset import draws_nothing
        random.seed(1)
        expected = random.random()
        random.seed(1)
        with generators_kept():
            seed_generators(5)
            print(random.random(), torch.rand(()).item())
        assert random.random() == expected
        assert draws_nothing(torch.zeros(3))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    seed_generators(5)
    assert run.stdout.split() == [str(random.random()), str(torch.rand(()).item())]


class Drawing(TensorDataset):
    """A TensorDataset that draws."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return torch.rand(()), *super().__getitem__(index)


class DrawingTensor(torch.Tensor):
    """A tensor that may do anything."""


class DrawingList(list[int]):
    """Indices that may do anything."""


tensors = TensorDataset(torch.arange(12.0), torch.arange(12))
PLAIN: dict[str, Any] = {
    "tensors": tensors,
    "subset": Subset(tensors, [3, 1, 2]),
    "subset by array": Subset(tensors, np.arange(4)),  # type: ignore[arg-type]
    "concatenated": ConcatDataset([tensors, Subset(tensors, range(2))]),
    "stacked": StackDataset(tensors, torch.zeros(12)),
    "stacked by name": StackDataset(a=tensors, b=torch.zeros(12)),
    "tensor": torch.zeros(12),
    "array": np.zeros(12),
    "range": range(12),
}
MAY_DRAW: dict[str, Any] = {
    "subclass": Drawing(torch.zeros(12)),
    "subset of it": Subset(Drawing(torch.zeros(12)), [1, 2]),
    "one of several": ConcatDataset([tensors, Drawing(torch.zeros(12), torch.zeros(12))]),
    "stacked with it": StackDataset(tensors, Drawing(torch.zeros(12))),
    "subclass of tensor": TensorDataset(torch.zeros(12).as_subclass(DrawingTensor)),
    "indices": Subset(tensors, DrawingList([1, 2])),
    "array of objects": np.zeros(12, object),
    "list": [torch.zeros(2)] * 12,
}


@pytest.mark.parametrize("name", [*PLAIN, *MAY_DRAW])
def test_only_what_surely_draws_nothing_is_not_seeded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(seed: int, reseed: object = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(seeded_dataset, "seed_generators", seeded)
    dataset = {**PLAIN, **MAY_DRAW}[name]
    assert draws_nothing(dataset) is (name in PLAIN)
    before = everything()
    if name in PLAIN:
        assert len(list(DataLoader(dataset, 4, seed=0))) == -(-len(dataset) // 4)
        assert len(list(DataLoader(dataset, None, seed=0))) == len(dataset)
    else:
        with pytest.raises(ZeroDivisionError):
            list(DataLoader(dataset, 4, seed=0))
    for options in ({"collate_fn": lambda samples: default_collate(samples)}, {"reseed": random.Random().seed}):
        with pytest.raises(ZeroDivisionError):
            list(DataLoader(dataset, 4, seed=0, **options))  # type: ignore[arg-type]
    assert everything() == before


def test_what_users_register_with_torchs_collating_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(list(batch)) + torch.rand(len(batch))

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, noisy)  # type: ignore[arg-type]
    dataset = TensorDataset(torch.zeros(12))
    whole = rows(DataLoader(dataset, 4, seed=0))
    rest = DataLoader(dataset, 4, seed=0)
    rest.set_epoch(0, 8)
    assert rows(rest) == whole[8:]
    assert len(set(whole)) == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_mixing_draws_the_same_whoever_collates(workers: int) -> None:
    def mixed(samples: list[Any]) -> list[torch.Tensor]:
        share = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(samples))
        inputs = torch.stack([sample[0] for sample in samples])
        return [share * inputs + (1 - share) * inputs[order], torch.full((len(samples),), random.gauss(0, 1))]

    def run(workers: int, position: int) -> list[tuple[float, ...]]:
        loader = DataLoader(tensors, 4, True, seed=0, collate_fn=mixed, num_workers=workers)
        loader.set_epoch(0, position)
        return rows(loader)

    assert run(workers, 4) == run(0, 0)[4:]
