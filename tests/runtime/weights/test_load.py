"""``checkflow.load_weights``: all of a model's weights or what fits, and a report that names the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import checkflow
from checkflow.core.errors import CorruptCheckpointError, MismatchError
from checkflow.runtime.weights.load import OtherKind
from tests.runtime.weights.test_exporter import Tied
from tests.runtime.weights.test_importer import raw, same_bytes, write_safetensors


def net(classes: int = 3) -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    model.add_module("head", nn.Linear(5, classes))
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_safetensors(state(net()), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_all_of_it(source: Path) -> None:
    model = net()
    addresses = [value.data_ptr() for value in model.state_dict().values()]
    report = checkflow.load_weights(model, source)
    assert same_bytes(state(model), safetensors.torch.load_file(source))
    assert [value.data_ptr() for value in model.state_dict().values()] == addresses
    assert report.complete
    assert set(report.loaded) == set(model.state_dict())
    assert str(report) == f"9 tensors loaded from {source}"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_strict_names_all_that_differs_and_writes_nothing(source: Path) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(4, 5)))
    model.add_module("head", nn.Linear(5, 7))
    model.add_module("new", nn.Linear(1, 1))
    before = state(model)
    with pytest.raises(MismatchError) as caught:
        checkflow.load_weights(model, source)
    text = str(caught.value)
    for words in (
        "missing 2: new.weight, new.bias;", "unexpected 5: body.1.",
        "misshapen 2: head.weight (float32[3, 5], in the model float32[7, 5]), head.bias",
    ):  # fmt: skip
        assert words in text
    assert "\n" not in text
    assert same_bytes(state(model), before)


def test_what_fits(source: Path) -> None:
    model = net(classes=7)
    before = state(model)
    report = checkflow.load_weights(model, source, strict=False)
    assert report.misshapen == (
        OtherKind("head.weight", "float32[3, 5]", "float32[7, 5]"), OtherKind("head.bias", "float32[3]", "float32[7]"),
    )  # fmt: skip
    assert (report.missing, report.unexpected, len(report.loaded)) == ((), (), 7)
    given = safetensors.torch.load_file(source)
    for name, value in state(model).items():
        assert raw(value) == raw(before[name] if name.startswith("head") else given[name])
    assert len(str(report).splitlines()) == 2


def test_names_may_be_changed(source: Path) -> None:
    model = nn.ModuleDict({"encoder": net().body, "head": nn.Linear(5, 3)})
    report = checkflow.load_weights(model, source, rename={"body.": "encoder."})
    assert report.complete
    assert torch.equal(model["encoder"][0].weight, safetensors.torch.load_file(source)["body.0.weight"])
    report = checkflow.load_weights(
        model["encoder"], source, rename=lambda name: name[5:] if name.startswith("body.") else None
    )
    assert report.complete
    assert sorted(report.left_out) == ["head.bias", "head.weight"]
    # the longest beginning that fits
    checkflow.load_weights(model, source, rename={"body.": "wrong.", "body.0.": "encoder.0.", "body.1.": "encoder.1."})
    with pytest.raises(MismatchError, match=r"no name in .* begins with 'bodi\.'"):
        checkflow.load_weights(model, source, rename={"bodi.": "encoder."}, strict=False)
    with pytest.raises(MismatchError, match="would both be named 'x'"):
        checkflow.load_weights(model, source, rename=lambda name: "x", strict=False)
    with pytest.raises(MismatchError, match=r"nothing of .* fits the model"):
        checkflow.load_weights(nn.Linear(1, 2), source, strict=False)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_before_names(prefix: str, tmp_path: Path) -> None:
    given = state(net())
    torch.save({prefix + name: value for name, value in given.items()}, tmp_path / "w.pt")
    for wrap in (lambda model: model, nn.DataParallel, torch.compile):
        model = net()
        assert checkflow.load_weights(wrap(model), tmp_path / "w.pt").complete
        assert same_bytes(state(model), given)


def test_a_module_that_is_called_module(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    given = state(model)
    write_safetensors(given, tmp_path / "w.safetensors")
    other = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert checkflow.load_weights(other, tmp_path / "w.safetensors").complete
    assert same_bytes(state(other), given)


def test_other_types(tmp_path: Path) -> None:
    write_safetensors({"weight": torch.randn(2, 2), "bias": torch.tensor([1, 2])}, tmp_path / "w.safetensors")
    model = nn.Linear(2, 2).bfloat16()
    report = checkflow.load_weights(model, tmp_path / "w.safetensors", strict=False)
    assert report.cast == (OtherKind("weight", "float32[2, 2]", "bfloat16[2, 2]"),)
    assert report.misshapen == (OtherKind("bias", "int64[2]", "bfloat16[2]"),)
    given = safetensors.torch.load_file(tmp_path / "w.safetensors")["weight"]
    assert torch.equal(model.weight, given.bfloat16())
    assert "cast, 1: weight (float32[2, 2], in the model bfloat16[2, 2])" in str(report)


def test_channels_last_memory_stays(tmp_path: Path) -> None:
    given = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    torch.save(given.state_dict(), tmp_path / "w.pt")
    for model in (nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)):
        strides = model.weight.stride()
        checkflow.load_weights(model, tmp_path / "w.pt")
        assert torch.equal(model.weight, given.weight)
        assert model.weight.stride() == strides


def test_ties_and_extra_state(tmp_path: Path) -> None:
    given = Tied()
    given.extra = {"count": 5}
    tensors = state(given)
    torch.save(given.state_dict(), tmp_path / "all.pt")
    model = Tied()
    report = checkflow.load_weights(model, tmp_path / "all.pt")
    assert "_extra_state" in report.loaded
    assert model.extra == {"count": 5}
    assert same_bytes(state(model), tensors)
    for gone in ("a.weight", "b.weight"):  # tools keep one name of the two
        write_safetensors({name: value for name, value in tensors.items() if name != gone}, tmp_path / "w.safetensors")
        model = Tied()
        report = checkflow.load_weights(model, tmp_path / "w.safetensors", strict=False)
        assert report.missing == ("_extra_state",)
        assert same_bytes(state(model), tensors)
    write_safetensors(tensors | {"b.weight": torch.zeros(4, 4)}, tmp_path / "w.safetensors")
    with pytest.raises(MismatchError, match=r"different values for a.weight and b.weight"):
        checkflow.load_weights(Tied(), tmp_path / "w.safetensors", strict=False)


def test_from_a_checkpoint_of_a_job(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps = {}
    with checkflow.Checkpointer(model, optimizer, directory=tmp_path / "ckpt", every=1) as checkpointer:
        for number in checkpointer.steps(2):
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            steps[number + 1] = state(model)
    for step in (1, 2):
        other = Tied()
        report = checkflow.load_weights(other, f"{tmp_path / 'ckpt'}@{step}")
        assert same_bytes(state(other), steps[step])
        assert other.extra == {"count": step}
        assert report.left_out == ("optimizer",)
    before = state(other)
    (file,) = (tmp_path / "ckpt" / "step-00000002").glob("model-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(file))):
        checkflow.load_weights(other, tmp_path / "ckpt")
    assert same_bytes(state(other), before)


def test_a_damaged_source_changes_nothing(tmp_path: Path) -> None:
    given = state(net())
    torch.save(given, tmp_path / "w.pt")
    pattern = raw(given["head.weight"])
    (tmp_path / "w.pt").write_bytes((tmp_path / "w.pt").read_bytes().replace(pattern, pattern[::-1]))
    model = net()
    before = state(model)
    with pytest.raises(CorruptCheckpointError, match=r"does not match its checksum|Bad CRC"):
        checkflow.load_weights(model, tmp_path / "w.pt")
    assert same_bytes(state(model), before)


def test_a_model_without_memory(source: Path) -> None:
    with torch.device("meta"):
        model = net()
    with pytest.raises(MismatchError, match="on the meta device"):
        checkflow.load_weights(model, source)
