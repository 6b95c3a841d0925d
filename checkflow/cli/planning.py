"""What commands pass to the planner: the device, the training step, and the limits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from checkflow.cli import options, probe
from checkflow.cli.progress import working
from checkflow.core.errors import CheckflowError

if TYPE_CHECKING:
    from checkflow.cli.options import GranularityName, Optimizer, ParallelName
    from checkflow.core.machine.device import Device
    from checkflow.planner.model_file.several_ranks import Ranks
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


def ranks_of(count: int | None, mesh: str | None, parallel: ParallelName | None) -> Ranks | None:
    """Return what options say of several ranks; typer.BadParameter if they do not fit together."""
    from checkflow.planner.model_file.several_ranks import SHARD, Ranks

    if count is None:
        if mesh is not None or parallel is not None:
            raise typer.BadParameter("--mesh and --parallel lay out several ranks: give their number with --ranks")
        return None
    layout = () if mesh is None else options.read_mesh(mesh)
    if layout and parallel is None:
        parallel = options.ParallelName.FSDP if any(name == SHARD for name, _ in layout) else options.ParallelName.DDP
    try:
        return Ranks(count, layout, None if parallel is None else parallel.value)
    except CheckflowError as error:
        raise typer.BadParameter(str(error)) from None


def plan_of(
    subject: Subject, device: Device, request: PlanRequest, granularity: GranularityName, ranks: Ranks | None = None
) -> Planned:
    """Trace and plan, for a device that need not exist here."""
    from checkflow.planner.ilp.search import watched
    from checkflow.planner.pipeline import plan_model

    with working(f"planning {subject.target} for {device.name}") as say, watched(say):
        return plan_model(subject, device, request, granularity.value, ranks)


def planner_for(
    device: str, ranks: Ranks | None = None
) -> Callable[[Subject, Device, PlanRequest, GranularityName], Planned]:
    """Return :func:`plan_of`, or for "auto" a function that also runs and measures the step here."""
    if device != options.AUTO:
        return functools.partial(plan_of, ranks=ranks)
    if ranks is not None:
        raise typer.BadParameter("--ranks plans a cluster by its catalogue, which --device auto does not measure")
    return probe.plan_measured
