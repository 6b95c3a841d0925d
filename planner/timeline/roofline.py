"""Predicts how long each operator takes on a device, by a roofline (Williams et al., 2009) over the catalogue's
numbers.

docs/explanation/planning.md has the formula and how GPUs deviate from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkflow.core.graph import Operator, TrainingGraph
from checkflow.core.machine.device import Device

# Winograd's algorithm for 2x2 outputs of a 3x3 kernel multiplies 2.25 times less (Lavin and Gray, "Fast algorithms for
# convolutional neural networks", 2016), less the cost of its transforms. Fitted with the catalogue's efficiencies:
# VGG-16 and AlexNet train faster in float32 than the flops of these cards would allow.
WINOGRAD_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class Float32Precision:
    """Whether float32 work may run in TF32 on matrix units. torch's defaults: convolutions may, products may not."""

    convolutions_tf32: bool = True
    products_tf32: bool = False


def current_precision() -> Float32Precision:
    """Return torch's setting in this process, which a model file may have changed when it was loaded."""
    # The newer of torch's two interfaces knows what either of them set; the older one may refuse to answer.
    return Float32Precision(
        convolutions_tf32=torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        products_tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
    )


def durations_seconds(graph: TrainingGraph, device: Device, precision: Float32Precision | None = None) -> list[float]:
    """Return each operator's seconds on the device; ``precision``: by default torch's current settings for TF32."""
    chosen = current_precision() if precision is None else precision
    fused = _fused_into_dropout(graph) if device.kind == "cuda" else frozenset()
    return [
        0.0 if index in fused else _operator_seconds(operator, device, chosen)
        for index, operator in enumerate(graph.operators)
    ]


def _operator_seconds(operator: Operator, device: Device, precision: Float32Precision) -> float:
    memory_rate = device.memory_bandwidth_bytes_per_second * device.memory_efficiency
    memory = (operator.read_bytes + operator.written_bytes) / memory_rate
    link = operator.waited_bytes / device.link_bandwidth_bytes_per_second
    if not operator.flops:
        return max(memory, link) + device.launch_seconds
    ways = []
    for dtype in _matrix_dtypes(operator, device, precision):
        efficiency = device.compute_efficiency if device.matrix_efficiency is None else device.matrix_efficiency
        compute = operator.flops / (device.matrix_flops_per_second[dtype] * efficiency)
        relaid = 2 * operator.relaid_bytes / memory_rate
        ways.append(max(compute, memory, link) + relaid)
    if not ways or operator.dtype == "float32":
        # A dtype without units of its own (bfloat16 on Pascal) runs in float32.
        plain = device.plain_flops_per_second
        peak = plain.get(operator.dtype, plain["float32"])
        gain = WINOGRAD_GAIN if operator.winograd and device.kind == "cuda" else 1.0
        compute = operator.flops / (peak * device.compute_efficiency * gain)
        ways.append(max(compute, memory, link))
    return min(ways) + device.launch_seconds


def _matrix_dtypes(operator: Operator, device: Device, precision: Float32Precision) -> tuple[str, ...]:
    """Return the dtypes in which matrix units can compute an operator with flops (a product or a convolution)."""
    dtype = operator.dtype
    if dtype == "float32":
        allowed = precision.convolutions_tf32 if "conv" in operator.target else precision.products_tf32
        dtype = "tf32" if allowed else dtype
    return (dtype,) if dtype in device.matrix_flops_per_second else ()


def _fused_into_dropout(graph: TrainingGraph) -> frozenset[int]:
    """Return the operators that only make dropout's random factors: ``bernoulli_`` on new memory, and its ``div_``."""
    found = set()
    operators = graph.operators
    for index in range(len(operators) - 1):
        drawn, scaled = operators[index], operators[index + 1]
        names = drawn.target.startswith("aten.bernoulli_.") and scaled.target.startswith("aten.div_.")
        if names and drawn.writes == scaled.reads == scaled.writes:
            found |= {index, index + 1}
    return frozenset(found)
