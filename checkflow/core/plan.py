"""Plan: the schedule of all chunks, what it was made for, and what it promises. Pure data, validated.

The file is canonical JSON, one serialisation per plan; a file that differs in any byte is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkflow.core.boxes import tensor_of
from checkflow.core.errors import PlanError, first_fault
from checkflow.core.graph import BOUNDARY, STRICT, AnchorKey, AnchorKind, Many
from checkflow.core.machine.device import DeviceKind
from checkflow.core.small_files import check_density, check_fields, check_members, read_regular
from checkflow.core.timeline import MOST_SECONDS, Granularity, Timeline, check_timeline

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Policy = Literal["direct", "snapshot"]

# Bytes per element, by dtype; a table, so that plans are read without torch.
_ITEM_BYTES = {
    dtype: size
    for size, dtypes in (
        (1, "bool uint8 int8 float4_e2m1fn_x2"),
        (1, "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"),
        (2, "uint16 int16 float16 bfloat16"),
        (4, "uint32 int32 float32 complex32"),
        (8, "uint64 int64 float64 complex64"),
        (16, "complex128"),
    )
    for dtype in dtypes.split()
}
_MOST_BYTES = 2**63 - 1  # the largest size of memory and files
MOST_STEPS = 2**24  # of a horizon, which is walked step by step
MAX_BYTES = 1 << 27  # of a file: Llama 3 405B, in chunks of 8 MiB, takes 45 MB


@dataclass(frozen=True, slots=True)
class Chunk:
    """A byte range of one state tensor, copied in one piece.

    Its bytes cross the link within step ``offload_step``. With ``snapshot_step``, they are first copied inside device
    memory at that step and leave from the copy, which is kept up to and including ``offload_step``; otherwise they
    leave from the live tensor. Steps are those of the horizon: step ``i`` of the timeline in iteration ``j`` after the
    boundary (from 0) is ``j * len(timeline.steps) + i``.
    """

    __pydantic_config__ = STRICT
    tensor: str
    offset_bytes: int
    length_bytes: int
    offload_step: int
    snapshot_step: int | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Name, shape and dtype of one state tensor, and whether it lies in host memory already."""

    __pydantic_config__ = STRICT
    name: str
    shape: Many[int]
    dtype: str
    size_bytes: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was made for. The runtime refuses a job whose state or optimizers differ.

    It cannot see the rest in a job, such as micro-batches; ``checkflow check`` compares that.
    """

    __pydantic_config__ = STRICT
    model: str
    state: Many[StateSpec]
    ties: Many[tuple[str, str]]
    batch: Many[tuple[Many[int], str]]
    micro_batches: int
    autocast: str
    optimizers: Many[tuple[str, str]]
    device: str
    ranks: int = 1
    device_kind: DeviceKind = "cuda"
    compiled: Many[str] = ()  # what torch.compile made: modules as in anchors, functions as "name()"

    @property
    def state_bytes(self) -> int:
        """Bytes of all state, in host memory, too."""
        return sum(spec.size_bytes for spec in self.state)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The objective that a plan reaches and the bound that no plan can beat."""

    __pydantic_config__ = STRICT
    status: Literal["optimal", "feasible"]
    formulation: str
    solver: str
    solver_version: str
    objective_bytes: int
    bound_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Training waits at an anchor, once per checkpoint, while the link goes on."""

    __pydantic_config__ = STRICT
    step: int  # of the horizon, as in a chunk
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The schedule of one checkpoint, over the ``interval`` iterations from its boundary to the next one's.

    State is first written in the first of these iterations; the rest then leaves from snapshots, or is never written.
    """

    __pydantic_config__ = STRICT
    fingerprint: Fingerprint
    policy: Policy
    bandwidth_bytes_per_second: float
    unit_bytes: int  # the link's capacity is counted in these, rounded on the running sum
    timeline: Timeline
    chunks: Many[Chunk]  # sorted by (offload_step, deadline, tensor, offset)
    graph_peak_bytes: int
    plan_peak_bytes: int
    stall_seconds: float  # of one checkpoint: the wait and the copies inside device memory
    interval: int  # iterations from one checkpoint to the next
    certificate: Certificate
    format: Literal["checkflow-plan"] = "checkflow-plan"
    version: Literal[1] = 1
    # A snapshot's stall is 2 x bytes / this; 0 if the plan prices no snapshots.
    memory_bandwidth_bytes_per_second: float = 0.0
    wait: Wait | None = None
    digest: str = ""

    @property
    def granularity(self) -> Granularity:
        return self.timeline.granularity

    def whole_name(self, name: str) -> str:
        """Return the state tensor that a name in this plan is of; a plan of one of several ranks names parts."""
        return name if self.fingerprint.ranks == 1 else tensor_of(name)

    @property
    def horizon_steps(self) -> int:
        """Steps from one checkpoint's boundary to the next one's."""
        return self.interval * len(self.timeline.steps)

    def capacities_bytes(self, unit_bytes: int = 1) -> list[int]:
        """Return the bytes (or units) that the link takes in each step of the horizon."""
        wait = None if self.wait is None else (self.wait.step, self.wait.seconds)
        return self.timeline.capacities_bytes(self.bandwidth_bytes_per_second, unit_bytes, self.interval, wait)

    @functools.cached_property
    def deadlines(self) -> dict[str, int | None]:
        """Return for each device tensor the last step in which a direct copy may use the link; None: no deadline."""
        return {
            name: None if group.first_write is None else group.first_write - 1
            for group in self.timeline.groups
            for name, _ in group.members
        }

    @functools.cached_property
    def host_tensors(self) -> tuple[str, ...]:
        """State tensors in host memory, copied at the boundary itself."""
        return tuple(spec.name for spec in self.fingerprint.state if spec.host)

    @property
    def snapshot_bytes(self) -> int:
        return sum(chunk.length_bytes for chunk in self.chunks if chunk.snapshot_step is not None)

    def sealed(self) -> Plan:
        return replace(self, digest=_digest(self))


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    from pydantic import TypeAdapter

    return TypeAdapter(Plan)


def _canonical(plan: Plan) -> bytes:
    data = _adapter().dump_python(plan, mode="json")
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode() + b"\n"


def _digest(plan: Plan) -> str:
    return hashlib.sha256(_canonical(replace(plan, digest=""))).hexdigest()


def validate(plan: Plan) -> None:
    """Check all but the arithmetic of memory and link (``planner.replay`` has that); PlanError at the first fault."""
    _validate_timeline(plan.timeline)
    _validate_fingerprint(plan.fingerprint)
    _validate_numbers(plan)
    _validate_horizon(plan)
    specs = {spec.name: spec for spec in plan.fingerprint.state}
    sizes = {name: size for group in plan.timeline.groups for name, size in group.members}
    device = {name for name, spec in specs.items() if not spec.host}
    if set(sizes) != device:
        odd = sorted(set(sizes) ^ device)[0]
        raise PlanError(f"the plan's timeline and fingerprint disagree about state tensor {odd}")
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for chunk in plan.chunks:
        _validate_chunk(plan, chunk, sizes)
        ranges[chunk.tensor].append((chunk.offset_bytes, chunk.offset_bytes + chunk.length_bytes))
    for name, spans in ranges.items():
        if specs[name].size_bytes != sizes[name]:
            raise PlanError(f"the plan gives two sizes for state tensor {name}")
        reached = 0
        for begin, end in sorted(spans):
            if begin != reached:
                raise PlanError(
                    f"the plan's chunks of {name} {'overlap' if begin < reached else 'leave a gap'} at byte {reached}"
                )
            reached = end
        if reached != sizes[name]:
            raise PlanError(f"the plan copies {reached} of the {sizes[name]} bytes of {name}")


def _validate_timeline(timeline: Timeline) -> None:
    steps = timeline.steps
    if not steps or steps[0].duration_seconds != 0 or steps[0].kind != "anchor" or steps[0].anchor != BOUNDARY:
        raise PlanError("the plan's timeline does not begin with the boundary")
    check_timeline(timeline)
    _validate_anchors(timeline)
    names: set[str] = set()
    reached = 0
    for group in timeline.groups:
        first = len(steps) if group.first_write is None else group.first_write
        if first <= reached:
            raise PlanError("the plan's groups of state are not sorted by deadline, each deadline once")
        reached = first
        if group.first_write is not None and timeline.granularity == "segment" and steps[first - 1].anchor is None:
            raise PlanError(f"state is due at step {first - 1}, where eager training has no anchor")
        for name, _ in group.members:
            if name in names:
                raise PlanError(f"state tensor {name} occurs twice in the plan's timeline")
            names.add(name)


def _validate_anchors(timeline: Timeline) -> None:
    """Every anchor once, at a time that can come; the boundary first, and nowhere else."""
    seen: set[AnchorKey] = set()
    for index, step in enumerate(timeline.steps):
        key = step.anchor
        if key is None:
            continue
        if key in seen or step.kind != "anchor":
            raise PlanError(f"anchor {key} occurs twice, or is not an anchor step")
        if index and key.kind is AnchorKind.BOUNDARY:
            raise PlanError(f"the plan has a boundary within the iteration, at step {index}")
        if key.occurrence < 0:
            raise PlanError(f"anchor {key} is to fire for time {key.occurrence}; times count from 0")
        seen.add(key)


def _validate_fingerprint(fingerprint: Fingerprint) -> None:
    names: set[str] = set()
    for spec in fingerprint.state:
        if spec.name in names:
            raise PlanError("the plan names a state tensor twice")
        names.add(spec.name)
        if spec.dtype not in _ITEM_BYTES:
            raise PlanError(f"the plan gives state tensor {spec.name} an unknown dtype: {spec.dtype}")
        if min(spec.shape, default=0) < 0 or spec.size_bytes != math.prod(spec.shape) * _ITEM_BYTES[spec.dtype]:
            raise PlanError(
                f"the plan gives state tensor {spec.name} {spec.size_bytes} bytes, not those of"
                f" {spec.dtype}{list(spec.shape)}"
            )
    if fingerprint.micro_batches < 1:
        raise PlanError(f"the plan is for {fingerprint.micro_batches} micro-batches an iteration")
    if fingerprint.ranks < 1:
        raise PlanError(f"the plan is for {fingerprint.ranks} ranks")


def _validate_numbers(plan: Plan) -> None:
    """The plan's own figures: each possible by itself, and none too large to count with."""
    if max(_counts_bytes(plan)) > _MOST_BYTES:
        raise PlanError("the plan counts more bytes than any memory has")
    if plan.graph_peak_bytes < 0:
        raise PlanError(f"the plan claims a peak of {plan.graph_peak_bytes} bytes for the graph")
    if plan.unit_bytes < 1:
        raise PlanError(f"the plan counts in units of {plan.unit_bytes} bytes")
    if not 0 < plan.bandwidth_bytes_per_second < math.inf:
        raise PlanError(f"the plan's link gives {plan.bandwidth_bytes_per_second} bytes per second")
    if not 0 <= plan.memory_bandwidth_bytes_per_second < math.inf:
        raise PlanError(f"the plan's device memory gives {plan.memory_bandwidth_bytes_per_second} bytes per second")
    if not math.isfinite(plan.timeline.available_bytes(plan.bandwidth_bytes_per_second)[-1]):
        raise PlanError("the plan's link takes more bytes in an iteration than a number can hold")
    certificate = plan.certificate
    if certificate.bound_bytes < 0:
        raise PlanError(f"the plan's certificate has a bound of {certificate.bound_bytes} bytes")
    if certificate.bound_bytes > certificate.objective_bytes:
        raise PlanError("the plan's certificate has a bound above its objective")


def _validate_horizon(plan: Plan) -> None:
    """The interval can be walked through, and training waits at an anchor within it."""
    if plan.interval < 1:
        raise PlanError(f"the plan claims a checkpoint every {plan.interval} iterations")
    if plan.horizon_steps > MOST_STEPS:
        raise PlanError(f"the plan spans {plan.interval} iterations of {len(plan.timeline.steps)} steps: too many")
    if plan.wait is None:
        return
    if not 0 <= plan.wait.step < plan.horizon_steps:
        raise PlanError(f"training waits at step {plan.wait.step}, outside of 0 … {plan.horizon_steps - 1}")
    step = plan.timeline.steps[plan.wait.step % len(plan.timeline.steps)]
    if step.kind != "anchor" or (plan.granularity == "segment" and step.anchor is None):
        raise PlanError(f"training waits in step {step.label!r}, which is no anchor")
    if not 0 < plan.wait.seconds <= MOST_SECONDS:
        raise PlanError(f"the plan's wait lasts {plan.wait.seconds} s")


def _counts_bytes(plan: Plan) -> Iterator[int]:
    """Yield all that is added up, or divided by a bandwidth."""
    yield plan.unit_bytes
    yield sum(spec.size_bytes for spec in plan.fingerprint.state)
    yield sum(size for group in plan.timeline.groups for _, size in group.members)
    for step in plan.timeline.steps:
        yield step.live_bytes
        yield step.link_bytes


def _validate_chunk(plan: Plan, chunk: Chunk, sizes: dict[str, int]) -> None:
    steps = plan.horizon_steps
    if chunk.tensor not in sizes:
        raise PlanError(f"the plan copies an unknown state tensor: {chunk.tensor}")
    if chunk.length_bytes < 1 or chunk.offset_bytes < 0:
        raise PlanError(f"a chunk of {chunk.tensor} has an empty or negative range")
    if not 0 <= chunk.offload_step < steps:
        raise PlanError(f"a chunk of {chunk.tensor} leaves at step {chunk.offload_step}, outside of 0 … {steps - 1}")
    deadline = plan.deadlines[chunk.tensor]
    if chunk.snapshot_step is None:
        if deadline is not None and chunk.offload_step > deadline:
            raise PlanError(f"a chunk of {chunk.tensor} leaves the live tensor after its deadline (step {deadline})")
    elif not 0 <= chunk.snapshot_step < chunk.offload_step or (deadline is not None and chunk.snapshot_step > deadline):
        raise PlanError(f"a chunk of {chunk.tensor} has its snapshot too late: step {chunk.snapshot_step}")
    elif plan.granularity == "segment" and _anchor_of(plan, chunk.snapshot_step) is None:
        raise PlanError(
            f"a chunk of {chunk.tensor} has its snapshot at step {chunk.snapshot_step},"
            " where eager training has no anchor"
        )


def _anchor_of(plan: Plan, step: int) -> AnchorKey | None:
    return plan.timeline.steps[step % len(plan.timeline.steps)].anchor


def dumps(plan: Plan) -> bytes:
    """Return the canonical bytes of a plan file, sealed with its digest; PlanError if too large to be read back."""
    data = _canonical(plan.sealed())
    if len(data) > MAX_BYTES:
        raise PlanError(f"the plan would have {len(data)} bytes, more than {MAX_BYTES}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_members(pairs)
    return dict(pairs)


def loads(data: bytes, name: str = "plan") -> Plan:
    """Read a plan; PlanError, with a reason of one line, for any changed byte."""
    from pydantic import ValidationError

    if len(data) > MAX_BYTES:
        raise PlanError(f"{name}: not a valid plan: it has more than {MAX_BYTES} bytes")
    try:
        check_density(data)
        # Freed before pydantic parses the text again: a hostile file may be large.
        check_fields(json.loads(data, object_pairs_hook=_object, parse_int=str, parse_float=str), Plan)
        plan: Plan = _adapter().validate_json(data)
    except ValidationError as error:
        raise PlanError(
            f"{name}: not a valid plan: {first_fault(error)}; make it anew (checkflow plan MODEL -o FILE)"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(f"{name}: not a valid plan: {reason}; make it anew (checkflow plan MODEL -o FILE)") from None
    if plan.digest != _digest(plan) or _canonical(plan) != data:
        raise PlanError(f"{name}: the plan was changed after it was made (its digest does not fit); make it anew")
    try:
        validate(plan)
    except PlanError as error:  # names come from the file, with any number of lines
        raise PlanError(" ".join(str(error).split())) from None
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file atomically (a temporary file, fsync, rename)."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise PlanError(f"cannot write the plan to {str(path)!r}: that names no file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a dead process, or a planted link
        # Jobs distrust world-writable plans, whatever the umask.
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o664)) as file:
            file.write(dumps(plan))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # report the first error
            temporary.unlink(missing_ok=True)
        raise PlanError(f"cannot write the plan to {target}: {error.strerror or error}") from error


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file; PlanError if it is unreadable, or not accepted by :func:`loads`."""
    try:
        data = read_regular(path, MAX_BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from error
    return loads(data, str(path))


def describe_mismatch(
    plan: Plan, state: dict[str, tuple[tuple[int, ...], str]], optimizers: dict[str, str], ranks: int = 1
) -> list[str]:
    """Return what differs between a plan's fingerprint and a live job: one line each, empty if it fits.

    Args:
        state: name to (shape, dtype) of every live state tensor.
        optimizers: name to implementation, as in ``Fingerprint.optimizers``.
        ranks: of the job.
    """
    if plan.fingerprint.ranks != ranks:
        in_job, in_plan = ("one process" if n == 1 else f"{n} ranks" for n in (ranks, plan.fingerprint.ranks))
        return [f"ranks: {in_job} in the job, {in_plan} in the plan"]
    planned = {spec.name: (spec.shape, spec.dtype) for spec in plan.fingerprint.state}
    lines: list[str] = []
    for name in planned.keys() | state.keys():
        have: Any = state.get(name)
        want: Any = planned.get(name)
        if have is None:
            lines.append(f"{name}: planned as {want[1]}{list(want[0])}, not in the job")
        elif want is None:
            lines.append(f"{name}: {have[1]}{list(have[0])} in the job, not in the plan")
        elif have != want:
            lines.append(f"{name}: {have[1]}{list(have[0])} in the job, {want[1]}{list(want[0])} in the plan")
    for name, implementation in plan.fingerprint.optimizers:
        if name not in optimizers:
            lines.append(f"optimizer {name}: planned as {implementation}, not in the job")
        elif optimizers[name] != implementation:
            lines.append(f"optimizer {name}: {optimizers[name]} in the job, {implementation} in the plan")
    for name in optimizers.keys() - dict(plan.fingerprint.optimizers).keys():
        lines.append(f"optimizer {name}: {optimizers[name]} in the job, not in the plan")
    return sorted(lines)
