"""Inputs for everything that reads files, made from real files. What reads them: ``feeds``."""

from __future__ import annotations

import collections
import datetime
import math
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash
from pydantic import TypeAdapter, ValidationError
from torch import nn

from checkflow import api
from checkflow.api import Checkpointer
from checkflow.core import plan as plans
from checkflow.core.plan import Plan
from checkflow.runtime.format import codec, layout, manifest
from checkflow.runtime.interval.algorithm import Costs
from checkflow.runtime.interval.profile import ProfileCache
from checkflow.runtime.store import files as store_files
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from tests.faults.fuzz import mutation
from tests.faults.fuzz.feeds import IDENTITY, Folder, content_of
from tests.faults.fuzz.mutation import Pairs, Raw
from tests.faults.plan_faults import good_plan
from tests.support.oracle import random_plan
from tests.support.store_tools import fill, record, small_layout

_DATA_START = 8


@dataclass(frozen=True)
class Target:
    """One reader's inputs. They cross to it as msgpack: bytes, or what of lists, dicts, numbers and None holds them.

    Args:
        make: draws an input.
        graft: an input with a value of hypothesis's at a place that is drawn; None: there are no such inputs.
    """

    name: str
    make: Callable[[random.Random], Any]
    graft: Callable[[random.Random, Any], Any] | None = None


@dataclass(frozen=True)
class Corpus:
    """Real files of the project: of a job that trained by a plan, and of a store with every kind of file."""

    manifests: tuple[bytes, ...]
    checkpoints: tuple[Path, ...]
    headers: tuple[bytes, ...]  # the text of each, with the size of its file
    header_sizes: tuple[int, ...]
    extras: tuple[bytes, ...]
    plans: tuple[bytes, ...]
    report: bytes
    captures: bytes
    profile: bytes


def every_kind_of_value() -> dict[str, Any]:
    """Extra state with a value of each type that it may hold."""
    plus_two = datetime.timezone(datetime.timedelta(hours=2), "CEST")
    tensors: list[Any] = [
        torch.arange(6.0).reshape(2, 3),
        torch.zeros(0, 3),
        nn.Parameter(torch.ones(2)),
        torch.Size([2]),
        torch.arange(6.0).reshape(2, 3).t(),
        codec.Stored("model/0.weight"),
        {codec.Named("optimizer", "0.weight"): 1},
    ]
    return {
        "plain": [None, True, -1, 2**63, 1.5, "text", b"bytes", {"a": [1, {"b": 2}]}],
        "containers": [(1, 2), {1: "a", None: "b"}, {1, 2, 3}, frozenset("ab"), collections.deque([1, 2], 5)],
        "mappings": [
            collections.Counter("aab"), collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {"k": [1]})
        ],
        "numbers": [2**200, -(2**70), 1 + 2j, bytearray(b"ab"), range(1, 9, 2), slice(None, 5, 2), math.inf, math.nan],
        "dates": [
            datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=plus_two), datetime.date(2024, 1, 1),
            datetime.time(1, 2, fold=1), datetime.timedelta(1, 2, 3), datetime.UTC, pathlib.Path("a/b"),
        ],
        "arrays": [np.arange(6.0).reshape(2, 3), np.zeros((2, 0)), np.array(["ab", ""]), np.float32(1.5),
                   np.datetime64("2024-01-01"), np.array([b"x"]), np.str_("")],
        "torch": [*tensors, torch.float32, torch.device("cpu"), torch.zeros(2, dtype=torch.bfloat16)],
        "generators": {"python": random.Random(0).getstate(), "torch": torch.get_rng_state()},
    }  # fmt: skip


def make_corpus(directory: Path) -> Corpus:
    """Train a small job by a plan, and fill a store beside it; all files lie below ``directory`` afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())

    def iterate() -> None:
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()

    iterate()
    made = [random_plan({"model": model}, {"optimizer": optimizer}, seed, interval=1 + seed) for seed in range(3)]
    job, kinds = directory / "job", directory / "kinds"
    with (
        mock.patch.object(api, "check_plan", plans.validate),  # random plans have no link
        Checkpointer(model, optimizer, directory=job, plan=made[0], every=1, audit=1) as checkpointer,
    ):
        for _ in checkpointer.steps(4):
            iterate()
    small = small_layout()
    halves = layout.make_layout([record("a/x", (3, 4)), record("a/y", (7,), "uint8"), record("b/z", (2, 2), "float16")])
    with Store(kinds, run_id="fuzz", keep_latest=3) as store:
        values = codec.encode(every_kind_of_value())
        store.commit(1, small, fill(small, 1)[0], values, {"epoch": 1, "loss": [0.5]},
                     ties=[("model/tied", "model/mask")], absent=["optimizer/none"], plan_digest="0" * 64)  # fmt: skip
        store.commit(2, halves, fill(halves, 2)[0], codec.encode({"n": 1}), {"epoch_end": True, "deep": {"a": [[]]}})
    checkpoints = (*find(job), *find(kinds))
    headers: list[bytes] = []
    sizes: list[int] = []
    for path in sorted(file for folder in checkpoints for file in folder.glob("*.safetensors")):
        data = path.read_bytes()
        headers.append(data[_DATA_START : _DATA_START + int.from_bytes(data[:_DATA_START], "little")])
        sizes.append(len(data))
    profile = ProfileCache(directory)
    profile.keep(IDENTITY, Costs(0.01, 0.002, 0.03, 0.004))
    return Corpus(
        tuple((path / manifest.MANIFEST).read_bytes() for path in checkpoints),
        checkpoints,
        tuple(headers),
        tuple(sizes),
        tuple((path / manifest.EXTRA).read_bytes() for path in checkpoints),
        tuple(plans.dumps(plan) for plan in (*made, good_plan())),
        (job / "report.json").read_bytes(),
        (job / "captures.json").read_bytes(),
        profile.path.read_bytes(),
    )


def make_targets(corpus: Corpus) -> tuple[Target, ...]:
    return (
        _manifest_target(corpus),
        _header_target(corpus),
        _extra_target(corpus),
        _plan_target(corpus),
        _json_target("report", corpus.report),
        _json_target("captures", corpus.captures),
        _profile_target(corpus),
        _folder_target(corpus),
    )


def _changed_json(rng: random.Random, texts: tuple[bytes, ...], trees: tuple[Any, ...]) -> bytes:
    """A changed text: three times of four by its structure."""
    which, other = rng.randrange(len(texts)), rng.randrange(len(texts))
    if rng.randrange(4):
        return mutation.dump(mutation.change_json(rng, trees[which], trees[other]))
    return mutation.change_bytes(rng, texts[which], texts[other])


# The manifest


def _sealed(body: bytes) -> bytes:
    """A manifest with a digest that fits, of JSON without one."""
    text = body.rstrip()[:-1]
    return text + b',"digest":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n'


def _unsealed(data: bytes) -> bytes:
    return data[: -manifest._DIGEST_BYTES] + b"}"


def _manifest_target(corpus: Corpus) -> Target:
    texts = tuple(map(_unsealed, corpus.manifests))
    trees = tuple(map(mutation.parse, texts))

    def make(rng: random.Random) -> bytes:
        if not rng.randrange(10):  # not sealed: nothing of it may reach the parser
            return mutation.change_bytes(rng, rng.choice(corpus.manifests), rng.choice(corpus.manifests))
        return _sealed(_changed_json(rng, texts, trees))

    def graft(rng: random.Random, value: Any) -> bytes:
        return _sealed(mutation.dump(mutation.graft_json(rng, rng.choice(trees), value)))

    return Target("manifest", make, graft)


# The header of a safetensors file


def _header_target(corpus: Corpus) -> Target:
    trees = tuple(map(mutation.parse, corpus.headers))

    def make(rng: random.Random) -> tuple[bytes, int]:
        text = _changed_json(rng, corpus.headers, trees)
        which = rng.randrange(len(corpus.headers))
        data_bytes = corpus.header_sizes[which] - _DATA_START - len(corpus.headers[which])
        return text, _DATA_START + len(text) + data_bytes

    def graft(rng: random.Random, value: Any) -> tuple[bytes, int]:
        text = mutation.dump(mutation.graft_json(rng, rng.choice(trees), value))
        return text, _DATA_START + len(text) + rng.choice(corpus.header_sizes)

    return Target("safetensors header", make, graft)


# The extra state


def _extra_target(corpus: Corpus) -> Target:
    trees = tuple(map(mutation.unpack, corpus.extras))

    def make(rng: random.Random) -> bytes:
        which, other = rng.randrange(len(trees)), rng.randrange(len(trees))
        data = corpus.extras[which]
        if rng.randrange(4):
            data = mutation.pack(mutation.change_packed(rng, trees[which], trees[other]))
        if not rng.randrange(3):
            data = mutation.change_bytes(rng, data, corpus.extras[other])
        return data

    return Target("extra state", make)


# Plans


def _plan_target(corpus: Corpus) -> Target:
    trees = tuple(map(mutation.parse, corpus.plans))
    adapter = TypeAdapter(Plan)

    def sealed(text: bytes) -> bytes:
        """With a digest that fits, and in canonical form, where the text has a plan's types."""
        try:
            return plans.dumps(adapter.validate_json(text))
        except (ValidationError, ValueError):
            return text

    def make(rng: random.Random) -> bytes:
        text = _changed_json(rng, corpus.plans, trees)
        return sealed(text) if rng.randrange(5) else text

    def graft(rng: random.Random, value: Any) -> bytes:
        return sealed(mutation.dump(mutation.graft_json(rng, rng.choice(trees), value)))

    return Target("plan", make, graft)


# The report of a run, and the times of its last captures


def _json_target(name: str, text: bytes) -> Target:
    texts, trees = (text,), (mutation.parse(text),)

    def graft(rng: random.Random, value: Any) -> bytes:
        return mutation.dump(mutation.graft_json(rng, trees[0], value))

    return Target(name, lambda rng: _changed_json(rng, texts, trees), graft)


# The profile of a job, which is passed over where it cannot be read


def _profile_target(corpus: Corpus) -> Target:
    texts = (corpus.profile,)
    trees = (mutation.parse(corpus.profile),)

    def graft(rng: random.Random, value: Any) -> bytes:
        return mutation.dump(mutation.graft_json(rng, trees[0], value))

    return Target("profile", lambda rng: _changed_json(rng, texts, trees), graft)


# A whole checkpoint


def _folder_target(corpus: Corpus) -> Target:
    good = [{entry.name: entry.read_bytes() for entry in path.iterdir()} for path in corpus.checkpoints]
    steps = [store_files.parse_step(path.name) or 0 for path in corpus.checkpoints]
    contents = [content_of(path) for path in corpus.checkpoints]

    def make(rng: random.Random) -> Folder:
        which = rng.randrange(len(good))
        files = dict(good[which])
        name, other = rng.choice(sorted(files)), rng.choice(sorted(files))
        if not rng.randrange(4):  # damage that no one sealed
            files[name] = mutation.change_bytes(rng, files[name], files[other])
            return Folder(steps[which], files, contents[which])
        if name == manifest.MANIFEST:
            files[name] = _with_manifest(rng, files)
        else:
            files[name] = _changed_file(rng, name, files[name], files[other])
            files[manifest.MANIFEST] = _resealed(files)
        return Folder(steps[which], files, None)

    return Target("checkpoint", make)


def _with_manifest(rng: random.Random, files: dict[str, bytes]) -> bytes:
    text = _unsealed(files[manifest.MANIFEST])
    tree = mutation.parse(text)
    return _sealed(_changed_json(rng, (text,), (tree,)))


def _changed_file(rng: random.Random, name: str, data: bytes, donor: bytes) -> bytes:
    """A changed file; of a safetensors file, in most cases its header alone."""
    if not name.endswith(".safetensors") or not rng.randrange(4):
        return mutation.change_bytes(rng, data, donor)
    length = int.from_bytes(data[:_DATA_START], "little")
    text = data[_DATA_START : _DATA_START + length]
    changed = _changed_json(rng, (text,), (mutation.parse(text),))
    told = len(changed) if rng.randrange(8) else rng.choice((0, 2**63, 2**64 - 1, len(data), len(changed) + 1))
    return told.to_bytes(_DATA_START, "little") + changed + data[_DATA_START + length :]


def _resealed(files: dict[str, bytes]) -> bytes:
    """The manifest as someone would make it who wants these files to be taken for good."""
    tree = mutation.parse(_unsealed(files[manifest.MANIFEST]))
    members = {key: index for index, (key, _) in enumerate(tree)}
    tree[members["files"]][1] = Pairs(
        [name, Pairs([["size_bytes", len(data)], ["blocks", _checksums(data)]])]
        for name, data in sorted(files.items())
        if name != manifest.MANIFEST
    )
    return _sealed(mutation.dump(tree))


def _checksums(data: bytes) -> list[str]:
    return [
        xxhash.xxh3_64_hexdigest(data[begin : begin + manifest.BLOCK_BYTES])
        for begin in range(0, len(data), manifest.BLOCK_BYTES)
    ]


__all__ = ["Corpus", "Raw", "Target", "make_corpus", "make_targets"]
