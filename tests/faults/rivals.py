"""Several processes at one directory: two writers, writers and readers, retention under a reader, the same step twice.

``python -m tests.faults.rivals DIRECTORY ROUNDS SEED`` prints one line of JSON. Free of torch and threads. In a round
two writers take turns while two readers look for the newest whole checkpoint. A writer that finds the other at work
must be refused as locked, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from checkflow.core.errors import LockedError
from checkflow.runtime.store.discovery import find_valid
from checkflow.runtime.store.reader import Checkpoint
from checkflow.runtime.store.store import Store
from tests.faults.kill_writer import check, seed_of
from tests.support.store_tools import fill, read_all, recover, small_layout

LAYOUT = small_layout()
WRITERS, READERS, TURNS = 2, 2, 4
HANG_SECONDS = 300.0  # which no machine needs, however busy


def write(directory: Path, notes: int, writer: int, source: random.Random) -> None:
    """Turns at the store, each with a few commits: the next step, or the same one again."""
    told = 0
    for turn in range(TURNS):
        patient = source.random() < 0.7
        try:
            store = Store(
                directory, run_id=f"w{writer}", keep_epochs=False, lock_wait_seconds=HANG_SECONDS if patient else 0
            )
        except LockedError as error:
            if "is being written by " not in str(error):  # it may not have put its name there yet
                raise
            told += 1
            continue
        with store:
            checkpoint = recover(store)
            step = -1
            if checkpoint is not None:
                checkpoint.close()
                step = checkpoint.step
                store.went_on_from(step)
            for number in range(source.randint(1, 3)):
                run = (writer * TURNS + turn) * 4 + number + 1
                step = max(0, step + source.choice((0, 1, 1)))
                staging, _ = fill(LAYOUT, seed_of(run, step))
                os.write(notes, f"attempt {run} {step}\n".encode())
                store.commit(step, LAYOUT, staging, str((run, step)).encode(), {"run": run})
                os.write(notes, f"done {run} {step}\n".encode())
    os.write(notes, f"told {told} 0\n".encode())


def read(directory: Path, notes_path: Path, over: Path) -> None:
    """Until it is over: what is found is whole, of what was written, and not older than what was there before."""
    ended = False
    while not ended:
        ended = over.exists()  # then once more
        before = _acknowledged(notes_path.read_text())
        found = find_valid(directory)
        if found is None:
            if before is not None and not _exchanged(notes_path.read_text(), before):
                raise AssertionError(f"nothing is found, and step {before[1]} was acknowledged")
            continue
        with found:
            if before is not None and found.step < before[1] and not _exchanged(notes_path.read_text(), before):
                raise AssertionError(f"step {found.step} is found, and step {before[1]} was acknowledged before")
            _look(found)


def _exchanged(text: str, acknowledged: tuple[int, int]) -> bool:
    """Whether someone has begun to write that step again: between two renames a reader then sees the one before it."""
    lines = [line.split() for line in text.split("\n")[:-1]]
    since = lines.index(["done", str(acknowledged[0]), str(acknowledged[1])])
    return any(line[0] == "attempt" and int(line[2]) == acknowledged[1] for line in lines[since:])


def _look(found: Checkpoint) -> None:
    run = int(found.info["run"])
    if found.extra_bytes != str((run, found.step)).encode():
        raise AssertionError(f"the extra state of step {found.step} is another one's")
    if read_all(found) != fill(LAYOUT, seed_of(run, found.step))[1]:
        raise AssertionError(f"step {found.step} is mixed")


def _acknowledged(text: str) -> tuple[int, int] | None:
    done = [line.split() for line in text.split("\n")[:-1] if line.startswith("done")]
    return (int(done[-1][1]), int(done[-1][2])) if done else None


def _fork(work: Callable[[], None], name: str, errors: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a child must end here, whatever it is
        os.write(errors, f"{name}: {type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def _wait(children: dict[int, str], deadline: float) -> list[str]:
    problems = []
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            name = children.pop(child)
            if os.waitstatus_to_exitcode(status):
                problems.append(f"{name} failed")
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            problems.append(f"L5 {', '.join(children.values())} hang")
            deadline += HANG_SECONDS
        else:
            time.sleep(0.001)
    return problems


def play(directory: Path, seed: int) -> tuple[int, int, list[str]]:
    """A round; how many commits were acknowledged, how often a writer was told of the other, and what is wrong."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    notes_path, over, errors_path = (directory.with_name(f"{directory.name}.{name}") for name in ("notes", "over", "e"))
    over.unlink(missing_ok=True)
    notes = os.open(notes_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    errors = os.open(errors_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    writers = {
        _fork(lambda w=w: write(directory, notes, w, random.Random(f"{seed} {w}")), f"writer {w}", errors): f"w{w}"
        for w in range(WRITERS)
    }  # fmt: skip
    readers = {
        _fork(lambda: read(directory, notes_path, over), f"reader {r}", errors): f"reader {r}" for r in range(READERS)
    }
    deadline = time.monotonic() + HANG_SECONDS * TURNS
    everyone = {**writers, **readers}
    while set(writers) & set(everyone) and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child and os.waitstatus_to_exitcode(status):
            break
        everyone.pop(child, None)
        time.sleep(0.001)
    over.touch()
    problems = _wait({child: name for child, name in everyone.items() if _is_ours(child)}, deadline)
    problems += errors_path.read_text().splitlines()
    os.close(notes)
    os.close(errors)
    lines = [line.split() for line in notes_path.read_text().splitlines()]
    attempts = {(int(run), int(step)) for kind, run, step in lines if kind == "attempt"}
    done = [(int(run), int(step)) for kind, run, step in lines if kind == "done"]
    if problem := check(directory, attempts, None):
        problems.append(problem)
    found = find_valid(directory)
    last = max((step for _, step in done), default=None)
    if found is None or found.step != last:
        problems.append(f"step {last} was acknowledged, {found and found.step} is the newest")
    else:
        with found:
            final = [run for run, step in done if step == last][-1]
            if found.info["run"] != final:
                problems.append(f"run {final} was the last to commit step {last}, run {found.info['run']}'s is there")
    told = sum(int(run) for kind, run, _ in lines if kind == "told")
    return len(done), told, problems


def _is_ours(child: int) -> bool:
    """Whether it has still to be waited for."""
    return Path(f"/proc/{child}").exists()


def main() -> int:
    directory, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("checkflow").setLevel(logging.CRITICAL)
    commits = told = tried = 0
    problems: list[str] = []
    for number in range(rounds):
        tried += 1
        done, refused, found = play(directory, seed + number)
        commits, told = commits + done, told + refused
        problems += [f"seed {seed + number}: {problem}" for problem in found]
        if found:
            break
    sys.stdout.write(json.dumps({"tried": tried, "commits": commits, "told": told, "problems": problems}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
