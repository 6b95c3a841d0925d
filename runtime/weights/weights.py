"""One model's weights, under whatever names, and bounded reads of the files in which they lie."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from checkflow.core import small_files
from checkflow.core.errors import CorruptCheckpointError, MismatchError, StorageError
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.system import fs

Form = Literal["safetensors", "dcp", "torch", "checkflow"]
EXTRA_STATE = "_extra_state"  # torch's key for what a module's get_extra_state gives
DCP_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor's dtype, by torch's name without "torch.", and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * STORED_TYPES[self.dtype].element_bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class SavedOptimizer:
    """The state of an optimizer beside a model's weights, by the model's names of parameters.

    Attributes:
        place: in the source, for messages.
        tensors: by parameter and key, such as ("layer.weight", "exp_avg").
        values: what is no tensor, such as a step that is a number, by parameter.
        read_into: fills a buffer of a tensor's size with its row-major bytes.
        read_groups: the options of parameter groups, each with the names of its "params".
        verify: reads what has checksums and compares it.
    """

    place: str
    tensors: Mapping[tuple[str, str], Described]
    values: Mapping[str, Mapping[str, Any]]
    read_into: Callable[[tuple[str, str], memoryview], None] = field(repr=False)
    read_groups: Callable[[], list[dict[str, Any]]] = field(repr=False)
    verify: Callable[[], None] = field(repr=False)

    def renamed(self, names: Mapping[str, str]) -> SavedOptimizer:
        """The same for a model whose parameters have other names; without those that have none."""
        olds = {new: old for old, new in names.items()}

        def groups() -> list[dict[str, Any]]:
            kept = ((group, [names[one] for one in group["params"] if one in names]) for group in self.read_groups())
            return [{**group, "params": params} for group, params in kept if params]

        return dataclasses.replace(
            self,
            tensors={(names[of], key): one for (of, key), one in self.tensors.items() if of in names},
            values={names[of]: values for of, values in self.values.items() if of in names},
            read_into=lambda one, buffer: self.read_into((olds[one[0]], one[1]), buffer),
            read_groups=groups,
        )


@dataclass(frozen=True)
class Weights:
    """One model's weights in an open source.

    Attributes:
        where: the source, for messages.
        tensors: by the keys of the model's state dict.
        ties: further name to a name in ``tensors``, where the source knows that both are one tensor.
        extras: what modules gave as extra state, by "<module>._extra_state".
        left_out: names of what else the source holds.
        read_into: fills a buffer of a tensor's size with its row-major bytes.
        verify: reads what has checksums and compares it.
        optimizer: what the source holds of the optimizer of these weights.
    """

    where: str
    form: Form
    tensors: Mapping[str, Described]
    read_into: Callable[[str, memoryview], None] = field(repr=False)
    verify: Callable[[], None] = field(repr=False)
    ties: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    optimizer: SavedOptimizer | None = None

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.tensors.values())

    def read(self, name: str) -> bytearray:
        """The row-major bytes of a tensor, or of a further name of one."""
        data = bytearray(self.tensors[self.ties.get(name, name)].size_bytes)
        self.read_into(self.ties.get(name, name), memoryview(data))
        return data


def renamed(weights: Weights, rename: Callable[[str], str | None]) -> Weights:
    """The same under other names; what is renamed to None is left out.

    Raises:
        MismatchError: two get one name.
    """
    names: dict[str, str] = {}  # new to old
    gone = []
    for old in (*weights.tensors, *weights.ties, *weights.extras):
        new = rename(old)
        if new is None:
            gone.append(old)
        elif new in names:
            raise MismatchError(f"{weights.where}: {names[new]!r} and {old!r} would both be named {new!r}")
        else:
            names[new] = old
    news = {old: new for new, old in names.items()}
    tensors: dict[str, Described] = {}
    ties: dict[str, str] = {}
    firsts: dict[str, str] = {}  # of each tensor, by its old name: the new name under which it stays
    for old in (*weights.tensors, *weights.ties):
        if (new := news.get(old)) is None:
            continue
        root = weights.ties.get(old, old)
        if root in firsts:
            ties[new] = firsts[root]
        else:
            firsts[root] = new
            tensors[new] = weights.tensors[root]
    roots = {new: root for root, new in firsts.items()}
    return dataclasses.replace(
        weights, tensors=tensors, ties=ties,
        extras={news[old]: value for old, value in weights.extras.items() if old in news},
        left_out=(*weights.left_out, *gone),
        optimizer=None if weights.optimizer is None else weights.optimizer.renamed(news),
        read_into=lambda name, buffer: weights.read_into(roots[name], buffer),
    )  # fmt: skip


def without_optimizer(weights: Weights) -> Weights:
    """The weights alone."""
    if weights.optimizer is None:
        return weights
    return dataclasses.replace(weights, optimizer=None, left_out=(*weights.left_out, weights.optimizer.place))


def clean(weights: Weights, *, strip: bool = True) -> Weights:
    """Without what wrappers put before names: ``_orig_mod.`` of torch.compile anywhere, and, if ``strip``, ``module.``
    of DistributedDataParallel where every name begins with it."""
    names = [
        ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name in (*weights.tensors, *weights.ties, *weights.extras)
    ]
    wrapped = strip and bool(names) and all(name.startswith("module.") for name in names)

    def rename(name: str) -> str:
        plain = ".".join(part for part in name.split(".") if part != "_orig_mod")
        return plain.removeprefix("module.") if wrapped else plain

    return renamed(weights, rename)


def read_bounded(path: Path, most_bytes: int) -> bytearray:
    """A whole regular file, of a size that is looked at before memory is taken."""
    fd, size = open_regular(path)
    try:
        if size > most_bytes:
            raise CorruptCheckpointError(f"{path} has {size} bytes, more than {most_bytes}")
        data = bytearray(size)
        read_exactly(path, fd, 0, memoryview(data))
    finally:
        fs.close(fd)
    return data


def plain_name(name: str) -> bool:
    """Whether this names a file in its own folder, and no hidden one."""
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}


def open_regular(path: Path) -> tuple[int, int]:
    """A file that may be behind a link, as in the caches of model hubs, and its size."""
    try:
        return small_files.open_regular(path)
    except small_files.IrregularError:
        raise CorruptCheckpointError(f"{path} is no regular file") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def read_exactly(path: Path, fd: int, begin: int, out: memoryview) -> None:
    flat = out.cast("B")
    try:
        count = fs.read_all(fd, flat, begin)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if count != len(flat):
        raise CorruptCheckpointError(f"{path} is truncated at byte {begin + count}")
