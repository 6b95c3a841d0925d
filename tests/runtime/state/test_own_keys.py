"""Optimizers of torch and of pytorch_optimizer: what their ``state_dict()`` adds goes on bit for bit, or is refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import checkflow
from checkflow.core.errors import CorruptCheckpointError, MismatchError, UnsupportedError
from checkflow.runtime.format.manifest import EXTRA
from checkflow.runtime.state import own_keys
from checkflow.runtime.state.collect import capture_extra
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.weights.exporter import state_dicts
from tests.support.saved_jobs import make_job, restore, save

Make = Callable[[nn.Module], Any]
AdamW = torch.optim.AdamW

# Those that cannot be made of a model's parameters alone, or not be stepped without more: a closure, several ranks,
# second derivatives, groups of their own, a model. Some of them follow below.
_NEED_MORE = frozenset((
    "adago", "adahessian", "adalomo", "adammini", "adamuon", "alig", "bsam", "demo", "distributedmuon", "lbfgs", "lomo",
    "muon", "muonclip", "normuon", "ranger21", "sophiah", "spectralsphere",
))  # fmt: skip
# Their state or groups hold objects of pytorch_optimizer's classes.
_REFUSED = frozenset(("conda", "scalableshampoo", "scion", "scionlight"))
_CLASSES = [name for name in sorted(pytorch_optimizer.get_supported_optimizers()) if name not in _NEED_MORE]
_OTHERS: dict[str, Make] = {
    "ranger21": lambda m: pytorch_optimizer.Ranger21(m.parameters(), 40, num_warm_up_iterations=3,
                                                     num_warm_down_iterations=3),
    "stablespam over some steps": lambda m: pytorch_optimizer.StableSPAM(m.parameters(), t_max=30),
    "trac": lambda m: pytorch_optimizer.TRAC(AdamW(m.parameters())),
    "orthograd": lambda m: pytorch_optimizer.OrthoGrad(AdamW(m.parameters())),
    "magma": lambda m: pytorch_optimizer.Magma(AdamW(m.parameters())),
    "lookahead": lambda m: _both(AdamW(m.parameters()), lambda inner: pytorch_optimizer.Lookahead(inner, k=3)),
    "adalomo": lambda m: pytorch_optimizer.AdaLOMO(m),
    "adammini": lambda m: pytorch_optimizer.AdamMini(m),
    "sam": lambda m: pytorch_optimizer.SAM(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "torch's lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, history_size=4),
}  # fmt: skip


def _both(inner: torch.optim.Optimizer, wrap: Callable[[Any], Any]) -> dict[str, torch.optim.Optimizer]:
    return {"inner": inner, "outer": wrap(inner)}


def _life(make: Make) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, make(model)


def _steps(model: nn.Module, optimizer: Any, first: int, count: int) -> list[torch.Tensor]:
    """Train, and return the parameters."""
    one = optimizer["outer"] if isinstance(optimizer, dict) else optimizer
    for number in range(first, first + count):
        torch.manual_seed(100 + number)
        batch = torch.randn(4, 6)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            one.zero_grad()
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward()
            return loss

        if isinstance(one, pytorch_optimizer.AdaLOMO):
            one.fused_backward(model(batch).square().mean(), 0.01)
        elif isinstance(one, pytorch_optimizer.SAM | torch.optim.LBFGS):
            closure()
            one.step(closure)
        else:
            closure()
            one.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _assert_goes_on(make: Make, directory: Path, *, before: int = 5, after: int = 7) -> Any:
    """A job that is restored has the parameters of one that goes on, bit for bit; returns the restored optimizer."""
    model, optimizer = _life(make)
    job = make_job(model, optimizer)
    _steps(model, optimizer, 0, before)
    save(job, directory)
    whole = _steps(model, optimizer, before, after)
    model, optimizer = _life(make)
    assert restore(make_job(model, optimizer), directory) is not None
    for one, other in zip(whole, _steps(model, optimizer, before, after), strict=True):
        assert torch.equal(one, other)
    return optimizer


@pytest.mark.parametrize("name", _CLASSES)
def test_classes_go_on_bit_for_bit_or_are_refused(name: str, tmp_path: Path) -> None:
    kind: Any = pytorch_optimizer.load_optimizer(name)
    refused = pytest.raises(UnsupportedError, match="an object of type pytorch_optimizer")
    with refused if name in _REFUSED else contextlib.nullcontext():
        _assert_goes_on(lambda model: kind(model.parameters()), tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize("name", _OTHERS)
def test_wrappers_and_classes_with_keys_of_their_own_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    _assert_goes_on(_OTHERS[name], tmp_path)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_wrapper_around_an_optimizer_gets_its_own_key_back(tmp_path: Path) -> None:
    """Such a wrapper shares ``state`` and ``param_groups`` with what it wraps, and counts beside them."""

    def make(model: nn.Module) -> PostLocalSGDOptimizer:
        return PostLocalSGDOptimizer(AdamW(model.parameters()), PeriodicModelAverager(period=2, warmup_steps=3))

    assert _assert_goes_on(make, tmp_path / "checkpoints").averager.step == 12


class Stale(PostLocalSGDOptimizer):
    """Has groups in a list of its own, as a wrapper of several optimizers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.param_groups = [*self.optim.param_groups]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", [PostLocalSGDOptimizer, Stale])
def test_a_schedule_of_a_wrapper_sets_the_rates_of_the_inner_optimizer_after_a_restart(
    kind: type[PostLocalSGDOptimizer], tmp_path: Path
) -> None:
    def life() -> tuple[nn.Module, PostLocalSGDOptimizer]:
        model = nn.Linear(6, 3)
        return model, kind(AdamW(model.parameters(), lr=0.1), PeriodicModelAverager(period=2))

    model, optimizer = life()
    save(make_job(model, optimizer), tmp_path / "checkpoints")
    model, optimizer = life()
    restore(make_job(model, optimizer), tmp_path / "checkpoints")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    schedule.step()
    assert optimizer.optim.param_groups[0] is optimizer.param_groups[0]
    assert optimizer.optim.param_groups[0]["lr"] == 0.05


class Counting(torch.optim.SGD):
    """Every third step is doubled; the counter is in ``state_dict()``."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.turn = 0
        self.average: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turn": self.turn, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn, self.average = state["turn"], state["average"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.turn += 1
        if self.average is None:
            self.average = torch.zeros(3, 2).t()
        self.average.add_(0.5)
        for _ in range(2 if self.turn % 3 == 0 else 1):
            super().step()


def _counting(model: nn.Module) -> Counting:
    return Counting(model.parameters(), lr=0.1, momentum=0.9)


def test_moments_stay_bit_for_bit_and_in_place_where_torch_would_cast_them(tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` gives moments the type of their parameter, and makes new tensors and tables."""

    def life() -> tuple[nn.Module, Counting]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3, dtype=torch.bfloat16)
        optimizer = _counting(model)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape)
        return model, optimizer

    model, optimizer = life()
    job = make_job(model, optimizer)
    optimizer.turn = 7
    save(job, tmp_path)
    kept = [table["momentum_buffer"].clone() for table in optimizer.state.values()]
    model, optimizer = life()
    tensors = [table["momentum_buffer"].zero_() for table in optimizer.state.values()]
    restore(make_job(model, optimizer), tmp_path)
    for table, tensor, value in zip(optimizer.state.values(), tensors, kept, strict=True):
        assert table["momentum_buffer"] is tensor
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, value)
    assert optimizer.turn == 7


def test_what_load_state_dict_writes_into_tensors_is_undone(tmp_path: Path) -> None:
    class Meddling(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            for parameter in self.param_groups[0]["params"]:
                parameter.data.zero_()
                self.state[parameter] = {"momentum_buffer": torch.ones_like(parameter)}
            self.param_groups[0]["lr"] = 5.0

    _assert_goes_on(lambda model: Meddling(model.parameters(), lr=0.1, momentum=0.9), tmp_path)


def test_tensors_of_own_keys_are_state_tensors_in_their_order(tmp_path: Path) -> None:
    optimizer = _assert_goes_on(_counting, tmp_path)
    assert optimizer.average.stride() == (1, 2)
    with open_checkpoint(tmp_path / "step-00000001") as checkpoint:
        assert checkpoint.tensors["job-state/optimizer.average"].permutation == (1, 0)
        assert checkpoint.manifest.version == 2


def test_hooks_of_torch_run_and_their_key_is_handed_back(tmp_path: Path) -> None:
    def job(seen: list[Any], turn: int) -> Any:
        model, optimizer = _life(lambda model: torch.optim.Adam(model.parameters()))
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "turn": turn})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.get("turn")))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        return make_job(model, optimizer)

    saving: list[Any] = []
    save(job(saving, 5), tmp_path)
    assert saving == ["saving"] * len(saving)
    loading: list[Any] = []
    restore(job(loading, 0), tmp_path)
    assert [one for one in loading if one != "saving"] == [5, "loaded"]


def test_load_hooks_run_where_nothing_was_added(tmp_path: Path) -> None:
    model, optimizer = _life(lambda model: torch.optim.Adam(model.parameters()))
    save(make_job(model, optimizer), tmp_path)
    seen: list[Any] = []
    model, optimizer = _life(lambda model: torch.optim.Adam(model.parameters()))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state)))
    restore(make_job(model, optimizer), tmp_path)
    assert seen == [["param_groups", "state"]]


def test_a_class_that_adds_nothing_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``state_dict()`` of a large optimizer takes time, at each checkpoint."""
    calls: list[str] = []
    for method in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(torch.optim.Optimizer, method, lambda *_, method=method: calls.append(method))
    model, optimizer = _life(lambda model: pytorch_optimizer.SOAP(model.parameters()))  # load_state_dict of its own
    job = make_job(model, optimizer)
    _steps(model, optimizer, 0, 2)
    save(job, tmp_path)
    restore(job, tmp_path)
    assert not calls


def test_tables_by_parameter_are_translated(tmp_path: Path) -> None:
    """In ``state_dict()`` itself, and under keys of the optimizer in its ``state``."""

    class ByParameter(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": {one: one.numel() for one in self.param_groups[0]["params"]}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]
            super().load_state_dict(state)

    model, optimizer = _life(lambda model: ByParameter(model.parameters(), lr=0.1))
    optimizer.state["table"] = {one: torch.ones(2) for one in model.parameters()}
    save(make_job(model, optimizer), tmp_path)
    model, optimizer = _life(lambda model: ByParameter(model.parameters(), lr=0.1))
    restore(make_job(model, optimizer), tmp_path)
    parameters = list(model.parameters())
    for found in (optimizer.seen, optimizer.state["table"]):
        assert all(one is other for one, other in zip(found, parameters, strict=True))


class _Keys(torch.optim.SGD):
    """Adds what a test says."""

    added: Callable[[_Keys], Any] = staticmethod(lambda self: {})

    def state_dict(self) -> Any:
        return {**super().state_dict(), "mine": type(self).added(self)}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)


def _raise(_: Any) -> Any:
    raise RuntimeError("not\nready")


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "by id": (
        lambda self: {id(one): 1 for one in self.param_groups[0]["params"]},
        r"a key that is the id\(\) of parameter 0.weight",
    ),
    "by a tensor": (lambda _: {torch.ones(2): 1}, "a tensor as a key that is no parameter"),
    "an object": (object, r"the state_dict\(\) of optimizer 'optimizer'\['mine'\].*cannot be saved"),
    "an error": (_raise, r"state_dict\(\) of optimizer 'optimizer', a Keys, raised RuntimeError.* not ready"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_carried_is_refused_at_the_start(case: str, tmp_path: Path) -> None:
    added, message = REFUSALS[case]
    keys = type("Keys", (_Keys,), {"added": staticmethod(added if case != "an object" else lambda _: object())})
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=message):
        checkflow.Checkpointer(model, keys(model.parameters(), lr=0.1), directory=tmp_path / case)


def test_a_key_that_nothing_takes_back_is_refused_at_the_start(tmp_path: Path) -> None:
    class OneWay(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "turn": 3}

    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"a OneWay, adds 'turn' to its state_dict\(\), and nothing takes that"):
        make_job(model, OneWay(model.parameters()))
    with pytest.raises(UnsupportedError, match="returned a list, no dictionary"):
        kind = type("Listing", (torch.optim.SGD,), {"state_dict": lambda self: []})
        make_job(model, kind(model.parameters()))


def test_another_job_is_told_what_its_optimizer_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _life(_counting)
    save(make_job(model, optimizer), tmp_path / "new")
    plain = type("Counting", (torch.optim.SGD,), {})  # of the same name, without the method
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(MismatchError, match="has 'average', 'turn' from the state_dict"):
        restore(make_job(model, plain(model.parameters(), lr=0.1, momentum=0.9)), tmp_path / "new")
    save(make_job(model, plain(model.parameters(), lr=0.1, momentum=0.9)), tmp_path / "old")
    with caplog.at_level(logging.WARNING, "checkflow"):
        restore(make_job(model, _counting(model)), tmp_path / "old")
    assert "has nothing of 'average', 'turn'" in caplog.text


def test_a_load_state_dict_that_raises_ends_the_start(tmp_path: Path) -> None:
    class Raising(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("turn")

    model, optimizer = _life(lambda model: Raising(model.parameters(), lr=0.1))
    job = make_job(model, optimizer)
    save(job, tmp_path)
    with pytest.raises(MismatchError, match=r"load_state_dict\(\) of optimizer 'optimizer', a Raising, raised Key"):
        restore(job, tmp_path)
    with pytest.raises(CorruptCheckpointError, match="half restored"):
        _steps(model, optimizer, 0, 1)


def test_a_state_dict_may_put_state_in_another_form(tmp_path: Path) -> None:
    """What differs from torch's own is kept as it is given; what is the same is kept once."""
    model, optimizer = _life(_counting)
    _steps(model, optimizer, 0, 1)
    job = make_job(model, optimizer)
    own = own_keys.take_own("optimizer", optimizer, optimizer.state_dict(), lambda value, _: value)
    assert own is not None
    assert own["keys"].keys() == {"turn", "average"}
    numbered = {**optimizer.state_dict(), "state": {"first": optimizer.state[model[0].weight]}}
    own = own_keys.take_own("optimizer", optimizer, numbered, lambda value, _: value)
    assert own is not None
    assert own["keys"].keys() == {"turn", "average", "state"}
    job.walk.current()
    assert "own" in capture_extra(job.walk, job.optimizers, {})["job"]["optimizers"]["optimizer"]
    assert (save(job, tmp_path) / EXTRA).stat().st_size < 2000


def test_what_a_model_adds_to_its_state_dict_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Buffers and get_extra_state are saved; what hooks or methods of the model add is in no checkpoint."""

    class Adding(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
            destination[f"{prefix}scale"] = torch.ones(2)
            destination[f"{prefix}renamed"] = self.weight.detach()

        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None: ...

    model = nn.Sequential(Adding(2, 2), nn.utils.spectral_norm(nn.Linear(2, 2)))
    model.register_state_dict_post_hook(lambda _module, state, _prefix, _metadata: state.update(turn=1))
    with caplog.at_level(logging.WARNING, "checkflow"):
        make_job(model, torch.optim.SGD(model.parameters()))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "model model adds '0.scale', 'turn' to its state_dict(), and no checkpoint holds that"
    ]


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["ranger21", "trac", "lookahead", "counting"])
def test_an_export_has_what_the_class_would_load(name: str, tmp_path: Path) -> None:
    """As ``torch.save`` of its ``state_dict()``: a script without checkflow goes on from it."""
    make = _counting if name == "counting" else _OTHERS[name]
    model, optimizer = _life(make)
    job = make_job(model, optimizer)
    _steps(model, optimizer, 0, 5)
    with open_checkpoint(save(job, tmp_path)) as checkpoint:
        found = state_dicts(checkpoint)
    whole = _steps(model, optimizer, 5, 4)
    torch.save(found, tmp_path / "exported.pt")
    found = torch.load(tmp_path / "exported.pt", weights_only=True)
    model, optimizer = _life(make)
    model.load_state_dict(found["model"])
    for key, one in optimizer.items() if isinstance(optimizer, dict) else [("optimizer", optimizer)]:
        one.load_state_dict(found[key])
    for one, other in zip(whole, _steps(model, optimizer, 5, 4), strict=True):
        assert torch.equal(one, other)
