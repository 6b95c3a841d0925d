"""What a roofline must know of convolutions: flops, whether Winograd's algorithm fits, and image layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import conv_flop_count

aten = torch.ops.aten
CONVOLUTIONS = frozenset({aten.convolution, aten.convolution_backward})


def _backward_flops(
    gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, *rest: Any, out_val: Any = None
) -> int:
    """Each gradient asked for, of the images and of the weight, costs as much as the forward convolution.

    torch's own formula forgets the groups: a depthwise convolution would count once for each channel.
    """
    _biases, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = rest
    forward = conv_flop_count([*images.shape], [*weight.shape], [*gradient.shape], transposed=transposed)
    return int(forward) * (int(wanted[0]) + int(wanted[1]))


CONVOLUTION_FLOPS: Mapping[OpOverloadPacket, Callable[..., int]] = {aten.convolution_backward: _backward_flops}


def has_fast_algorithm(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether Winograd's algorithm fits: two dimensions, a kernel of 3x3 or more, no stride, dilation or groups."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    weight = given["weight"]
    return (
        weight.dim() == 4
        and min(weight.shape[2:]) >= 3
        and given["groups"] == 1
        and not given["transposed"]
        and {*given["stride"], *given["dilation"]} == {1}
    )


def relaid_bytes(inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors in channels-first layout (NCHW), which matrix units take as channels-last (NHWC)."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*inputs, *outputs)
        if (tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.dim() == 5 and not tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )
