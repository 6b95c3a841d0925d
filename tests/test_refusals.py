"""The list of refusals is closed: docs/reference/refusals.md, the code, and what really happens say the same."""

from __future__ import annotations

import ast
import collections
import datetime
import importlib
import re
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from checkflow.api import Checkpointer
from checkflow.core.errors import CheckflowError, ModelError, TraceError, UnsupportedError
from checkflow.core.machine.device import find_device
from checkflow.core.plan import Plan
from checkflow.core.state import collect_state
from checkflow.core.training_step import TrainingStep
from checkflow.planner.live.planner import scaled_seconds
from checkflow.planner.model_file.several_ranks import Ranks, process_group
from checkflow.planner.pipeline import Subject, plan_model
from checkflow.planner.record.recorder import RecordedIteration
from checkflow.planner.schedule.scheduler import PlanRequest
from checkflow.planner.timeline.measured import measure_step
from checkflow.planner.trace.trace import trace
from checkflow.runtime.arguments import refuse_for_ranks
from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.format import codec, layout, manifest
from checkflow.runtime.format.layout import TensorRecord, make_layout
from checkflow.runtime.ranks.identity import find_identity
from checkflow.runtime.shards import save_shard
from checkflow.runtime.snapshot.chunk_map import planned_records
from checkflow.runtime.state.meshes import placements
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from checkflow.runtime.weights.exporter import optimizer_state, state_dicts
from checkflow.runtime.weights.load import load_weights
from tests.support.planned_jobs import plan_by_trace
from tests.support.recording import record_step
from tests.support.steps.training_steps import sgd
from tests.support.store_tools import record, small_layout

ROOT = Path(__file__).parent.parent
KINDS = ("UnsupportedError", "TraceError", "ModelError")
# What no training job meets is listed on the page of what refuses it, and provoked in that one's tests.
OWN_PAGES = {
    "shards.md": "runtime/shards/*.py",
    "dcp.md": "checkflow/integrations/dcp.py",
    "integrations.md": "checkflow/integrations/[alt]*.py",
}
Directory = Path
Run = Callable[[Path], Any]


# The code's own messages, and those of the document


def template(node: ast.expr, names: dict[str, Any]) -> str:
    """A message as it stands in the code, with "…" for what is filled in; named constants are written out."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr), ast.unparse(node)
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            assert isinstance(part, ast.FormattedValue)
            constant = names.get(part.value.id) if isinstance(part.value, ast.Name) else None
            parts.append(constant if isinstance(constant, str) else "…")
    return "".join(parts)


def messages_of(path: Path) -> Iterator[str]:
    """What a file refuses. A message that a function makes counts with each string that it returns."""
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    parts = path.relative_to(ROOT).with_suffix("").parts
    where = [part for part in parts if part not in ("checkflow", "__init__")]
    names = vars(importlib.import_module(".".join(["checkflow", *where])))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        kind, message = node.func.id, node.args[0] if node.args else None
        if kind not in KINDS or (kind == "ModelError" and path.name != "training_step.py"):
            continue  # model files that cannot be built are no refusals of a training step
        assert message is not None
        if isinstance(message, ast.Call) and isinstance(message.func, ast.Name):
            for part in ast.walk(functions[message.func.id]):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield template(part.value, names)
        else:
            yield template(message, names)


def in_the_code() -> set[str]:
    files = [path for folder in ("checkflow", "planner", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
    elsewhere = {path for pattern in OWN_PAGES.values() for path in ROOT.glob(pattern)}
    files = [path for path in files if not path.name.startswith("__") and path not in elsewhere]
    return {message for path in files for message in messages_of(path)}


def in_the_document(page: str = "reference/refusals.md") -> list[str]:
    return re.findall(r"^- `(.+)`$", (ROOT / "docs" / page).read_text(), re.MULTILINE)


def test_the_document_lists_what_the_code_refuses_and_nothing_else() -> None:
    listed = in_the_document()
    assert len(listed) == len(set(listed))
    assert set(listed) - in_the_code() == set()
    assert in_the_code() - set(listed) == set()


@pytest.mark.parametrize("page", OWN_PAGES)
def test_what_has_a_page_of_its_own_lists_there_what_it_refuses(page: str) -> None:
    messages = {message for path in ROOT.glob(OWN_PAGES[page]) for message in messages_of(path)}
    assert set(in_the_document(f"how-to/{page}")) == messages != set()


# State that is refused, by the planner and by the runtime


class Opaque(torch.Tensor):
    """A subclass that says nowhere what its values are."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Opaque:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.values_of_mine = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    return model


def with_flat_buffer() -> nn.Module:
    flat = torch.zeros(4)
    model = with_buffer(flat)
    model.weight = nn.Parameter(flat.view(2, 2))
    return model


def with_sparse_momentum(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model.parameters())
    optimizer.state[model.weight]["momentum_buffer"] = torch.eye(2).to_sparse()
    return optimizer


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


STATE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "expanded": (lambda: with_buffer(torch.zeros(1).expand(3)), "model/odd is expanded"),
    "gaps": (lambda: with_buffer(torch.zeros(6)[::2]), "model/odd is expanded or has gaps"),
    "overlap": (with_flat_buffer, "model/odd and model/weight overlap|model/weight and model/odd overlap"),
    "two dtypes": (lambda: with_two_dtypes(), "overlap in memory"),
    "a conjugate beside its base": (lambda: with_conjugate(), "overlap in memory"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "model/0.weight has no shape yet"),
    "nested": (
        lambda: with_buffer(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
        "model/odd is a nested",
    ),
    "mkldnn": (lambda: with_buffer(torch.zeros(2, 2).to_mkldnn()), "model/odd is torch._mkldnn"),
    "quantized": (lambda: with_buffer(quantized()), "model/odd is quantized"),
}


def with_two_dtypes() -> nn.Module:
    model = with_buffer(torch.zeros(3))
    model.register_buffer("bits", model.odd.view(torch.int32))
    return model


def with_conjugate() -> nn.Module:
    model = with_buffer(torch.zeros(3, dtype=torch.complex64))
    model.register_buffer("turned", model.odd.conj())
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    dense = [p for p in model.parameters() if not nn.parameter.is_lazy(p)]
    return torch.optim.SGD(dense or [nn.Parameter(torch.zeros(1))], lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[Any], Any] = id) -> TrainingStep:
    return TrainingStep(step=step, models={"model": model}, optimizers={"optimizer": optimizer}, batch=None)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of another job: what is refused is refused before it is looked at."""
    model = nn.Linear(2, 2)
    return plan_by_trace(
        TrainingStep(model, sgd(model.parameters()), loss=lambda m, x: m(x).sum(), batch=torch.zeros(1, 2))
    )


pytestmark = pytest.mark.every_case  # the last test looks at what all have seen
seen: set[str] = set()  # messages that were provoked, as the document has them


def assert_refused(run: Callable[[], Any], kind: type[CheckflowError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message
    found = [row for row in in_the_document() if re.fullmatch(re.escape(row).replace("…", ".*"), message)]
    assert found, message
    seen.update(found)


@pytest.mark.parametrize("name", STATE)
def test_state_is_refused_by_planner_and_runtime(name: str, tmp_path: Path, plan: Plan) -> None:
    build, says = STATE[name]
    model = build()
    optimizer = optimizer_of(model)
    assert_refused(lambda: trace(step_of(model, optimizer), name="n"), UnsupportedError, says)
    assert_refused(lambda: Checkpointer(model, optimizer, directory=tmp_path, plan=plan), UnsupportedError, says)


def test_a_loss_that_is_no_tensor() -> None:
    model = nn.Linear(2, 2)
    step = TrainingStep(model, sgd(model.parameters()), loss=lambda model, x: 1.0, batch=torch.ones(1, 2))
    assert_refused(lambda: step.run(step.batch), ModelError, "loss= returned a float, not a tensor")


def test_a_batch_beyond_all_addresses() -> None:
    model = nn.Linear(1, 1)
    batch = torch.randn(2**61, 1, device="meta")
    step = TrainingStep(model, sgd(model.parameters()), loss=lambda model, x: model(x).sum(), batch=batch)
    assert_refused(lambda: trace(step, name="n"), TraceError, "more bytes than memory has addresses")


def test_more_containers_than_what_reads_them_takes() -> None:
    assert_refused(lambda: codec.encode([[]] * 50_000, most_bytes=0), UnsupportedError, "too many small containers")


def test_sparse_state_of_an_optimizer(tmp_path: Path, plan: Plan) -> None:
    model = nn.Linear(2, 2)
    optimizer = with_sparse_momentum(model)
    says = "optimizer/weight.momentum_buffer is sparse"
    assert_refused(lambda: trace(step_of(model, optimizer), name="n"), UnsupportedError, says)
    assert_refused(lambda: Checkpointer(model, optimizer, directory=tmp_path, plan=plan), UnsupportedError, says)


def test_distributed_tensors(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        model = with_buffer(DTensor.from_local(torch.zeros(2), mesh))
        torch.save({"odd": torch.zeros(2)}, tmp_path / "weights.pt")
        assert_refused(lambda: load_weights(model, tmp_path / "weights.pt"), UnsupportedError, "before the model is")
    finally:
        dist.destroy_process_group()


def test_state_of_a_rank_that_has_no_definite_place() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.two_tensor import TwoTensor

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("refused", "also"))
        elsewhere = DeviceMesh("cpu", [1, 2])

        def place(model: nn.Module) -> None:
            state = collect_state({"model": model}, {}, of_a_rank=True)
            placements(state, {"model": model}, {}, 0, 4)

        def refused(local: torch.Tensor, mesh: DeviceMesh, laid: list[Any], says: str, **whole: Any) -> None:
            model = with_buffer(DTensor.from_local(local, mesh, laid, run_check=False, **whole))
            assert_refused(lambda: place(model), UnsupportedError, says)

        whole = {"shape": torch.Size([4]), "stride": (1,)}
        flat = torch.zeros(4)
        refused(flat, mesh, [Partial(), Replicate()], "odd is a DTensor with Partial.*: its value is a sum")
        refused(flat, mesh, [_StridedShard(0, split_factor=3), Replicate()], "odd .*whose parts are no boxes")
        refused(torch.zeros(3), mesh, [Shard(0), Replicate()], r"odd has \[3\] on rank 0, where .*give \[2\]", **whole)
        refused(torch.zeros(0), elsewhere, [Replicate()], "odd lies on a mesh that rank 0 is not part of")
        refused(TwoTensor(flat, flat.clone()), mesh, [Replicate()] * 2, "odd.a is a DTensor of parts")
        flattened = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
        assert_refused(lambda: place(flattened), UnsupportedError, "FullyShardedDataParallel")
    finally:
        dist.destroy_process_group()


# What only the planner refuses: a live job may do it


def chooses() -> TrainingStep:
    """A step with an operator that takes functions."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = torch.cond(x.sum() > 0, lambda y: model(y), lambda y: -model(y), (x,))
        return chosen.sum()

    return TrainingStep(model, optimizer, loss=loss, batch=(torch.ones(1, 2),))


def tracing(
    step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any],
    model: Callable[[], nn.Module] = lambda: nn.Linear(2, 2),
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Callable[[Path], Any]:
    def run(_: Path) -> Any:
        made = model()
        optimizing = optimizer(made.parameters())
        return trace(
            TrainingStep(
                step=lambda x: step(made, optimizing, x),
                models={"model": made},
                optimizers={"optimizer": optimizing},
                batch=torch.ones(1, 2),
            ),
            name="n",
        )

    return run


def grow(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    model.odd = torch.cat([model.odd, x[0]])


class LateState(torch.optim.Optimizer):
    """An optimizer that looks at the data before it makes any state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and torch.nonzero(parameter.grad).shape[0] > 2:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)


def backward_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()


def jagged(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    model(torch.nested.as_nested_tensor([x, x], layout=torch.jagged)).values().sum().backward()


def branch(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    if model(x).sum() > 0:
        model(x)


def in_a_thread(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    thread.join()


class TwiceInAStep(torch.optim.SGD):
    """An optimizer that runs its closure twice."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            super().step(closure)


TRACED: dict[str, tuple[Run, str]] = {
    "closure": (
        tracing(lambda m, o, x: o.step(lambda: m(x).sum().backward()), optimizer=TwiceInAStep),
        "TwiceInAStep runs its closure more than once",
    ),
    "growing state": (tracing(grow, lambda: with_buffer(torch.zeros(2))), r"model/odd is float32\[4\] before"),
    "new state": (
        tracing(lambda m, o, x: m.register_buffer(f"b{len(m._buffers)}", torch.zeros(1))),
        r"changes the set of state \(model/b1\)",
    ),
    "branch": (tracing(branch), r"aten\.\w+\.default needs the values of tensors at .*if model"),
    "sparse product": (
        tracing(lambda m, o, x: m.odd @ m(x).t(), lambda: with_buffer(torch.eye(2).to_sparse())),
        "no fake implementation at .*Checkpointer",
    ),
    "functions": (
        tracing(lambda m, o, x: torch.cond(x.sum() > 0, lambda y: m(y), lambda y: -m(y), (x,))),
        r"cond at .*test_refusals.*takes functions",
    ),
    "functions, recorded": (lambda _: record_step(chooses(), name="n"), "cond cannot be recorded"),
    "an error of the step": (tracing(lambda m, o, x: m(x[:, :1])), r"aten\.addmm\.default raised RuntimeError at"),
    "csr": (tracing(branch, lambda: with_buffer(torch.eye(2).to_sparse_csr())), r"cannot trace a torch\.sparse_csr"),
    "jagged": (tracing(jagged), "it makes sizes that depend on data"),
    "opaque": (tracing(branch, lambda: with_buffer(Opaque(torch.zeros(2)))), "cannot trace a Opaque"),
    "late state": (tracing(backward_and_step, optimizer=LateState), "cannot trace LateState: its state"),
    "another thread": (tracing(in_a_thread), "model runs forward in another thread"),
    "no step, traced": (
        tracing(lambda m, o, x: m(x).sum().backward()),
        "no optimizer stepped in the iteration that was t",
    ),
    "no step": (lambda _: record_step(step_of(nn.Linear(2, 2), LateState([torch.zeros(1)])), name="n"), "no optimizer"),
}


def with_closure() -> TrainingStep:
    model = nn.Linear(2, 2)
    optimizer = TwiceInAStep(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step_of(model, optimizer, lambda _: optimizer.step(closure))


def never_the_same() -> TrainingStep:
    """A step that does more in each iteration."""
    done: list[int] = []

    def step(_: Any) -> None:
        done.append(1)
        for _ in done:
            torch.ones(1).add_(1)

    return TrainingStep(step=step, models={"model": nn.Linear(1, 1)}, batch=None)


TRACED |= {
    "a step that fails when run": (
        lambda _: measure_step(TrainingStep(step=len, models={"model": nn.Linear(1, 1)}, batch=None), name="n", runs=1),
        "cannot run n: TypeError: object of type 'NoneType'",
    ),
    "closure, run": (lambda _: measure_step(with_closure(), name="n"), "TwiceInAStep runs its closure more than once"),
    "an iteration without operators": (
        lambda _: scaled_seconds(
            RecordedIteration(
                trace(TrainingStep(step=id, models={"model": nn.Linear(2, 2)}, batch=None), name="n"), ()
            ),
            1.0,
        ),
        "ran no operator: what trains is not what was passed",
    ),
    "iterations that differ": (lambda _: measure_step(never_the_same(), name="n", runs=3), "3 different orders"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", TRACED)
def test_what_cannot_be_planned(name: str, tmp_path: Path) -> None:
    run, says = TRACED[name]
    assert_refused(lambda: run(tmp_path), TraceError, says)


def test_a_trace_that_refuses_leaves_no_mode_behind() -> None:
    with pytest.raises(TraceError):
        TRACED["opaque"][0](Path())
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), TorchDispatchMode)


# What only the planner of several ranks refuses


def with_hook(model: DistributedDataParallel) -> nn.Module:
    model.register_comm_hook(None, lambda state, bucket: None)
    return model


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "hook": (lambda table: with_hook(DistributedDataParallel(table)), "with a communication hook"),
    "mixed precision": (
        lambda table: DistributedDataParallel(table, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)),
        "with mixed_precision=",
    ),
    "sparse gradients": (lambda _: DistributedDataParallel(nn.Embedding(8, 4, sparse=True)), "with sparse gradients"),
    "offloaded": (
        lambda table: fully_shard(table, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "fully_shard with CPUOffloadPolicy",
    ),
    "flat": (lambda table: FullyShardedDataParallel(table, device_id=torch.device("cpu")), "use torch's newer"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_that_no_trace_follows(name: str) -> None:
    wrap, says = WRAPPED[name]
    with process_group(Ranks(8)):
        model = wrap(nn.Embedding(8, 4))
        rows = torch.zeros(3, dtype=torch.long)
        step = TrainingStep(model, sgd(model.parameters()), loss=lambda model, x: model(x).sum(), batch=rows)
        assert_refused(lambda: trace(step, name="n"), TraceError, says)


MODEL_FILE = """
import torch, checkflow
import torch.distributed as dist
from torch import nn

def stage(model, x):
    dist.send(x, 1)
    dist.recv(x, 1)
    return model(x).sum()

def build():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkflow.TrainingStep(model, optimizer, loss={loss}, batch=torch.zeros(2, 4))
"""


def test_a_rank_that_others_do_not_resemble_or_that_is_planned_alone(tmp_path: Path) -> None:
    def plan(loss: str, ranks: Ranks | None) -> None:
        file = tmp_path / "job.py"
        file.write_text(MODEL_FILE.format(loss=loss))
        plan_model(Subject(str(file), None, {}, None), find_device("H100"), PlanRequest(1, 1), "segment", ranks)

    assert_refused(lambda: plan("stage", Ranks(2)), UnsupportedError, "^job sends between two ranks")
    with process_group(Ranks(2)):  # as if the file had joined it
        says = r"^job is one of 2 ranks \(c10d.allreduce_.default\)"
        assert_refused(lambda: plan("lambda model, x: model(x).sum()", None), UnsupportedError, says)


# What the runtime refuses


class NoPosition:
    def __iter__(self) -> Iterator[int]:
        return iter(())


def open_with(model: nn.Module | None = None, **arguments: Any) -> Callable[[Path, Plan], Any]:
    def run(directory: Path, plan: Plan) -> Any:
        chosen = model if model is not None else nn.Linear(2, 2)
        keywords = {"optimizer": sgd([nn.Parameter(torch.zeros(1))]), "directory": directory, "plan": plan}
        return Checkpointer(chosen, **{**keywords, **arguments})

    return run


def on_devices(*devices: str) -> Callable[[Path, Plan], Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Module()
    with FakeTensorMode():  # which makes tensors for devices that are not there
        for number, device in enumerate(devices):
            model.register_buffer(f"state{number}", torch.empty(2, device=device))
    return open_with(model)


def plan_with_lbfgs(_directory: Path, _plan: Plan) -> Any:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    batch = torch.zeros(1, 2)
    return trace(TrainingStep(model, optimizer, loss=lambda m, x: m(x).sum(), batch=batch), name="n")


class Around(torch.optim.Optimizer):
    """A wrapper as many are: with a state of its own, and without a call of Optimizer.__init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def with_wrapper(directory: Path, plan: Plan) -> Any:
    return open_with(optimizer=Around(sgd(nn.Linear(2, 2).parameters())))(directory, plan)


def run_with_wrapper() -> Any:
    model = nn.Linear(2, 2)
    optimizer = Around(sgd(model.parameters()))
    return TrainingStep(model, optimizer, loss=lambda m, x: m(x).sum(), batch=torch.zeros(1, 2))


def with_state_dict(adds: Callable[[torch.optim.Optimizer], Any]) -> Callable[[Path, Plan], Any]:
    class Adding(torch.optim.SGD):
        def state_dict(self) -> Any:
            added = adds(self)
            return {**super().state_dict(), **added} if isinstance(added, dict) else added

    return lambda directory, _: Checkpointer(
        model := nn.Linear(2, 2), Adding(model.parameters(), lr=0.1), directory=directory
    )


def fitting(plan: Plan, directory: Path) -> tuple[nn.Module, torch.optim.Optimizer, Checkpointer]:
    model = nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    return model, optimizer, Checkpointer(model, optimizer, directory=directory, plan=plan, on_error="raise")


def goes_on_closed(directory: Path, plan: Plan) -> None:
    _, _, checkpointer = fitting(plan, directory)
    checkpointer.close()
    checkpointer.step()


def export_parts() -> None:
    saved = {"groups": [{"params": ["w"]}], "values": {}, "others": {}}
    optimizer_state("optimizer", saved, {"w.exp_avg.codes": torch.zeros(1)}, {})


def export_shards(directory: Path) -> None:
    path = save_shard(directory / "shards", 1, 0, 1, run_id="r", dense={"w": np.zeros(2)})
    with open_checkpoint(path) as checkpoint:
        state_dicts(checkpoint)


class Nothing(NoPosition):
    def state_dict(self) -> None: ...
    def load_state_dict(self, state: object) -> None: ...


def not_in_order(_directory: Path, _plan: Plan) -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    resumable(TorchDataLoader(Numbers(), num_workers=2, in_order=False))


def draws_its_order(_directory: Path, _plan: Plan) -> None:
    resumable(StatefulDataLoader([0, 1], sampler=RandomSampler([0, 1])))  # type: ignore[arg-type]


def not_kept(_directory: Path, _plan: Plan) -> None:
    loader = resumable(StatefulDataLoader([0, 1], 1))  # type: ignore[arg-type]
    list(loader)
    loader.state_at(0, 1)


def used_before(_directory: Path, _plan: Plan) -> None:
    class StartsOver:
        def __iter__(self) -> StartsOver:
            return self

        def __next__(self) -> int:
            return 0

        def reset(self) -> None: ...

    loader = resumable(StartsOver())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())


def asks_for_the_loader(directory: Path, plan: Plan) -> None:
    with fitting(plan, directory)[2] as checkpointer:
        checkpointer.loader  # noqa: B018


def iterates_twice(directory: Path, plan: Plan) -> None:
    model = nn.Linear(2, 2)
    loader = DataLoader([0, 1], 1)
    with Checkpointer(model, sgd(model.parameters()), loader, directory=directory, plan=plan) as checkpointer:
        for _ in checkpointer.epochs(1):
            list(checkpointer.loader)
            list(checkpointer.loader)


def nested_iterations(_directory: Path, _plan: Plan) -> None:
    loader = DataLoader([0, 1], 1)
    for _ in loader:
        list(loader)


def goes_on_without_skipping(_directory: Path, _plan: Plan) -> None:
    loader = DataLoader([0, 1], 1)
    loader.set_epoch(3, 1)
    list(loader.as_torch())


class Untold(DataLoader):
    """Counts nothing but its position."""

    used_batches = ResumableLoader.used_batches


def cannot_tell_what_was_used(_directory: Path, _plan: Plan) -> None:
    loader = Untold([0, 1], 1)
    loader.set_epoch(0, 1)
    list(loader.as_torch())


RUNTIME: dict[str, tuple[Callable[[Path, Plan], Any], str]] = {
    "LBFGS": (plan_with_lbfgs, "optimizer optimizer is LBFGS"),
    "wrapper": (with_wrapper, "optimizer optimizer is Around around SGD, whose state is in no checkpoint"),
    "wrapper, traced": (lambda _, __: trace(run_with_wrapper(), name="n"), "optimizer optimizer is Around around SGD"),
    "wrapper, run": (lambda _, __: measure_step(run_with_wrapper(), name="n"), "is Around around SGD"),
    "a URL": (lambda _, __: load_weights(nn.Linear(2, 2), "s3://bucket/run"), "s3://bucket/run is a URL"),
    "own keys that nothing takes": (with_state_dict(lambda _: {"turn": 1}), "adds 'turn' to its state_dict"),
    "an error in state_dict": (with_state_dict(lambda _: 1 // 0), "raised ZeroDivisionError"),
    "no dictionary": (with_state_dict(lambda _: []), "returned a list"),
    "by id": (with_state_dict(lambda one: {id(one.param_groups[0]["params"][0]): 1}), "the id"),
    "by a tensor": (with_state_dict(lambda _: {torch.ones(1): 1}), "a tensor as a key"),
    "reserved": (
        lambda path, _: Checkpointer({"job-state": nn.Linear(2, 2)}, directory=path),
        "no model or optimizer can be called job-state",
    ),
    "meta": (open_with(nn.Linear(2, 2, device="meta")), "model/weight is on the meta device"),
    "hogwild": (
        open_with(nn.Linear(2, 2).share_memory()),
        "parameter model/weight lies in memory that processes share",
    ),
    "device": (on_devices("cpu", "xpu:0"), "model/state1 lies on xpu:0: this version trains on one NVIDIA GPU"),
    "two devices": (on_devices("cpu", "cuda:0", "cuda:1"), "model/state2 lies on cuda:1, and what is copied on cuda:0"),
    "opaque": (open_with(with_buffer(Opaque(torch.zeros(2)))), "model/odd is a Opaque"),
    "no state_dict": (open_with(state={"x": 3}), r"state\['x'\] is a int"),
    "loader": (open_with(loader=NoPosition()), "loader is a NoPosition"),
    "ranks that draw": (lambda _, __: next(iter(DataLoader([0, 1], rank=0, world_size=2))), "pass seed="),
    "parts": (lambda _, __: export_parts(), "only its job can put together"),
    "shards": (lambda directory, _: export_shards(directory), "was saved by shards"),
    "used once": (lambda _, __: resumable(iter([0])), "a list_iterator can be iterated once only"),
    "data": (lambda _, __: resumable({"x": 0}), "a dict is no loader"),
    "not in order": (not_in_order, "in_order=False"),
    "draws its order": (draws_its_order, "the order of this RandomSampler"),
    "None for a state": (lambda _, __: list(resumable(Nothing())), "returned None"),
    "not kept": (not_kept, "was not kept"),
    "used before": (used_before, "StartsOver was iterated before"),
    "no loader": (asks_for_the_loader, "without a loader"),
    "closed": (goes_on_closed, "is closed, and would save nothing"),
    "twice": (iterates_twice, "iterated twice"),
    "at once": (nested_iterations, "cannot go on"),
    "a plan of ranks": (lambda _, plan: refuse_for_ranks(plan), "plan= names one plan"),
    "ranks without a group": (
        lambda _, __: find_identity({"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "4"}),
        "torchrun has started 4 ranks",
    ),
    "used": (goes_on_without_skipping, "batch 0 of epoch 3 was used before"),
    "untold": (cannot_tell_what_was_used, "a Untold does not say"),
    "iterable data": (lambda _, __: DataLoader(NoPosition(), 1), "map-style"),
    "bits": (lambda _, __: make_layout([TensorRecord("m/q", "bits8", (1,), 1, 1)]), "m/q is bits8"),
    "owner": (lambda _, __: make_layout([record("a b/x", ())]), "letters"),
    "unicode": (lambda _, __: make_layout([record("m/\udc80", ())]), "Unicode"),
    "twice named": (lambda _, __: make_layout([record("m/x", ()), record("m/x", ())]), "two state tensors"),
    "size": (lambda _, __: make_layout([TensorRecord("m/x", "float32", (2,), 4, 4)]), "4 bytes in elements of 4"),
    "packed scalar": (
        lambda _, __: make_layout([TensorRecord("m/x", "float4_e2m1fn_x2", (), 1, 1)]),
        "at least one dimension",
    ),
    "order": (lambda _, __: make_layout([record("m/x", (2, 3), order=(0, 0))]), "no order"),
    "planned dtype": (lambda _, plan: planned_records(with_dtype(plan, "bits8")), "dtype 'bits8'"),
    "information": (lambda _, __: manifest.to_info({"x": object()}), "must be JSON"),
    "information in the manifest": (lambda _, __: manifest.dumps(make_manifest({"x": object()})), "written as JSON"),
}


def with_dtype(plan: Plan, dtype: str) -> Plan:
    specs = tuple(replace(spec, dtype=dtype) for spec in plan.fingerprint.state)
    return replace(plan, fingerprint=replace(plan.fingerprint, state=specs))


def make_manifest(info: dict[str, Any]) -> manifest.Manifest:
    return manifest.Manifest(1, "run", "", 1, {}, {}, info=info)


@pytest.mark.parametrize("name", RUNTIME)
def test_what_the_runtime_refuses(name: str, tmp_path: Path, plan: Plan) -> None:
    run, says = RUNTIME[name]
    assert_refused(lambda: run(tmp_path, plan), UnsupportedError, says)


class Own:
    pass


def circular() -> list[Any]:
    one: list[Any] = []
    one.append(one)
    return one


EXTRA: dict[str, Callable[[], Any]] = {
    "an own object": Own,
    "a zone by name": lambda: datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "objects in an array": lambda: np.array([Own()]),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a factory": lambda: collections.defaultdict(lambda: 3),
    "a huge integer": lambda: 1 << (8 << 16),
    "a circle": circular,
}


@pytest.mark.parametrize("name", EXTRA)
def test_what_no_checkpoint_holds_as_extra_state(name: str) -> None:
    assert_refused(lambda: codec.encode(EXTRA[name](), name="state"), UnsupportedError, "^state")


def test_limits_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large to be reached in a test: the limits are lowered."""

    def too_large(*_: Any, **__: Any) -> bytes:
        raise ValueError("memoryview is too large")

    with monkeypatch.context() as patch:
        patch.setattr(codec.msgpack, "packb", too_large)  # what msgpack says beyond 4 GiB
        assert_refused(lambda: codec.encode("x"), UnsupportedError, "too large to be saved")
    with monkeypatch.context() as patch:
        patch.setattr(codec, "MAX_EXTRA_BYTES", codec._ADDED_BYTES + 100)
        assert_refused(lambda: codec.encode([np.zeros(30)], name="state"), UnsupportedError, r"^state\[0\]: all values")
    monkeypatch.setattr(layout, "MAX_HEADER_BYTES", 4000)
    assert_refused(lambda: make_layout([record("m/x", ())]), UnsupportedError, "do not fit")
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 10)
    assert_refused(lambda: manifest.dumps(make_manifest({})), UnsupportedError, "more than 10")
    monkeypatch.setattr(manifest, "MAX_EXTRA_BYTES", 3)
    monkeypatch.setattr(layout, "MAX_HEADER_BYTES", 100_000_000)
    store, small = Store(tmp_path, run_id="r"), small_layout()
    try:
        staging = memoryview(bytearray(small.buffer_bytes))
        assert_refused(lambda: store.commit(1, small, staging, b"four", {}), UnsupportedError, "more than 3")
    finally:
        store.close()


def test_a_job_whose_manifest_would_be_too_large_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 500)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        with Checkpointer(model, optimizer, directory=tmp_path, every=1) as checkpointer:
            for _ in checkpointer.steps(3):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()

    assert_refused(train, UnsupportedError, "would have some 8 tensors or parts of tensors")
    assert not list(tmp_path.glob("**/*.safetensors"))


LINEAR = nn.Linear(1, 1)
SGD = sgd(LINEAR.parameters())
STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "no form": ({"model": LINEAR}, "either"),
    "both forms": ({"model": LINEAR, "loss": id, "step": id}, "either"),
    "model twice": ({"model": LINEAR, "models": {}, "step": id}, "not both"),
    "no model": ({"step": id}, "needs a model"),
    "no optimizer": ({"model": LINEAR, "loss": id}, "pass optimizer="),
    "two models": (
        {"models": {"a": LINEAR, "b": LINEAR}, "optimizer": sgd(LINEAR.parameters()), "loss": id},
        "one model",
    ),
    "a function": ({"models": {"a": id}, "step": id}, "not an nn.Module"),
    "a list": ({"model": LINEAR, "optimizers": {"a": []}, "step": id}, "not a torch.optim.Optimizer"),
    "half a batch": ({"model": LINEAR, "step": id, "micro_batches": 0.5}, "micro_batches"),
}


@pytest.mark.parametrize("name", STEPS)
def test_how_a_training_step_is_made(name: str) -> None:
    arguments, says = STEPS[name]
    assert_refused(lambda: TrainingStep(batch=None, **arguments), ModelError, says)


def test_every_row_of_the_document_was_provoked(request: pytest.FixtureRequest) -> None:
    """Last in the file; says nothing where tests of it were left out."""
    here = [item for item in request.session.items if item.path == request.node.path]
    mine = ast.parse(Path(__file__).read_text()).body
    functions = {node.name for node in mine if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    if {item.originalname for item in here} != functions or request.session.testsfailed:
        pytest.skip("not all tests of this file ran")
    assert set(in_the_document()) - seen == set()
