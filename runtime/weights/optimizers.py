"""Finds an optimizer's state among the names of a saved job, by the parameters of its model.

torch's ``get_state_dict`` saves ``<place>.state.<parameter>.exp_avg`` and ``<place>.param_groups.<number>.lr``; with
``flatten_optimizer_state_dict``, ``<place>.param_groups.<parameter>.lr``. An optimizer's own ``state_dict()`` has
numbers for parameters, which mean something only if its groups have ``param_names``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkflow.runtime.format import codec

STATE, GROUPS = "state", "param_groups"
_NAMES = ("params", "param_names")
Path = tuple[Any, ...]  # keys of nested dictionaries, and numbers in lists


@dataclass(frozen=True)
class FoundOptimizer:
    """Where a source has an optimizer's state. A leaf is what the source calls a value.

    Attributes:
        state: leaves by parameter and key.
        options: of each group, its parameters, and leaves by option.
        leaves: all that belong to this optimizer.
    """

    place: str
    state: dict[tuple[str, str], str] = field(default_factory=dict)
    options: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)


def only_of_optimizer(names: Collection[str]) -> bool:
    """Whether this is a flat state dict of an optimizer."""
    return any(name.startswith(f"{GROUPS}.") for name in names) and all(
        name.startswith((f"{STATE}.", f"{GROUPS}.")) for name in names
    )


def of_optimizer(name: str, tensors: Collection[str]) -> bool:
    """Whether a name in a flat state dict of everything is that of an optimizer's state."""
    return _split(name.split("."), tensors, {}) is not None


def find_optimizers(
    leaves: Mapping[str, Path], parameters: Collection[str], load: Callable[[str], Any]
) -> tuple[list[FoundOptimizer], list[str]]:
    """The optimizers that have state of these parameters; and places of those whose parameters have no names.

    Args:
        leaves: with the place of each, without those of the model.
        load: gives the value of a leaf.
    """
    groups: dict[str, dict[int, dict[str, str]]] = {}  # place, number, option
    for leaf, path in leaves.items():
        if len(path) > 2 and path[-3] == GROUPS and isinstance(path[-2], int):
            groups.setdefault(_dotted(path[:-3]), {}).setdefault(path[-2], {})[str(path[-1])] = leaf
    grouped = {leaf for of_place in groups.values() for options in of_place.values() for leaf in options.values()}
    members: dict[str, dict[int, list[str]]] = {}
    numbers: dict[str, dict[str, str]] = {}  # of places that number their parameters
    for place, of_place in groups.items():
        listed = {number: [load(options[key]) if key in options else [] for key in _NAMES]
                  for number, options in of_place.items()}  # fmt: skip
        members[place] = {number: names or params for number, (params, names) in listed.items()}
        if any(isinstance(one, int) for params, _ in listed.values() for one in params):
            numbers[place] = {str(one): name for params, names in listed.values()
                              for one, name in zip(params, names, strict=False) if name in parameters}  # fmt: skip
    found: dict[str, FoundOptimizer] = {}
    of_parameters: dict[str, dict[str, dict[str, str]]] = {}  # place, parameter, option
    nameless = [place for place, names in numbers.items() if not names]
    for leaf, path in leaves.items():
        hit = None if leaf in grouped else _split(_dotted(path).split("."), parameters, numbers)
        if hit is None:
            continue
        marker, place, name, key = hit
        if marker == STATE:
            one = found.setdefault(place, FoundOptimizer(place))
            one.state[name, key] = leaf
            one.leaves.append(leaf)
        else:
            of_parameters.setdefault(place, {}).setdefault(name, {})[key] = leaf
    for place, one in found.items():
        for number, options in groups.get(place, {}).items():
            names = [name for name in members[place][number] if name in parameters]
            one.options.append((names, {key: leaf for key, leaf in options.items() if key not in _NAMES}))
            one.leaves.extend(options.values())
        for name, options in of_parameters.get(place, {}).items():
            one.options.append(([name], {key: leaf for key, leaf in options.items() if key not in _NAMES}))
            one.leaves.extend(options.values())
    return list(found.values()), nameless


def read_groups(found: FoundOptimizer, load: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Parameter groups, as a job saves them; parameters with the same options are one group, those without any are one.

    Raises:
        UnsupportedError: a value cannot be stored.
    """
    groups: dict[bytes, dict[str, Any]] = {}
    for names, options in found.options:
        values = {key: load(leaf) for key, leaf in options.items()}
        alike = codec.encode(values, name=found.place)
        groups.setdefault(alike, {**values, "params": []})["params"] += names
    known = {name for group in groups.values() for name in group["params"]}
    if rest := list(dict.fromkeys(name for name, _ in found.state if name not in known)):
        groups[b""] = {"params": rest}
    return list(groups.values())


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _split(
    parts: Sequence[str], parameters: Collection[str], numbers: Mapping[str, Mapping[str, str]]
) -> tuple[str, str, str, str] | None:
    """Marker, place, parameter and key of ``<place>.<marker>.<parameter>.<key>``; None if this is no such name.

    ``numbers``: parameters by their numbers, of places that have numbers for names.
    """
    for at, marker in enumerate(parts):
        if marker not in (STATE, GROUPS):
            continue
        place = ".".join(parts[:at])
        if place in numbers and marker == STATE:
            known = numbers[place].get(parts[at + 1]) if len(parts) == at + 3 else None
            return None if known is None else (marker, place, known, parts[at + 2])
        for end in range(len(parts) - 1, at + 1, -1):
            if (name := ".".join(parts[at + 1 : end])) in parameters:
                return marker, place, name, ".".join(parts[end:])
    return None
