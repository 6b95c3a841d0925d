"""The tests are tested: without an fsync, a write, a checksum or the no-follow the suite goes red."""

from __future__ import annotations

import pytest

from tests.faults.mutations import FILES, FS, KINDS, MANIFEST, PLAN, SUITE, Mutation, find_all, is_noticed

POWER = ("tests/runtime/store/test_store.py", "power_cut_at_any_call")
# A kind, the function that something is deleted of, and the least part of the suite that sees it. ``make faults``
# deletes all that find_all() finds.
QUICK = [
    pytest.param("fsync of a file", "write_file", POWER, id="fsync of a file"),
    pytest.param("fsync", "_write_files", POWER, id="fsync of the temporary folder"),
    pytest.param("fsync", "_publish", POWER, id="fsync of the root"),
    pytest.param("write", "_write", ("tests/runtime/store/test_store.py", "comes_back"), id="the write"),
    pytest.param(
        "checksum", "read_block", ("tests/runtime/store/test_reader.py", "anywhere_in_the_data"), id="the checksum"
    ),
    pytest.param(
        "no-follow", "open_folder", ("tests/runtime/store/test_reader.py", "linked_checkpoint"), id="the no-follow"
    ),
    pytest.param("plan: flush, fsync", "save", ("tests/core/test_plan_faults.py", "power_cut"), id="a plan's flush"),
]


def found(kind: str, function: str) -> list[Mutation]:
    return [one for one in find_all() if one.kind == kind and one.place.startswith(f"{function}: ")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "function", "suite"), QUICK)
def test_the_suite_goes_red_without(kind: str, function: str, suite: tuple[str, str]) -> None:
    """The last of several: of a block's refusals the checksum, of a plan's calls its fsync."""
    assert is_noticed(found(kind, function)[-1], suite)


@pytest.mark.slow
def test_the_suite_stays_green_if_nothing_is_deleted() -> None:
    assert not is_noticed(None, ("tests/runtime/store/test_store.py", "comes_back"))


def test_what_protects_data_is_found() -> None:
    """The places that this has to know of; more are found as they are written."""
    places = {(one.kind, one.place.partition(":")[0]) for one in find_all()}
    assert {
        ("fsync of a file", "write_file"), ("fsync", "_write_files"), ("fsync", "_publish"),
        ("fsync of an exchange", "settle"), ("write", "_write"), ("checksum", "read_block"),
        ("digest", "loads"), ("no-follow", "open_folder"),
        ("no-follow", "open_lock"), ("plan: flush, fsync", "save"),
    } <= places  # fmt: skip
    assert {one.kind for one in find_all()} == set(KINDS)
    assert {FILES, FS, MANIFEST, PLAN} <= set(SUITE)
