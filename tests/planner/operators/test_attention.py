"""Attention and dropout in a trace for a GPU: the kernels that a CUDA build of torch chooses, and what they keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from checkflow.core.graph import TrainingGraph
from checkflow.core.machine.device import CATALOGUE, find_device
from checkflow.core.training_step import TrainingStep
from checkflow.planner import pipeline
from checkflow.planner.measure.machine import Machine
from checkflow.planner.operators.attention import ATTENTION_FLOPS, cuda_kernels
from checkflow.planner.schedule.scheduler import PlanRequest
from checkflow.planner.trace.trace import trace
from tests.support.steps import training_steps as steps

HALF, FULL = torch.bfloat16, torch.float32
CUDNN, FLASH, EFFICIENT, PLAIN = "cudnn", "flash", "efficient", "plain"
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 48, 16  # of attention, unless a test says otherwise


class Attention(nn.Module):
    """Self-attention on BATCH,LENGTH,heads*width, with as many key heads as asked for."""

    def __init__(self, width: int, keys: int, again: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(HEADS * width, HEADS * width), nn.Linear(HEADS * width, HEADS * width)
        self.key, self.value = nn.Linear(HEADS * width, keys * width), nn.Linear(HEADS * width, keys * width)
        self.width, self.again, self.options = width, again, options

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        parts = (project(x).unflatten(-1, (-1, self.width)) for project in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), **self.options)
        out: torch.Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)
        return out.float().square().mean()


def traced(
    dtype: torch.dtype = FULL,
    width: int = WIDTH,
    length: int = LENGTH,
    keys: int = HEADS,
    target: Any = "cuda",
    again: bool = False,
    capability: tuple[int, int] | None = None,
    **options: Any,
) -> TrainingGraph:
    model = Attention(width, keys, again, options).to(dtype)
    x = torch.randn(BATCH, length, HEADS * width, dtype=dtype)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda model, x: model(x), batch=x)
    return trace(step, name="n", target=target, compute_capability=capability)


def kernel_of(graph: TrainingGraph) -> str:
    """Which kernel forward and backward use, both the same one."""
    targets = [operator.target for operator in graph.operators]
    fused = (CUDNN, FLASH, EFFICIENT)
    found = {name for name in fused if f"aten._scaled_dot_product_{name}_attention.default" in targets}
    back = {name for name in fused if f"aten._scaled_dot_product_{name}_attention_backward.default" in targets}
    assert found == back
    assert ("aten.bmm.default" in targets) == (not found)
    return found.pop() if found else PLAIN


MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
# By the conditions in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": (EFFICIENT, {}),
    "float32, dropout": (EFFICIENT, {"dropout_p": 0.1}),
    "float32, width of 4": (EFFICIENT, {"width": 4}),
    "float32, width of 6": (PLAIN, {"width": 6}),
    "float64": (PLAIN, {"dtype": torch.float64}),
    "bfloat16": (FLASH, {"dtype": HALF}),
    "float16": (FLASH, {"dtype": torch.float16}),
    "bfloat16, dropout": (FLASH, {"dtype": HALF, "dropout_p": 0.1}),
    "bfloat16, causal": (FLASH, {"dtype": HALF, "is_causal": True}),
    "bfloat16, width of 12": (FLASH, {"dtype": HALF, "width": 12}),  # padded to 16
    "bfloat16, width of 256": (FLASH, {"dtype": HALF, "width": 256}),
    "bfloat16, width of 264": (EFFICIENT, {"dtype": HALF, "width": 264}),
    "bfloat16, width of 260": (PLAIN, {"dtype": HALF, "width": 260}),
    "bfloat16, mask": (EFFICIENT, {"dtype": HALF, "attn_mask": MASK}),
    "float32, mask": (EFFICIENT, {"attn_mask": MASK}),
    "float32, odd mask": (EFFICIENT, {"length": 41, "attn_mask": torch.zeros(41, 41)}),
    "float64, mask": (PLAIN, {"dtype": torch.float64, "attn_mask": MASK}),
    "bfloat16, shared keys": (FLASH, {"dtype": HALF, "keys": 2, "enable_gqa": True}),
    "float32, shared keys": (PLAIN, {"keys": 2, "enable_gqa": True}),
    "bfloat16, checkpointing": (FLASH, {"dtype": HALF, "dropout_p": 0.1, "again": True}),
    "float32, checkpointing": (EFFICIENT, {"dropout_p": 0.1, "again": True}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_of_a_gpu_is_traced(name: str) -> None:
    kernel, settings = CHOICES[name]
    assert kernel_of(traced(**settings)) == kernel


HOPPER, BLACKWELL = (9, 0), (10, 0)
BIAS = {"attn_mask": torch.zeros(LENGTH, LENGTH, dtype=HALF)}
# Likewise; where cuDNN's kernel does not fit, it is what another card takes.
CHOICES_BY_CARD: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "9.0": (CUDNN, HOPPER, {}),
    "10.0": (CUDNN, BLACKWELL, {}),
    "10.3": (CUDNN, (10, 3), {}),
    "8.0": (FLASH, (8, 0), {}),
    "12.0": (FLASH, (12, 0), {}),
    "9.0, float16": (CUDNN, HOPPER, {"dtype": torch.float16}),
    "9.0, float32": (EFFICIENT, HOPPER, {"dtype": FULL}),
    "9.0, causal": (CUDNN, HOPPER, {"is_causal": True}),
    "9.0, dropout of 1/8": (CUDNN, HOPPER, {"dropout_p": 0.125}),
    "9.0, dropout of 1/10": (FLASH, HOPPER, {"dropout_p": 0.1}),
    "9.0, one element": (FLASH, HOPPER, {"length": 1}),
    "9.0, two elements": (CUDNN, HOPPER, {"length": 2}),
    "9.0, width of 12": (FLASH, HOPPER, {"width": 12}),
    "9.0, width of 256": (CUDNN, HOPPER, {"width": 256}),
    "9.0, width of 264": (EFFICIENT, HOPPER, {"width": 264}),
    "10.0, width of 128": (CUDNN, BLACKWELL, {"width": 128}),
    "10.0, width of 136": (FLASH, BLACKWELL, {"width": 136}),
    "9.0, mask": (CUDNN, HOPPER, {"attn_mask": MASK}),
    "9.0, bias": (CUDNN, HOPPER, BIAS),
    "9.0, bias for each head": (CUDNN, HOPPER, {"attn_mask": torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=HALF)}),
    "9.0, bias of three dimensions": (EFFICIENT, HOPPER, {"attn_mask": torch.zeros(1, LENGTH, LENGTH, dtype=HALF)}),
    "9.0, turned bias": (EFFICIENT, HOPPER, {"attn_mask": torch.zeros(LENGTH, LENGTH, dtype=HALF).t()}),
    "9.0, shared keys": (CUDNN, HOPPER, {"keys": 2, "enable_gqa": True}),
    "9.0, shared keys and mask": (CUDNN, HOPPER, {"keys": 2, "enable_gqa": True, "attn_mask": MASK}),
    "9.0, checkpointing": (CUDNN, HOPPER, {"again": True}),
    "7.0, float16": (EFFICIENT, (7, 0), {"dtype": torch.float16}),
    "7.0, float16, width of 12": (PLAIN, (7, 0), {"dtype": torch.float16, "width": 12}),
    "7.0, bfloat16": (PLAIN, (7, 0), {}),
    "7.0, float32, width of 6": (EFFICIENT, (7, 0), {"dtype": FULL, "width": 6}),
    "6.1, float16, width of 12": (EFFICIENT, (6, 1), {"dtype": torch.float16, "width": 12}),
}


@pytest.mark.parametrize("name", CHOICES_BY_CARD)
def test_the_kernel_is_the_cards(name: str) -> None:
    kernel, capability, settings = CHOICES_BY_CARD[name]
    assert kernel_of(traced(**{"dtype": HALF, **settings}, capability=capability)) == kernel


MODEL = """
import torch, checkflow
from torch.nn.functional import scaled_dot_product_attention

class Attention(torch.nn.Linear):
    def forward(self, x):
        heads = super().forward(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads).float().square().mean()

def build() -> checkflow.TrainingStep:
    model = Attention(64, 64).bfloat16()
    batch = torch.randn(2, 48, 64, dtype=torch.bfloat16)
    return checkflow.TrainingStep(model, torch.optim.SGD(model.parameters()), loss=lambda m, x: m(x), batch=batch)
"""


@pytest.mark.parametrize(("card", "kernel"), [("A100 80GB", FLASH), ("H100", CUDNN), ("H200", CUDNN), ("L4", CUDNN)])
def test_a_plan_is_made_and_checked_with_the_kernels_of_its_device(
    card: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a card of the catalogue, and for this machine's: here one that calls itself L4 and is of a Hopper's make."""
    (tmp_path / "model.py").write_text(MODEL)
    here = Machine(torch.device("cpu"), "cuda", "L4", "torch", 2**34, HOPPER)
    monkeypatch.setattr(pipeline, "this_machine", lambda: here)
    device = replace(CATALOGUE["H200"], name="L4") if card == "L4" else find_device(card)
    subject = pipeline.Subject(str(tmp_path / "model.py"), None, {}, None)
    request = PlanRequest(device.link_bandwidth_bytes_per_second, device.memory_bandwidth_bytes_per_second)
    planned = pipeline.plan_model(subject, device, request, "operator")
    assert kernel_of(planned.graph) == kernel
    assert planned.outcome.plan is not None
    pipeline.check_model(planned.outcome.plan, subject)


def test_a_bias_that_is_learnt_is_not_for_cudnn() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(WIDTH, HEADS, False, {})
            self.attention.options["attn_mask"] = self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x)
            return out

    model = Biased().to(HALF)
    x = torch.randn(BATCH, LENGTH, HEADS * WIDTH, dtype=HALF)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda model, x: model(x), batch=x)
    assert kernel_of(trace(step, name="n", compute_capability=HOPPER)) == EFFICIENT


@pytest.mark.parametrize(("version", "kernel"), [(91500, FLASH), (91501, CUDNN), (None, CUDNN)])
def test_an_older_cudnn_comes_last(version: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert kernel_of(traced(HALF, capability=HOPPER)) == kernel


def test_cudnn_comes_last_where_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernel_of(traced(HALF, capability=HOPPER)) == FLASH


@pytest.mark.parametrize(("warn_only", "kernel"), [(False, FLASH), (True, CUDNN)])
def test_cudnn_is_not_deterministic(warn_only: bool, kernel: str) -> None:
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        assert kernel_of(traced(HALF, capability=HOPPER)) == kernel
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shared", [1, 2])
def test_what_cudnn_keeps(shared: int) -> None:
    """The result and, in float32, a number for each query; of a bias for all, that one alone."""
    length = 41  # which other kernels pad
    bias = torch.zeros(length, length, dtype=HALF)
    options = {"keys": HEADS // shared, "enable_gqa": shared > 1, "attn_mask": bias, "length": length}
    graph = traced(HALF, capability=HOPPER, **options)
    (forward,) = [i for i, o in enumerate(graph.operators) if "cudnn_attention.default" in o.target]
    (backward,) = [i for i, o in enumerate(graph.operators) if "cudnn_attention_backward" in o.target]
    values = BATCH * HEADS * length * WIDTH * 2
    made = [storage for storage in graph.storages if storage.created == forward]
    assert sorted(storage.size_bytes for storage in made) == [8, 8, BATCH * HEADS * length * 4, values]
    assert all(storage.eager_end >= backward for storage in made)
    read = values + 2 * values // shared + bias.nbytes
    assert graph.operators[forward].read_bytes == read
    # Besides, backward reads the result and its gradient, what was kept for each query, and two numbers of dropout's.
    assert graph.operators[backward].read_bytes == read + 2 * values + BATCH * HEADS * length * 4 + 16
    assert graph.operators[backward].written_bytes == values + 2 * values // shared
    products = 2 * BATCH * HEADS * length * length * WIDTH
    assert [graph.operators[i].flops for i in (forward, backward)] == [2 * products, 5 * products]


def test_a_gpus_kernels_are_for_gpus_only() -> None:
    targets = {operator.target for operator in traced(target="cpu").operators}
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in targets


@pytest.mark.parametrize(
    ("allowed", "kernel"),
    [
        ([SDPBackend.MATH], PLAIN),
        ([SDPBackend.EFFICIENT_ATTENTION], EFFICIENT),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], FLASH),
        ([SDPBackend.CUDNN_ATTENTION], CUDNN),
    ],
)
@pytest.mark.parametrize("capability", [(8, 0), HOPPER])
def test_what_the_user_switched_off_is_not_chosen(
    allowed: list[SDPBackend], kernel: str, capability: tuple[int, int]
) -> None:
    with sdpa_kernel(allowed):
        assert kernel_of(traced(HALF, capability=capability)) == kernel


def test_under_autocast_attention_is_in_reduced_precision() -> None:
    model = Attention(WIDTH, HEADS, False, {})

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", HALF):
            out: torch.Tensor = model(x)
        return out

    batch = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=loss, batch=batch)
    assert kernel_of(trace(step, name="n")) == FLASH


def test_inside_of_multi_head_attention_too() -> None:
    model = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, 32, batch_first=True)
    batch = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda model, x: model(x).mean(), batch=batch)
    assert kernel_of(trace(step, name="n")) == EFFICIENT


def test_the_fused_kernels_keep_no_weights_of_attention() -> None:
    weights = BATCH * HEADS * LENGTH * LENGTH * 4
    for fused in (True, False):
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if fused else SDPBackend.MATH):
            graph = traced(dropout_p=0.1)
        turn = next(i for i, operator in enumerate(graph.operators) if operator.phase == "backward")
        kept = [s.size_bytes for s in graph.storages if 0 <= s.created < turn <= s.eager_end]
        assert (weights in kept) is not fused


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_the_mask_of_dropout(target: Any) -> None:
    """A byte for each element on a GPU, a number on a CPU."""
    model = nn.Sequential(nn.Linear(8, 24), nn.Dropout(0.5), nn.Linear(24, 3))
    batch = torch.randn(10, 8)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda model, x: model(x).sum(), batch=batch)
    graph = trace(step, name="n", target=target)
    (index,) = [i for i, operator in enumerate(graph.operators) if operator.module == "model/1" and i < 6][:1]
    made = [storage.size_bytes for storage in graph.storages if storage.created == index]
    assert 240 * (1 if target == "cuda" else 4) in made
    assert ("aten.native_dropout.default" in {o.target for o in graph.operators}) == (target == "cuda")


@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (1.0, True), (0.5, False)])
def test_dropout_without_a_mask(rate: float, training: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.Dropout(rate), nn.Linear(24, 3)).train(training)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda m, x: m(x).sum(), batch=torch.randn(10, 8))
    targets = {operator.target for operator in trace(step, name="n").operators}
    assert "aten.native_dropout.default" not in targets


def test_real_tensors_are_computed_as_ever() -> None:
    query = torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True)
    expected = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with cuda_kernels():
        torch.testing.assert_close(F.scaled_dot_product_attention(query, query, query, is_causal=True), expected)
        torch.manual_seed(0)
        found = F.dropout(query, 0.3)
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(query, 0.3))


@pytest.mark.parametrize("packet", [packet for packet in ATTENTION_FLOPS if packet in flop_registry], ids=str)
@pytest.mark.parametrize("shared", [1, 2])
def test_the_formulas_of_flops_are_torchs(packet: Any, shared: int) -> None:
    """For queries and values of other lengths and widths; and with shared keys, which torch 2.11 does not count."""
    query, value = torch.empty(2, 4, 5, 16), torch.empty(2, 4 // shared, 7, 24)
    key, gradient = torch.empty(2, 4 // shared, 7, 16), torch.empty(2, 4, 5, 24)
    given = (gradient, query, key, value) if "backward" in str(packet) else (query, key, value)
    whole = [one.expand(2, 4, 7, -1) if one.shape[1] == 1 else one.repeat(1, 4 // one.shape[1], 1, 1) for one in given]
    assert ATTENTION_FLOPS[packet](*given) == flop_registry[packet](*whole, out_val=None) > 0


def test_flops_are_those_that_torch_counts_on_a_gpu() -> None:
    graph = traced(dropout_p=0.1)
    with FakeTensorMode(), cuda_kernels():
        model = Attention(WIDTH, HEADS, False, {"dropout_p": 0.1})
        batch = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
        step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda model, x: model(x), batch=batch)
        with FlopCounterMode(display=False) as counter:
            step.run(step.batch)
    assert graph.flops == counter.get_total_flops() > 0
