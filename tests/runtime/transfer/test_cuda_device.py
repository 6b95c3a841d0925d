"""What torch says of CUDA's errors, told as ours, by the device that the copy engine for GPUs speaks to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from checkflow.core.errors import CheckflowError
from checkflow.runtime.transfer.cuda_device import CudaDevice

FAULT = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(FAULT)


@pytest.fixture
def device() -> CudaDevice:
    """Without a GPU: only what speaks to torch alone can be asked of it."""
    device = object.__new__(CudaDevice)
    device.memory, device._index = torch.device("cuda:0"), 0
    device._free_events = ([], [])
    return device


def event(**calls: Callable[..., Any]) -> Any:
    return SimpleNamespace(event=SimpleNamespace(**calls), timed=True)


def test_a_device_that_has_failed_is_told_of_in_a_line(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    there = event(query=lambda: True, elapsed_time=fail, record=fail, wait=fail)
    device._free_events[1].append(there)
    calls: list[Callable[[], object]] = [
        lambda: device.done(event(query=fail)),
        lambda: device.seconds_between(there, there),
        lambda: device.seconds_between(there, event(query=fail)),
        lambda: device.record("stream", timed=True),
        lambda: device.wait("stream", there),
        lambda: device.allocate(1),
    ]
    monkeypatch.setattr(torch, "UntypedStorage", fail)
    for name in ("is_current_stream_capturing", "current_stream"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            patch.setattr(torch.cuda, name, fail)
            with pytest.raises(CheckflowError, match=r"^CUDA: CUDA error: an illegal memory access was encountered$"):
                device.current()
    for call in calls:
        with pytest.raises(CheckflowError, match=r"^CUDA: CUDA error: an illegal memory access was encountered$"):
            call()


def test_the_time_between_events_is_in_seconds_and_none_before_the_later_one(device: CudaDevice) -> None:
    before = event(elapsed_time=lambda after: 250.0)
    assert device.seconds_between(before, event(query=lambda: True)) == 0.25
    assert device.seconds_between(before, event(query=lambda: False)) == 0.0


def test_nothing_is_copied_while_a_graph_is_captured(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream of {index}")
    with pytest.raises(CheckflowError, match="captured into a CUDA graph"):
        device.current()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert device.current() == "stream of 0"
