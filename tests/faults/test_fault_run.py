"""The long run of faults: what it counts, that it goes on where it was, and that a failure is one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import fault_run
from tests.faults.fault_rows import TITLES, Part, parts

ROOT = Path(__file__).parents[2]


def printing(fault: str, name: str, text: str, *, code: int = 0) -> Part:
    """A part that leaves a mark in a file each time it runs."""
    program = f"import pathlib, sys; print({text!r}); open({name!r} + '.ran', 'a').write('x'); sys.exit({code})"
    return Part(fault, name, "json", (sys.executable, "-c", program.replace("{", "{{").replace("}", "}}")))


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[Part], *arguments: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(fault_run, "ROOT", folder)
    monkeypatch.setattr(fault_run, "parts", lambda: rows)
    monkeypatch.setattr(
        sys, "argv", ["fault_run.py", "--state", "state.json", "--output", "out.json", "--page", "page.md", *arguments]
    )
    code = fault_run.main()
    return code, {row["fault"]: row for row in json.loads((folder / "out.json").read_text())["faults"]}


def test_it_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    good = printing("F5", "good", '{"tried": 1000, "problems": []}')
    bad = printing("F5", "bad", '{"tried": 10, "problems": ["seed 3: lost"]}', code=1)
    other = printing("F8", "other", '{"tried": 7, "problems": []}')
    code, rows = run(monkeypatch, tmp_path, [good, bad, other], "--only", "F5")
    assert code == 1
    assert (rows["F5"]["tried"], rows["F5"]["passed"], rows["F5"]["problems"]) == (1010, 1009, ["bad: seed 3: lost"])
    assert (rows["F8"]["done"], rows["F8"]["tried"]) == (0, 0)
    assert "F5 bad: seed 3: lost" in capsys.readouterr().out
    mended = printing("F5", "bad", '{"tried": 10, "problems": []}')
    code, rows = run(monkeypatch, tmp_path, [good, mended, other])
    assert (code, rows["F5"]["passed"], rows["F8"]["passed"]) == (0, 1010, 7)
    assert [(tmp_path / f"{name}.ran").read_text() for name in ("good", "bad", "other")] == ["x", "xx", "x"]
    assert "| F5 | " + TITLES["F5"] + " | 2 of 2 | 1,010 | 1,010 |" in (tmp_path / "page.md").read_text()
    run(monkeypatch, tmp_path, [good, mended, other], "--fresh", "--limit", "1")
    assert [(tmp_path / f"{name}.ran").read_text() for name in ("good", "bad", "other")] == ["xx", "xx", "xx"]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "new.py").write_text("")  # another source
    run(monkeypatch, tmp_path, [good], "--seconds", "1000")
    assert (tmp_path / "good.ran").read_text() == "xxx"
    code, rows = run(monkeypatch, tmp_path, [other], "--seconds", "0")
    assert (rows["F8"]["done"], (tmp_path / "other.ran").read_text()) == (0, "xx")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, "it printed no result"),
        ("nonsense", 0, "it printed no result"),
        ("[]", 0, "it printed no result"),
        ('{"problems": []}', 0, "it printed no result"),
        ('{"tried": 5, "problems": []}', 9, "ended with 9"),
    ],
)
def test_a_part_that_says_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int, said: str
) -> None:
    ended, rows = run(monkeypatch, tmp_path, [printing("F9", "part", text, code=code)])
    assert ended == 1
    assert said in rows["F9"]["problems"][0]


def test_tests_are_counted() -> None:
    assert fault_run.read_pytest("...\n3 passed, 2 deselected in 0.10s\n", 0) == (3, [])
    text = "F..\nFAILED tests/test_x.py::test_y - assert 1\n1 failed, 2 passed, 1 skipped in 0.10s\n"
    assert fault_run.read_pytest(text, 1) == (3, ["FAILED tests/test_x.py::test_y - assert 1"])
    for text, code in (("5 deselected in 0.1s\n", 5), ("", 4), ("2 skipped in 0.1s\n", 0)):
        tried, problems = fault_run.read_pytest(text, code)
        assert (tried, len(problems)) == (0, 1)


def test_a_state_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(SystemExit, match="remove it"):
        fault_run.load_state(tmp_path / "state.json", "x")


def test_what_cannot_mount_is_skipped_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fault_run, "why_not", lambda kind: "there is no mkfs")
    part = Part("F3", "ext4", "json", ("false",), mounts=True)
    for must, code in (("0", 0), ("1", 1)):
        monkeypatch.setenv("CHECKFLOW_MUST_MOUNT", must)
        ended, rows = run(monkeypatch, tmp_path, [part])
        assert (ended, rows["F3"]["done"], rows["F3"]["skipped"]) == (code, 0, ["ext4: there is no mkfs"])


def test_every_row_has_parts_of_its_own() -> None:
    everything = parts()
    assert {part.fault for part in everything} == set(TITLES)
    assert len({fault_run.key(part) for part in everything}) == len(everything)
    for part in everything:
        names = [word for word in part.command if word.startswith(("tests/", "tests."))]
        assert names, part
        assert all((ROOT / name).is_file() or (ROOT / f"{name.replace('.', '/')}.py").is_file() for name in names), part


@pytest.mark.parametrize(
    "module", sorted(set(re.findall(r"python -m (tests\.[\w.]+)", (ROOT / "Makefile").read_text())))
)
def test_what_make_runs_begins_without_the_tests_around_it(module: str) -> None:
    """The long runs are started by hand, and seldom."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
