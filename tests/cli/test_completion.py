"""What a shell completes: a real bash on a terminal, with the script that the command line shows."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from checkflow.cli.main import FOUND, main
from tests.support.terminals import terminal


def test_bash_completes_commands_models_and_files(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "checkflow"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m checkflow "$@"\n')
    program.chmod(0o755)
    (tmp_path / "plan-of-mine.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    with terminal("bash", "--norc", "--noprofile", "-i", cwd=tmp_path) as there:
        there.send(f"PATH={tmp_path}/bin:$PATH; eval \"$(checkflow --show-completion)\"; echo rea''dy\n")
        there.read_until(r"[\r\n]ready")
        for typed, completed in (
            ("checkflow veri", "checkflow verify "),
            ("checkflow plan resnet1", "checkflow plan resnet18 "),
            ("checkflow plan digits --solve", "--solver "),
            ("checkflow show pla", "checkflow show plan-of-mine.json "),
            ("checkflow report chec", "checkflow report checkpoints/"),
        ):
            there.text = ""
            there.send(typed + "\t")
            there.read_until(completed)
            there.send("\x15")  # Ctrl-U: an empty line again
        there.send("exit\n")
        assert there.end()[0] == 0


def test_the_version_names_what_answers_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == FOUND
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"checkflow {metadata.version('checkflow')}"  # scripts cut it
    for name, package in (("torch", "torch"), ("HiGHS", "highspy")):
        assert f"{name} {metadata.version(package)}" in said
