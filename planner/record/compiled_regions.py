"""What compiled regions of a recorded live job did unseen by a dispatch mode: one operator for each forward and
backward.

Compiled code runs compiled while recorded, with the same bits and memory. docs/explanation/tracing.md ("the record")
says what the operator stands for. Compiled functions get no more than this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from checkflow.anchors.regions import uncompiled
from checkflow.planner.iteration.iteration import WatchedIteration
from checkflow.planner.iteration.placement import NO_CROSSING
from checkflow.planner.operators import operators as op
from checkflow.planner.record.allocator import Transients

# torch's name of a compiled graph's autograd node.
_NODE = "CompiledFunctionBackward"


class Spans(Protocol):
    """Measures stretches of time that contain operators."""

    def open(self) -> object:
        """Begin a stretch."""

    def keep_rest(self, span: object, apart_seconds: float, /) -> None:
        """End a stretch: keep what no kept operator took of it, less ``apart_seconds``, as one more operator's time."""


class LiveRegions:
    """Notes what a job's regions did unseen, in one recorded iteration."""

    def __init__(self, iteration: WatchedIteration, spans: Spans, transients: Transients) -> None:
        self._iteration, self._spans, self._transients = iteration, spans, transients
        # Operators, autograd nodes and compile seconds before it, its time, and its memory mark.
        self._open: list[tuple[int, int, float, object, int]] = []
        self._watching = False
        self._compiling = _CompilingTime()

    def start(self) -> None:
        self._watching = True
        self._compiling.start()

    def stop(self) -> None:
        if self._watching:
            self._watching = False
            self._open.clear()
            self._compiling.stop()

    def entered(self) -> None:
        """A region's forward or backward begins."""
        if self._watching:
            nodes, compiling = torch._C._autograd._get_sequence_nr(), self._compiling.seconds
            position, span, mark_bytes = self._iteration.position(), self._spans.open(), self._transients.begin()
            self._open.append((position, nodes, compiling, span, mark_bytes))

    def left(self, modules: Mapping[str, nn.Module], result: Any) -> None:
        """It has ended and returned this."""
        if not self._open:  # watching began or ended within it
            return
        position, first_node, compiling, span, mark_bytes = self._open.pop()
        transient_bytes = self._transients.end(mark_bytes)
        with _disable_current_modes(), torch.no_grad():
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for node in _compiled_nodes(made, first_node):
                made += [tensor for tensor in node.saved_tensors if tensor is not None]
                node.register_prehook(uncompiled(lambda _: self.entered()))
                node.register_hook(uncompiled(lambda gradients, _: self.left(modules, gradients)))
            seen = self._iteration.position() > position
            self._note(modules, made, span, compiling, transient_bytes, seen=seen)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer stepped in compiled code: it wrote what it writes, seen or not."""
        if not self._open:
            return
        _, _, compiling, span, mark_bytes = self._open.pop()
        transient_bytes = self._transients.end(mark_bytes)
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        updated = [parameter for parameter in updated if parameter.grad is not None]
        state = [v for p in updated for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        device = [tensor for tensor in (*updated, *state) if not self._iteration.places.holds(tensor)]
        unseen = [(tensor, op.touched_bytes(tensor)) for tensor in device if not self._was_written(tensor)]
        if unseen:
            gradients = [(part, op.touched_bytes(part)) for p in updated for part in op.tensors_in(p.grad)]
            effect = op.Effects((*unseen, *gradients), tuple(unseen), (), computes=True)
            self._append(span, compiling, effect, transient_bytes)

    def _was_written(self, tensor: torch.Tensor) -> bool:
        index = self._iteration.ledger.find(tensor)
        return index is not None and self._iteration.ledger.first_write(index) is not None

    def _append(self, span: object, compiling: float, effect: op.Effects, transient_bytes: int) -> None:
        number = sum(operator.target == "compiled region" for operator in self._iteration.operators)
        self._spans.keep_rest(span, self._compiling.seconds - compiling)
        name = f"compiled_region_{number}"
        self._iteration.append(name, "compiled region", effect, 0, NO_CROSSING, transient_bytes)

    def _note(
        self,
        modules: Mapping[str, nn.Module],
        made: Sequence[torch.Tensor],
        span: object,
        compiling: float,
        transient_bytes: int,
        *,
        seen: bool,
    ) -> None:
        iteration = self._iteration
        device = [tensor for tensor in made if not iteration.places.holds(tensor)]
        new = [tensor for tensor in device if iteration.ledger.find(tensor) is None]
        state = [
            tensor
            for module in modules.values()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and not iteration.places.holds(tensor)
        ]
        if (seen and not new) or not (state or new):
            return
        effect = op.Effects(
            reads=tuple((tensor, op.touched_bytes(tensor)) for tensor in state),
            writes=tuple((tensor, op.touched_bytes(tensor)) for tensor in new),
            outputs=tuple(new),
            computes=True,
        )
        self._append(span, compiling, effect, transient_bytes)


def _compiled_nodes(results: list[torch.Tensor], first: int) -> Iterator[Any]:
    """Yield the compiled graphs' autograd nodes made since the node of this number, above these results."""
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        if node.name().startswith(_NODE):
            yield node
        waiting += [above for above, _ in node.next_functions if above is not None]


class _CompilingTime:
    """How long torch has compiled since the start, which later iterations will not repeat."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0

    def start(self) -> None:
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def stop(self) -> None:
        if self._begin in callback_handler.start_callbacks:  # otherwise torch._dynamo.reset() has removed them
            callback_handler.remove_start_callback(self._begin)
            callback_handler.remove_end_callback(self._end)

    def _begin(self, _arguments: Any) -> None:
        self._begun = time.perf_counter()

    def _end(self, _arguments: Any) -> None:
        self.seconds += time.perf_counter() - self._begun
