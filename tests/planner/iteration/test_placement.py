"""What training itself moves between device and host: seen by the trace, priced, and planned around."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from checkflow.core.graph import Operator, TrainingGraph
from checkflow.core.machine.device import find_device
from checkflow.core.timeline import Timeline
from checkflow.core.training_step import TrainingStep
from checkflow.planner.iteration.placement import HostMemory
from checkflow.planner.pipeline import Planned, Subject, plan_model
from checkflow.planner.schedule.replay import check_plan, simulate
from checkflow.planner.schedule.scheduler import Outcome, PlanRequest, make_plan
from checkflow.planner.trace.trace import trace
from tests.support.steps import training_steps as steps

ROWS, WIDTH = 8, 16
SIZE = ROWS * WIDTH * 4  # of one activation


def mlp(loss: Callable[..., Any], optimizer: Any = steps.sgd) -> TrainingStep:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return TrainingStep(model, optimizer(model.parameters()), loss=loss, batch=torch.randn(ROWS, WIDTH))


def copies(graph: TrainingGraph) -> list[tuple[str, int, int]]:
    """Phase, bytes to the host, and bytes waited for, of every operator that crosses the link or may."""
    found = [o for o in graph.operators if o.link_bytes or o.waited_bytes or "copy" in o.target]
    return [(o.phase, o.link_bytes, o.waited_bytes) for o in found]


def plain(operators: tuple[Operator, ...]) -> list[tuple[str, int, int]]:
    return [(o.target, o.read_bytes, o.written_bytes) for o in operators]


def use(x: Any) -> None:
    """Where a step hands a tensor to its user."""


def into_pinned(x: torch.Tensor) -> None:
    torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def into_named(x: torch.Tensor) -> None:
    torch.empty_like(x, device="cpu").copy_(x, non_blocking=True)


def into_several(x: torch.Tensor) -> None:
    torch._foreach_copy_([torch.zeros(ROWS, WIDTH), torch.zeros(WIDTH)], [x, x[0]])


# Each with the bytes that it copies to the host, and those for which it waits.
@pytest.mark.parametrize(
    ("moves", "link_bytes", "waited_bytes"),
    [
        (lambda x: x.cpu(), SIZE, SIZE),
        (lambda x: x.to("cpu"), SIZE, SIZE),
        (lambda x: x.to(torch.device("cpu"), non_blocking=True), SIZE, 0),
        (lambda x: x.to(device="cpu", dtype=torch.float16), SIZE, SIZE),  # converted on the host
        (lambda x: x.half().cpu(), SIZE // 2, SIZE // 2),
        (lambda x: x[0].expand(ROWS, WIDTH).cpu(), SIZE, SIZE),  # made whole before it leaves
        (lambda x: x[:, :3].cpu(), SIZE * 3 // WIDTH, SIZE * 3 // WIDTH),
        (lambda x: x.to("cpu").to("cpu").cpu(), SIZE, SIZE),  # is there already
        (lambda x: x.to(torch.zeros(3)), SIZE, SIZE),  # where another tensor is
        (into_pinned, SIZE, 0),
        (into_named, SIZE, 0),
        (into_several, SIZE + SIZE // ROWS, SIZE + SIZE // ROWS),
        (lambda x: x.cpu().add(1).numel(), SIZE, SIZE),  # what the host computes is no operator of the device
        (lambda x: x.sum().cpu(), 0, 0),  # a scalar
        (lambda x: x.sum().item(), 0, 0),
        (lambda x: x.to("cuda").to(x.device).cuda(), 0, 0),  # is there already
        (lambda x: x.to(torch.float64), 0, 0),
        (lambda x: x.clone(), 0, 0),
    ],
)
def test_copies_to_the_host_are_seen(moves: Callable[[Any], Any], link_bytes: int, waited_bytes: int) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        use(moves(out.detach()))
        return out.sum()

    graph = trace(mlp(loss), name="n", target="cuda")
    assert sum(o.link_bytes for o in graph.operators) == link_bytes
    assert sum(o.waited_bytes for o in graph.operators) == waited_bytes
    assert all(o.phase == "forward" and o.read_bytes for o in graph.operators if o.link_bytes)
    assert "aten.add.Tensor" not in [o.target for o in graph.operators]
    on_cpu = trace(mlp(loss), name="n", target="cpu")
    assert {(o.link_bytes, o.waited_bytes) for o in on_cpu.operators} == {(0, 0)}


def test_pinning_moves_nothing() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x.pin_memory())  # the batch is on the device already
        out.detach().cpu().pin_memory()
        return out.sum()

    assert copies(trace(mlp(loss), name="n")) == [("forward", SIZE, SIZE)]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_to_the_device_use_the_other_direction(non_blocking: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(ROWS, WIDTH)
        out: torch.Tensor = model(noise.to(x.device, non_blocking=non_blocking) + x)
        return out.sum()

    graph = trace(mlp(loss), name="n")
    assert copies(graph) == [("forward", 0, 0 if non_blocking else SIZE)]
    copied = next(o for o in graph.operators if "copy" in o.target)
    assert (copied.read_bytes, copied.written_bytes) == (0, SIZE)
    assert "aten.randn.default" not in [o.target for o in graph.operators]


def test_gradients_come_back_the_way_the_values_went() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x).cpu(), torch.zeros(ROWS, WIDTH))

    graph = trace(mlp(loss), name="n")
    assert copies(graph) == [("forward", SIZE, SIZE), ("backward", 0, SIZE)]
    assert not [o for o in graph.operators if "mse" in o.target]

    def there_and_back(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x.requires_grad_().cpu().cuda())
        return out.sum()

    both = trace(mlp(there_and_back), name="n")
    assert copies(both) == [
        ("forward", SIZE, SIZE),
        ("forward", 0, SIZE),
        ("backward", SIZE, SIZE),
        ("backward", 0, SIZE),
    ]


# Offloaded activations


def packed_bytes(step: TrainingStep) -> int:
    """What a real run of the forward saves for backward inside of save_on_cpu, which is replaced by a counter."""
    sizes: list[int] = []

    class Counter(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(lambda tensor: sizes.append(tensor.nbytes if tensor.dim() else 0) or tensor, lambda t: t)

    original = torch.autograd.graph.save_on_cpu
    torch.autograd.graph.save_on_cpu = Counter  # type: ignore[assignment,misc]
    try:
        step.run(step.batch)
    finally:
        torch.autograd.graph.save_on_cpu = original  # type: ignore[misc]
    return sum(sizes)


@pytest.mark.parametrize("offload", ["pageable", "pinned"])
def test_offloaded_activations_use_the_link_and_leave_the_device(offload: str) -> None:
    graph = trace(steps.offloading(offload=offload), name="n")
    resident = trace(steps.offloading(offload="no"), name="n")
    saved = packed_bytes(steps.offloading(offload=offload))
    assert sum(o.link_bytes for o in graph.operators if o.phase == "forward") == saved > 0
    assert sum(o.link_bytes for o in graph.operators if o.phase != "forward") == 0
    waited = {
        phase: sum(o.waited_bytes for o in graph.operators if o.phase == phase) for phase in ("forward", "backward")
    }
    assert waited == dict.fromkeys(waited, saved if offload == "pageable" else 0)
    # Without what crosses the link it is the same step.
    kept = [o for o in graph.operators if not o.link_bytes and "copy" not in o.target]
    assert plain(tuple(kept)) == plain(resident.operators)

    def at_the_loss(which: TrainingGraph) -> int:
        position = [o.target for o in which.operators].index("aten._log_softmax.default")
        return which.live_bytes(eager=True)[0][position]

    # At the loss, what the blocks save waits in host memory: each block's convolution's output, batch norm's two
    # statistics, and ReLU's output. The last block's output stays, because the head saves it too.
    activation = 16 * 32 * 64 * 4
    statistics = 2 * 32 * 4
    assert at_the_loss(resident) - at_the_loss(graph) == 3 * (2 * activation + statistics) - activation
    n = len(graph.operators)
    for storage in graph.storages:
        assert -1 <= storage.created <= storage.graph_end <= storage.eager_end <= n


def test_the_trace_of_an_offloading_step_for_the_cpu_is_as_without() -> None:
    graph = trace(steps.offloading(offload="pinned"), name="n", target="cpu")
    assert {(o.link_bytes, o.waited_bytes) for o in graph.operators} == {(0, 0)}


def test_offloading_by_a_function_of_the_users_own() -> None:
    class Offload(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.device = x.device
            ctx.kept = x.to("cpu", non_blocking=True)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return ctx.kept.to(ctx.device, non_blocking=True).exp() * gradient

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Offload.apply(model(x))  # type: ignore[no-untyped-call]
        return out.sum()

    graph = trace(mlp(loss), name="n")
    assert copies(graph) == [("forward", SIZE, 0), ("backward", 0, 0)]
    assert [o.written_bytes for o in graph.operators if "copy" in o.target] == [0, SIZE]


def test_gradients_that_go_to_the_host_as_they_come() -> None:
    step = mlp(lambda model, x: model(x).sum())
    weight = next(step.models["model"].parameters())
    gone: list[torch.Tensor] = []

    def offload(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gone[:] = [parameter.grad.to("cpu", non_blocking=True)]

    weight.register_post_accumulate_grad_hook(offload)
    assert copies(trace(step, name="n")) == [("backward", WIDTH * WIDTH * 4, 0)]


def test_offloading_and_recomputing_together() -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: torch.Tensor = checkpoint(model, model[0](x), use_reentrant=True)
        return out.sum()

    graph = trace(mlp(loss), name="n")
    recomputed = [o.phase for o in graph.operators if o.target == "aten.tanh.default"]
    assert recomputed == ["forward", "backward"]
    assert sum(o.link_bytes for o in graph.operators) > SIZE


def test_a_buffer_that_the_step_has_captured_is_host_memory_if_it_is_used_so() -> None:
    ring = [torch.zeros(ROWS, WIDTH) for _ in range(2)]

    def offload(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        ring[0].copy_(out.detach(), non_blocking=True)
        return out.sum()

    graph = trace(mlp(offload), name="n")
    assert copies(graph) == [("forward", SIZE, 0)]
    assert "captured" not in [storage.name for storage in graph.storages]

    def weigh(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x) * ring[1]
        return out.sum()

    weighed = trace(mlp(weigh), name="n")
    assert not copies(weighed)
    assert "captured" in [storage.name for storage in weighed.storages]


def test_optimizer_state_that_waits_in_host_memory() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def move(where: str) -> None:
        for values in optimizer.state.values():
            values["momentum_buffer"] = values["momentum_buffer"].to(where)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        move("cuda")
        optimizer.step()
        move("cpu")

    batch = torch.randn(ROWS, WIDTH)
    graph = trace(TrainingStep(step=step, models={"m": model}, optimizers={"o": optimizer}, batch=batch), name="n")
    placements = {entry.name: (entry.placement, entry.first_write) for entry in graph.state}
    assert placements["o/weight.momentum_buffer"] == ("host", None)
    assert placements["m/weight"][0] == "device"
    size = WIDTH * WIDTH * 4
    assert [(link, waited) for _, link, waited in copies(graph)] == [(0, size), (size, size)]
    assert not optimizer.state


# Names of the CPU that mean the device


def test_a_step_that_names_the_planning_machines_device_is_as_one_that_names_none() -> None:
    """``device = "cuda" if torch.cuda.is_available() else "cpu"``, where it is not."""
    mask = torch.ones(ROWS, WIDTH)

    def named(device: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.to(device)
        noise = torch.randn(ROWS, WIDTH, device=device) + torch.zeros(WIDTH)
        out: torch.Tensor = model((x + noise) * mask)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return out.sum()

    for optimizer in (functools.partial(torch.optim.Adam, lr=0.1), functools.partial(torch.optim.RMSprop, lr=0.1)):
        expected = trace(mlp(functools.partial(named, "cuda"), optimizer), name="n")
        for device in ("cpu", torch.device("cpu")):
            graph = trace(mlp(functools.partial(named, device), optimizer), name="n")
            assert graph.operators == expected.operators
            assert graph.storages == expected.storages
            assert not copies(graph)


def test_such_a_step_may_offload_all_the_same() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out: torch.Tensor = model(x.to("cpu"))
        return out.cpu().sum()

    graph = trace(mlp(loss), name="n")
    # The input, the second layer's weight and tanh's output, for both who save it; then the output.
    assert [link for _, link, _ in copies(graph) if link] == [SIZE, SIZE, SIZE, WIDTH * WIDTH * 4, SIZE]


def test_a_default_device_is_no_host_memory() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.zeros(ROWS, WIDTH).copy_(x)
        out: torch.Tensor = model(x)
        return out.sum()

    assert [link for _, link, _ in copies(trace(mlp(loss), name="n"))] == [SIZE]
    with torch.device("meta"):
        assert [link for _, link, _ in copies(trace(mlp(loss), name="n"))] == [0]


def test_torchs_own_methods_are_back_afterwards() -> None:
    hooks, function = torch.autograd.graph.saved_tensors_hooks, torch.autograd.function.BackwardCFunction

    def methods() -> list[object]:
        return [hooks.__enter__, function.apply, getattr(function, "apply_boxed", None)]  # torch 2.11 lacks the last

    before = methods()

    def fails(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss")

    with pytest.raises(Exception, match="no loss"):
        trace(mlp(fails), name="n")
    assert methods() == before


def test_memory_that_is_freed_is_forgotten() -> None:
    host = HostMemory(apart=True)
    tensor = torch.zeros(3)
    host.mark(tensor, frozenset(("copied",)))
    assert host.holds(tensor)
    del tensor
    assert not host._places
    assert not host._watches


# From the model to the plan

DEVICE = dataclasses.replace(find_device("RTX 3090"), launch_seconds=5e-5)


def planned(offload: str, bandwidth: float, **limits: Any) -> Planned:
    request = PlanRequest(bandwidth, DEVICE.memory_bandwidth_bytes_per_second, **limits)
    subject = Subject("tests.support.steps.training_steps:offloading", 16, {"offload": offload}, None)
    return plan_model(subject, DEVICE, request, "segment")


@pytest.mark.parametrize("offload", ["pageable", "pinned"])
def test_a_plan_leaves_the_link_to_training_first(offload: str) -> None:
    quiet = planned("no", 1e9)
    assert not any(step.link_bytes for step in quiet.timeline.steps)
    fast = DEVICE.link_bandwidth_bytes_per_second
    found = planned(offload, fast, extra_memory_bytes=0, max_interval=1)
    least = found.outcome.least_bandwidth_bytes_per_second
    assert least is not None
    for bandwidth in (fast, float(least)):
        plan = planned(offload, bandwidth, extra_memory_bytes=0, max_interval=1).outcome.plan
        assert plan is not None
        check_plan(plan)
        steps_of_it = plan.timeline.steps
        own = [step.link_bytes for step in steps_of_it]
        assert sum(own) == sum(o.link_bytes for o in found.graph.operators) > 0
        forward = next(i for i, step in enumerate(steps_of_it) if "backward" in step.label or "gradient" in step.label)
        assert sum(own[:forward]) == sum(own)
        replay = simulate(plan)
        assert sum(replay.link_bytes) == plan.timeline.state_bytes
        for step, used, traffic in zip(steps_of_it, replay.link_bytes, own, strict=True):
            room = bandwidth * step.duration_seconds
            # Capacity is rounded on its running sum: a step may have one unit that an earlier one had not used.
            assert used + min(traffic, room) <= room + plan.unit_bytes


@pytest.mark.parametrize("offload", ["pageable", "pinned"])
def test_a_link_that_would_do_without_training_s_traffic_does_not_do_with_it(offload: str) -> None:
    found = planned(offload, 1e9)
    alone = dataclasses.replace(
        found.timeline, steps=tuple(dataclasses.replace(step, link_bytes=0) for step in found.timeline.steps)
    )

    def asked(timeline: Timeline, bandwidth: float) -> Outcome:
        memory = DEVICE.memory_bandwidth_bytes_per_second
        request = PlanRequest(bandwidth, memory, extra_memory_bytes=0, max_interval=1)
        return make_plan(timeline, found.fingerprint, request, graph_peak_bytes=found.graph_peak_bytes)

    least, enough = (asked(which, 1e9).least_bandwidth_bytes_per_second for which in (found.timeline, alone))
    assert least is not None
    assert enough is not None
    assert least > 1.05 * enough
    between = (least + enough) / 2
    assert asked(alone, between).plan is not None
    with_it = asked(found.timeline, between)
    assert with_it.plan is None
    assert "training itself uses" in with_it.explanation
