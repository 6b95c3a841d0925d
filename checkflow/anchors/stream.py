"""AnchorStream: the anchors of a job as training reaches them, numbered since the boundary.

docs/explanation/boundaries.md, "Where hooks are", says where each kind hangs and what compiled code does with them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from checkflow.anchors import hooks, regions
from checkflow.anchors.occurrences import Numbers, Place
from checkflow.core.errors import MismatchError
from checkflow.core.graph import AnchorKey, AnchorKind
from checkflow.core.state import module_names, parameter_paths

Told = Callable[[AnchorKey], None]


@dataclass(frozen=True, kw_only=True)
class Subscriber:
    """Functions that a stream calls at events; what is None hears nothing of its event.

    Attributes:
        places: the modules and parameters whose anchors are wanted, each of which gets a hook.
        forward: called with the key when a module of ``places`` runs forward, in evaluation too, outside of backward.
        entering: called after that with the module's name, the key, and the compiled function that calls it. The key is
            None where no anchor is; only a stream for planning looks for the function.
        leaving: called with the module's name and its result, or None after an error.
        gradient: called with the key of a parameter whose gradient was accumulated; see
            :meth:`AnchorStream.skip_gradients`.
        step_begins: likewise for an optimizer of the job that is about to write.
        step_ends: likewise for an optimizer of the job that has stepped.
        stepping: called after ``step_begins`` with the optimizer, which may be none of the job's.
        stepped: likewise, before ``step_ends``.
        model: called with the name and arguments of a whole model in training mode, outside of backward.
        training: called after that, and when a module of ``places`` runs forward in training mode.
        evaluation: called at each forward of a whole model in evaluation mode.
        unseen: called with a module's name when its hook is compiled, before the compiled code runs: its anchor will
            not be seen.
        repeated: called with the name of an optimizer before it runs its closure again.
        unevaluated: called with the name of an optimizer after a step that has not run its closure.
        replayed: called with a CUDA graph before its replay, which calls no hook.
    """

    places: frozenset[Place] = frozenset()
    forward: Told | None = None
    entering: Callable[[str, AnchorKey | None, str | None], object] | None = None
    leaving: Callable[[str, Any], None] | None = None
    gradient: Told | None = None
    step_begins: Told | None = None
    step_ends: Told | None = None
    stepping: Callable[[torch.optim.Optimizer], None] | None = None
    stepped: Callable[[torch.optim.Optimizer], None] | None = None
    model: Callable[[str, Any], None] | None = None
    training: Callable[[], None] | None = None
    evaluation: Callable[[], None] | None = None
    unseen: Callable[[str], None] | None = None
    repeated: Callable[[str], None] | None = None
    unevaluated: Callable[[str], None] | None = None
    replayed: Callable[[Any], None] | None = None


class AnchorStream:
    """A stream tells the anchors of one job to those who subscribe.

    Each event has one table of the functions that it calls, in the order in which their roles came first. An error in
    one ends the event, and goes to training. Who subscribes within an event is told from the next one on.

    What hangs last runs first: hooks are hung anew when a subscriber with places comes or changes, those of whole
    models last, since a boundary comes before the anchors of a forward.

    Args:
        planning: whether the stream serves to make a plan. Then a module that a compiled function calls is no anchor,
            even if the function runs uncompiled, as in a trace, and hooks hang inside of compiled regions, too.

    Attributes:
        fired: anchors of modules that were reached in uncompiled code, at least once, and do not run in graphs since.
        repeated: optimizers that run their closure more than once, or never.
        steps: what is known of those that no hook sees.
        hung: how many times hooks were hung.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        repeated: Iterable[str] = (),
        *,
        planning: bool = False,
    ) -> None:
        self._models, self._planning = models, planning
        self._optimizers = {id(optimizer): name for name, optimizer in optimizers.items()}
        self.repeated = set(repeated)
        self._subscribers: dict[str, Subscriber] = {}
        self._tables: dict[str, tuple[Callable[..., None], ...]] = {}
        self._numbers = Numbers()
        self._boundary = self.hung = 0  # number of the last boundary
        self._gradients_matter = True  # otherwise nobody waits for them before the next step or boundary
        self._unevaluated: set[str] = set()  # optimizers in a step that have not run their closure yet
        self.fired: set[Place] = set()
        self._traced: set[Place] = set()  # compiled into code, and not fired since
        self.steps = hooks.UnseenSteps()
        self._look_again = False  # a hook was compiled
        self._replayed_after = -1  # the last boundary that a replay of a CUDA graph followed
        self._targets: dict[Place, weakref.ref[Any] | None] = {}  # an iteration may drop modules and parameters
        self._regions: dict[str, regions.CompiledRegion] = {}
        self._inside: set[Place] = set()  # anchors of modules inside of compiled regions, without hooks
        self._hangings: list[hooks.Hanging] = []
        self._served: Subscriber | None = None  # all hooks hang for it; a signal's handler may raise before they do

    def subscribe(self, role: str, subscriber: Subscriber) -> None:
        """Call a subscriber's functions from now on, and no more those of the one that had its role.

        MismatchError if the job lacks one of its places; then everything stays as it is.
        """
        subscribers = {**self._subscribers, role: subscriber}
        places = {place for one in subscribers.values() for place in one.places}
        found = self._find_targets(places)
        for kind, name in sorted(places - found.keys()):
            what = {AnchorKind.FORWARD: "module", AnchorKind.GRADIENT: "parameter"}.get(kind, "optimizer")
            raise MismatchError(f"the plan has an anchor at {what} {name}, which the job does not have")
        self._targets, self._served = found, None
        self.add(role, subscriber)
        self.hang()
        self._served = subscriber

    def add(self, role: str, subscriber: Subscriber) -> None:
        """Call a subscriber's functions likewise. Hooks stay as they are: ``places``, ``leaving`` need subscribe()."""
        self._subscribers[role] = subscriber
        for event in (field.name for field in fields(Subscriber)[1:]):
            self._tables[event] = tuple(filter(None, (getattr(one, event) for one in self._subscribers.values())))

    def _tell(self, event: str, *what: Any) -> None:
        for tell in self._tables[event]:
            tell(*what)

    def boundary(self) -> None:
        """Number occurrences from 0 again: an iteration begins."""
        self._boundary += 1
        self._gradients_matter = True

    def skip_gradients(self) -> None:
        """Let the anchors at gradients pass in silence until an evaluation, an optimizer's step or a boundary.

        A job has hundreds of them, and between checkpoints only the first says something new: that backward runs.
        """
        self._gradients_matter = False

    def remove(self) -> None:
        """Take all hooks away."""
        while self._hangings:
            self._hangings.pop().remove()

    def hang(self) -> None:
        """Hang hooks at all places that are wanted, in place of those that hang, and begin to number anew."""
        self.remove()
        self._regions = regions.compiled_regions(self._models)
        self._look_again = False
        self.hung += 1
        self.boundary()
        try:
            self._inside = {place for place in sorted(self._targets) if not self._hang_at(place)}
            for name, model in () if self._planning else self._models.items():
                self._hangings.append(hooks.around_forward(model, self._model_hook(name), with_keywords=True))
            self._hangings.append(hooks.around_steps(self._before_step, self._after_step, self.steps))
            if not self._planning:
                self._hangings.append(hooks.around_replays(self._before_replay))
        except BaseException:
            self.remove()
            raise

    def _hang_at(self, place: Place) -> bool:
        """Hang the hooks at one place; returns False if its module runs inside of a compiled region.

        Such a module gets a hook only for planning.
        """
        target = None if (reference := self._targets[place]) is None else reference()
        if place[0] is AnchorKind.GRADIENT and target is not None:
            self._hangings.append(hooks.at_gradient(target, self._gradient_hook(place)))
        elif place[0] is AnchorKind.FORWARD and target is not None:
            entry = regions.entry_of(self._regions, place[1], target)
            # A hook that was once compiled into a function is not hung again: the function would be recompiled.
            if (entry is not None or self._planning) and (place[1] in self._regions or place not in self._traced):
                before, after = self._forward_hooks(place, inside=entry is None)
                self._hangings.append(hooks.around_forward(target if entry is None else entry, before, after))
            return entry is not None
        return True

    @property
    def replays(self) -> bool:
        """Return whether a CUDA graph was replayed since the last boundary."""
        return self._replayed_after == self._boundary

    @property
    def silent(self) -> frozenset[Place]:
        """Return the wanted forward anchors that do not fire before their module runs, or have not fired yet.

        Code that was compiled before the hooks were hung bypasses them, and so do the replays of a CUDA graph.
        """
        forward = {place for place in self._targets if place[0] is AnchorKind.FORWARD}
        return frozenset(forward & (self._inside | self._traced) | forward - self.fired)

    def outdated(self, subscriber: Subscriber, *, replaced: bool) -> bool:
        """Return whether anchors may pass this subscriber by, so that it must subscribe again.

        Modules were compiled, or, if ``replaced``, maybe replaced; or an error came while hooks were hung, or after
        another subscriber took its role.
        """
        if self._served is not subscriber:
            return True
        looking, self._look_again = replaced or self._look_again, False
        if looking and (regions.compiled_regions(self._models) != self._regions or not self._same_targets()):
            return True
        return not all(hanging.in_place() for hanging in self._hangings if hanging.in_place is not None)

    def _same_targets(self) -> bool:
        found = self._find_targets(self._targets)
        return all(found.get(place) is target for place, target in self._targets.items())

    def _find_targets(self, places: Iterable[Place]) -> dict[Place, weakref.ref[Any] | None]:
        """Return what the job has at these places: modules and parameters; None at frozen ones, and at others."""
        optimizers = dict.fromkeys(self._optimizers.values())
        parameters = parameter_paths(self._models).items()
        have: dict[AnchorKind, Mapping[str, Any]] = {
            AnchorKind.BOUNDARY: {"": None},
            AnchorKind.FORWARD: dict(module_names(self._models)),
            AnchorKind.GRADIENT: {name: tensor if tensor.requires_grad else None for name, tensor in parameters},
            AnchorKind.OPTIMIZER_PRE: optimizers,
            AnchorKind.OPTIMIZER_POST: optimizers,
        }
        found = {(kind, name): have[kind][name] for kind, name in places if name in have[kind]}
        return {place: None if target is None else weakref.ref(target) for place, target in found.items()}

    def _model_hook(self, name: str) -> hooks.Before:
        def reached(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if regions.in_backward():
                return
            if module.training:
                for tell in self._tables["model"]:
                    tell(name, (arguments, keywords))
                for tell in self._tables["training"]:
                    tell()
            else:
                self._gradients_matter = True  # a backward that follows is training again
                self._tell("evaluation")

        return hooks.outside(reached)

    def _forward_hooks(self, place: Place, *, inside: bool) -> tuple[hooks.Before, hooks.After | None]:
        """Return hooks around a module's forward, which is no anchor ``inside`` of a compiled region."""
        occurrences, tables, planning = self._numbers[place], self._tables, self._planning

        def reached(module: nn.Module, _arguments: Any) -> None:
            key, function = None, regions.compiled_function() if planning else None
            if not (inside or function or regions.in_backward()):
                if module.training:
                    for tell in tables["training"]:
                        tell()
                self.fired.add(place)
                if self._traced:
                    self._traced.discard(place)
                key = occurrences.next(self._boundary)
                for tell in tables["forward"]:
                    tell(key)
            for tell in tables["entering"]:
                tell(place[1], key, function)

        def note_compiled() -> bool:
            self._traced.add(place)
            self._look_again = True
            self._tell("unseen", place[1])
            return True

        def left(_module: nn.Module, _arguments: Any, result: Any) -> None:
            self._tell("leaving", place[1], result)

        after = hooks.outside(left) if self._tables["leaving"] else None
        return hooks.outside(reached, note_compiled, evaluating=self._planning), after

    def _gradient_hook(self, place: Place) -> Callable[[torch.Tensor], None]:
        occurrences = self._numbers[place]

        def hook(_parameter: torch.Tensor) -> None:
            if self._gradients_matter:
                key = occurrences.next(self._boundary)
                for tell in self._tables["gradient"]:
                    tell(key)

        return hook

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
        name = self._optimizers.get(id(optimizer))
        if name is None and not self._tables["stepping"]:
            return None
        begins, again = functools.partial(self._step_begins, name, optimizer), functools.partial(self._repeats, name)
        guarded = hooks.guard_closure(arguments, keywords, begins, again)
        if guarded is not None and name is not None:
            self._unevaluated.add(name)
        return guarded

    def _step_begins(self, name: str | None, optimizer: torch.optim.Optimizer) -> None:
        if self._planning and regions.compiled_function(whole=True) is not None:
            self.steps.known = True
        if name is not None:
            self._unevaluated.discard(name)
            key = self._numbers[AnchorKind.OPTIMIZER_PRE, name].next(self._boundary)
            for tell in self._tables["step_begins"]:
                tell(key)
        for tell in self._tables["stepping"]:
            tell(optimizer)

    def _before_replay(self, graph: Any) -> None:
        """Trust no anchor that has not fired in this iteration: it may have moved into the graph."""
        if not self.replays:
            self._replayed_after = self._boundary
            self.fired = {place for place in self.fired if self._numbers[place].reached(self._boundary)}
        self._tell("replayed", graph)

    def _repeats(self, name: str | None) -> None:
        if name is not None:  # others' state is not saved: they may step freely
            self._tell("repeated", name)

    def _after_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        for tell in self._tables["stepped"]:
            tell(optimizer)
        name = self._optimizers.get(id(optimizer))
        if name is None:
            return
        if name in self._unevaluated:
            self._unevaluated.discard(name)
            self._tell("unevaluated", name)
        self._gradients_matter = True
        key = self._numbers[AnchorKind.OPTIMIZER_POST, name].next(self._boundary)
        for tell in self._tables["step_ends"]:
            tell(key)
