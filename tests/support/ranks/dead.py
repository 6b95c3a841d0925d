"""Ranks that have died, without processes: captures of arrays in shared memory, which nobody holds any more."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checkflow.core.boxes import shares, whole
from checkflow.runtime.format import codec
from checkflow.runtime.format.digest import Digest, digest_memory
from checkflow.runtime.format.layout import Layout, TensorRecord, make_layout
from checkflow.runtime.memory_tier.records import NOTHING, RunLife
from checkflow.runtime.memory_tier.staging import StagingBuffer
from checkflow.runtime.memory_tier.tier import MemoryTier
from checkflow.runtime.ranks.council import Council
from checkflow.runtime.ranks.joining import Alone
from checkflow.runtime.ranks.records import Start, StartReport
from checkflow.runtime.snapshot.capturer import Capture
from checkflow.runtime.start.memory import look, reclaim, reclaim_alone
from checkflow.runtime.store.parts import Source, part_records
from checkflow.runtime.store.retention import Rules
from checkflow.runtime.store.shared import SharedStore
from checkflow.runtime.store.store import Store
from checkflow.runtime.system.aligned_memory import map_address
from tests.support.ranks.tools import arranged, filled, load, part, save
from tests.support.shard_tools import together
from tests.support.store_tools import Array, record

SHAPES = {"model/weight": (5, 3), "model/scalar": (), "optimizer/weight.exp_avg": (5, 3)}


def arrays_of(step: int) -> dict[str, Array]:
    """The state after a step: no two steps have an element alike."""
    return {
        name: np.arange(1000 * step, 1000 * step + int(np.prod(shape)), dtype=np.float64).reshape(shape)
        for name, shape in SHAPES.items()
    }


@dataclass(frozen=True)
class DeadRun:
    """A run whose ranks have died.

    Args:
        kind: how arrays lie on its ranks, of rank_tools.KINDS.
        steps: by rank, those that its memory has.
        by_plan: steps captured by a plan.
        torn: steps whose bytes are others than at the boundary, on the last rank.
    """

    directory: Path
    run_id: str
    kind: str
    steps: tuple[Collection[int], ...]
    base: tuple[int, str] = (NOTHING, "")
    durable: int = NOTHING
    by_plan: Collection[int] = ()
    audited: Collection[int] = ()
    torn: Collection[int] = ()
    info: Callable[[int], Mapping[str, Any]] = field(default=lambda step: {"epoch": step})

    def leave(self) -> list[Path]:
        """Leave the captures; returns the ranks' folders."""
        return [self._leave(rank) for rank in range(len(self.steps))]

    def _leave(self, rank: int) -> Path:
        ranks = len(self.steps)
        tier = MemoryTier(self.directory, RunLife(self.run_id, *self.base, self.durable, rank, ranks))
        layout, sources = _lay_out(self.kind, rank, ranks)
        memories = tier.allocate(max(1, len(self.steps[rank])), max(1, layout.buffer_bytes), None)
        assert memories is not None
        for index, step in enumerate(self.steps[rank]):
            arrays = arrays_of(step)
            values = {
                name: part(arrays[sources[name].tensor], sources[name].box) if name in sources else arrays[name]
                for name in layout.tensors
            }
            memories[index][: layout.buffer_bytes] = bytes(filled(layout, values))
            address, digests = map_address(memories[index]), None
            if step in self.audited:
                digests = _Audited(layout, address)
            if step in self.torn and rank == ranks - 1:
                largest = max(layout.tensors.values(), key=lambda one: one.record.size_bytes)
                memories[index][largest.staging_offset] ^= 1
            capture = Capture(
                step, StagingBuffer(index, memories[index], address), layout, b"", {}, (), (), digests, {},  # type: ignore[arg-type]
                "plan", by_plan=step in self.by_plan, sources=sources,
            )  # fmt: skip
            tier.keep(capture, extra_of(step, rank), dict(self.info(step)))
        assert tier._lock is not None
        assert tier._folder is not None
        os.close(tier._lock)
        os.close(tier._folder)
        assert tier._path is not None
        return tier._path


class _Audited:
    def __init__(self, layout: Layout, address: int) -> None:
        self._digests = {
            name: Digest("xxh3", digest_memory("xxh3", address + one.staging_offset, one.record.size_bytes).value)
            for name, one in layout.tensors.items()
        }

    def take(self) -> dict[str, Digest]:
        return self._digests


def extra_of(step: int, rank: int) -> bytes:
    return codec.encode({"iteration": step, "epoch": 0, "position": step, "turns": 0, "rank": rank})


def _lay_out(kind: str, rank: int, ranks: int) -> tuple[Layout, dict[str, Source]]:
    arrays = arrays_of(0)
    whole_records = {name: record(name, array.shape, array.dtype.name) for name, array in arrays.items()}
    if ranks == 1:
        return make_layout(list(whole_records.values())), {}
    records: list[TensorRecord] = []
    sources: dict[str, Source] = {}
    for name, boxes in shares(arranged(kind, arrays)[rank].values(), rank).items():
        mine, of = part_records(name, boxes, whole_records[name])
        records, sources = records + mine, sources | of
    return make_layout(records, shard=rank, shards=ranks), sources


def save_whole(store: Store, step: int, run_id: str = "") -> None:
    """One process's checkpoint of a step."""
    save(store, step, arranged("one", arrays_of(step)), arrays_of(step), extra=extra_of(step, 0))


def holds(path: Path, step: int) -> bool:
    """Whether a checkpoint holds the state after this step and nothing else."""
    expected = arrays_of(step)
    found = load(path, {name: whole(array.shape) for name, array in expected.items()})
    return all(np.array_equal(found[name], expected[name]) for name in expected)


def start_again(directory: Path, ranks: int, mode: str | int = "auto", **rules: Any) -> list[Any]:
    """Start so many ranks, on threads; returns of rank 0 the steps put on storage, of others what they heard; or what
    they raise. Memory is given back after a start that all agree on.
    """
    if ranks == 1:
        with Store(directory, run_id=uuid.uuid4().hex, **rules) as store:
            newest, give_back = reclaim_alone(store, mode, Alone())
            give_back()
            return [newest]
    values: dict[str, bytes] = {}
    here = threading.Lock()

    def start(rank: int) -> Any:
        council = Council(rank, ranks, "start", lambda: _Dictionary(values, here))
        try:
            return _lead(council, directory, mode, rules) if rank == 0 else _follow(council, directory, rank)
        except BaseException as error:
            council.refuse(error)
            raise
        finally:
            council.close()

    return together(ranks, start)


def _lead(council: Council, directory: Path, mode: str | int, rules: Mapping[str, Any]) -> frozenset[int]:
    done: frozenset[int] = frozenset()
    with Store(directory, run_id=uuid.uuid4().hex, **rules) as store:
        left = look(store.directory, 0, locked=True)

        def choose(reports: Mapping[int, StartReport]) -> int | None:
            nonlocal done
            done = reclaim(store, mode, left, reports, council)
            return max(done, default=None)

        council.agree_start(StartReport({"job": "one"}, left.report()), choose, store.run_id)
        left.give_back()
        council.agree_restored(StartReport({"job": "one"}, restored=True), 30)
        return done


def _follow(council: Council, directory: Path, rank: int) -> Start:
    left = look(directory, rank, locked=False)

    def assist(start: Start, attempt: Any) -> None:
        store = SharedStore(directory, run_id=start.run_id, rules=Rules(), trust=None)
        left.assist(council, store, attempt, start.dead_run_id)

    start = council.agree_start(StartReport({"job": "one"}, left.report()), assist=assist)
    left.give_back()
    council.agree_restored(StartReport({"job": "one"}, restored=True), 30)
    return start


class _Dictionary:
    """A meeting place in memory."""

    def __init__(self, values: dict[str, bytes], here: threading.Lock) -> None:
        self._values, self._here = values, here

    def put(self, key: str, value: bytes) -> None:
        with self._here:
            self._values[key] = value

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        with self._here:
            return {key: self._values[key] for key in keys if key in self._values}

    def drop(self, keys: Collection[str]) -> None:
        with self._here:
            for key in keys:
                self._values.pop(key, None)

    def close(self, *, last: bool = False) -> None:
        """Nothing is open."""
