"""Hooks at the anchors of eager training. They call back with an AnchorKey and do nothing else.

docs/explanation/boundaries.md, "Where hooks are", says where each kind hangs and what compiled code does with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from checkflow.anchors import regions
from checkflow.anchors.hooks import Hanging, UnseenSteps, around_forward, around_steps, at_gradient, guard_closure
from checkflow.anchors.occurrences import Numbers, Occurrences, Place
from checkflow.core.errors import MismatchError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.state import module_names, parameter_paths

Fire = Callable[[AnchorKey], None]


@dataclass
class Sightings:
    """What is known of a job's anchors; it outlives hooks that are removed and hung anew."""

    fired: set[Place] = field(default_factory=set)  # fired in uncompiled code, at least once
    traced: set[Place] = field(default_factory=set)  # compiled into code, and not fired since
    steps: UnseenSteps = field(default_factory=UnseenSteps)
    repeated: set[str] = field(default_factory=set)  # optimizers that run their closure more than once, or never


class AnchorHooks:
    """The hooks of one job. Raises MismatchError if the job lacks what a key names.

    Args:
        fire: called with each key in ``keys`` when it is reached, and with every optimizer's pre- and post-step;
            see :meth:`skip_gradients`.
        on_forward: called with the name and arguments of a whole model in training mode, outside of backward.
        on_evaluation: called at each forward of a whole model in evaluation mode.
        on_training: called when a hooked module or a whole model runs forward in training mode, outside of backward.
        on_traced: called when a hook is compiled, before the compiled code runs.
        on_repeated: called before an optimizer runs its closure again, or after a step that never ran it.
        sightings: what earlier hooks of the job have seen.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        keys: Iterable[AnchorKey],
        fire: Fire,
        on_forward: Callable[[str, Any], None],
        on_training: Callable[[], None],
        on_evaluation: Callable[[], None],
        on_traced: Callable[[], None] = lambda: None,
        on_repeated: Callable[[str], None] = lambda _: None,
        sightings: Sightings | None = None,
    ) -> None:
        self._on_repeated = on_repeated
        self._unevaluated: set[str] = set()  # optimizers in a step that have not run their closure yet
        self._fire, self._on_training, self._on_traced = fire, on_training, on_traced
        self._on_forward, self._on_evaluation = on_forward, on_evaluation
        self.sightings = Sightings() if sightings is None else sightings
        self.regions = regions.compiled_regions(models)
        self._models = models
        self._inside: set[Place] = set()  # anchors of modules inside of compiled regions, without hooks
        self._wanted: set[Place] = set()
        self._targets: dict[Place, Any] = {}
        self._steps = Numbers()
        self._boundary = 0  # number of the last boundary
        self._gradients_matter = True  # otherwise nobody waits for them before the next step or boundary
        self._hangings: list[Hanging] = []
        self._look_again = False  # a hook was compiled
        self._optimizers = {id(optimizer): name for name, optimizer in optimizers.items()}
        try:
            self._watch(keys)
            # Last, so that it runs before all others: a boundary comes before the forward's keys.
            self._watch_forward(models)
            self._hangings.append(around_steps(self._before_step, self._after_step, self.sightings.steps))
        except BaseException:
            self.remove()
            raise

    def reset(self) -> None:
        """A boundary: count occurrences from 0 again."""
        self._boundary += 1
        self._gradients_matter = True

    def skip_gradients(self) -> None:
        """Let the anchors at gradients pass in silence until an evaluation, an optimizer's step or a boundary.

        A job has hundreds of them, and between checkpoints only the first says something new: that backward runs.
        """
        self._gradients_matter = False

    def remove(self) -> None:
        while self._hangings:
            self._hangings.pop().remove()

    @property
    def silent(self) -> frozenset[Place]:
        """The requested forward anchors that do not fire before their module runs.

        If anything is compiled, each must have fired once: code compiled before the hooks were hung bypasses them.
        """
        compiled, known = regions.anything_compiled(), self._inside | self.sightings.traced
        if not (compiled or known):
            return frozenset()
        forward = {place for place in self._wanted if place[0] is AnchorKind.FORWARD}
        passed_by = forward - self.sightings.fired if compiled else set()
        return frozenset(forward & known | passed_by)

    def outdated(self, *, replaced: bool) -> bool:
        """Whether modules or parameters lack hooks: they were compiled, or, if ``replaced``, maybe replaced."""
        looking, self._look_again = replaced or self._look_again, False
        if looking and (regions.compiled_regions(self._models) != self.regions or not self._same_targets()):
            return True
        return not all(hanging.in_place() for hanging in self._hangings if hanging.in_place is not None)

    def _same_targets(self) -> bool:
        found = self._find_targets()
        return all(found.get(place) is target for place, target in self._targets.items())

    def _find_targets(self) -> dict[Place, Any]:
        """The modules and parameters of the requested anchors; None for a frozen parameter."""
        modules = dict(module_names(self._models))
        parameters = parameter_paths(self._models)
        found: dict[Place, Any] = {}
        for kind, name in self._wanted:
            if kind is AnchorKind.FORWARD and name in modules:
                found[kind, name] = modules[name]
            elif kind is AnchorKind.GRADIENT and name in parameters:
                found[kind, name] = parameters[name] if parameters[name].requires_grad else None
        return found

    def take_unseen_step(self) -> bool:
        """Whether, since the last call, an optimizer stepped in compiled code that hooks could not leave."""
        steps = self.sightings.steps
        taken, steps.taken = steps.taken, False
        return taken

    def _watch(self, keys: Iterable[AnchorKey]) -> None:
        self._wanted = {(key.kind, key.name) for key in keys}
        self._targets = self._find_targets()
        for place in sorted(self._wanted):
            kind, name = place
            if kind in (AnchorKind.FORWARD, AnchorKind.GRADIENT) and place not in self._targets:
                what = "module" if kind is AnchorKind.FORWARD else "parameter"
                raise MismatchError(f"the plan has an anchor at {what} {name}, which the job does not have")
            if kind is AnchorKind.FORWARD:
                self._watch_module(name, self._targets[place])
            elif kind is AnchorKind.GRADIENT:
                parameter = self._targets[place]
                if parameter is not None:
                    self._hangings.append(at_gradient(parameter, self._gradient_hook(kind, name)))
            elif kind is not AnchorKind.BOUNDARY and name not in self._optimizers.values():
                raise MismatchError(f"the plan has an anchor at optimizer {name}, which the job does not have")

    def _watch_module(self, name: str, module: nn.Module) -> None:
        """Hang a module's hook, unless it runs inside of compiled code."""
        entry = regions.entry_of(self.regions, name, module)
        if entry is None:
            self._inside.add((AnchorKind.FORWARD, name))
        elif name in self.regions or (AnchorKind.FORWARD, name) not in self.sightings.traced:
            # A hook that was once compiled into a function is not hung again: the function would be recompiled.
            self._hangings.append(around_forward(entry, self._forward_hook(AnchorKind.FORWARD, name)))

    def _watch_forward(self, models: Mapping[str, nn.Module]) -> None:
        for name, model in models.items():
            self._hangings.append(around_forward(model, self._whole_forward_hook(name), with_keywords=True))

    def _whole_forward_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        @regions.uncompiled
        def reached(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if regions.in_backward():
                return
            if module.training:
                self._on_forward(name, (arguments, keywords))
                self._on_training()
            else:
                self._gradients_matter = True  # a backward that follows is training again
                self._on_evaluation()

        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                reached(module, arguments, keywords)

        return hook

    def _forward_hook(self, kind: AnchorKind, name: str) -> Callable[[nn.Module, Any], None]:
        place = kind, name
        occurrences, sightings = Occurrences(place), self.sightings

        @regions.uncompiled
        def reached(module: nn.Module) -> None:
            if not regions.in_backward():
                if module.training:
                    self._on_training()
                sightings.fired.add(place)
                if sightings.traced:
                    sightings.traced.discard(place)
                self._fire(occurrences.next(self._boundary))

        @regions.while_compiling  # runs while the hook is compiled and leaves no code
        def note_compiled() -> bool:
            sightings.traced.add(place)
            self._look_again = True
            self._on_traced()
            return True

        def hook(module: nn.Module, _arguments: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                reached(module)
            elif module.training:
                note_compiled()

        return hook

    def _gradient_hook(self, kind: AnchorKind, name: str) -> Callable[[torch.Tensor], None]:
        occurrences = Occurrences((kind, name))

        def hook(_parameter: torch.Tensor) -> None:
            if self._gradients_matter:
                self._fire(occurrences.next(self._boundary))

        return hook

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        name = self._optimizers.get(id(optimizer))
        if name is None:
            return None
        begins, again = functools.partial(self._step_begins, name), functools.partial(self._on_repeated, name)
        noted = guard_closure(arguments, keywords, begins, again)
        if noted is not None:
            self._unevaluated.add(name)
        return noted

    def _step_begins(self, name: str) -> None:
        self._unevaluated.discard(name)
        self._fire(self._steps[AnchorKind.OPTIMIZER_PRE, name].next(self._boundary))

    def _after_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        name = self._optimizers.get(id(optimizer))
        if name is None:
            return
        if name in self._unevaluated:
            self._unevaluated.discard(name)
            self._on_repeated(name)
        self._gradients_matter = True
        self._fire(self._steps[AnchorKind.OPTIMIZER_POST, name].next(self._boundary))
