"""What commands pass to the planner: the device, the training step, and the limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from checkflow.cli import options, probe
from checkflow.cli.console import working

if TYPE_CHECKING:
    from checkflow.cli.options import GranularityName, Optimizer
    from checkflow.core.device import Device
    from checkflow.planner.pipeline import Planned, Subject
    from checkflow.planner.schedule.scheduler import PlanRequest


def device_of(text: str) -> Device:
    """Return a device as :func:`.options.choose_device`, or for "auto" this machine, measured."""
    return probe.measure_device() if text == options.AUTO else options.choose_device(text)


def subject_of(model: str, batch_size: int | None, settings: list[str] | None, optimizer: Optimizer | None) -> Subject:
    """Return what options ask to plan; typer.BadParameter for a plan file or an invalid setting."""
    from checkflow.planner.pipeline import Subject

    options.refuse_plan_file(model)
    return Subject(
        model, batch_size, options.read_settings(settings or []), None if optimizer is None else optimizer.value
    )


def request_of(
    device: Device,
    bandwidth: float | None = None,
    memory_limit: int | None = None,
    link_share: float = 1.0,
    **others: Any,
) -> PlanRequest:
    """Return the request for a plan; the device fills in what the user leaves out."""
    from checkflow.planner.pipeline import default_memory_limit_bytes
    from checkflow.planner.schedule.scheduler import PlanRequest

    return PlanRequest(
        bandwidth_bytes_per_second=link_share
        * (device.link_bandwidth_bytes_per_second if bandwidth is None else bandwidth),
        link_share=link_share,
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=default_memory_limit_bytes(device) if memory_limit is None else memory_limit,
        copy_seconds=device.copy_seconds,
        **others,
    )


def plan_of(subject: Subject, device: Device, request: PlanRequest, granularity: GranularityName) -> Planned:
    """Trace and plan, for a device that need not exist here."""
    from checkflow.planner.pipeline import plan_model

    with working(f"planning {subject.target} for {device.name}"):
        return plan_model(subject, device, request, granularity.value)


def planner_for(device: str) -> Callable[[Subject, Device, PlanRequest, GranularityName], Planned]:
    """Return :func:`plan_of`, or for "auto" a function that also runs and measures the step here."""
    return probe.plan_measured if device == options.AUTO else plan_of
