"""``checkflow torture``: what loses nothing passes, and what breaks a promise, or cannot be tried, is told as that."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from checkflow.cli.main import main
from checkflow.cli.tables.torture import torture_tables
from checkflow.core.reports import run_report
from checkflow.core.reports.run_report import RunReport
from checkflow.runtime.inspect import verify
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.torture.campaign import Campaign, Kill, Torture
from checkflow.torture.checks import Found, check_audits, check_replayed, check_resumed
from checkflow.torture.life import Aim
from checkflow.torture.processes import below, members, nothing_left
from tests.cli.test_main import Said
from tests.support.programs.tortured_job import FAILURE, flip_a_byte
from tests.support.store_tools import fill, small_layout
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
NOTHING_LOST, WRONG_USAGE, LOST, UNTRIED = 0, 2, 3, 4
KILLED_THEN_ASKED = 0  # the seed of such a pair, half of the kills being SIGTERM
Call = Callable[..., Said]


def job(kind: str, directory: object) -> list[str]:
    return ["--", sys.executable, "-m", "tests.support.programs.tortured_job", kind, str(directory)]


def running_in(folder: Path) -> list[int]:
    """Processes that were started with a path in a folder, wherever they are."""
    found = psutil.process_iter(["pid", "cmdline"])
    return [one.info["pid"] for one in found if any(str(folder) in part for part in one.info["cmdline"] or ())]


@pytest.fixture
def torture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Tortures a job in a folder of its own; what runs below this process is the same afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(kind: str, *options: str) -> Said:
        before = {one.pid for one in psutil.Process().children(recursive=True)}
        code = main(["torture", "--seed", "3", *options, *job(kind, tmp_path / "checkpoints")])
        assert {one.pid for one in psutil.Process().children(recursive=True)} == before
        assert running_in(tmp_path) == []
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


# What loses nothing


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, Path]:
    """A training job, killed once and asked to end once: what was said, and where it trained."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--kills", "2", "--children", "0", "--terms", "0.5", "--seed", str(KILLED_THEN_ASKED), "--json"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "checkflow", "torture", *options, *job("trains", "checkpoints")],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return Said(done.returncode, done.stdout, done.stderr), folder


@pytest.mark.slow
def test_a_training_job_loses_nothing(trained: tuple[Said, Path]) -> None:
    said, folder = trained
    assert (said.code, said.err) == (NOTHING_LOST, "")
    data = said.json
    assert (data["verdict"], data["problems"], data["untried"], data["remarks"]) == ("nothing lost", [], None, [])
    assert Path(data["directory"]) == folder / "checkpoints"  # found by its lock
    killed, asked = data["kills"]
    assert (killed["signal"], killed["code"]) == ("SIGKILL", -signal.SIGKILL)
    assert (asked["signal"], asked["code"]) == ("SIGTERM", 75)
    assert 1 <= killed["acknowledged"] < asked["acknowledged"]
    for kill in data["kills"]:
        assert kill["restorable"] >= kill["acknowledged"]
        assert kill["told"]
        assert kill["resumed_from"] >= kill["restorable"]  # host memory may have had a newer one
    assert asked["replayed"] == 0  # it was saved at its last boundary
    assert data["lives"] == 3  # the last one goes on until it has saved
    assert data["restorable_step"] > asked["acknowledged"]
    assert all(not verify(path).fault for path in find(folder / "checkpoints"))


@pytest.mark.slow
def test_a_table_by_default(torture: Call) -> None:
    said = torture("good", "--kills", "2", "--children", "0")
    assert (said.code, said.err) == (NOTHING_LOST, "")
    assert "│ 2 │ SIGKILL │ python" in said.out
    assert "nothing lost: 2 kills in " in said.out
    assert said.out.rstrip().endswith("seed 3")


def test_a_narrow_terminal_cuts_no_word(tmp_path: Path) -> None:
    tried = Torture(Campaign(("python", "train.py"), None, 1, None, 0, 1.0, terms=0, children=0, log=tmp_path / "log"))
    tried.kills.append(Kill("SIGKILL", "python 1234567", "training", 123.4, 12345678, 12345678, -9, 12345678, 12, True))
    narrow = Console(width=80, file=io.StringIO())
    for part in torture_tables(tried):
        narrow.print(part)
    said = narrow.file.getvalue()  # type: ignore[attr-defined]
    assert "│ SIGKILL │ " in said
    assert " │ training │ " in said


def test_the_same_seed_draws_the_same_kills(tmp_path: Path) -> None:
    def draws(seed: int) -> list[Aim]:
        campaign = Campaign(("true",), None, 9, None, seed, 1.0, terms=0.2, children=0.3, log=tmp_path / "log")
        tried, source = Torture(campaign), random.Random(seed)
        return [tried._draw(source) for _ in range(200)]

    assert draws(1) == draws(1) != draws(2)
    assert {aim.moment for aim in draws(1)} == {"training", "writing"}  # nothing was killed yet: not in start-up
    assert {(aim.signal.name, aim.child) for aim in draws(1)} == {
        ("SIGKILL", False), ("SIGKILL", True), ("SIGTERM", False),
    }  # fmt: skip


def test_a_job_that_ends_otherwise_when_asked_is_told_of(torture: Call) -> None:
    said = torture("good", "--kills", "1", "--terms", "1")
    assert said.code == NOTHING_LOST
    assert "the job ended with -15, not 75: [/b] is no markup" in " ".join(said.out.split())


def test_a_trainer_goes_on_without_a_child_that_it_does_not_need(torture: Call) -> None:
    said = torture("leaves a child", "--kills", "1", "--children", "1", "--json")
    assert (said.code, said.err) == (NOTHING_LOST, "")
    assert said.json["kills"][0]["code"] is None


def test_children_that_hide_are_found(torture: Call) -> None:
    """It leaves the session, and its parent is killed first: only who takes in orphans finds it."""
    said = torture("leaves a child", "--kills", "1", "--children", "0", "--json")
    assert (said.code, said.err) == (NOTHING_LOST, "")


def test_nothing_that_was_started_runs_on(tmp_path: Path) -> None:
    """Interrupted in the middle of its start, before anybody knows it."""
    with pytest.raises(KeyboardInterrupt), nothing_left(below()):
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        raise KeyboardInterrupt
    assert not psutil.pid_exists(started.pid)


def test_what_ran_before_is_left_alone_with_all_that_it_starts() -> None:
    """Of a shell that has become this command, say: what it had begun in the background."""
    script = "read go; sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as before:
        assert before.stdin is not None
        assert before.stdout is not None
        strangers = below()
        with nothing_left(strangers):
            print("go", file=before.stdin, flush=True)
            started = psutil.Process(int(before.stdout.readline()))
            ours = subprocess.Popen(["sleep", "600"])
            assert [one.pid for one in members(strangers)] == [ours.pid]
        assert (started.is_running(), before.poll(), psutil.pid_exists(ours.pid)) == (True, None, False)
        started.kill()
        before.wait()


def test_a_launcher_is_not_taken_for_the_trainer(torture: Call, capsys: pytest.CaptureFixture[str]) -> None:
    command = " ".join(job("good", "checkpoints")[1:])
    code = main(
        ["torture", "--kills", "1", "--seed", "1", "--children", "0", "--json", "--", "sh", "-c", f"{command}; exit 3"]
    )
    data = json.loads(capsys.readouterr().out)
    assert code == NOTHING_LOST
    assert data["kills"][0]["victim"].startswith("python")


@pytest.mark.parametrize("given", [True, False])
def test_what_was_damaged_before_is_nobodys_fault(torture: Call, tmp_path: Path, given: bool) -> None:
    """One that no restore reads, and no retention takes away."""
    with make_store(tmp_path / "checkpoints") as store:
        commit(store, 1, 2)
    os.truncate(tmp_path / "checkpoints" / "step-00000001" / "model-00000-of-00001.safetensors", 9)
    said = torture("good", "--kills", "1", "--json", *(("--directory", "checkpoints") if given else ()))
    assert said.code == NOTHING_LOST, said.json["problems"]
    assert (tmp_path / "checkpoints" / "step-00000001").exists()
    if given:
        assert "step 2 was there before" in said.json["remarks"][0]
        assert "step-00000001 was damaged before" in said.json["remarks"][1]


def test_a_damaged_one_that_the_job_sets_aside_is_no_loss(torture: Call, tmp_path: Path) -> None:
    with make_store(tmp_path / "checkpoints") as store:
        commit(store, 1, 2)
    flip_a_byte(tmp_path / "checkpoints" / "step-00000002")
    assert torture("good", "--kills", "1", "--directory", "checkpoints").code == NOTHING_LOST


def test_time_that_is_over_ends_it(torture: Call) -> None:
    said = torture("good", "--seconds", "0.001", "--json")
    assert said.code == NOTHING_LOST
    assert (len(said.json["kills"]), said.json["lives"]) == (1, 2)


# What breaks a promise

BROKEN: dict[str, tuple[str, str]] = {
    "goes back": ("L1", "the job went on from step "),
    "begins anew": ("L1", "the job made a checkpoint of step "),
    "loses the newest": ("L1", "the job took it away"),
    "damages a byte": ("L3", "is damaged: model-00000-of-00001.safetensors"),
    "damages at start": ("L1", "the job took it away"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_promise_is_told(torture: Call, kind: str) -> None:
    promise, text = BROKEN[kind]
    said = torture(kind, "--kills", "3", "--children", "0", "--directory", "checkpoints", "--json")
    assert said.code == LOST
    assert said.json["verdict"] == "lost"
    problem = said.json["problems"][0]
    assert problem["promise"] == promise
    assert text in problem["text"]
    assert f"checkflow: {promise}: {problem['text']}\n" in said.err
    assert len(said.json["kills"]) < 3  # what was found stays as it was


# What cannot be tried

UNTRIABLE: dict[str, tuple[list[str], str]] = {
    "fails": ([], f"the job failed by itself, with exit code {FAILURE}: the data set is missing"),
    "fails later": ([], f"the job failed by itself after kill 1, with exit code {FAILURE}: the data set is missing"),
    "makes none": (["--directory", "checkpoints"], "made no checkpoint in "),
    "ends": (["--directory", "checkpoints"], "came to its end before it was killed"),
    "writes elsewhere": (["--directory", "checkpoints"], "elsewhere, not to "),
    "writes elsewhere later": ([], "elsewhere after kill 1, not to "),
    "writes to two": ([], "say which by --directory"),
    "comes to its end": ([], "came to its end after 1 of 2 kills, which lost nothing: "),
    "is told to go back": (
        [],
        "goes back to an older step (resume=STEP) and has renamed its newest checkpoint to .superseded-step-",
    ),
    "hangs": (["--patience", "8"], "the job hangs after kill 1: no checkpoint and no end within 8 s"),
}


@pytest.mark.parametrize("kind", UNTRIABLE)
def test_a_job_that_cannot_be_tried_is_told_why(torture: Call, kind: str) -> None:
    options, text = UNTRIABLE[kind]
    said = torture(kind, "--kills", "2", "--children", "0", *options)
    assert said.code == UNTRIED
    assert text in said.err
    assert said.err.count("\n") == 1
    assert "not tried as asked" in said.out


def test_a_job_that_is_not_seen_to_write_is_asked_for_its_directory(torture: Call) -> None:
    said = torture("makes none")
    assert said.code == UNTRIED
    assert "say where by --directory; it said: nothing to train" in said.err


def test_a_command_that_does_not_wait_for_its_training_is_told(
    torture: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["torture", "--", "sh", "-c", "sleep 600 &"]) == UNTRIED
    assert "came to its end (what it left running was ended: a command must wait for" in capsys.readouterr().err


@pytest.mark.slow
def test_a_launcher_that_starts_the_job_again_is_no_hang(torture: Call, capsys: pytest.CaptureFixture[str]) -> None:
    command = " ".join(job("good", "checkpoints")[1:])
    asked = ["--kills", "1", "--terms", "1", "--json", "--seed", "1"]
    assert main(["torture", *asked, "--", "sh", "-c", f"until {command}; do :; done"]) == NOTHING_LOST
    (kill,) = json.loads(capsys.readouterr().out)["kills"]
    assert (kill["signal"], kill["code"]) == ("SIGTERM", None)


@pytest.mark.slow
def test_what_was_done_before_all_this_is_not_held_against_a_job(trained: tuple[Said, Path], tmp_path: Path) -> None:
    """Its checkpoints were brought back from a copy, say, and its report was not."""
    copied = tmp_path / "checkpoints"
    shutil.copytree(trained[1] / "checkpoints", copied)
    *earlier, last = run_report.load(copied / run_report.FILE)
    far = dataclasses.replace(last, iteration=last.iteration + 1000, closed=True)
    runs = [run_report.dump_run(run) for run in (*earlier, far)]
    (copied / run_report.FILE).write_bytes(run_report.dump_file(runs))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "checkflow", "torture", "--kills", "1", "--json", *job("trains", "checkpoints")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (NOTHING_LOST, "")


def test_a_directory_that_another_job_writes_to_is_left_alone(torture: Call, tmp_path: Path) -> None:
    with make_store(tmp_path / "checkpoints") as store:
        commit(store, 1)
        said = torture("good", "--directory", "checkpoints")
    assert said.code == 1
    assert said.err == f"checkflow: {tmp_path}/checkpoints is being written by another job; stop it first\n"


USAGE: dict[str, tuple[list[str], str]] = {
    "no command": ([], "Missing argument"),
    "an unknown command": (["--", "no-such-command"], "no command no-such-command"),
    "a script that is no program": (["--", "./file"], "./file is no program that can be run"),
    "an empty command": (["--", ""], "no command ''"),
    "no kills": (["--kills", "0", "--", "true"], "--kills"),
    "no time": (["--seconds", "0", "--", "true"], "a number of seconds above 0, not 0"),
    "no number": (["--patience", "long", "--", "true"], "not a number of seconds: 'long'"),
    "no share": (["--terms", "2", "--", "true"], "from 0 to 1, not 2"),
    "a share in words": (["--children", "half", "--", "true"], "not a share: 'half'"),
    "no directory": (["--directory", "file", "--", "true"], "file is no directory"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    arguments, text = USAGE[name]
    assert main(["torture", *arguments]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
    assert captured.err.endswith("see: checkflow torture --help\n")


def test_a_log_that_cannot_be_written_is_told_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "missing" / "log"
    assert main(["torture", "--log", str(log), "--", "true"]) == 1
    said = f"checkflow: cannot write what the job says to {log}: No such file or directory\n"
    assert capsys.readouterr().err == said


def test_a_job_that_says_nothing_is_told_of_once(torture: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torture", "--", "true"]) == UNTRIED
    assert capsys.readouterr().err.endswith("say where by --directory; it said nothing\n")


def test_a_log_that_is_taken_away_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["torture", "--log", "log", "--", "rm", "log"]) == UNTRIED
    assert capsys.readouterr().err.endswith("it said nothing\n")


def test_options_of_the_command_are_its_own(torture: Call, tmp_path: Path, capsys: Any) -> None:
    seen = tmp_path / "seen"
    assert main(["torture", "--", "sh", "-c", f'echo "$@" > {seen}', "sh", "--debug", "--kills", "x"]) == UNTRIED
    assert seen.read_text() == "--debug --kills x\n"
    capsys.readouterr()


def test_what_was_tried_is_told_when_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "checkflow", "torture", "--kills", "100000", "--log", "log", "--json"]
    running = subprocess.Popen(
        [*command, *job("good", tmp_path / "checkpoints")], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    below = psutil.Process(running.pid)
    first = wait_for(lambda: find_all(tmp_path) and below.children())[0]
    wait_for(lambda: not first.is_running())  # the first kill has been
    wait_for(below.children)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate()
    assert running.returncode == 130
    assert err == "checkflow: interrupted\n"
    data = json.loads(out)
    assert data["verdict"] == "interrupted"
    assert len(data["kills"]) >= 1
    assert running_in(tmp_path) == []


def find_all(folder: Path) -> tuple[Path, ...]:
    directory = folder / "checkpoints"
    return find(directory) if directory.exists() else ()


def make_store(directory: Path) -> Store:
    return Store(directory, run_id="run", keep_latest=9)


def commit(store: Store, *steps: int) -> None:
    layout = small_layout()
    for step in steps:
        store.commit(step, layout, fill(layout, step)[0], b"extra", {})


# The checks, of what a run says of itself


@pytest.fixture(scope="module")
def run(trained: tuple[Said, Path]) -> RunReport:
    """A real one."""
    return run_report.load(trained[1] / "checkpoints" / run_report.FILE)[-1]


def test_a_run_must_go_on_from_the_newest(run: RunReport) -> None:
    there = Found(restorable=7)
    for resumed in (7, 8):
        assert check_resumed(there, there, dataclasses.replace(run, resumed_from=resumed)) == []
    assert check_resumed(Found(), there, dataclasses.replace(run, resumed_from=None)) == []
    aside = dataclasses.replace(there, aside=frozenset({".broken-step-00000007"}))
    (problem,) = check_resumed(there, aside, dataclasses.replace(run, resumed_from=6))
    assert "went on from step 6, though step 7 was there, whole; it is called .broken-step-00000007 now" in problem.text


def test_iterations_done_again_are_bounded_where_intervals_are_exact(run: RunReport) -> None:
    assert (run.frequency.reason, run.frequency.disk_interval, run.device) == ("every", 1, "cpu")
    for replayed, wrong in ((None, 0), (0, 0), (3, 0), (4, 1)):
        again = dataclasses.replace(run, replayed_iterations=replayed)
        assert len(check_replayed(run, again)) == wrong
    again = dataclasses.replace(run, replayed_iterations=100)
    for other in (
        None,
        dataclasses.replace(run, failed=1),
        dataclasses.replace(run, device="NVIDIA H100"),
        dataclasses.replace(run, frequency=dataclasses.replace(run.frequency, reason="overhead")),
    ):
        assert check_replayed(other, again) == []


def test_breaches_are_no_checkpoints(run: RunReport) -> None:
    assert check_audits(run) == []
    (problem,) = check_audits(dataclasses.replace(run, breaches=1, audited=1, audits_passed=0))
    assert problem.promise == "L2"
