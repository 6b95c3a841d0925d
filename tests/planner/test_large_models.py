"""The largest shipped models, Llama 3 and DLRM: in full size on fake tensors, and small for real; GPT-2, small."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch

from checkflow.core.errors import ModelError
from checkflow.core.graph import AnchorKind, TrainingGraph
from checkflow.core.machine.device import find_device
from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.model_file.several_ranks import Ranks
from checkflow.planner.pipeline import Planned, Subject, default_memory_limit_bytes, plan_model
from checkflow.planner.schedule.scheduler import PlanRequest
from checkflow.planner.trace.trace import trace
from tests.support.steps.training_steps import flop_counter

TINY: dict[str, dict[str, Any]] = {
    "llama": {"batch_size": 2, "sequence": 8, "layers": 2, "width": 64, "vocabulary": 50},
    "dlrm": {"batch_size": 6, "width": 4, "lookups": 2, "rows": 10},
    "dlrm adam": {"batch_size": 6, "width": 4, "lookups": 2, "rows": 10, "table_optimizer": "sparse_adam"},
    "gpt2": {"batch_size": 2, "length": 8, "layers": 2, "heads": 2, "width": 16, "vocabulary": 50},
    "gpt2 mixed": {"batch_size": 2, "length": 8, "layers": 2, "heads": 2, "width": 16, "vocabulary": 50, "mixed": True},
}
H200 = find_device("H200")


def build(case: str) -> TrainingStep:
    torch.manual_seed(0)
    step = importlib.import_module(f"checkflow.models.{case.partition(' ')[0]}").build(**TINY[case])
    assert isinstance(step, TrainingStep)
    return step


def plan(model: str, ranks: Ranks | None = None, **settings: str) -> Planned:
    request = PlanRequest(
        bandwidth_bytes_per_second=H200.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=H200.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=default_memory_limit_bytes(H200),
    )
    return plan_model(Subject(model, None, settings, None), H200, request, "segment", ranks)


@pytest.mark.parametrize(
    ("size", "parameters"), [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)]
)
def test_llama_has_the_published_number_of_parameters(size: str, parameters: int) -> None:
    (model,) = load_training_step("llama", settings={"size": size})[1].models.values()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("llama", {"size": "7B"}, "unknown size '7B'; choose one of: 8B, 70B, 405B"),
        ("llama", {"width": "100"}, "width 100 does not divide into 32 heads of an even width"),
        ("llama", {"width": "0"}, "width 0 does not divide into 32 heads of an even width"),
        ("dlrm", {"table_optimizer": "adam"}, "unknown table_optimizer 'adam'; choose one of: sgd, sparse_adam"),
    ],
)
def test_wrong_settings_are_one_line(model: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_training_step(model, settings=settings)
    assert str(caught.value).endswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_llama_is_planned_whole() -> None:
    """8B in bfloat16 fits one H200, and its state leaves behind the computation without more memory."""
    planned = plan("llama")
    graph, made = planned.graph, planned.outcome.plan
    assert made is not None
    assert made.certificate.status == "optimal"
    assert made.plan_peak_bytes == planned.outcome.training_peak_bytes
    assert graph.parameters == 8_030_261_248
    host = [entry for entry in graph.state if entry.placement == "host"]
    tensors = sum(entry.kind == "parameter" for entry in graph.state)
    assert {entry.name.rpartition(".")[2] for entry in host} == {"step"}
    assert graph.state_bytes == 3 * 2 * graph.parameters + 4 * tensors
    assert len(host) == tensors == 32 * 9 + 3
    # The bulk of it by hand: 6 flops a token and weight of the linear layers, 3.5 x 4 a token, token and width of
    # the attention (whose backward makes the scores again).
    tokens, linear = 8192, graph.parameters - 128_256 * 4096
    assert graph.flops == pytest.approx(6 * tokens * linear + 14 * tokens**2 * 4096 * 32, rel=1e-3)


@pytest.mark.slow
def test_llama_is_planned_over_64_ranks() -> None:
    """FSDP2 gathers 32 layers twice and the rest once; each rank has a 64th of the state."""
    planned = plan("llama", ranks=Ranks(64, parallel="fsdp"))
    kinds = Counter(one.collective.kind for one in planned.graph.operators if one.collective is not None)
    assert kinds == {"all-gather": 65, "reduce-scatter": 33}
    assert planned.outcome.status == "optimal"
    assert planned.several is not None
    counters = 4 * (32 * 9 + 3)
    assert planned.several.global_state_bytes == 6 * planned.graph.parameters + 64 * counters
    assert planned.graph.state_bytes == pytest.approx(planned.several.global_state_bytes / 64, rel=0.001)


@pytest.mark.slow
def test_dlrm_is_planned_whole() -> None:
    planned = plan("dlrm")
    graph, made = planned.graph, planned.outcome.plan
    assert planned.outcome.training_peak_bytes < 1.01 * graph.state_bytes  # no gradient is as large as its table
    assert graph.state_bytes == 4 * graph.parameters == 4 * 540_677_217
    # A step of less than a millisecond, gigabytes of state, one link: a checkpoint takes many iterations.
    assert made is not None
    needed = graph.state_bytes / made.bandwidth_bytes_per_second / planned.timeline.iteration_seconds
    assert needed <= made.interval < 2 * needed


@pytest.mark.parametrize("case", TINY)
def test_flops_are_those_of_the_flop_counter(case: str) -> None:
    step = build(case)
    with flop_counter() as counter:
        step.run(step.batch)
    assert trace(build(case), name=case, target="cpu").flops == counter.get_total_flops() > 0


def _state(step: TrainingStep) -> dict[str, torch.Tensor]:
    """The values of all device state, by the names that the trace gives them: of tied tensors the first."""
    (model,) = step.models.values()
    first = {value.data_ptr(): key for key, value in reversed(model.state_dict().items())}
    found = {f"model/{key}": value for key, value in model.state_dict().items() if first[value.data_ptr()] == key}
    for owner, optimizer in step.optimizers.items():
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, table in optimizer.state.items():
            for key, value in table.items():
                if isinstance(value, torch.Tensor):
                    found[f"{owner}/{names[id(parameter)]}.{key}"] = value
    return {name: value.clone() for name, value in found.items()}


def _really_written_by(step: TrainingStep) -> dict[str, str]:
    """For each state tensor the optimizer whose step changes it in the second iteration; no other place does."""
    step.run(step.batch)
    seen = [_state(step)]
    writers: dict[str, str] = {}

    def before(*_: Any) -> None:
        now = _state(step)
        assert all(torch.equal(now[name], value) for name, value in seen[-1].items()), "written outside of a step"

    def after(owner: str) -> Any:
        def hook(*_: Any) -> None:
            now = _state(step)
            writers.update((name, owner) for name in now if not torch.equal(now[name], seen[-1][name]))
            seen.append(now)

        return hook

    for owner, optimizer in step.optimizers.items():
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after(owner))
    step.run(step.batch)
    return writers


def _traced_writer(graph: TrainingGraph, operator: int) -> str:
    """The optimizer between whose anchors an operator lies."""
    at = {(anchor.key.kind, anchor.key.name): anchor.position for anchor in graph.anchors}
    (owner,) = [
        name
        for name, _ in graph.optimizers
        if at[AnchorKind.OPTIMIZER_PRE, name] <= operator < at[AnchorKind.OPTIMIZER_POST, name]
    ]
    return owner


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("case", TINY)
def test_first_writes_are_those_of_a_real_step(case: str, target: Any) -> None:
    graph = trace(build(case), name=case, target=target)
    real = build(case)
    writers = _really_written_by(real)
    entries = {entry.name: entry for entry in graph.state}
    assert set(entries) == set(_state(real))
    assert len(writers) > 0.8 * len(entries)  # all but norms, whose steps are below bfloat16's resolution at first
    for name, entry in entries.items():
        assert (entry.placement == "host") == name.endswith(".step")
        if entry.placement == "host":
            continue
        assert entry.first_write is not None, name
        traced = _traced_writer(graph, entry.first_write)
        assert writers.get(name, traced) == traced, name
        assert entry.size_bytes == _state(real)[name].nbytes


def test_llama_looks_back_and_not_ahead_and_knows_positions() -> None:
    torch.manual_seed(0)
    # One layer: in a second one the causal mask alone would tell positions apart.
    step = importlib.import_module("checkflow.models.llama").build(**{**TINY["llama"], "layers": 1})
    model = step.models["model"].float()
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    ahead, swapped = tokens.clone(), tokens.clone()
    ahead[0, -1], swapped[0, :2] = 11, tokens[0, :2].flip(0)
    logits = model(tokens)[0]
    assert torch.allclose(model(ahead)[0, :-1], logits[:-1], atol=1e-7)
    assert not torch.allclose(model(ahead)[0, -1], logits[-1], atol=1e-3)
    change = (model(swapped)[0, -1] - logits[-1]).abs().max()
    model.rotations.fill_(1)  # no rotation: then the last token sees a set, and the order of it does not matter
    without = (model(swapped)[0, -1] - model(tokens)[0, -1]).abs().max()
    assert change > 100 * without


def test_dlrm_learns_one_batch_by_heart_and_writes_only_rows_looked_up() -> None:
    step = build("dlrm")
    (model,) = step.models.values()
    before = {name: value.clone() for name, value in model.embeddings.named_parameters()}
    losses = [step.run(step.batch).item() for _ in range(200)]
    assert losses[-1] < 0.5 * losses[0]
    for number, (name, table) in enumerate(model.embeddings.named_parameters()):
        changed = (table != before[name]).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) <= set(step.batch[1][number].flatten().tolist()), name
