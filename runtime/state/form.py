"""The form of a job's state: names, shapes and groups. A restart must have the checkpoint's form, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from checkflow.core.state import dtype_name
from checkflow.runtime.state.collect import Models, Optimizers, StateWalk


@dataclass(frozen=True)
class Form:
    """A form holds what a restore compares, but for the state that optimizers make by themselves.

    Attributes:
        tensors: dtype and shape of the models' tensors, by name.
        ties: their further names, to the names under which they are in ``tensors``.
        groups: names of parameters in each group, by optimizer.
    """

    tensors: Mapping[str, str]
    ties: Mapping[str, str]
    groups: Mapping[str, tuple[tuple[str, ...], ...]]


def form_of(walk: StateWalk, models: Models, optimizers: Optimizers) -> Form:
    """Return the form of the state that a walk has found last."""
    state = walk.latest
    return Form(
        {
            item.name: f"{dtype_name(item.tensor.dtype)}{list(item.tensor.shape)}"
            for item in state.tensors
            if item.kind != "optimizer"
        },
        {further: name for further, name in state.ties if further.partition("/")[0] in models},
        {
            owner: tuple(
                tuple(walk.names[owner][id(one)] for one in group["params"]) for group in optimizer.param_groups
            )
            for owner, optimizer in optimizers.items()
        },
    )


def changes(first: Form, now: Form) -> Iterator[str]:
    """Yield each change of a form, in words."""
    for owner, groups in now.groups.items():
        before = first.groups[owner]
        if len(groups) != len(before):
            yield f"{owner} has {len(groups)} parameter groups instead of {len(before)}"
        for number, (here, there) in enumerate(zip(groups, before, strict=False)):
            if here != there:
                odd = next(iter(sorted(set(here) ^ set(there))), None)
                what = f"{'no longer' if odd in there else 'also'} {odd}" if odd else "its parameters in another order"
                yield f"group {number} of {owner} has {what}"
    yield from _differences("", first.tensors, now.tensors)
    yield from _differences("the tie of ", first.ties, now.ties)


def _differences(what: str, first: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(now.keys() | first.keys()):
        if name not in first or name not in now:
            yield f"{what}{name} is {'new' if name in now else 'gone'}"
        elif now[name] != first[name]:
            yield f"{what}{name} is {now[name]} instead of {first[name]}"
