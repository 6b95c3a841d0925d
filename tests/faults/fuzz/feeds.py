"""What reads files, and what a result must satisfy to count as valid: one function a target.

Each gives an input to its reader and returns "valid", or lets the reader's error pass. A result that is not valid after
all is an AssertionError. Nothing is imported here that only makes inputs: memory is measured where this runs.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from checkflow.core import plan as plans
from checkflow.core.reports import capture_times, run_report
from checkflow.planner.schedule import replay
from checkflow.runtime.format import codec, manifest
from checkflow.runtime.interval.profile import Identity, ProfileCache
from checkflow.runtime.store import files as store_files
from checkflow.runtime.store.reader import open_checkpoint

Feed = Callable[[Any], str]

IDENTITY = Identity("model", "batch", "plan", "cpu", 1, "ext4")  # of the job whose profile is read
_MOST_PLAYED_STEPS = 10_000  # of a plan's horizon: longer ones are read, and not played through
_DATA_START = 8


class Folder(NamedTuple):
    """The files of a checkpoint. ``original``: where nothing was sealed anew, what they must give if they give any."""

    step: int
    files: dict[str, bytes]
    original: dict[str, bytes] | None


def make_feeds(directory: Path) -> dict[str, Feed]:
    """All of them, by the target's name; ``directory`` is where those that read from a disk find their inputs."""
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "manifest": feed_manifest,
        "safetensors header": feed_header,
        "extra state": feed_extra,
        "plan": feed_plan,
        "report": feed_report,
        "captures": feed_captures,
        "profile": lambda data: feed_profile(directory, data),
        "checkpoint": lambda item: feed_folder(directory, Folder(*item)),
    }


def feed_manifest(data: bytes) -> str:
    files = manifest.files_of(data, "manifest.json")
    read = manifest.loads(data, "manifest.json")
    assert files in (None, read.files)
    assert manifest.loads(manifest.dumps(read), "again") == read
    return "valid"


def feed_header(item: tuple[bytes, int]) -> str:
    """The text of a safetensors file's header, and the size of the file."""
    text, size_bytes = item
    found, _ = store_files.parse_header(Path("x.safetensors"), text, size_bytes)
    data = _DATA_START + len(text)
    again = {
        key: {"dtype": one.code, "shape": one.shape, "data_offsets": [one.begin - data, one.end - data]}
        for key, one in found.items()
    }
    spelled = json.dumps(again).encode().ljust(len(text))
    shift = len(spelled) - len(text)
    read, _ = store_files.parse_header(Path("again"), spelled, size_bytes + shift)
    moved = {key: store_files.StoredTensor(one.code, one.shape, one.begin - shift, one.end - shift)
             for key, one in read.items()}  # fmt: skip
    assert moved == found
    assert all(data <= one.begin <= one.end <= size_bytes for one in found.values())
    return "valid"


def feed_extra(data: bytes) -> str:
    """Decode; what comes out must be of the input's size, and encode to bytes that stay the same from then on."""
    again = codec.encode(codec.decode(data))
    # A float16's two bytes may come back as a float of nine; no more than that.
    assert len(again) <= 16 * len(data) + 1024, f"{len(data)} bytes made {len(again)}"
    assert codec.encode(codec.decode(again)) == again
    return "valid"


def feed_plan(data: bytes) -> str:
    plan = plans.loads(data)
    assert plans.dumps(plan) == data
    if plan.horizon_steps <= _MOST_PLAYED_STEPS:
        replay.check_plan(plan)  # as before each run: it may refuse what only arithmetic finds
    return "valid"


def feed_report(data: bytes) -> str:
    runs = run_report.loads(data, "report.json")
    assert run_report.loads(run_report.dump_file(map(run_report.dump_run, runs)), "again") == runs
    return "valid"


def feed_captures(data: bytes) -> str:
    file = capture_times.loads(data, "captures.json")
    assert capture_times.loads(capture_times.dumps(file), "again") == file
    return "valid"


def feed_profile(directory: Path, data: bytes) -> str:
    """A profile is passed over where it cannot be read. Each run of a job reads it once."""
    cache = ProfileCache(directory)
    cache.path.write_bytes(data)
    with _Quiet():
        costs = cache.find(IDENTITY)
        if costs is None:
            return "passed over"
        cache.keep(IDENTITY, costs)
        assert ProfileCache(directory).find(IDENTITY) == costs
    assert 0 < costs.iteration_seconds < math.inf
    return "valid"


class _Quiet:
    """Warnings about files that are passed over are what is asked for here; a hundred thousand lines are not."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("checkflow")
        self._before, self._logger.disabled = self._logger.disabled, True

    def __exit__(self, *_: object) -> None:
        self._logger.disabled = self._before


def feed_folder(directory: Path, item: Folder) -> str:
    """A whole checkpoint: verified, and read twice."""
    path = directory / store_files.step_name(item.step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, data in item.files.items():
        (path / name).write_bytes(data)
    content = content_of(path)
    if item.original is not None:
        assert content == item.original, "damaged data was returned as good"
        return "valid"
    assert content_of(path) == content
    codec.decode(content[""])
    return "valid"


def content_of(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes, and under "" the extra state's."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        found = {"": checkpoint.extra_bytes}
        for name in checkpoint.tensors:
            data = bytearray(checkpoint.size_bytes(name))
            checkpoint.read_into(name, memoryview(data))
            found[name] = bytes(data)
        return found
