"""Small files of any origin: what is looked at before anything is made of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkflow.core.graph import Many, Named
from checkflow.core.small_files import IrregularError, check_density, check_fields, open_regular


@dataclass(frozen=True)
class Leaf:
    size: int
    name: str = ""


@dataclass(frozen=True)
class Whole:
    first: Leaf
    leaves: Many[Leaf]
    perhaps: Leaf | None = None
    named: Named[str, Leaf] | None = None
    plain: Any = None


LEAF = {"size": 1}
WHOLE = {"first": LEAF, "leaves": [LEAF, LEAF]}


@pytest.mark.parametrize(
    ("plain", "missing"),
    [
        (WHOLE, None),
        ({**WHOLE, "perhaps": None, "named": {"a": LEAF}, "plain": {}}, None),
        ({**WHOLE, "first": 7, "leaves": {}, "named": []}, None),  # of another type: that is for pydantic
        ([], None),
        ({}, "first"),
        ({"first": LEAF}, "leaves"),
        ({**WHOLE, "first": {"name": "n"}}, "first.size"),
        ({**WHOLE, "leaves": [LEAF, {}]}, "leaves.1.size"),
        ({**WHOLE, "perhaps": {}}, "perhaps.size"),
        ({**WHOLE, "named": {"a": LEAF, "b": {}}}, "named.b.size"),
    ],
)
def test_a_field_that_is_missing_is_told_by_its_place(plain: Any, missing: str | None) -> None:
    if missing is None:
        check_fields(plain, Whole)
        return
    with pytest.raises(ValueError, match=rf"^{missing}: Field required$"):
        check_fields(plain, Whole)


def test_files_denser_than_real_ones_are_refused_but_for_small_ones() -> None:
    check_density(b"[" * 65536)
    check_density(b"[]     ," * 10**5)
    with pytest.raises(ValueError, match="it has 100000 elements in 100000 bytes"):
        check_density(b"[" * 10**5)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDONLY | os.O_NOFOLLOW], ids=["links", "no links"])
def test_what_takes_a_file_s_place_while_it_is_opened(
    flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "file", os.open
    path.write_bytes(b"x")

    def swap(*args: Any, **named: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(*args, **named)

    monkeypatch.setattr(os, "open", swap)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(IrregularError, match="it is a FIFO, no regular file, remove it"):
        open_regular(path, flags, advice=", remove it")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_link_that_takes_a_file_s_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "file", os.open
    path.write_bytes(b"x")

    def swap(*args: Any, **named: Any) -> int:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
        return real(*args, **named)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
