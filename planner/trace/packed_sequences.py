"""Rows of different lengths in a trace: packed sequences (``pack_padded_sequence``), ``ctc_loss``, ``grouped_mm``.

Lengths are data, which a trace lacks: it takes every sequence to be as long as the longest can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

# Makes a tensor of lengths in host memory.
MakeLengths = Callable[[Sequence[int]], torch.Tensor]

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def replacement(func: Callable[..., Any], args: tuple[Any, ...], make: MakeLengths) -> Callable[..., Any] | None:
    """Return what runs in place of a call that needs sequence lengths, with the same arguments; None: the call itself.

    ``make`` makes the tensors of lengths that packing and unpacking return.
    """
    if func is torch._pack_padded_sequence:
        return lambda data, lengths, batch_first: _pack(data, batch_first, make)
    if func is torch._pad_packed_sequence:
        return lambda *given: _unpack(*given, make=make)
    if func in (F.ctc_loss, torch.ctc_loss):
        # Lists of numbers select an overload without a fake kernel.
        return lambda *given, **named: func(
            *(_as_tensor(value, make) for value in given),
            **{key: _as_tensor(value, make) for key, value in named.items()},
        )
    packed = func in _RECURRENT and isinstance(args[1], torch.Tensor) and not isinstance(args[2], list)
    return (lambda *given: _run_packed(func, *given)) if packed else None


def _as_tensor(value: Any, make: MakeLengths) -> Any:
    return make(value) if isinstance(value, list | tuple) else value


def _pack(data: torch.Tensor, batch_first: bool, make: MakeLengths) -> tuple[torch.Tensor, torch.Tensor]:
    steps = data.transpose(0, 1) if batch_first else data
    return torch.cat(steps.unbind(0)), make([steps.shape[1]] * steps.shape[0])


def _unpack(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, length: int, *, make: MakeLengths
) -> tuple[torch.Tensor, torch.Tensor]:
    longest, sequences = batch_sizes.shape[0], int(batch_sizes[0])
    padded = data.new_full((length, sequences, *data.shape[1:]), value)
    padded.flatten(0, 1)[: data.shape[0]].copy_(data)
    return padded.transpose(0, 1) if batch_first else padded, make([longest] * sequences)


def _run_packed(
    func: Callable[..., Any], data: torch.Tensor, batch_sizes: torch.Tensor, hidden: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    longest, sequences = batch_sizes.shape[0], int(batch_sizes[0])
    rows = data.shape[0]
    padded = data if rows == longest * sequences else F.pad(data, (0, 0, 0, longest * sequences - rows))
    output, *states = func(padded.view(longest, sequences, -1), hidden, *rest, False)
    return output.flatten(0, 1)[:rows], *states


@contextlib.contextmanager
def lengths_faked() -> Iterator[None]:
    """Add fake kernels of ctc_loss, which torch lacks, and of grouped_mm, where torch's takes no bfloat16."""
    fakes: Mapping[Any, Callable[..., Any]] = {
        aten._ctc_loss.Tensor: _ctc_loss,
        aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
        aten._grouped_mm.default: _grouped_mm,
    }
    table = fake_impls.op_implementations_dict
    before = {func: table[func] for func in fakes if func in table}
    table.update(fakes)
    try:
        yield
    finally:
        for func in fakes:
            del table[func]
        table.update(before)


def _ctc_loss(
    _mode: Any, _func: Any, log_probabilities: torch.Tensor, targets: torch.Tensor, _inputs: Any, lengths: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sequence, and for each the logarithms of (times, 2·targets + 1) probabilities."""
    times = log_probabilities.shape[0]
    sequences = log_probabilities.shape[1] if log_probabilities.dim() == 3 else 1
    known = lengths.constant if isinstance(lengths, FakeTensor) else None
    if known is not None:
        longest = max(known.flatten().tolist(), default=0)
    else:  # concatenated targets: only their number is known, so assume equal lengths
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // max(sequences, 1))
    return (
        log_probabilities.new_empty((sequences,) if log_probabilities.dim() == 3 else ()),
        log_probabilities.new_empty((sequences, times, 2 * longest + 1)),
    )


def _ctc_loss_backward(_mode: Any, _func: Any, _gradient: Any, log_probabilities: torch.Tensor, *_: Any) -> Any:
    return torch.empty_like(log_probabilities, memory_format=torch.contiguous_format)


def _grouped_mm(
    mode: Any, _func: Any, a: torch.Tensor, b: torch.Tensor, offs: Any = None, _bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    from torch._meta_registrations import _create_grouped_mm_output_tensor  # private: no other trace depends on it

    with mode:  # a real tensor has no gradient in a trace
        made: torch.Tensor = _create_grouped_mm_output_tensor(a, b, offs, out_dtype or a.dtype)  # type: ignore[no-untyped-call]
    return made
