"""What one model file sets in torch holds for its plan, and not for the next one's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from checkflow.core.machine.device import CATALOGUE, Device, read_device
from checkflow.planner.measure.torch_settings import torch_settings_kept
from checkflow.planner.pipeline import Planned, Subject, check_model, default_memory_limit_bytes, plan_model
from checkflow.planner.schedule.scheduler import PlanRequest

MODEL = """
import torch
import checkflow
{settings}

def build() -> checkflow.TrainingStep:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(512, 512)
    return checkflow.TrainingStep(model, optimizer, loss=lambda model, x: model(x).square().mean(), batch=(batch,))
"""
SETTINGS = {
    "older switch": "torch.backends.cuda.matmul.allow_tf32 = True",
    "newer switch": 'torch.backends.cuda.matmul.fp32_precision = "tf32"',
    "one word": 'torch.set_float32_matmul_precision("high")',
    "all backends": 'torch.backends.fp32_precision = "tf32"',
    "cudnn": 'torch.backends.cudnn.conv.fp32_precision = "ieee"',
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "deterministic": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "device": 'torch.set_default_device("meta")',
    "dtype": "torch.set_default_dtype(torch.float64)",
    "gradients": "torch.set_grad_enabled(False)",
    "attention": "torch.backends.cuda.enable_flash_sdp(False)",
    "cudnn's attention": "torch.backends.cuda.enable_cudnn_sdp(False)",
}


def state() -> tuple[object, ...]:
    backends = torch.backends
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = "set by another interface"
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        products,
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        backends.cudnn.benchmark,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    )


@pytest.mark.parametrize("statement", SETTINGS.values(), ids=SETTINGS)
def test_settings_end_with_what_set_them(statement: str) -> None:
    before = state()
    with torch_settings_kept():
        exec(statement)
        within = state()
    assert state() == before
    assert within != before


def test_settings_end_with_an_error_too() -> None:
    before = state()
    with pytest.raises(ValueError, match="model"), torch_settings_kept():
        torch.set_default_dtype(torch.float64)
        raise ValueError("the model's")
    assert state() == before


def planned(folder: Path, name: str, settings: str, device: Device) -> Planned:
    (folder / f"{name}.py").write_text(MODEL.format(settings=settings))
    request = PlanRequest(
        device.link_bandwidth_bytes_per_second,
        device.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=default_memory_limit_bytes(device),
    )
    return plan_model(Subject(str(folder / f"{name}.py"), None, {}, None), device, request, "segment")


@pytest.mark.parametrize("name", ["one word", "dtype"])
def test_one_model_s_settings_do_not_reach_the_next(name: str, tmp_path: Path) -> None:
    device = CATALOGUE["A100 80GB"]
    first = planned(tmp_path, "plain", "", device)
    second = planned(tmp_path, "other", SETTINGS[name], device)
    third = planned(tmp_path, "again", "", device)
    assert second.timeline.iteration_seconds != first.timeline.iteration_seconds  # in force while it is planned
    assert third.timeline == first.timeline


def test_the_kind_of_a_device_is_said_not_guessed(tmp_path: Path) -> None:
    """torch takes other optimizers' implementations on a CPU; a plan is checked for the kind it was made for."""
    gpu = dataclasses.replace(CATALOGUE["RTX 3090"], name="cpu beside")
    cpu = dataclasses.replace(CATALOGUE["cpu"], name="workstation")
    made = {}
    for device in (gpu, cpu):
        file = tmp_path / f"{device.name}.json"
        file.write_bytes(TypeAdapter(Device).dump_json(device))
        made[device.name] = planned(tmp_path, "model", "", read_device(file))
    for of in made.values():
        assert of.outcome.plan is not None
        check_model(of.outcome.plan, of.subject)
    implementations = {name: of.graph.optimizers for name, of in made.items()}
    assert implementations["cpu beside"] == planned(tmp_path, "model", "", CATALOGUE["RTX 3090"]).graph.optimizers
    assert implementations["workstation"] == planned(tmp_path, "model", "", CATALOGUE["cpu"]).graph.optimizers
    assert implementations["cpu beside"] != implementations["workstation"]


def test_a_device_file_without_a_kind_is_a_gpu(tmp_path: Path) -> None:
    data = TypeAdapter(Device).dump_python(CATALOGUE["cpu"], mode="json")
    del data["kind"], data["compute_capability"]
    (tmp_path / "d.json").write_bytes(TypeAdapter(object).dump_json(data))
    assert read_device(tmp_path / "d.json").kind == "cuda"
    assert CATALOGUE["cpu"].kind == "cpu"
