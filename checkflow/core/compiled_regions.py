"""Regions: the modules that run inside code which torch.compile or torch.jit made, and the anchor before each.

Hooks inside a region are useless: compiled in, they act after it has run; added later, they never fire. So its one
anchor lies in the uncompiled code around it, named after the outermost compiled module. Modules called by a compiled
function (a loss, a whole step) do not know of it: no region is found.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from checkflow.core.state import clean_key

P = ParamSpec("P")
R = TypeVar("R")
Before = Callable[..., None]
After = Callable[[nn.Module, Any, Any], None]


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
    """Whether torch has compiled code in this process, which may have bypassed hooks."""
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
    """Whether ``torch.compile`` decorated the module's class, so that calling it runs hooks in compiled code."""
    return hasattr(type(module)._call_impl, "_torchdynamo_orig_callable")


@dataclass
class UnseenSteps:
    """What is known of optimizers that step in compiled code which cannot be left for an anchor."""

    known: bool = False  # there is one: set when its code is compiled
    taken: bool = False  # it has stepped: set when its code has run


def step_hook(reached: Callable[[Any, Any, Any], Any], unseen: UnseenSteps) -> Callable[[Any, Any, Any], Any]:
    """Return an optimizer hook for which compiled code is left (a graph break, beside torch's own in its steps).

    In code that must be compiled in one piece (``fullgraph=True``), it notes the step in ``unseen`` instead.
    """
    outside = uncompiled(reached)

    @while_compiling
    def in_one_piece() -> bool:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        translator = InstructionTranslator.current_tx()
        whole = bool(translator.one_graph or translator.error_on_graph_break)
        unseen.known |= whole
        return whole

    def hook(optimizer: Any, arguments: Any, keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and in_one_piece():
            unseen.taken = True  # torch does this when the compiled code has run
            return None
        return outside(optimizer, arguments, keywords)

    return hook


def with_closure(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of an optimizer's step with its closure replaced by ``make(closure)``; None: it has none."""
    closure = next((value for value in (*arguments, *keywords.values()) if callable(value)), None)
    if closure is None:
        return None
    other = make(closure)
    return (
        tuple(other if value is closure else value for value in arguments),
        {name: other if value is closure else value for name, value in keywords.items()},
    )


def noting(closure: Callable[..., Any], first: Callable[[], None], again: Callable[[], None]) -> Callable[..., Any]:
    """Wrap a step's closure to call ``first`` after its first run, and ``again`` before each further one."""
    ran = False

    def noted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal ran
        if ran:
            again()
        result = closure(*arguments, **keywords)
        if not ran:
            ran = True
            first()
        return result

    return noted


@dataclass(frozen=True, slots=True)
class Hanging:
    """Functions that are called around a module's forward."""

    remove: Callable[[], None]  # in any order among several
    in_place: Callable[[], bool]  # whether they will still be called


def around_forward(
    entry: nn.Module, before: Before, after: After | None = None, *, with_keywords: bool = False
) -> Hanging:
    """Call functions around each forward of a module, outside of its compiled code, before any of its own hooks.

    A compiled wrapper's own hooks run before the compiled code; ``module.compile()`` compiles the module's hooks in, so
    this goes around the call itself; a compiled ``forward`` leaves hooks outside; scripted modules call each other
    without hooks, but run the outermost one's.

    Args:
        before: called with the module and its positional arguments.
        with_keywords: ``before`` is called with the keyword arguments, too.
        after: called with the module, its arguments and None or the result, after errors, too.
    """
    if entry._compiled_call_impl is not None:
        return _around_call(entry, before, after, with_keywords=with_keywords)
    # By nn.Module's own methods: scripted modules refuse theirs, yet run hooks when Python calls them.
    handles = [nn.Module.register_forward_pre_hook(entry, before, prepend=True, with_kwargs=with_keywords)]
    if after is not None:
        handles.append(nn.Module.register_forward_hook(entry, after, always_call=True))
    own = {handle.id for handle in handles}
    _own_hooks.update(own)
    # pickle and copy.deepcopy ask here; a user's own rule stays.
    copyreg.dispatch_table.setdefault(type(entry), _reduce_without_hooks)

    def remove() -> None:
        for handle in handles:
            handle.remove()
        _own_hooks.difference_update(own)

    return Hanging(remove, lambda: True)


_own_hooks: set[int] = set()  # by the numbers that torch gives to hooks of all modules


def _reduce_without_hooks(module: nn.Module) -> Any:
    """Pickle or copy a module without what :func:`around_forward` has registered.

    Hooks watch one job's own module; copies may be loaded where checkflow is not installed.
    """
    reduced: Any = module.__reduce_ex__(4)
    make, arguments, state, *rest = reduced
    if isinstance(state, dict):
        for name, hooks in state.items():
            if name.startswith(("_forward_pre_hooks", "_forward_hooks")) and not _own_hooks.isdisjoint(hooks):
                left = OrderedDict((number, hook) for number, hook in hooks.items() if number not in _own_hooks)
                state = {**state, name: left}
    return make, arguments, state, *rest


def _around_call(entry: nn.Module, before: Before, after: After | None, *, with_keywords: bool) -> Hanging:
    """Wrap ``_compiled_call_impl``, which nn.Module calls in place of its hooks and forward after ``compile()``."""
    inner = entry._compiled_call_impl
    assert inner is not None
    active = True

    @functools.wraps(inner)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not active:
            return inner(*arguments, **keywords)
        before(entry, arguments, *((keywords,) if with_keywords else ()))
        result = None
        try:
            result = inner(*arguments, **keywords)
        finally:
            if after is not None:
                after(entry, arguments, result)
        return result

    def remove() -> None:
        nonlocal active
        active = False
        if entry._compiled_call_impl is call:  # otherwise someone has wrapped this one
            entry._compiled_call_impl = inner

    def in_place() -> bool:
        function: Any = entry._compiled_call_impl
        while function is not None and function is not call:
            function = getattr(function, "__wrapped__", None)  # what someone has wrapped
        return function is call

    entry._compiled_call_impl = call
    return Hanging(remove, in_place)
