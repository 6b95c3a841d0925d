"""Loads weights into an existing model without a Checkpointer: all of them, or what fits, with a report.

Every name, shape, dtype and checksum is checked before the first byte of the model is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from checkflow.core.errors import MismatchError
from checkflow.core.state import DEFAULT_MODEL, collect_state, dtype_name
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.state.collect import modules_with_extra_state
from checkflow.runtime.state.restore import refuse_difference
from checkflow.runtime.weights.source import open_weights
from checkflow.runtime.weights.torch_files import as_tensor
from checkflow.runtime.weights.weights import EXTRA_STATE, Described, Weights, clean, renamed, without_optimizer

_MOST_NAMES = 10  # of a list in a message
_PREFIX = f"{DEFAULT_MODEL}/"
Rename = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class OtherKind:
    """A tensor whose dtype or shape differs between source and model, each as "float32[10, 4]"."""

    name: str
    source: str
    model: str

    def __str__(self) -> str:
        return f"{self.name} ({self.source}, in the model {self.model})"


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_weights` did. Names are those of the model's state dict; in ``unexpected`` the source's.

    Attributes:
        loaded: tensors that were set; tied ones under their first name.
        missing: in the model, not in the source; they keep their values.
        unexpected: in the source, not in the model.
        misshapen: of another shape, or of a dtype that is not cast (an integer for a float); they keep their values.
        cast: loaded from another dtype of the same kind.
        left_out: what the source holds beside the model's weights.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[OtherKind, ...]
    cast: tuple[OtherKind, ...]
    left_out: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether model and source have the same tensors."""
        return not (self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded from {self.source}"]
        for what in ("missing", "unexpected", "misshapen", "cast", "left_out"):
            if found := getattr(self, what):
                lines.append(f"  {what.replace('_', ' ')}, {len(found)}: {_some(found)}")
        return "\n".join(lines)


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    key: str | None = None,
) -> LoadReport:
    """Set a model's parameters and persistent buffers in place, keeping their types and devices.

    Floating-point values are cast to the model's floating-point dtype, and the report says so. Prefixes of
    DistributedDataParallel and torch.compile (``module.``, ``_orig_mod.``) are ignored on either side. Call it before a
    Checkpointer is made: what that resumes from replaces these weights.

    Args:
        source: a directory of checkpoints (the newest), ``DIRECTORY@STEP``, or one checkpoint; a safetensors file, one
            in shards (its index, or their folder), a file of ``torch.save``, a folder of torch.distributed.checkpoint.
        strict: refuse a source that lacks a tensor, has a further one, or one of another shape or kind; nothing is
            written then. False: take what fits.
        rename: prefixes of the source's names to the model's (the longest that fits counts: ``{"backbone.":
            "encoder."}``), or a function of a name, which returns None to leave the tensor out.
        key: the name of the model in a source of several.

    Raises:
        MismatchError: strict, and source and model differ; or nothing of the source fits; or a rename fits no name, or
            gives two tensors one name. The model is unchanged.
        CorruptCheckpointError: the source is damaged. The model is unchanged, unless the damage came meanwhile.
        StorageError: it cannot be read.
        UnsupportedError: the model's state has no memory of its own.
    """
    live, aliases = _live(model)
    with open_weights(source, key=key) as found:
        wrapped = bool(aliases) and all(name.startswith("module.") for name in aliases)
        weights = clean(without_optimizer(found), strip=not wrapped)
        if rename is not None:
            weights = renamed(weights, _renaming(rename, weights))
        modules = {
            (path.partition("/")[2] + f".{EXTRA_STATE}").removeprefix("."): module
            for path, module in modules_with_extra_state({DEFAULT_MODEL: model})
        }
        names = _names(aliases, weights)
        report = _compare(weights, live, aliases, names, modules.keys())
        if strict and not report.complete:
            raise MismatchError(
                f"{report.source} does not fit the model: missing {_counted(report.missing)}; unexpected "
                f"{_counted(report.unexpected)}; misshapen {_counted(report.misshapen)}; strict=False takes what fits"
            )
        if not report.loaded:
            raise MismatchError(
                f"nothing of {report.source} fits the model: it has {_some([*weights.tensors])}, the model "
                f"{_some([*live])}; pass rename={{'old.': 'new.'}}"
            )
        weights.verify()
        with torch.no_grad():
            for name in report.loaded:
                if name in live:
                    origin = weights.tensors[weights.ties.get(names[name], names[name])]
                    live[name].detach().copy_(as_tensor(origin, weights.read(names[name])))
        for name, value in weights.extras.items():
            if name in modules:
                modules[name].set_extra_state(value)
    return report


def _live(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model's tensors by their first names, and all names with the first one of each."""
    state = collect_state({DEFAULT_MODEL: model}, {})
    live = {item.name.removeprefix(_PREFIX): item.tensor for item in state.tensors}
    for name, tensor in live.items():
        if tensor.is_meta:
            raise MismatchError(f"{name} is on the meta device: give the model memory first (model.to_empty(device=…))")
    further = {further.removeprefix(_PREFIX): name.removeprefix(_PREFIX) for further, name in state.ties}
    return live, {name: name for name in live} | further


def _names(aliases: Mapping[str, str], weights: Weights) -> dict[str, str]:
    """The source's name for each of the model's tensors that it has; MismatchError if tied names differ in value."""
    names: dict[str, str] = {}
    for alias, first in aliases.items():
        if alias not in weights.tensors and alias not in weights.ties:
            continue
        other = names.setdefault(first, alias)
        if weights.ties.get(alias, alias) != weights.ties.get(other, other):
            refuse_difference(
                weights.where, other, alias,
                lambda name: (str(weights.tensors[weights.ties.get(name, name)]), weights.read(name)), "model",
            )  # fmt: skip
    return names


def _compare(
    weights: Weights,
    live: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    names: Mapping[str, str],
    modules: Iterable[str],
) -> LoadReport:
    loaded, misshapen, cast = [], [], []
    for name, tensor in live.items():
        if name not in names:
            continue
        have = weights.tensors[weights.ties.get(names[name], names[name])]
        want = Described(dtype_name(tensor.dtype), tuple(tensor.shape))
        if have != want:
            other = OtherKind(name, str(have), str(want))
            if not _castable(have, want):
                misshapen.append(other)
                continue
            cast.append(other)
        loaded.append(name)
    extras = list(modules)
    missing = [name for name in live if name not in names] + [name for name in extras if name not in weights.extras]
    unexpected = [name for name in (*weights.tensors, *weights.ties) if name not in aliases]
    return LoadReport(
        weights.where, (*loaded, *(name for name in extras if name in weights.extras)), tuple(missing),
        (*unexpected, *(name for name in weights.extras if name not in extras)), tuple(misshapen), tuple(cast),
        weights.left_out,
    )  # fmt: skip


def _castable(have: Described, want: Described) -> bool:
    """Between floating-point types, and between complex ones; not types that pack several numbers into a byte."""
    kinds = [getattr(torch, one.dtype) for one in (have, want)]
    packed = any(STORED_TYPES[one.dtype].packed for one in (have, want) if one.dtype in STORED_TYPES)
    alike = all(kind.is_floating_point for kind in kinds) or all(kind.is_complex for kind in kinds)
    return have.shape == want.shape and alike and not packed


def _renaming(rename: Rename, weights: Weights) -> Callable[[str], str | None]:
    if callable(rename):
        return rename
    olds = sorted(rename, key=len, reverse=True)
    names = (*weights.tensors, *weights.ties, *weights.extras)
    for old in olds:
        if not any(name.startswith(old) for name in names):
            raise MismatchError(f"rename: no name in {weights.where} begins with {old!r}; it has {_some(names)}")

    def change(name: str) -> str:
        old = next((old for old in olds if name.startswith(old)), None)
        return name if old is None else rename[old] + name.removeprefix(old)

    return change


def _some(found: Iterable[object]) -> str:
    return ", ".join(_few([str(one) for one in found]))


def _few(words: list[str]) -> Iterator[str]:
    yield from words[:_MOST_NAMES]
    if len(words) > _MOST_NAMES:
        yield f"and {len(words) - _MOST_NAMES} more"


def _counted(found: tuple[object, ...]) -> str:
    return f"{len(found)}: {_some(found)}" if found else "none"
