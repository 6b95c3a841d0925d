"""Where files are written, and who may read them: in their directory, through no link, with the user's umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.weights.exporter import export
from tests.faults.fuzz.targets import make_corpus
from tests.support.shard_tools import World

# Who may read what is written


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory: Path, umask: int, besides: int = 0) -> set[str]:
    """The names of all that is there, each of it with the mode that the umask leaves; no file is for all to write."""
    found = list(directory.rglob("*"))
    for path in found:
        expected = 0o600 if path.name == ".lock" else (0o777 if path.is_dir() else 0o664) & ~umask
        assert path.stat().st_mode & 0o7777 & ~besides == expected & ~besides, path
    return {path.name for path in found}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0], indirect=True, ids=oct)
def test_files_and_directories_have_the_modes_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    make_corpus(tmp_path / "corpus")
    assert {
        "manifest.json", "state.msgpack", ".lock", "report.json", "profile.json", "step-00000002"
    } <= modes(tmp_path / "corpus", umask)  # fmt: skip
    World().save(tmp_path / "shards", 1, 2)
    assert {"manifest.json", ".shards.json", "step-00000001"} <= modes(tmp_path / "shards", umask)
    (tmp_path / "exports").mkdir()
    with open_checkpoint(find(tmp_path / "corpus" / "job")[0]) as checkpoint:
        for name, form in (("weights.safetensors", "safetensors"), ("weights.pt", "torch"), ("dcp", "dcp")):
            export(checkpoint, tmp_path / "exports" / name, form)
    assert {"weights.safetensors", "weights.pt", "dcp"} <= modes(tmp_path / "exports", umask, 0o002)  # torch's


def test_staging_memory_has_no_name_that_another_user_could_open() -> None:
    from checkflow.runtime.memory_tier.staging import StagingBuffers

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


# Links that lead away


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file that nobody may change."""
    path = tmp_path / "precious"
    path.write_bytes(b"x")
    yield path
    assert path.read_bytes() == b"x"


def test_a_job_writes_through_no_link(tmp_path: Path, precious: Path) -> None:
    """Not at the names of its files, nor at those of their drafts."""
    directory = tmp_path / "corpus"
    planted = [directory / "job" / name for name in ("report.json", ".report.json.tmp", ".broken-report.json")]
    planted += [directory / name for name in ("profile.json", ".profile.json.tmp")]
    (directory / "job").mkdir(parents=True)
    for path in planted:
        path.symlink_to(precious)
    make_corpus(directory)
    for name in ("job/report.json", "profile.json"):
        assert (directory / name).is_file()
        assert not (directory / name).is_symlink()


@pytest.mark.parametrize("name", [".tmp-shards", ".shards.json"])
def test_shards_are_written_through_no_link(tmp_path: Path, precious: Path, name: str) -> None:
    """A board that is a link is replaced, and so is the draft of one."""
    directory, world = tmp_path / "shards", World()
    world.save(directory, 1, 2)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(precious)
    world.save(directory, 2, 2)
    world.check(directory, 2)
