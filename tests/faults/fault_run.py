"""The long run of faults: ``make faults``, or ``python -m tests.faults.fault_run --help``.

Runs every part of :mod:`fault_rows`, one process after the other, and prints a table of faults tried, passed and
seconds; the same as JSON and as a page of docs/. A run that is interrupted goes on where it was: what passed is kept in
a state file until the source changes, then all of it is tried anew.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults.fault_rows import TITLES, Part, parts
from tests.faults.mounting import in_namespace, must_mount, why_not

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".faults.json"
PART_SECONDS = 3600.0
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def digest_of_source() -> str:
    """Of all that is run: what was tried of another source says nothing."""
    digest = hashlib.sha256()
    for folder in ("checkflow", "planner", "runtime", "models", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB, Python {platform.python_version()}"
    )


def source() -> str:
    """Which state of the project that is, in words."""
    git = ("git", "-C", str(ROOT))
    try:
        commit = subprocess.run((*git, "rev-parse", "--short=10", "HEAD"), capture_output=True, text=True, check=True)
        changed = subprocess.run((*git, "status", "--porcelain", "*.py"), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"commit {commit.stdout.strip()}" + (" with changes" if changed.stdout.strip() else "")


def run_part(part: Part) -> dict[str, Any]:
    """One part to its end: what it tried, how much of it passed, and what went wrong."""
    begun = time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="checkflow-faults-", dir=memory))
    try:
        if part.mounts and (reason := why_not("ext4") or why_not("xfs")):
            return _outcome(0, [reason] if must_mount() else [], begun, skipped=reason)
        answer = folder / "answer.json"
        command = [word.format(folder=folder, answer=answer) for word in part.command]
        done = subprocess.run(
            in_namespace(*command) if part.mounts else command,
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=PART_SECONDS,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if part.kind == "pytest":
            tried, problems = read_pytest(done.stdout, done.returncode)
        else:
            tried, problems = read_json(answer.read_text() if answer.exists() else done.stdout, done.stderr)
        if done.returncode and not problems:
            problems = [f"ended with {done.returncode}: {done.stderr.strip()[-500:]}"]
        return _outcome(tried, problems, begun)
    except subprocess.TimeoutExpired:
        return _outcome(0, [f"hangs: not done after {PART_SECONDS:.0f} s"], begun)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(tried: int, problems: list[str], begun: float, *, skipped: str = "") -> dict[str, Any]:
    failed = min(tried, len(problems)) if problems else 0
    return {
        "tried": tried, "passed": tried - failed, "seconds": round(time.monotonic() - begun, 1), "problems": problems,
        "skipped": skipped,
    }  # fmt: skip


def read_json(text: str, errors: str) -> tuple[int, list[str]]:
    """The number of faults and the problems that a program prints as its last object."""
    try:
        found = json.loads(text if text.lstrip().startswith("{\n") else text.strip().splitlines()[-1])
        tried = next(found[key] for key in ("tried", "kills", "commits") if key in found)
        return int(tried), [str(problem) for problem in found["problems"]]
    except (ValueError, IndexError, KeyError, StopIteration):
        return 0, [f"it printed no result: {(text + errors).strip()[-500:]}"]


def read_pytest(text: str, code: int) -> tuple[int, list[str]]:
    """The number of tests that ran, and those that failed."""
    counts = {kind: int(number) for number, kind in _COUNTS.findall(text.strip().splitlines()[-1] if text else "")}
    problems = [line.strip() for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    tried = counts.get("passed", 0) + counts.get("failed", 0) + counts.get("error", 0)
    if code not in (0, 1) or not tried:
        problems.append(f"pytest ended with {code}, {tried} tests ran: {text.strip()[-300:]}")
    return tried, problems


# What is kept, and what is said


def load_state(path: Path, digest: str) -> dict[str, Any]:
    """The outcomes of earlier runs of the same source, by part."""
    try:
        state = json.loads(path.read_text())
        return dict(state["outcomes"]) if state["digest"] == digest else {}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no state of this program ({error}): remove it") from None


def save_state(path: Path, digest: str, outcomes: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"digest": digest, "outcomes": outcomes}, indent=1) + "\n")
    temporary.replace(path)


def key(part: Part) -> str:
    return f"{part.fault} {part.name}"


def summary(all_parts: Iterable[Part], outcomes: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each fault: what has been tried of it so far."""
    rows: dict[str, dict[str, Any]] = {}
    for part in all_parts:
        row = rows.setdefault(part.fault, {
            "fault": part.fault, "title": TITLES[part.fault], "parts": 0, "done": 0, "tried": 0, "passed": 0,
            "seconds": 0.0, "problems": [], "skipped": [],
        })  # fmt: skip
        row["parts"] += 1
        if (outcome := outcomes.get(key(part))) is None:
            continue
        row["done"] += not outcome["skipped"]
        for name in ("tried", "passed", "seconds"):
            row[name] = round(row[name] + outcome[name], 1) if name == "seconds" else row[name] + outcome[name]
        row["problems"] += [f"{part.name}: {problem}" for problem in outcome["problems"]]
        row["skipped"] += [f"{part.name}: {outcome['skipped']}"] if outcome["skipped"] else []
    return list(rows.values())


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("", "fault", "parts", "tried", "passed", "seconds", title="Faults", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        style = "red" if row["problems"] else "" if row["done"] == row["parts"] else "dim"
        table.add_row(
            row["fault"], row["title"], f"{row['done']} of {row['parts']}", f"{row['tried']:,}", f"{row['passed']:,}",
            f"{row['seconds']:,.1f}", style=style,
        )  # fmt: skip
    console.print(table)
    for row in rows:
        for problem in (*row["problems"], *(f"skipped, {reason}" for reason in row["skipped"])):
            console.print(f"{row['fault']} {problem}", markup=False)


def page(rows: list[dict[str, Any]], tried: str) -> str:
    """The same as a page of docs/; ``tried`` is the state of the project."""
    lines = [
        "# Injected faults and their results", "",
        "`make faults` (`tests/faults/fault_run.py`) makes this page. It injects every fault that store, plans and"
        " solvers must survive. If it is interrupted, it continues at the next run. `make test-all` runs a short form."
        " After each fault this must hold: the newest acknowledged checkpoint exists; a restore returns, bit for bit, a"
        " state that was written; a damaged file is refused by name, never returned as good; the next save works;"
        " nothing hangs.", "",
        f"Measured at {tried}, on {machine()}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. Seconds are wall time,"
        " on a machine that also did other work. A part is one process. If not all parts are done, the run was ended"
        " early.", "",
        "| | fault | parts done | tried | passed | seconds |", "| --- | --- | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for row in rows:
        lines.append(
            f"| {row['fault']} | {row['title']} | {row['done']} of {row['parts']} | {row['tried']:,} | "
            f"{row['passed']:,} | {row['seconds']:,.1f} |"
        )
    lines += ["", *(f"- {row['fault']} {text}" for row in rows for text in (*row["problems"], *row["skipped"]))]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="F", choices=list(TITLES), help="these faults alone")
    parser.add_argument("--seconds", type=float, default=None, help="begin no part after so many seconds")
    parser.add_argument("--limit", type=int, default=None, help="this many parts of each fault at most")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried before")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--output", type=Path, default=None, help="the table as JSON")
    parser.add_argument("--page", type=Path, default=None, help="the table as Markdown")
    chosen = parser.parse_args()
    console, digest, tried, begun = Console(), digest_of_source(), source(), time.monotonic()
    outcomes = {} if chosen.fresh else load_state(chosen.state, digest)
    everything, taken = parts(), dict.fromkeys(TITLES, 0)
    for part in everything:
        taken[part.fault] += 1
        if (chosen.only and part.fault not in chosen.only) or (chosen.limit and taken[part.fault] > chosen.limit):
            continue
        before = outcomes.get(key(part))
        if before is not None and not before["problems"] and not before["skipped"]:
            continue
        if chosen.seconds is not None and time.monotonic() - begun > chosen.seconds:
            break
        console.print(f"{part.fault} {part.name} …", end=" ", markup=False, highlight=False)
        outcome = outcomes[key(part)] = run_part(part)
        said = f"{outcome['passed']} of {outcome['tried']} in {outcome['seconds']} s"
        console.print(outcome["skipped"] or said, markup=False, highlight=False)
        save_state(chosen.state, digest, outcomes)
    rows = summary(everything, outcomes)
    show(rows, console)
    if chosen.output is not None:
        chosen.output.write_text(json.dumps({"source": tried, "machine": machine(), "faults": rows}, indent=2) + "\n")
    if chosen.page is not None:
        chosen.page.write_text(page(rows, tried))
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
