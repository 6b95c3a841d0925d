"""Attention and dropout in a trace for a GPU: the kernels that a CUDA build of torch chooses, and what they keep."""

from __future__ import annotations

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
from checkflow.core.training_step import TrainingStep
from checkflow.planner.operators.attention import ATTENTION_FLOPS, cuda_kernels
from checkflow.planner.trace.trace import trace
from tests.support import training_steps as steps

HALF, FULL = torch.bfloat16, torch.float32
FLASH, EFFICIENT, PLAIN = "flash", "efficient", "plain"
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
    **options: Any,
) -> TrainingGraph:
    model = Attention(width, keys, again, options).to(dtype)
    x = torch.randn(BATCH, length, HEADS * width, dtype=dtype)
    step = TrainingStep(model, steps.sgd(model.parameters()), loss=lambda model, x: model(x), batch=x)
    return trace(step, name="n", target=target)


def kernel_of(graph: TrainingGraph) -> str:
    """Which kernel forward and backward use, both the same one."""
    targets = [operator.target for operator in graph.operators]
    found = {name for name in (FLASH, EFFICIENT) if f"aten._scaled_dot_product_{name}_attention.default" in targets}
    back = {
        name for name in (FLASH, EFFICIENT) if f"aten._scaled_dot_product_{name}_attention_backward.default" in targets
    }
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


def test_a_gpus_kernels_are_for_gpus_only() -> None:
    targets = {operator.target for operator in traced(target="cpu").operators}
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in targets


@pytest.mark.parametrize(
    ("allowed", "kernel"),
    [
        ([SDPBackend.MATH], PLAIN),
        ([SDPBackend.EFFICIENT_ATTENTION], EFFICIENT),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], FLASH),
    ],
)
def test_what_the_user_switched_off_is_not_chosen(allowed: list[SDPBackend], kernel: str) -> None:
    with sdpa_kernel(allowed):
        assert kernel_of(traced(HALF)) == kernel


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
