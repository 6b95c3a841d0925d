"""Regions: the modules that run inside code which torch.compile or torch.jit made, and the anchor before each.

Hooks inside a region are useless: compiled in, they act after it has run; added later, they never fire. So its one
anchor lies in the uncompiled code around it, named after the outermost compiled module. Modules called by a compiled
function (a loss, a whole step) do not know of it: no region is found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from checkflow.core.state import clean_key

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """Modules that run inside one compiled call."""

    name: str  # of the outermost one, "<model>/<path>", and of the anchor before it
    entry: nn.Module | None  # what uncompiled code calls; None: its class is compiled, and takes no anchor


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that torch compiles neither it nor what it calls."""
    wrapped: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped


def anything_compiled() -> bool:
    """Return whether torch has compiled code in this process, which may have bypassed hooks."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return compiler is not None and bool(getattr(compiler, "FRAME_COUNTER", True))


def while_compiling(function: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap a function so that torch calls it once, when it compiles a call of it, and compiles in the result."""
    marked: Callable[[], bool] = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return marked


def compiled_regions(models: Mapping[str, nn.Module]) -> dict[str, CompiledRegion]:
    """Return the region of each module inside of one, by name as in :func:`checkflow.core.state.module_names`."""
    found: dict[str, CompiledRegion] = {}
    seen: set[int] = set()
    for owner, model in models.items():
        for name, module, region in _walk(model, owner, "", None):
            if id(module) not in seen:
                seen.add(id(module))
                if region is not None:
                    found[name] = region
    return found


def _walk(
    module: nn.Module, owner: str, path: str, region: CompiledRegion | None
) -> Iterator[tuple[str, nn.Module, CompiledRegion | None]]:
    """Yield every module below this one, in the order of ``named_modules``, with the outermost region around it."""
    name = f"{owner}/{clean_key(path)}"
    if region is None and _is_compiled(module):
        region = CompiledRegion(name, None if _class_is_compiled(module) else module)
    inner = _inside_wrapper(module, top=not path)
    if inner is not None:
        yield from _walk(inner, owner, path, region)
        return
    yield name, module, region
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, owner, f"{path}.{key}" if path else key, region)


def _inside_wrapper(module: nn.Module, *, top: bool) -> nn.Module | None:
    """Return the module inside a wrapper of torch.compile, or of DataParallel around a whole model."""
    if top and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner: nn.Module = module.module
        return inner
    if type(module).__name__ == "OptimizedModule":  # by name: torch._dynamo is slow to import
        return module._modules["_orig_mod"]
    return None


def _is_compiled(module: nn.Module) -> bool:
    if type(module).__name__ == "OptimizedModule":
        # torch.compiler.disable(module) makes such a wrapper, too, and runs its inside eagerly.
        return type(module.__dict__.get("dynamo_ctx")).__name__ != "DisableContext"
    return (
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or _class_is_compiled(module)
    )


def _class_is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` decorated the module's class, so that calling it runs hooks in compiled code."""
    return hasattr(type(module)._call_impl, "_torchdynamo_orig_callable")


def entry_of(regions: Mapping[str, CompiledRegion], name: str, module: nn.Module) -> nn.Module | None:
    """Return what uncompiled code calls to run a module; None: it runs inside of compiled code, and takes no anchor."""
    region = regions.get(name)
    return module if region is None else region.entry if region.name == name else None


def compiled_function(*, whole: bool = False) -> str | None:
    """Name the outermost compiled function being called; ``whole``: only of those with ``fullgraph=True``."""
    name: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            enclosed = frame.f_locals
            if not whole or getattr(enclosed.get("self"), "fullgraph", False):
                name = str(getattr(enclosed.get("fn"), "__qualname__", "compiled code")).rpartition(".")[2]
        frame = frame.f_back
    return name


def in_backward() -> bool:
    """Return whether autograd runs on this thread now."""
    return int(torch._C._current_graph_task_id()) != -1
