"""Hooks around modules, optimizers' steps and their closures. They know nothing of what they are hung for."""

from __future__ import annotations

import copyreg
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from checkflow.anchors.regions import uncompiled, while_compiling

Before = Callable[..., None]
After = Callable[[nn.Module, Any, Any], None]
StepHook = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Hanging:
    """Functions that are called at one place of training."""

    remove: Callable[[], None]  # in any order among several
    in_place: Callable[[], bool] | None = None  # whether they will still be called; None: they will


@dataclass
class UnseenSteps:
    """These flags say what is known of optimizers that step where no hook is called.

    That is compiled code which cannot be left for an anchor, or a CUDA graph that holds a whole step.
    """

    known: bool = False  # there is one: set when its code is compiled, or has run inside of a graph
    taken: bool = False  # it has stepped: set when its code has run

    def replayed(self) -> None:
        """Note that a step was taken, as the user says."""
        self.known = self.taken = True

    def take(self) -> bool:
        """Return whether an optimizer has stepped since the last call."""
        taken, self.taken = self.taken, False
        return taken


def _step_hook(reached: StepHook, unseen: UnseenSteps) -> StepHook:
    """Return an optimizer hook for which compiled code is left (a graph break, beside torch's own in its steps).

    In code that must be compiled in one piece (``fullgraph=True``), it notes the step in ``unseen`` instead.
    """
    apart = uncompiled(reached)

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
        return apart(optimizer, arguments, keywords)

    return hook


def around_steps(before: StepHook, after: StepHook, unseen: UnseenSteps) -> Hanging:
    """Call functions around each step of every optimizer, by torch's global hooks."""
    first = register_optimizer_step_pre_hook(_step_hook(before, unseen))
    last = register_optimizer_step_post_hook(_step_hook(after, unseen))

    def remove() -> None:
        first.remove()
        last.remove()

    return Hanging(remove)


def around_replays(before: Callable[[Any], None]) -> Hanging:
    """Call a function with each CUDA graph of this process that is about to be replayed."""
    if not hasattr(torch.cuda.CUDAGraph.replay, _TOLD):
        _wrap_replay()
    number = next(_counted)
    _before_replays[number] = before

    def remove() -> None:
        _before_replays.pop(number, None)

    return Hanging(remove)


_TOLD = "_checkflow_told"
_before_replays: dict[int, Callable[[Any], None]] = {}
_counted = itertools.count()


def _wrap_replay() -> None:
    """Wrap torch's method once and for good: it has no hooks, and others may have wrapped the wrapper."""
    inner = torch.cuda.CUDAGraph.replay

    @functools.wraps(inner)
    def replay(graph: Any) -> None:
        for before in tuple(_before_replays.values()):
            before(graph)
        inner(graph)

    setattr(replay, _TOLD, True)
    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]


def at_gradient(parameter: torch.Tensor, reached: Callable[[torch.Tensor], None]) -> Hanging:
    """Call a function whenever a parameter's gradient was accumulated."""
    return Hanging(parameter.register_post_accumulate_grad_hook(uncompiled(reached)).remove)  # type: ignore[no-untyped-call]


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


def guard_closure(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], begins: Callable[[], None], again: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call ``begins`` before an optimizer's step can write: now, or when its closure has run for the first time.

    ``again`` is called before each further run. Returns the step's arguments with the closure guarded; None: it has
    none.
    """

    def guard(closure: Callable[..., Any]) -> Callable[..., Any]:
        ran = False

        def guarded(*arguments: Any, **keywords: Any) -> Any:
            nonlocal ran
            if ran:
                again()
            result = closure(*arguments, **keywords)
            if not ran:
                ran = True
                begins()
            return result

        return guarded

    noted = with_closure(arguments, keywords, guard)
    if noted is None:
        begins()
    return noted


def outside(
    reached: Callable[..., None], noted: Callable[[], bool] | None = None, *, evaluating: bool = False
) -> Callable[..., None]:
    """Return a hook around a module's forward that torch never compiles.

    Args:
        reached: called with what the hook is called with.
        noted: called instead while code around it is compiled that calls the module in training mode; leaves no code.
        evaluating: whether ``noted`` is called in evaluation mode, too.
    """
    apart, note = uncompiled(reached), None if noted is None else while_compiling(noted)

    def hook(module: nn.Module, *arguments: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            apart(module, *arguments)
        elif note is not None and (evaluating or module.training):
            note()

    return hook


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

    return Hanging(remove)


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
