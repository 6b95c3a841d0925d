"""How long each operator takes on a device: a roofline (Williams et al., 2009) over the catalogue's numbers.

An operator lasts max(flops / (peak · efficiency), bytes / (bandwidth · efficiency), waited / link) + launch, where
``waited`` are the bytes of a copy to or from host memory for which training waits, and ``link`` is the whole bandwidth
of the device's link. Copies that training does not wait for (``non_blocking``, and all into pinned memory) last no
longer than they keep the device's memory busy, as they would on a stream of their own. Both err to the safe side, short
iterations, which leave the link less time: no copy is faster than the link (pageable memory is slower, and so is a
share of the link), and a copy that is not waited for still takes its bytes from what the link can carry.

Which peak: halves and TF32 run on the matrix units where the card has such, float32 where TF32 is allowed on the faster
of both. What a GPU does otherwise than its operators tell:

- General units do convolutions of 3x3 and more by Winograd's algorithm, with :data:`WINOGRAD_GAIN` times fewer flops.
- Matrix units take images pixel by pixel (NHWC). Those that lie channel by channel, torch's default, are turned before
  and after by kernels of their own, which read and write them once more.
- Dropout is one kernel. torch's CPU dispatch, by which steps are traced, makes the random factors first, in two
  operators that do not run on a GPU: they last 0 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkflow.core.device import Device
from checkflow.core.graph import Operator, TrainingGraph

# Winograd's algorithm for 2x2 outputs of a 3x3 kernel multiplies 2.25 times less (Lavin and Gray, "Fast algorithms for
# convolutional neural networks", 2016); some of that goes into turning images to its form and back. Fitted with the
# catalogue's efficiencies: VGG-16 and AlexNet train faster in float32 than the flops of these cards would allow.
WINOGRAD_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class Float32Precision:
    """Where float32 work may run in TF32 on matrix units. The defaults are torch's: convolutions may, products not."""

    convolutions_tf32: bool = True
    products_tf32: bool = False


def current_precision() -> Float32Precision:
    """What torch is set to in this process; a model file that sets it when loaded is planned as it will run."""
    # The newer of torch's two interfaces: it tells what either of them set, while the older one may refuse to answer.
    return Float32Precision(
        convolutions_tf32=torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        products_tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
    )


def durations_seconds(graph: TrainingGraph, device: Device, precision: Float32Precision | None = None) -> list[float]:
    """Seconds that each operator of the graph takes on the device, in the graph's order.

    Args:
        precision: where float32 may run in TF32; torch's current settings by default.
    """
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
        # A dtype without units of its own (bfloat16 on Pascal) is computed in float32.
        plain = device.plain_flops_per_second
        peak = plain.get(operator.dtype, plain["float32"])
        gain = WINOGRAD_GAIN if operator.winograd and device.kind == "cuda" else 1.0
        compute = operator.flops / (peak * device.compute_efficiency * gain)
        ways.append(max(compute, memory, link))
    return min(ways) + device.launch_seconds


def _matrix_dtypes(operator: Operator, device: Device, precision: Float32Precision) -> tuple[str, ...]:
    """The dtype in which the matrix units compute an operator with flops (a product or a convolution), if they do."""
    dtype = operator.dtype
    if dtype == "float32":
        allowed = precision.convolutions_tf32 if "conv" in operator.target else precision.products_tf32
        dtype = "tf32" if allowed else dtype
    return (dtype,) if dtype in device.matrix_flops_per_second else ()


def _fused_into_dropout(graph: TrainingGraph) -> frozenset[int]:
    """Operators that only make dropout's random factors: ``bernoulli_`` on new memory, and ``div_`` of the same."""
    found = set()
    operators = graph.operators
    for index in range(len(operators) - 1):
        drawn, scaled = operators[index], operators[index + 1]
        names = drawn.target.startswith("aten.bernoulli_.") and scaled.target.startswith("aten.div_.")
        if names and drawn.writes == scaled.reads == scaled.writes:
            found |= {index, index + 1}
    return frozenset(found)
