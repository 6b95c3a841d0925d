"""One rank of a cluster that is not there: torch's fake process group, and a model wrapped in DDP or FSDP2 under it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn

from checkflow.core.errors import CheckflowError, ModelError
from checkflow.core.training_step import TrainingStep

Parallel = Literal["ddp", "fsdp"]
REPLICATE, SHARD = "replicate", "shard"
MOST_RANKS = 2**20
UNSEEN = "_checkflow_unseen"  # marks a wrapper around a model that the training step calls by itself


@dataclass(frozen=True)
class Ranks:
    """How many ranks train, and how they share the work.

    Raises:
        CheckflowError: the mesh does not multiply to the ranks, or has dimensions that ``parallel`` does not know.
    """

    count: int
    mesh: tuple[tuple[str, int], ...] = ()  # name and size of each dimension, outermost first
    parallel: Parallel | None = None  # None: the model file wraps its models itself

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST_RANKS:
            raise CheckflowError(f"plans of several ranks are for 2 to {MOST_RANKS} ranks, not {self.count}")
        if self.parallel is not None and self.parallel not in get_args(Parallel):
            raise CheckflowError(f"--parallel is one of {', '.join(get_args(Parallel))}, not {self.parallel}")
        if self.mesh and self.parallel is None:
            raise CheckflowError("--mesh goes with --parallel; a file that wraps its model itself makes its own mesh")
        if not self.mesh:
            return
        size = math.prod(size for _, size in self.mesh)
        text = ",".join(f"{name}={size}" for name, size in self.mesh)
        if size != self.count:
            raise CheckflowError(f"--mesh {text} has {size} ranks, and --ranks says {self.count}")
        known = ([REPLICATE],) if self.parallel == "ddp" else ([SHARD], [REPLICATE, SHARD])
        if [name for name, _ in self.mesh] not in known:
            usual = " or ".join(",".join(f"{name}=N" for name in names) for names in known)
            raise CheckflowError(f"--parallel {self.parallel} takes --mesh {usual}, not {text}")


@contextlib.contextmanager
def process_group(ranks: Ranks | None) -> Iterator[None]:
    """Be rank 0 of so many ranks that talk to nobody; None: of no group. Nothing of it is left afterwards."""
    if ranks is None:
        yield
        return
    if not dist.is_available():
        raise CheckflowError("this build of torch has no torch.distributed, by which several ranks are planned")
    if dist.is_initialized():
        raise CheckflowError("this process is in a process group already: plan several ranks in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.count)
    try:
        with _anywhere():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _anywhere() -> Iterator[None]:
    """Let meshes name accelerators that this machine lacks, and DDP take models without data."""
    from torch.distributed import device_mesh
    from torch.nn.parallel import distributed

    def on_cpu(original: Callable[..., None]) -> Callable[..., None]:
        def made(self: Any, device_type: str, *arguments: Any, **keywords: Any) -> None:
            original(self, "cpu" if device_type != "meta" else device_type, *arguments, **keywords)

        return made

    def nothing(*_: Any, **__: Any) -> None:
        """Ranks that are not there have the same parameters."""

    mesh: Any = device_mesh.DeviceMesh
    saved = [
        (mesh, "__init__", on_cpu(mesh.__init__)),
        (distributed, "_verify_param_shape_across_processes", nothing),
        (distributed, "_sync_module_states", nothing),
    ]
    with contextlib.ExitStack() as restored:
        for owner, name, instead in saved:
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, instead)
        yield


def parallelize(step: TrainingStep, ranks: Ranks, name: str) -> TrainingStep:
    """Return the step with its models wrapped as ``ranks.parallel`` says; its optimizers follow.

    FSDP2 shards each item of the outermost lists of modules (a transformer's blocks), then the rest, as is usual.

    Raises:
        ModelError: the models cannot be wrapped after they were built.
    """
    if ranks.parallel is None:
        return step
    wrapped = [module for model in step.models.values() for module in model.modules() if _is_wrapped(module)]
    if wrapped:
        raise ModelError(f"{name} wraps its model in {type(wrapped[0]).__name__} itself: leave out --parallel, --mesh")
    try:
        if ranks.parallel == "ddp":
            return _with_ddp(step)
        return _with_fsdp(step, ranks)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{name} cannot be wrapped for --parallel {ranks.parallel}: {reason}") from error


def _is_wrapped(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, nn.parallel.DistributedDataParallel | FSDPModule | FullyShardedDataParallel)


def _with_ddp(step: TrainingStep) -> TrainingStep:
    models = {
        key: nn.parallel.DistributedDataParallel(model) if _trains(model) else model
        for key, model in step.models.items()
    }
    if step.loss is None:
        for key, model in models.items():
            setattr(model, UNSEEN, model is not step.models[key])
    return _rebuilt(step, models)


def _with_fsdp(step: TrainingStep, ranks: Ranks) -> TrainingStep:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    named = ranks.mesh or ((SHARD, ranks.count),)
    sizes, names = tuple(size for _, size in named), tuple(name for name, _ in named)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    places = {
        id(parameter): (module, key)
        for model in step.models.values()
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    if kept := [key for key, optimizer in step.optimizers.items() if optimizer.state]:
        raise ValueError(f"{kept[0]} has state before its first step: wrap the model where it is built")
    for model in step.models.values():
        if _trains(model):
            for block in blocks(model):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
    now = {before: module._parameters[key] for before, (module, key) in places.items()}
    for optimizer in step.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
    return _rebuilt(step, step.models)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard each by itself: the items of the outermost lists and sequences of modules."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [child for child in model.children() if _trains(child)]
    if isinstance(model, nn.ModuleDict):
        return [block for child in model.values() for block in blocks(child)]
    return [block for child in model.children() for block in blocks(child)]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _rebuilt(step: TrainingStep, models: dict[str, Any]) -> TrainingStep:
    general: dict[str, Any] = {"loss": step.loss} if step.loss is not None else {"step": step.function}
    return TrainingStep(
        models=models, optimizers=step.optimizers, batch=step.batch, micro_batches=step.micro_batches, **general
    )
