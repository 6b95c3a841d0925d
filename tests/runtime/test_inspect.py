"""``checkflow ls``, ``verify``, ``diff``: what they say of real checkpoints, whole and damaged; they change nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.cli.main import main
from checkflow.core import plan as plans
from checkflow.runtime import inspect
from checkflow.runtime.format import codec
from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.store.store import Store
from tests.runtime.test_checkpointer import make, make_plan
from tests.support.ranks import tools as rank_tools
from tests.support.store_tools import fill, record, tree


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a job; to be copied, not changed."""
    directory = tmp_path_factory.mktemp("trained") / "ckpt"
    plan = make_plan()
    model, optimizer, iterate = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "check_plan", plans.validate)
        with Checkpointer(
            model, optimizer, directory=directory, plan=plan, every=1, keep_latest=3, state={"scheduler": scheduler}
        ) as checkpointer:
            for _ in checkpointer.steps(5):
                iterate()
                scheduler.step()
    return directory


@pytest.fixture
def directory(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "ckpt"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    main([*(str(argument) for argument in arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_a_directory_holds(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "step-00000003" / "state.msgpack").unlink()
    shutil.copytree(directory / "step-00000004", directory / ".broken-step-00000002")
    (directory / ".tmp-00000009-run").mkdir()
    before = tree(directory)
    code, text = run(capsys, "ls", directory)
    assert code == 1  # step 3 cannot be restored
    for words in ("cannot be restored: state.msgpack is missing", "damaged, set aside", "the next run removes it"):
        assert words in " ".join(text.split())
    entries = as_json(capsys, "ls", directory)["entries"]
    assert [(one["step"], one["kind"], one["valid"]) for one in entries] == [
        (5, "checkpoint", True), (4, "checkpoint", True), (3, "checkpoint", False),
        (4, "broken", True), (None, "leftover", False),
    ]  # fmt: skip
    assert entries[0]["size_bytes"] == sum(file.stat().st_size for file in (directory / "step-00000005").iterdir())
    assert entries[0]["tensors"] == 27  # 9 of the model, 3 for each of 6 parameters
    assert tree(directory) == before


def test_one_checkpoint_is_listed_alone(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = as_json(capsys, "ls", directory)["entries"]
    assert len(entries) > 1
    for entry in (one for one in entries if one["kind"] == "checkpoint"):
        for reference in (entry["path"], f"{directory}@{entry['step']}"):
            assert as_json(capsys, "ls", reference)["entries"] == [entry]
    code, text = run(capsys, "ls", f"{directory}@99")
    assert (code, text) == (
        1,
        f"checkflow: {directory} holds no checkpoint of step 99: checkflow ls {directory} lists those that it has\n",
    )


def test_a_directory_of_checkpoints_stands_for_its_report(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_directory, by_file = (as_json(capsys, "compare", one) for one in (directory, directory / "report.json"))
    assert by_directory == by_file


def test_an_empty_directory_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ls", tmp_path) == (0, f"{tmp_path} holds no checkpoint\n")
    code, text = run(capsys, "ls", tmp_path / "missing")
    assert code == 1
    assert "cannot read the checkpoint directory" in text
    for command in ("verify", "diff"):
        arguments = [tmp_path] * (1 if command == "verify" else 2)
        assert run(capsys, command, *arguments) == (1, f"checkflow: {tmp_path} holds no checkpoint\n")
    assert run(capsys, "verify", tmp_path / "missing")[0] == 1


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "state.msgpack", "manifest.json"])
def test_one_flipped_bit_is_found(directory: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(capsys, "verify", directory)[0] == 0
    damage(directory / "step-00000004" / name)
    before = tree(directory)
    code, text = run(capsys, "verify", directory)
    assert code == 1
    assert name in text
    assert text.count("whole, every checksum fits") == 2
    found = as_json(capsys, "verify", directory)["checkpoints"]
    assert [one["valid"] for one in found] == [True, False, True]
    assert run(capsys, "verify", directory / "step-00000005")[0] == 0
    assert run(capsys, "verify", f"{directory}@4")[0] == 1
    assert tree(directory) == before


def test_progress_counts_every_byte(directory: Path) -> None:
    seen: list[int] = []
    path = directory / "step-00000005"
    outcome = inspect.verify(path, seen.append)
    assert outcome.fault is None
    assert sum(seen) == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")


def test_a_checkpoint_and_itself(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "diff", directory, f"{directory}@5", "--exit-code")
    assert code == 0
    assert "0 of 27 tensors differ, 0 other values" in " ".join(text.split())


def test_how_two_steps_differ(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = directory / "step-00000003", directory / "step-00000005"
    found = as_json(capsys, "diff", first, second)
    names = {one["name"] for one in found["tensors"]}
    assert "model/0.weight" in names
    assert "optimizer/0.weight.step" in names
    (step,) = (one for one in found["tensors"] if one["name"] == "optimizer/0.weight.step")
    assert (step["elements"], step["differing"], step["largest"]) == (1, 1, 2.0)
    (weight,) = (one for one in found["tensors"] if one["name"] == "model/0.weight")
    one, other = _weights(first), _weights(second)
    assert weight["largest"] == pytest.approx((one - other).abs().double().max().item())
    assert weight["differing"] == int((one != other).sum())
    extra = {row["where"]: (row["first"], row["second"]) for row in found["extra"]}
    assert extra["iteration"] == ("3", "5")
    assert extra["job.optimizers.optimizer.groups[0].lr"] == ("0.005", "0.0025")
    code, text = run(capsys, "diff", first, second, "--exit-code")
    assert code == 1
    assert "model/0.weight" in text


def _weights(path: Path) -> torch.Tensor:
    import safetensors.torch

    return safetensors.torch.load_file(path / "model-00000-of-00001.safetensors")["0.weight"]


def test_other_types_shapes_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, records: list[Any], extra: Any) -> Path:
        layout = make_layout(records)
        with Store(tmp_path / name, run_id="run") as store:
            return store.commit(1, layout, fill(layout, 3)[0], codec.encode(extra), {})

    first = write("a", [record("model/w", (2, 3)), record("model/only", (1,)), record("model/e", (0, 4))], {"a": 1})
    second = write("b", [record("model/w", (3, 2)), record("model/e", (0, 4))], {"b": [1, float("nan")], "a": 1})
    found = as_json(capsys, "diff", first, second)
    assert found["compared"] == 3
    assert {one["name"]: (one["first"], one["second"]) for one in found["tensors"]} == {
        "model/w": ("float32[2, 3]", "float32[3, 2]"), "model/only": ("float32[1]", None),
    }  # fmt: skip
    assert found["extra"] == [
        {"where": "b[0]", "first": "-", "second": "1"}, {"where": "b[1]", "first": "-", "second": "nan"},
    ]  # fmt: skip
    text = " ".join(run(capsys, "diff", first, second)[1].split())
    assert "only in the first" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "int8", "bool", "float8_e4m3fn", "float64"])
def test_changes_of_every_kind_of_number(tmp_path: Path, dtype: str) -> None:
    paths = []
    layout = make_layout([record("model/w", (5,), dtype)])
    for seed in (1, 2):
        staging = fill(layout, seed)[0]
        with Store(tmp_path / str(seed), run_id="run") as store:
            paths.append(store.commit(1, layout, staging, codec.encode({}), {}))
    (changed,) = inspect.compare(*paths).tensors
    assert changed.elements == 5
    assert changed.differing is not None
    assert 1 <= changed.differing <= 5
    assert changed.largest is None or changed.largest >= 0


def test_damage_is_refused_by_diff(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(directory / "step-00000004" / "model-00000-of-00001.safetensors")
    code, text = run(capsys, "diff", directory, f"{directory}@4")
    assert code == 1
    assert "is damaged" in text


@pytest.mark.parametrize("reference", ["{0}@7", "{0}@x", "{0}/step-00000009"])
def test_what_is_not_there(directory: Path, capsys: pytest.CaptureFixture[str], reference: str) -> None:
    code, text = run(capsys, "verify", reference.format(directory))
    assert code == 1
    assert text.startswith("checkflow: ")


@pytest.mark.parametrize("what", ["x" * 300, "@" + "9" * 300, "@" + "9" * 5000, "@best" + "x" * 300])
def test_names_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    for command in ("ls", "verify"):
        code, text = run(capsys, command, f"{tmp_path / 'checkpoints'}{what}")
        assert (code, text.count("\n")) == (1, 1)
        assert text.startswith(("checkflow: there is no ", "checkflow: cannot read the checkpoint directory "))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_checkpoint_of_another_user_is_named_as_such_and_read(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading is no resume."""
    os.chown(directory / "step-00000005", 65534, 65534)
    os.chown(directory / "step-00000003", 65534, 65534)
    owners = {one["step"]: one["owner"] for one in as_json(capsys, "ls", directory)["entries"]}
    assert owners == {5: "user nobody (65534)", 4: None, 3: "user nobody (65534)"}
    printed = " ".join(run(capsys, "ls", directory)[1].split())
    assert "of user nobody (65534): step 5, 3; a job resumes from that only if its trust= allows it" in printed
    assert run(capsys, "verify", directory)[0] == 0


# Versions of several ranks


ARRAYS = {"model/weight": np.arange(35, dtype=np.float32).reshape(7, 5), "model/bias": np.arange(7, dtype=np.int64)}
SEVERAL = [kind for kind in rank_tools.KINDS if kind != "one"]


def save_ranks(directory: Path, kind: str, own: int = 0, seed: int = 0) -> Path:
    """A version whose last rank has a tensor (``own``) and extra state (``seed``) with other values."""
    ranks = rank_tools.arranged(kind, ARRAYS)
    last = len(ranks) - 1
    owns = [{"model/own": np.full(3, rank + (own if rank == last else 0), np.float32)} for rank in range(len(ranks))]
    extras = [
        codec.encode({"iteration": 1, "seed": rank + (seed if rank == last else 0)}) for rank in range(len(ranks))
    ]
    with Store(directory, run_id="run") as store:
        return rank_tools.save(store, 1, ranks, ARRAYS, extra=extras[0], own=owns, extras=extras)


@pytest.mark.parametrize("kind", SEVERAL)
def test_what_each_rank_has_to_itself_is_compared(tmp_path: Path, kind: str) -> None:
    first = save_ranks(tmp_path / "first", kind)
    last = len(rank_tools.arranged(kind, ARRAYS)) - 1
    assert inspect.compare(first, save_ranks(tmp_path / "same", kind)).tensors == ()
    other = inspect.compare(first, save_ranks(tmp_path / "other", kind, own=2, seed=5))
    (changed,) = other.tensors
    assert (changed.name, changed.differing, changed.largest) == (f"model/own of rank {last}", 3, 2.0)
    assert other.extra == ((f"rank {last}: seed", str(last), str(last + 5)),)


def test_versions_of_other_numbers_of_ranks_are_compared(tmp_path: Path) -> None:
    found = inspect.compare(save_ranks(tmp_path / "two", "fsdp 2"), save_ranks(tmp_path / "four", "hsdp 2x2"))
    assert [one.name for one in found.tensors] == ["model/own of rank 2", "model/own of rank 3"]
    assert {one.first for one in found.tensors} == {None}
    assert found.extra == (("ranks", "2", "4"),)


@pytest.mark.parametrize("kind", SEVERAL)
def test_ranks_are_listed_and_the_damage_of_any_is_found(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_ranks(tmp_path, kind)
    world_size = len(rank_tools.arranged(kind, ARRAYS))
    (listed,) = inspect.list_directory(tmp_path)
    assert (listed.ranks, listed.fault, inspect.verify(path).fault) == (world_size, None, None)
    assert main(["ls", str(tmp_path)]) == 0
    assert "┃ ranks ┃" in capsys.readouterr().out
    for file in sorted(path.glob("*-*")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert file.name in str(inspect.verify(path).fault)
        file.write_bytes(whole)
    assert inspect.verify(path).fault is None


def test_an_export_says_what_it_takes_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = rank_tools.arranged("ddp 2", ARRAYS)
    job = {"job": {"optimizers": {}, "modules": {}, "objects": {}}, "iteration": 1, "epoch": 0}
    owns = [{"model/own": np.full(3, rank, np.float32)} for rank in range(2)]
    with Store(tmp_path / "ranks", run_id="run") as store:
        rank_tools.save(store, 1, ranks, ARRAYS, extra=codec.encode(job), own=owns)
    assert main(["export", str(tmp_path / "ranks"), "-o", str(tmp_path / "all.pt")]) == 0
    out = capsys.readouterr().out
    assert "1 tensor has values of its own on each rank: those of the lowest rank are written" in out
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    assert saved["model"]["own"].tolist() == [0.0] * 3
    assert saved["model"]["weight"].numpy().tobytes() == ARRAYS["model/weight"].tobytes()
