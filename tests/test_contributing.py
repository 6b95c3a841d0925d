"""CONTRIBUTING.md as a map: each module of a folder that it has a table of is there, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_HEAD = re.compile(r"\| what \| where, in `(\w+)/` \|")
_MODULE = re.compile(r"`([\w/]+\.py)`")  # with its folder, where that is another one


def named() -> dict[str, list[str]]:
    """The modules that the tables name, by the folder that the table is of."""
    found: dict[str, list[str]] = {}
    folder = None
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if head := _HEAD.fullmatch(line):
            folder = head[1]
        elif not line.startswith("|"):
            folder = None
        if folder is not None:
            found.setdefault(folder, []).extend(_MODULE.findall(line))
    return found


def outside_of_tables() -> Iterator[str]:
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        if not line.startswith("|"):
            yield from (name for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|json|toml))`", line))


@pytest.mark.parametrize("folder", ["checkflow", "planner", "runtime", "benchmarks"])
def test_each_module_is_in_its_folders_table_once(folder: str) -> None:
    here = ROOT / folder
    modules = {path.relative_to(here).as_posix() for path in here.rglob("*.py") if path.name != "__init__.py"}
    count = Counter(name for name in named()[folder] if (here / name).is_file())
    assert modules - count.keys() == set()
    assert [name for name, times in count.items() if times > 1] == []


def test_each_file_that_is_named_exists() -> None:
    tables = [(folder, name) for folder, names in named().items() for name in names]
    missing = [name for folder, name in tables if not any((ROOT / at / name).is_file() for at in (folder, "."))]
    missing += [name for name in outside_of_tables() if not (ROOT / name).is_file()]
    assert missing == []


@pytest.mark.parametrize(
    "script", sorted(set(re.findall(r"python (tests/[\w/]+\.py)", (ROOT / "Makefile").read_text())))
)
def test_what_make_runs_begins_without_the_tests_around_it(script: str) -> None:
    """The long runs are started by hand, and seldom."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, script, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
