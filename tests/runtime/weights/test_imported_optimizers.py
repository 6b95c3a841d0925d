"""``checkflow import`` of torch.distributed.checkpoint with an optimizer: a job goes on with its moments."""

from __future__ import annotations

import logging
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import checkflow
from checkflow.core.errors import CorruptCheckpointError, MismatchError
from checkflow.runtime.store.discovery import find
from checkflow.runtime.weights.importer import import_weights
from checkflow.runtime.weights.optimizers import find_optimizers
from checkflow.runtime.weights.source import open_weights
from tests.runtime.test_inspect import as_json, run
from tests.runtime.weights.test_importer import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP's, that it runs in one process
Job = tuple[nn.Module, torch.optim.Optimizer]
State = dict[str, Any]


def make(kind: str = "adamw") -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
    groups = [
        {"params": [*model[0].parameters(), *model[1].parameters()], "weight_decay": 0.1},
        {"params": [*model[2].parameters()], "lr": 0.02},
    ]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
        "named": lambda: torch.optim.Adam([*model.named_parameters()], lr=0.01),
    }
    return model, makers[kind]()


def train(job: Job, steps: range) -> None:
    model, optimizer = job
    for step in steps:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()


def trained(kind: str = "adamw") -> Job:
    job = make(kind)
    train(job, range(3))
    return job


def states(job: Job, *, flat: bool) -> tuple[State, State]:
    model, optimizer = get_state_dict(*job, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return dict(model), dict(optimizer)


FORMS: dict[str, Callable[[Job], State]] = {
    "nested": lambda job: dict(zip(("model", "optimizer"), states(job, flat=False), strict=True)),
    "flat optimizer": lambda job: dict(zip(("model", "optim"), states(job, flat=True), strict=True)),
    "app": lambda job: {"app": dict(zip(("model", "optim"), states(job, flat=False), strict=True))},
    "as torchtitan": lambda job: {**states(job, flat=True)[0], "optimizer": states(job, flat=True)[1]},
    "one flat": lambda job: {**states(job, flat=True)[0], **states(job, flat=True)[1]},
    "dotted": lambda job: {
        **states(job, flat=True)[0], **{f"optimizer.{key}": value for key, value in states(job, flat=True)[1].items()}
    },
}  # fmt: skip


def everything(job: Job) -> list[tuple[str, Any]]:
    model, optimizer = job
    names = dict(model.named_parameters())
    return [*model.state_dict().items()] + [
        (f"{name}.{key}", value)
        for name, parameter in names.items()
        for key, value in sorted(optimizer.state[parameter].items())
    ]


def assert_equal(found: Job, expected: Job) -> None:
    assert [name for name, _ in everything(found)] == [name for name, _ in everything(expected)]
    for (name, one), (_, other) in zip(everything(found), everything(expected), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("form", "kind"),
    [("nested", "momentum"), ("nested", "rmsprop"), *((form, "adamw") for form in FORMS)],
)
def test_a_job_goes_on_as_if_it_had_not_moved(
    form: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(kind)
    save_dcp({**FORMS[form](expected), "train_step": 3}, tmp_path / "dcp")
    done = as_json(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt", "--step", 3)
    assert done["left_out"] == ["train_step"]
    assert done["optimizer_tensors"] == sum(len(table) for table in expected[1].state.values())
    job = make(kind)
    caplog.set_level(logging.WARNING, "checkflow")
    with checkflow.Checkpointer(*job, directory=tmp_path / "ckpt", resume="must") as checkpointer:
        assert_equal(job, expected)
        for step in checkpointer.steps(6):
            train(job, range(step, step + 1))
    train(expected, range(3, 6))
    assert_equal(job, expected)
    assert "imported weights and state of optimizer and nothing else: the place in the data" in caplog.text
    assert "taking the script's" not in caplog.text


def test_an_optimizers_own_state_dict_with_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained("named")
    model, optimizer = expected
    # In another order, so that the numbers alone would be wrong.
    optimizer.param_groups[0]["params"].reverse()
    optimizer.param_groups[0]["param_names"].reverse()
    save_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "dcp")
    assert as_json(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")["optimizer_tensors"] == 18
    job = make("named")
    with checkflow.Checkpointer(*job, directory=tmp_path / "ckpt"):
        assert_equal(job, expected)


def test_numbers_that_are_no_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Older optimizers count steps in Python."""
    job = trained()
    state = FORMS["nested"](job)
    for table in state["optimizer"]["state"].values():
        table["step"] = int(table["step"])
    save_dcp(state, tmp_path / "dcp")
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")[0] == 0
    found = make()
    with checkflow.Checkpointer(*found, directory=tmp_path / "ckpt"):
        assert [table["step"] for table in found[1].state.values()] == [3] * 6


def test_names_that_wrappers_add(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained()
    model, optimizer = states(expected, flat=True)
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.items()}
    of_optimizer = {
        re.sub(r"^(state|param_groups)\.", r"\1.module._orig_mod.", name): value for name, value in optimizer.items()
    }
    save_dcp({"model": wrapped, "optimizer": of_optimizer}, tmp_path / "dcp")
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")[0] == 0
    job = make()
    with checkflow.Checkpointer(*job, directory=tmp_path / "ckpt"):
        assert_equal(job, expected)


def test_what_was_imported_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained()
    save_dcp(FORMS["as torchtitan"](expected), tmp_path / "dcp")
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")[0] == 0
    assert run(capsys, "export", tmp_path / "ckpt", "-o", tmp_path / "all.pt")[0] == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    job = make()
    job[0].load_state_dict(found["model"])
    job[1].load_state_dict(found["optimizer"])
    assert_equal(job, expected)
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [0.01, 0.02]
    assert run(capsys, "export", tmp_path / "ckpt", "-o", tmp_path / "again", "--flat")[0] == 0
    back = FORMS["as torchtitan"](make())
    load_dcp(back, checkpoint_id=tmp_path / "again", no_dist=True)
    for name, value in FORMS["as torchtitan"](expected)["optimizer"].items():
        assert (
            torch.equal(back["optimizer"][name], value) if torch.is_tensor(value) else back["optimizer"][name] == value
        )


def test_hyperparameters_are_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = trained()
    job[1].param_groups[1]["lr"] = torch.tensor(0.25)
    job[1].param_groups[0]["betas"] = (0.5, 0.5)
    save_dcp(FORMS["flat optimizer"](job), tmp_path / "dcp")
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")[0] == 0
    found = make()
    found[1].param_groups[0]["lr"] = 0.01
    with checkflow.Checkpointer(*found, directory=tmp_path / "ckpt"):
        assert [group["lr"] for group in found[1].param_groups] == [0.01, 0.02]
    assert "lr of optimizer was 0.25 where it was imported from: taking the script's 0.02" in caplog.text
    assert (
        "betas of optimizer was [0.5, 0.5] where it was imported from: taking the script's [0.9, 0.999]" in caplog.text
    )
    assert "weight_decay" not in caplog.text


def test_what_has_no_names_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    save_dcp({"model": model.state_dict(), "a": {"optimizer": optimizer.state_dict(), "x": 1}}, tmp_path / "dcp")
    done = as_json(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")
    assert done["optimizer_tensors"] == 0
    assert done["left_out"] == ["a"]
    save_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "other")
    done = as_json(capsys, "import", tmp_path / "other", tmp_path / "ckpt", "--step", 1)
    assert done["left_out"] == ["optimizer (its parameters have numbers; get_state_dict gives names)"]


def test_two_optimizers_with_the_same_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = FORMS["nested"](trained())
    save_dcp({**state, "other": state["optimizer"]}, tmp_path / "dcp")
    done = as_json(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")
    assert done["optimizer_tensors"] == 0
    assert done["left_out"] == [
        f"{name} (state of these weights in several optimizers)" for name in ("optimizer", "other")
    ]


def test_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained()
    save_dcp(FORMS["nested"](expected), tmp_path / "dcp")
    done = as_json(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt", "--weights-only")
    assert (done["left_out"], done["optimizer_tensors"]) == (["optimizer"], 0)
    job = make("sgd")
    with checkflow.Checkpointer(*job, directory=tmp_path / "ckpt"):
        assert torch.equal(job[0][0].weight, expected[0][0].weight)
        assert not job[1].state
    assert checkflow.load_weights(make()[0], tmp_path / "dcp").left_out == ("optimizer",)


def test_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_dcp(FORMS["nested"](trained()), tmp_path / "dcp")
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")[0] == 0
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "named", "--optimizer", "o")[0] == 0
    partly = make()
    del partly[1].param_groups[1]
    for directory, job, says in [
        ("ckpt", make("momentum"), "optimizer 'optimizer' is one with the options .*betas.*, SGD in the job"),
        ("ckpt", partly, r"optimizer 'optimizer' of the job has no parameter 2\.bias"),
        ("named", make(), "the checkpoint's state of optimizer 'o' is not in the job"),
    ]:
        before = [value.clone() for value in job[0].state_dict().values()]
        with pytest.raises(MismatchError, match=f"{says}.*--weights-only"):
            checkflow.Checkpointer(*job, directory=tmp_path / directory)
        assert all(map(torch.equal, before, job[0].state_dict().values()))
        assert not job[1].state
    model, optimizer = make()
    with checkflow.Checkpointer(model, {"o": optimizer}, directory=tmp_path / "named"):
        assert len(optimizer.state) == 6


def test_names_that_cannot_be_a_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_dcp(FORMS["nested"](trained()), tmp_path / "dcp")
    for arguments, says in ((["--optimizer", "a/b"], "a name is"), (["--model", "optimizer"], "cannot both be named")):
        code, error = run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt", *arguments)
        assert (code, says in error) == (1, True)
    assert not (tmp_path / "ckpt").exists()


def test_state_in_dictionaries_of_its_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = FORMS["nested"](trained())
    state["optimizer"]["state"]["0.weight"]["factors"] = {"left": torch.ones(2, 2)}
    save_dcp(state, tmp_path / "dcp")
    code, error = run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")
    assert code == 1
    assert "optimizer has state of 0.weight in a dictionary of its own (factors.left)" in error
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt", "--weights-only")[0] == 0


def test_parameters_without_state_begin_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = FORMS["nested"](trained())
    del state["optimizer"]["state"]["2.bias"]
    save_dcp(state, tmp_path / "dcp")
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")[0] == 0
    job = trained()  # what it has of its own must go
    with checkflow.Checkpointer(*job, directory=tmp_path / "ckpt"):
        assert len(job[1].state) == 5
    assert "has no state for 1 parameters, such as 2.bias" in caplog.text


def test_damage_of_a_moment_is_found_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = trained()
    job[1].state[job[0][0].weight]["exp_avg"].fill_(1.25)
    save_dcp(FORMS["nested"](job), tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = file.read_bytes()
    at = data.index(torch.full((6, 8), 1.25).numpy().tobytes())
    file.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    code, error = run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt")
    assert code == 1
    assert "is damaged" in error
    assert not (tmp_path / "ckpt").exists()
    assert run(capsys, "import", tmp_path / "dcp", tmp_path / "ckpt", "--weights-only")[0] == 0
    with open_weights(tmp_path / "dcp") as weights:
        assert weights.optimizer is not None
        with pytest.raises(CorruptCheckpointError):
            weights.optimizer.verify()


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    model = nn.Linear(1 << 11, 1 << 11, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    save_dcp(dict(zip(("model", "optimizer"), states((model, optimizer), flat=False), strict=True)), tmp_path / "dcp")
    size = 1 << 24
    with open_weights(tmp_path / "dcp") as weights:
        tracemalloc.start()
        try:
            done = import_weights(weights, tmp_path / "ckpt")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert done.size_bytes > 3 * size
    assert size < peak < 2.5 * size  # one that is written and one that is read, beside torch's own memory for a piece
    assert find(tmp_path / "ckpt")


PART = st.sampled_from(["state", "param_groups", "0", "1", "weight", "a"])
NAMES = st.sets(st.lists(PART, min_size=1, max_size=3).map(".".join), min_size=1, max_size=4)


@given(NAMES, st.sampled_from([(), ("o",), ("app", "optim")]), st.booleans())
def test_every_name_is_found_wherever_it_lies(parameters: set[str], place: tuple[str, ...], flat: bool) -> None:
    """Names of modules may be those of the optimizer's own dictionaries."""
    leaves: dict[str, tuple[Any, ...]] = {}
    for name in parameters:
        for key in ("exp_avg", "step"):
            path = (*place, f"state.{name}.{key}") if flat else (*place, "state", name, key)
            leaves[".".join(path)] = path
    ordered = sorted(parameters)
    values = {}
    for number, name in enumerate(ordered):
        path = (*place, f"param_groups.{name}.lr") if flat else (*place, "param_groups", number, "lr")
        leaves[f"lr of {name}"] = path
        if not flat:
            leaves[f"params of {name}"] = (*path[:-1], "params")
            values[f"params of {name}"] = [name]
    # A name may continue another one ("a" and "a.0"): no model has both as parameters.
    if any(other.startswith(f"{name}.") for name in parameters for other in parameters):
        return
    found, nameless = find_optimizers(leaves, parameters, values.__getitem__)
    assert not nameless
    (one,) = found
    assert one.place == ".".join(place)
    assert one.state.keys() == {(name, key) for name in parameters for key in ("exp_avg", "step")}
    assert sorted((*names, options["lr"]) for names, options in one.options) == [
        (name, f"lr of {name}") for name in ordered
    ]
    assert sorted(one.leaves) == sorted(leaves)
