"""Damaged and hostile files, drawn at random: the short form of ``make fuzz``, and what the long one relies on."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import TypeAdapter

from checkflow.core import plan as plans
from checkflow.core.errors import CorruptCheckpointError, PlanError, ReportError
from checkflow.core.machine.device import Device
from checkflow.core.plan import Plan
from checkflow.core.planner_api import PlannerInput
from checkflow.core.reports.run_report import ReportFile
from checkflow.core.small_files import MOST_TIMES
from checkflow.runtime.format import codec, manifest
from checkflow.runtime.interval.profile import KeptProfile
from checkflow.runtime.ranks.records import Board
from checkflow.runtime.shards.writer import Share
from checkflow.runtime.store import files as store_files
from tests.core.test_plan import good_plan
from tests.faults.fuzz import mutation
from tests.faults.fuzz import run as fuzz
from tests.faults.fuzz.process import Reader, reading
from tests.faults.fuzz.targets import Target, make_corpus, make_targets

INPUTS = 400  # by each of the two seeds
# As with hypothesis's examples (conftest.py): the same in every run, unless others are asked for.
DRAWN = secrets.randbelow(2**32) if os.environ.get("HYPOTHESIS_PROFILE") == "random" else 1


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, ...]:
    return make_targets(make_corpus(tmp_path_factory.mktemp("fuzz")))


@pytest.fixture(scope="module")
def by_name(targets: tuple[Target, ...]) -> dict[str, Target]:
    return {target.name: target for target in targets}


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with reading() as found:
        yield found


@pytest.mark.parametrize("seed", [0, DRAWN], ids=["fixed", "drawn"])
def test_any_file_gives_a_valid_result_or_an_error_of_ours(
    targets: tuple[Target, ...], reader: Reader, tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")  # noqa: T201 - what a failure is tried again with
    run = fuzz.Fuzz(seed, tmp_path / "found", reader)
    fuzz.run_all(run, targets, INPUTS)
    assert [(one.where, one.what) for one in run.findings] == [], (
        f"python -m tests.faults.fuzz.run --seed {seed} --only TARGET:NUMBER"
    )
    assert sum(tally.inputs for tally in run.tallies.values()) >= INPUTS
    for name, tally in run.tallies.items():
        assert any(outcome.endswith("Error") or outcome == "passed over" for outcome in tally.outcomes), name
        assert seed or tally.outcomes["valid"], f"no input got through {name}: the changes are too crude"


def test_what_is_not_changed_is_valid(targets: tuple[Target, ...], tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    for data in corpus.manifests:
        assert manifest.dumps(manifest.loads(data, "m")) == data
    for data in corpus.extras:
        codec.decode(data)
        assert mutation.pack(mutation.unpack(data)) == data
    assert json.loads(mutation.dump(mutation.parse(corpus.report))) == json.loads(corpus.report)


def test_an_input_follows_from_seed_and_number(by_name: dict[str, Target]) -> None:
    for target in by_name.values():
        assert fuzz.draw(target, 5, 3) == fuzz.draw(target, 5, 3)


# A reader at fault


def run_broken(fault: str, target: Target, inputs: int, tmp_path: Path, *, warm: bool = False) -> fuzz.Fuzz:
    """A run with a reader that has this fault. ``warm``: after three inputs memory counts."""
    with reading(fault, **({"hang_seconds": 2.0} if fault == "hang" else {})) as reader:
        run = fuzz.Fuzz(0, tmp_path, reader)
        if warm:
            fuzz.run_own(run, target, 0, 3)
            run.warm()
        fuzz.run_own(run, target, 3, inputs)
    return run


@pytest.mark.parametrize(
    ("fault", "what", "details"),
    [
        ("another_error", "KeyError in another_error", "of the reader's own"),
        ("two_lines", "an error of more than one line", "one\ntwo"),
        ("address_space", "MemoryError in address_space", "bytearray"),
        ("abort", "manifest: the reader died of SIGABRT", "in abort"),
        ("leave", "manifest: the reader ended with status 0", ""),
        ("hang", "manifest: the reader hangs", "in hang"),
    ],
)
def test_a_reader_at_fault_is_found_with_the_input_that_shows_it(
    by_name: dict[str, Target], tmp_path: Path, fault: str, what: str, details: str
) -> None:
    run = run_broken(fault, by_name["manifest"], 1, tmp_path)
    assert [(one.where, one.what) for one in run.findings] == [("manifest:3", what)]
    kept = Path(run.findings[0].file)
    assert kept.read_bytes() == fuzz.draw(by_name["manifest"], 0, 3)
    assert details in kept.with_suffix(".txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["memory", "leak"])
def test_memory_that_a_reader_takes_is_found(by_name: dict[str, Target], tmp_path: Path, fault: str) -> None:
    """Whether it keeps a little of each input, or takes much for a moment."""
    run = run_broken(fault, by_name["manifest"], 10, tmp_path, warm=True)
    assert [one.what for one in run.findings] == ["too much memory"]
    assert run.growth_bytes is not None
    assert 90 * 2**20 < run.growth_bytes < 200 * 2**20
    assert (run.findings[0].where == "manifest:3") == (fault == "memory")


@pytest.mark.slow
def test_a_death_ends_no_run(by_name: dict[str, Target], tmp_path: Path) -> None:
    """Others than the manifest's reader do as they should; the memory of one that died is not known."""
    with reading("abort") as reader:
        run = fuzz.Fuzz(0, tmp_path, reader)
        fuzz.run_own(run, by_name["extra state"], 0, 5)
        run.warm()
        fuzz.run_own(run, by_name["manifest"], 0, 1)
        fuzz.run_own(run, by_name["extra state"], 5, 5)
        figures = fuzz.figures_of(run, 0.0)
    assert figures["targets"]["extra state"]["inputs"] == 10
    assert figures["targets"]["manifest"]["outcomes"] == {"!died of SIGABRT": 1}
    assert (figures["memory_growth_bytes"], len(figures["findings"])) == (None, 1)


def test_a_reader_that_gives_damaged_data_is_found(by_name: dict[str, Target], tmp_path: Path) -> None:
    with reading("unverified") as reader:
        run = fuzz.Fuzz(0, tmp_path, reader)
        for number in range(200):
            fuzz.run_own(run, by_name["checkpoint"], number, 1)
            if run.findings:
                break
    assert [one.what.partition(" ")[0] for one in run.findings] == ["AssertionError"]


# What fuzzing found, one row each


def ext(code: int, content: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(content))))


def test_a_number_is_no_bytearray() -> None:
    with pytest.raises(CorruptCheckpointError, match="not bytes"):
        codec.decode(ext(codec.BYTEARRAY, 2**33))


@pytest.mark.parametrize("dtype", ["<U0", "|S0"])
def test_elements_of_no_size_take_no_memory(dtype: str) -> None:
    array = codec.decode(ext(codec.ARRAY, [dtype, [2**40], b""]))
    assert (array.shape, array.nbytes, array.dtype) == ((2**40,), 0, np.dtype(dtype))


def sealed(text: bytes) -> bytes:
    from xxhash import xxh3_128_hexdigest

    return text[:-1] + b',"digest":"' + xxh3_128_hexdigest(text[:-1]).encode() + b'"}\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"world_size":1', b'"world_size":1,"world_size":1'),
        (b'"loss":[0.5]', b'"loss":[0.5],"loss":[0.5]'),
        (b'"loss":[0.5]', b'"loss":[NaN]'),
        (b'"loss":[0.5]', b'"loss":[-Infinity]'),
        (b'"loss":[0.5]', b'"loss":[1e999]'),
        (b'"loss":[0.5]', b'"loss":[' + b"9" * 5000 + b"]"),
    ],
    ids=["key twice", "key twice in info", "NaN", "infinity", "overflow", "5,000 digits"],
)
def test_a_manifest_says_the_same_to_every_reader(tmp_path: Path, old: bytes, new: bytes) -> None:
    text = next(data for data in make_corpus(tmp_path).manifests if old in data)[: -manifest._DIGEST_BYTES] + b"}"
    assert manifest.loads(sealed(text), "m").world_size == 1
    with pytest.raises(CorruptCheckpointError) as caught:
        manifest.loads(sealed(text.replace(old, new, 1)), "m")
    assert "\n" not in str(caught.value)


GOOD_HEADER = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'


@pytest.mark.parametrize(
    "header",
    [
        GOOD_HEADER.replace(b"[2]", b"[2.0]"),
        GOOD_HEADER.replace(b"[2]", b'["2"]'),
        GOOD_HEADER.replace(b"[2]", b"[true]"),
        GOOD_HEADER.replace(b"[2]", b"[-2]"),
        GOOD_HEADER.replace(b"[0,2]", b"[0,2,3]"),
        GOOD_HEADER.replace(b"[0,2]", b'"02"'),
        GOOD_HEADER.decode().encode("utf-16"),
    ],
    ids=["float", "text", "boolean", "negative", "three ends", "ends as text", "UTF-16"],
)
def test_headers_that_other_readers_refuse(header: bytes) -> None:
    store_files.parse_header(Path("x"), GOOD_HEADER, 8 + len(GOOD_HEADER) + 2)
    with pytest.raises(CorruptCheckpointError):
        store_files.parse_header(Path("x"), header, 8 + len(header) + 2)


def test_keys_with_line_breaks_make_messages_of_one_line(by_name: dict[str, Target], tmp_path: Path) -> None:
    from checkflow.core import plan
    from checkflow.core.reports import run_report

    corpus = make_corpus(tmp_path)
    for data, read, kind in (
        (corpus.plans[0], plan.loads, PlanError),
        (corpus.report, lambda text: run_report.loads(text, "r"), ReportError),
    ):
        tree = mutation.parse(data)
        tree.append(["a\nb" * 1000, 1])
        with pytest.raises(kind) as caught:
            read(mutation.dump(tree))  # type: ignore[operator]
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


# Hostile files of many faults


def collections_in(schema: Any, place: str) -> Iterator[tuple[str, bool]]:
    """Each collection of any number of items in what pydantic made of a class, and whether its first fault ends it."""
    if isinstance(schema, dict):
        if schema.get("type") == "tagged-union":  # what JSON has, in ``info``: there is nothing that it is not
            return
        if schema.get("type") in ("list", "set", "frozenset", "dict") or "variadic_item_index" in schema:
            yield place, schema.get("fail_fast", False)
        for key, inner in schema.items():
            if key not in ("metadata", "serialization") and schema.get("name") != "info":
                yield from collections_in(inner, f"{place}.{schema.get('name', key)}")
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from collections_in(inner, place)


@pytest.mark.parametrize("kind", [Plan, ReportFile, manifest.Manifest, Board, Share, PlannerInput, Device, KeptProfile])
def test_a_collection_that_is_read_ends_at_its_first_fault(kind: type[Any]) -> None:
    schema = TypeAdapter(kind).core_schema
    found = list(collections_in(schema, kind.__name__))
    assert found or kind is KeptProfile
    assert [place for place, ends in found if not ends] == []


def test_of_a_million_faults_one_is_told(reader: Reader) -> None:
    """And the others take no memory: what is read takes so many times its own size, and no more."""
    plan = json.loads(plans.dumps(good_plan()))
    faults = b"[" + b"{}," * 1_000_000 + b"{}]"
    members = b",".join(b'"%d":0' % n for n in range(300_000)) + b"}"
    head = b'{"step":1,"run_id":"r","plan_digest":"","world_size":1,"files":{},'
    inputs = [
        ("plan", json.dumps({**plan, "chunks": "x"}).encode().replace(b'"x"', faults)),
        ("plan", json.dumps({**plan, "wait": "x"}).encode().replace(b'"x"', b"{" + members)),
        ("manifest", sealed(head + b'"tensors":{' + members + b"}")),
        ("manifest", sealed(head + b'"tensors":{"a":{"pieces":[{' + members + b"]}}}")),
        ("manifest", sealed(b"{" + members)),
        ("report", b'{"format": "checkflow-report", "version": 1, "runs": ' + faults + b"}"),
        ("report", b'{"format": "checkflow-report", "version": 1, "runs": [{' + members + b"]}"),
    ]
    for name, data in inputs:
        before = reader.resident_bytes()
        reader.forget_highest()
        answer = reader.give(name, data)
        assert (answer.outcome.endswith("Error"), answer.found) == (True, "")
        assert reader.highest_bytes() - before < MOST_TIMES * len(data), (name, data[:100])


LARGE = ("1.5 ", "[]       ", '{"a":0}  ', "members ")  # of each target, in each place


@pytest.mark.slow
def test_large_files_of_hostile_shapes_take_so_many_times_their_size(reader: Reader, tmp_path: Path) -> None:
    """Those that are no denser than real ones, and lack fields or have them all; ``make fuzz`` gives the others too."""
    run = fuzz.Fuzz(0, tmp_path / "found", reader)
    files = [one for one in fuzz.large_files(make_corpus(tmp_path)) if one[1].startswith(LARGE)]
    assert len(files) == len(LARGE) * (4 + 2 * (4 + 3 + 4 + 2))
    fuzz.run_large(run, files)
    assert [(one.where, one.what) for one in run.findings] == []


def test_memory_that_a_large_file_takes_is_found(tmp_path: Path) -> None:
    with reading("memory") as reader:
        run = fuzz.Fuzz(0, tmp_path, reader)
        fuzz.run_large(run, [("manifest", "text", b"x" * fuzz.LARGE_BYTES)])
    assert [(one.where, one.what) for one in run.findings] == [("manifest:text", "memory of a large manifest")]


def test_own_random_numbers_alone_decide() -> None:
    tree = mutation.parse(b'{"a":[1,2,{"b":null}],"c":"text"}')
    one, other = (mutation.dump(mutation.change_json(random.Random(3), tree, tree)) for _ in range(2))
    assert one == other
    assert mutation.dump(tree) == b'{"a":[1,2,{"b":null}],"c":"text"}'
