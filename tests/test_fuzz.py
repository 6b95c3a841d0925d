"""Damaged and hostile files, drawn at random: the short form of ``make fuzz``, and what the long one relies on."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import fuzz
import fuzz_mutation as mutation
import msgpack
import numpy as np
import pytest
from fuzz_targets import Target, make_corpus, make_targets

from checkflow.errors import CorruptCheckpointError, PlanError, ReportError
from checkflow.runtime import extra_state, manifest, opening

INPUTS = 400  # by each of the two seeds


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, ...]:
    directory = tmp_path_factory.mktemp("fuzz")
    return make_targets(make_corpus(directory / "corpus"), directory / "inputs")


@pytest.fixture(scope="module")
def by_name(targets: tuple[Target, ...]) -> dict[str, Target]:
    return {target.name: target for target in targets}


@pytest.mark.parametrize("seed", [0, secrets.randbelow(2**32)], ids=["fixed", "drawn"])
def test_any_file_gives_a_valid_result_or_an_error_of_ours(
    targets: tuple[Target, ...], tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")  # noqa: T201 - what a failure is tried again with
    run = fuzz.Fuzz(seed, tmp_path / "found")
    with fuzz.bounded_address_space():
        fuzz.run_all(run, targets, INPUTS)
    assert [(one.where, one.what) for one in run.findings] == [], (
        f"python tests/fuzz.py --seed {seed} --only TARGET:NUMBER"
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
        extra_state.decode(data)
        assert mutation.pack(mutation.unpack(data)) == data
    assert json.loads(mutation.dump(mutation.parse(corpus.report))) == json.loads(corpus.report)


def test_an_input_follows_from_seed_and_number(by_name: dict[str, Target]) -> None:
    for target in by_name.values():
        assert fuzz.draw(target, 5, 3) == fuzz.draw(target, 5, 3)


def test_a_reader_that_lets_another_error_pass_is_found(by_name: dict[str, Target], tmp_path: Path) -> None:
    def feed(data: bytes) -> str:
        raise KeyError("of the reader's own")

    run = fuzz.Fuzz(0, tmp_path)
    fuzz.run_own(run, Target("manifest", by_name["manifest"].make, feed), 0, 3)
    assert [one.what for one in run.findings] == ["KeyError in feed"]
    assert Path(run.findings[0].file).read_bytes() == fuzz.draw(by_name["manifest"], 0, 0)


def test_a_reader_that_gives_damaged_data_is_found(
    by_name: dict[str, Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkflow.runtime import files, reader

    def read_block(file: opening.OpenFile, block: int, out: memoryview) -> None:
        files.read_all(file.fd, out, block * manifest.BLOCK_BYTES)

    monkeypatch.setattr(reader, "read_block", read_block)
    run = fuzz.Fuzz(0, tmp_path)
    fuzz.run_own(run, by_name["checkpoint"], 0, 200)
    assert any(one.what.startswith("AssertionError") for one in run.findings)


# What fuzzing found, one row each


def ext(code: int, content: object) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(content))))


def test_a_number_is_no_bytearray() -> None:
    with pytest.raises(CorruptCheckpointError, match="not bytes"):
        extra_state.decode(ext(extra_state.BYTEARRAY, 2**33))


@pytest.mark.parametrize("dtype", ["<U0", "|S0"])
def test_elements_of_no_size_take_no_memory(dtype: str) -> None:
    array = extra_state.decode(ext(extra_state.ARRAY, [dtype, [2**40], b""]))
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
    opening.parse_header(Path("x"), GOOD_HEADER, 8 + len(GOOD_HEADER) + 2)
    with pytest.raises(CorruptCheckpointError):
        opening.parse_header(Path("x"), header, 8 + len(header) + 2)


def test_keys_with_line_breaks_make_messages_of_one_line(by_name: dict[str, Target], tmp_path: Path) -> None:
    from checkflow import plan, run_report

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


# Who may read what is written


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    import os

    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0], indirect=True, ids=oct)
def test_files_and_directories_have_the_modes_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    make_corpus(tmp_path / "corpus")
    seen = set()
    for path in (tmp_path / "corpus").rglob("*"):
        mode = path.stat().st_mode & 0o7777
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, path.name
        seen.add(path.name)
    assert {"manifest.json", "state.msgpack", ".lock", "report.json", "profile.json", "step-00000002"} <= seen


def test_staging_memory_has_no_name_that_another_user_could_open() -> None:
    from checkflow.runtime.staging import StagingBuffers

    pool = StagingBuffers(1)
    pool.grow(1 << 20)
    buffer = pool.take()
    line = next(
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= buffer.address < int(line.split()[0].split("-")[1], 16)
    )
    assert line.split()[1] == "rw-p"  # private to this process, and of no file
    assert line.split()[4] == "0"
    pool.give_back(buffer)
    pool.close()


def test_own_random_numbers_alone_decide() -> None:
    tree = mutation.parse(b'{"a":[1,2,{"b":null}],"c":"text"}')
    one, other = (mutation.dump(mutation.change_json(random.Random(3), tree, tree)) for _ in range(2))
    assert one == other
    assert mutation.dump(tree) == b'{"a":[1,2,{"b":null}],"c":"text"}'
