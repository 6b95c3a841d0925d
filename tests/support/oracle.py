"""The torn-checkpoint oracle: a synchronous clone of all state at each boundary is the truth.

Every committed checkpoint must equal the truth of its boundary, bit for bit, read with our restore and with the public
safetensors library.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from checkflow.api import Checkpointer
from checkflow.core.graph import BOUNDARY, AnchorKey, AnchorKind
from checkflow.core.plan import Certificate, Chunk, Fingerprint, Plan, StateSpec
from checkflow.core.state import collect_state, dtype_name
from checkflow.core.timeline import StateGroup, Step, Timeline
from checkflow.runtime.job.compatibility import implementations
from checkflow.runtime.store.reader import Checkpoint, open_checkpoint

Truth = dict[str, torch.Tensor]
Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def clone_state(models: Models, optimizers: Optimizers) -> Truth:
    """All state now, by name, in memory of its own, where it lies."""
    tensors = collect_state(models, optimizers).tensors
    return {item.name: item.tensor.detach().clone().resolve_conj().resolve_neg() for item in tensors}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.cpu(), other.cpu()
    return one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor through our reader."""
    entry = checkpoint.tensors[name]
    tensor = torch.empty(tuple(entry.shape), dtype=getattr(torch, entry.dtype))
    if tensor.numel():
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy()).cast("B")
        checkpoint.read_into(name, view)
    return tensor


def assert_checkpoint_is(path: Path, truth: Truth) -> None:
    """The checkpoint holds exactly the truth, for our reader and for the public library."""
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tensors) == set(truth), set(checkpoint.tensors) ^ set(truth)
        for name, tensor in truth.items():
            assert same_bits(read_tensor(checkpoint, name), tensor), f"{path.name}: {name} differs (our reader)"
    public: Truth = {}
    for file in path.glob("*.safetensors"):
        owner = file.name.split("-")[0]
        public |= {f"{owner}/{key}": tensor for key, tensor in safetensors.torch.load_file(file).items()}
    assert set(public) == set(truth)
    for name, tensor in truth.items():
        # Complex types that safetensors does not know are pairs of real numbers there.
        pairs = tensor.dtype in (torch.complex32, torch.complex128)
        expected = torch.view_as_real(tensor) if pairs else tensor
        assert same_bits(public[name], expected), f"{path.name}: {name} differs (safetensors)"


def run_oracle(
    checkpointer: Checkpointer,
    iterate: Callable[[int], Any],
    models: Models,
    optimizers: Optimizers,
    *,
    iterations: int,
    after_boundary: Callable[[int], None] = lambda iteration: None,
) -> dict[int, Truth]:
    """Train with explicit iterations; returns the truth of each boundary, and checks nothing."""
    truths: dict[int, Truth] = {}
    for _ in checkpointer.steps(iterations):
        if checkpointer.iteration:
            truths[checkpointer.iteration] = clone_state(models, optimizers)
            after_boundary(checkpointer.iteration)
        iterate(checkpointer.iteration)
    truths[checkpointer.iteration] = clone_state(models, optimizers)
    return truths


def random_plan(
    models: Models, optimizers: Optimizers, seed: int, *, chunk_bytes: int = 4096, interval: int = 1
) -> Plan:
    """A plan that keeps every deadline of a job whose optimizer state exists, and is random otherwise.

    Anchors: each module's forward in registration order, then the optimizers' steps. No link, no memory: whatever keeps
    the deadlines must give consistent checkpoints.
    """
    rng = random.Random(seed)
    state = collect_state(models, optimizers)
    forwards = [AnchorKey(AnchorKind.FORWARD, item.module) for item in state.tensors if item.module]
    keys = [BOUNDARY, *dict.fromkeys(forwards)]
    for name in optimizers:
        keys += [AnchorKey(AnchorKind.OPTIMIZER_PRE, name), AnchorKey(AnchorKind.OPTIMIZER_POST, name)]
    steps: list[Step] = []
    for key in keys:
        steps.append(Step("anchor", str(key), 0.0, 0, anchor=key))
        steps.append(Step("segment", f"after {key}", 1e-3, 0))
    place = {key: 2 * index for index, key in enumerate(keys)}
    first_step = place[AnchorKey(AnchorKind.OPTIMIZER_PRE, next(iter(optimizers)))]
    groups: dict[int | None, list[tuple[str, int]]] = {}
    chunks: list[Chunk] = []
    specs = []
    for item in state.tensors:
        host = item.name.endswith(".step") and item.tensor.device.type == "cpu"
        size = item.tensor.nbytes
        specs.append(StateSpec(item.name, tuple(item.tensor.shape), dtype_name(item.tensor.dtype), size, host))
        if host:
            continue
        deadline = place[AnchorKey(AnchorKind.FORWARD, item.module)] if item.module else first_step
        frozen = item.kind == "parameter" and not item.tensor.requires_grad
        groups.setdefault(None if frozen else deadline + 1, []).append((item.name, size))
        chunks += _random_chunks(rng, item.name, size, None if frozen else deadline, interval * len(steps), chunk_bytes)
    ordered = sorted(groups.items(), key=lambda pair: (pair[0] is None, pair[0] or 0))
    timeline = Timeline("segment", tuple(steps), tuple(StateGroup(u, tuple(sorted(m))) for u, m in ordered))
    fingerprint = Fingerprint(
        "random", tuple(specs), state.ties, (), 1, "", tuple(implementations(models, optimizers).items()), "cpu"
    )
    certificate = Certificate("feasible", "random", "none", "", 0, 0)
    chunks.sort(key=lambda chunk: (chunk.offload_step, chunk.tensor, chunk.offset_bytes))
    return Plan(
        fingerprint, "direct", 1e12, 1, timeline, tuple(chunks), 0, 0, 0.0, interval, certificate
    ).sealed()  # fmt: skip


def _random_chunks(
    rng: random.Random, name: str, size: int, deadline: int | None, steps: int, chunk_bytes: int
) -> list[Chunk]:
    chunks, offset = [], 0
    while offset < size:
        length = min(size - offset, rng.randint(1, chunk_bytes))
        last = steps - 1 if deadline is None else deadline
        if rng.random() < 0.5:
            chunks.append(Chunk(name, offset, length, rng.randint(0, last)))
        else:
            made = rng.randrange(0, last + 1, 2)
            chunks.append(Chunk(name, offset, length, rng.randint(made + 1, steps - 1), made))
        offset += length
    return chunks


def undated(plan: Plan, part: str, *, snapshots: bool = False) -> Plan:
    """The same plan as if nobody had seen a write of these tensors; they leave as late as they can."""
    last = plan.horizon_steps - 1
    groups, loose = [], []
    for group in plan.timeline.groups:
        kept = tuple(member for member in group.members if part not in member[0])
        loose += [member for member in group.members if part in member[0]]
        if kept and group.first_write is not None:
            groups.append(dataclasses.replace(group, members=kept))
        else:
            loose += kept
    groups.append(dataclasses.replace(plan.timeline.groups[-1], first_write=None, members=tuple(sorted(loose))))
    made = last - 1 if snapshots else None
    chunks = tuple(
        dataclasses.replace(chunk, offload_step=last, snapshot_step=made) if part in chunk.tensor else chunk
        for chunk in plan.chunks
    )
    timeline = dataclasses.replace(plan.timeline, groups=tuple(groups))
    return dataclasses.replace(plan, timeline=timeline, chunks=chunks).sealed()
