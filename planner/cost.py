"""How long each operator takes on a device: a roofline (Williams et al., 2009) over the catalogue's numbers.

An operator lasts max(flops / (peak · efficiency), bytes / (bandwidth · efficiency), waited / link) + launch, where
``waited`` are the bytes of a copy to or from host memory for which training waits, and ``link`` is the whole bandwidth
of the device's link. Copies that training does not wait for (``non_blocking``, and all into pinned memory) last no
longer than they keep the device's memory busy, as they would on a stream of their own. Both err to the safe side, short
iterations, which leave the link less time: no copy is faster than the link (pageable memory is slower, and so is a
share of the link), and a copy that is not waited for still takes its bytes from what the link can carry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkflow.graph import Operator, TrainingGraph
from checkflow.hardware import Device


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
    return [_operator_seconds(operator, device, chosen) for operator in graph.operators]


def _operator_seconds(operator: Operator, device: Device, precision: Float32Precision) -> float:
    compute = operator.flops / _reachable_flops_per_second(operator, device, precision) if operator.flops else 0.0
    moved_bytes = operator.read_bytes + operator.written_bytes
    memory = moved_bytes / (device.memory_bandwidth_bytes_per_second * device.memory_efficiency)
    link = operator.waited_bytes / device.link_bandwidth_bytes_per_second
    return max(compute, memory, link) + device.launch_seconds


def _reachable_flops_per_second(operator: Operator, device: Device, precision: Float32Precision) -> float:
    """Peak times efficiency of the units that an operator with flops (a product or a convolution) runs on."""
    dtype = operator.dtype
    if dtype == "float32":
        convolution = "conv" in operator.target
        allowed = precision.convolutions_tf32 if convolution else precision.products_tf32
        dtype = "tf32" if allowed else dtype
    if dtype in device.matrix_flops_per_second:
        efficiency = device.compute_efficiency if device.matrix_efficiency is None else device.matrix_efficiency
        return device.matrix_flops_per_second[dtype] * efficiency
    # A dtype without units of its own (TF32 on older cards, bfloat16 on Pascal) is computed in float32.
    plain = device.plain_flops_per_second
    return plain.get(dtype, plain["float32"]) * device.compute_efficiency
