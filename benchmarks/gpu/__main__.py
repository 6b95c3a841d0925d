"""Everything that needs a GPU, in one command of some minutes: the CUDA tests, and all measurements.

It uses the Python that runs it and that Python's torch: it installs nothing and uses no network. Each part runs in a
process of its own and has its time; one that fails, hangs or crashes is ended, and costs the others nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import (
    LOCKED_MEMORY,
    RIGHT_COPIES,
    Part,
    Row,
    Status,
    allowed_seconds,
    case_name,
    judge,
    unable,
)
from benchmarks.gpu.packages import LEAST_TORCH, how_to_bring, how_to_mend, install, lacking, minima
from benchmarks.gpu.worker import Worker

ROOT = Path(__file__).parents[2]
SCHEMA = 3
BUDGET_SECONDS = 480.0
CALLS = (1, 2, 3)
CALL_SECONDS = 570.0  # of one, half a minute less than the machine gives
FIRST_SECONDS = 100.0  # to unpack wheels and import torch: its gigabytes may come from a slow disk, or from afar

Case = dict[str, Any]  # the fields of benchmarks.gpu.loop.Case
#: Batches that a card has to work on for longer than the state needs to leave; halved where memory does not suffice.
CASES: tuple[Case, ...] = (
    {"model": "gpt2", "batch_size": 16, "settings": {"mixed": True}, "thorough": True},
    {"model": "resnet18", "batch_size": 128, "optimizer": "momentum", "thorough": True},
    {"model": "bert", "batch_size": 16, "optimizer": "adam", "thorough": True},
    {"model": "alexnet", "batch_size": 512, "optimizer": "momentum", "thorough": True},
    {"model": "vit", "batch_size": 64, "optimizer": "adam"},
    {"model": "vgg11", "batch_size": 128, "optimizer": "momentum"},
    {"model": "mnasnet", "batch_size": 128, "optimizer": "momentum"},
    {"model": "resnet3d", "batch_size": 64, "optimizer": "momentum"},
    {"model": "transformer", "batch_size": 512, "optimizer": "adam"},
    {"model": "gpt2", "batch_size": 8},
    {"model": "resnet18", "batch_size": 32, "optimizer": "adam"},
    {"model": "alexnet", "batch_size": 32, "optimizer": "adam"},
)
QUICK_CASES: tuple[Case, ...] = ({"model": "digits", "batch_size": 4, "settings": {"width": 8}, "thorough": True},)


@dataclasses.dataclass(frozen=True)
class Task:
    """A part, and what its process is asked for: a function, "module:function", and its options."""

    part: Part
    function: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def name_of(case: Case) -> str:
    """As "gpt2 mixed batch 16"."""
    return case_name(**{key: value for key, value in case.items() if key != "thorough"})


def tasks(card: str, output: Path, *, quick: bool) -> tuple[Task, ...]:
    """All parts in the order in which they run: what every other rests on first, then by weight.

    Args:
        card: what files are named after.
    """
    cases = QUICK_CASES if quick else CASES
    small = cases[1] if len(cases) > 1 else cases[0]
    first = [_case(case, 2) for case in cases if case.get("thorough")]
    known = {case["model"] for case in cases if case.get("thorough")}
    others = [_case(case, 3) for case in cases if case["model"] not in known]
    again = [_case(case, 3) for case in cases if case["model"] in known and not case.get("thorough")]
    probe = ["checkflow", "probe", "--quick", "--json", "--directory", str(output)]
    probe += ["-o", str(output / f"probe-{card}.json")]
    auto = ["checkflow", "plan", "resnet18", "--device", "auto", "--json"]
    memory = ["benchmarks.memory", "--only", "resnet18", "--output", str(output / f"memory-{card}.json")]
    step_time = ["benchmarks.step_time", "--quick", "--only", "resnet18", "bert"]
    step_time += ["--output", str(output / f"step-time-{card}.json")]
    return (
        _task(Part("smoke", "what this machine allows, and a short job", 25.0, 5.0, on_cpu=True), "smoke"),
        _task(Part("link", "the device that plans are made for, and its bare link", 50.0, 10.0, on_cpu=True), "link"),
        _task(
            Part(
                f"copies {name_of(cases[0])}", "across the link, by a plan", 50.0, 12.0,
                needs=(RIGHT_COPIES, LOCKED_MEMORY), last=True,
            ),
            "copies", case=cases[0],
        ),
        _task(Part("tests", "tests with the marker cuda", 150.0, 20.0, beside="tests"), "tests", alone=False),
        _task(
            Part("traces", "each case's memory by its trace", 150.0, 20.0, beside="tests", on_cpu=True),
            "traces", cases=list(cases),
        ),
        _task(Part("tests alone", "those that spoil their process", 40.0, 15.0, beside="alone"), "tests", alone=True),
        *first,
        *others,
        _task(
            Part("live", "a job that makes its own plan", 40.0, 20.0, needs=(RIGHT_COPIES,)),
            "live", case=small, seconds=30.0,
        ),
        _task(Part("probe", "checkflow probe", 40.0, 20.0), "command", arguments=probe),
        _task(Part("device auto", "checkflow plan --device auto", 45.0, 20.0, call=3), "command", arguments=auto),
        _task(
            Part("memory", "benchmarks/memory.py, one model", 45.0, 20.0, call=2, needs=(RIGHT_COPIES,)),
            "command", arguments=memory,
        ),
        *(
            _task(Part(tool, "short, watched by NVIDIA", 85.0, 30.0, call=3, beside="tools"), "sanitized", tool=tool)
            for tool in ("memcheck", "racecheck")
        ),
        *again,
        _task(
            Part("disk", "durable checkpoints beside bare writes", 40.0, 15.0, on_cpu=True, needs=(RIGHT_COPIES,)),
            "disk", case=small,
        ),
        _task(
            Part("step time", "benchmarks/step_time.py, two models", 50.0, 25.0, call=3), "command", arguments=step_time
        ),
    )  # fmt: skip


def _task(part: Part, function: str, **options: Any) -> Task:
    return Task(part, f"benchmarks.gpu.parts:{function}", options)


def _case(case: Case, call: int) -> Task:
    thorough = bool(case.get("thorough"))
    part = Part(
        f"case {name_of(case)}", "with and without checkpoints", 95.0 if thorough else 35.0, 12.0,
        call=call, needs=(RIGHT_COPIES,), on_cpu=True, last=thorough,
    )  # fmt: skip
    return _task(part, "case", case=case)


# --- the run


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Run:
    """A run, and its JSON, which is written anew whenever something is known."""

    def __init__(self, file: Path, log: Path, card: str, environment: Row, budget_seconds: float, begun: float) -> None:
        self.file, self.log = file, log
        self._begun, self._budget_seconds = begun, budget_seconds
        self._changed = threading.Lock()
        self._numbers: Row | None = None  # the probe's device
        self._traced: dict[str, Row] = {}  # by the name of the case
        self._host_memory: dict[str, Row] = {}  # what the smoke part found of it
        self.result: Row = {
            "schema": SCHEMA,
            "card": card,
            "begun": _now(),
            "budget_seconds": budget_seconds,
            "seconds": 0.0,
            "environment": environment,
            "earlier": [],  # the runs that the rest of the parts are of: of each when it began, and on what it ran
            "targets": [],
            "parts": {},
        }

    @property
    def left_seconds(self) -> float:
        return self._budget_seconds - (time.monotonic() - self._begun)

    def note(self, part: Part, status: Status, reason: str, seconds: float, rows: list[Row]) -> None:
        """Keep how a part ended."""
        with self._changed:
            self.result["parts"][part.name] = {
                "what": part.what, "ended": _now(), "status": status, "reason": reason, "seconds": seconds,
                "rows": rows,
            }  # fmt: skip
            cases = {
                name.removeprefix("case "): entry["rows"]
                for name, entry in self.result["parts"].items()
                if name.startswith(("case ", "copies "))
            }
            self.result["targets"] = judge(cases)
            self.result["seconds"] = time.monotonic() - self._begun
            temporary = self.file.with_name(f".{self.file.name}.tmp")
            temporary.write_text(json.dumps(self.result, indent=1) + "\n")
            os.replace(temporary, self.file)
            self._learn(part.name, rows)
            print(f"{status:8} {seconds:6.1f} s  {part.name}{': ' + reason if reason else ''}", flush=True)

    def recall(self, earlier: Row) -> bool:
        """Keep what an earlier run on such a card found, of each part what ended last; False: it is of none such."""
        if (earlier.get("schema"), earlier.get("card")) != (SCHEMA, self.result["card"]):
            return False
        for one in (*earlier["earlier"], {name: earlier[name] for name in ("begun", "environment")}):
            if one not in self.result["earlier"]:
                self.result["earlier"].append(one)
        parts = self.result["parts"]
        for name, entry in earlier["parts"].items():
            if name not in parts or parts[name]["ended"] < entry["ended"]:
                parts[name] = entry
                self._learn(name, entry["rows"])
        return True

    def _learn(self, name: str, rows: Sequence[Row]) -> None:
        """What later parts are told of earlier ones."""
        if name == "link":
            probed = next((row for row in rows if row.get("section") == "probe" and "device" in row), None)
            self._numbers = None if probed is None else probed["device"]
        elif name == "smoke":
            self._host_memory = {row["kind"]: row for row in rows if "kind" in row}
        elif name == "traces":
            self._traced = {row["case"]: row for row in rows if "training_peak_bytes" in row}

    def do(self, task: Task, worker: Worker, common: Mapping[str, Any]) -> None:
        """One part, within what is left of the budget, unless this machine is unable to."""
        lacks = [why for what, why in unable(self._host_memory).items() if what in task.part.needs]
        if lacks:
            self.note(task.part, "skipped", lacks[0], 0.0, [])
            return
        limit = allowed_seconds(task.part, self.left_seconds)
        if limit is None:
            self.note(task.part, "skipped", f"{max(0.0, self.left_seconds):.0f} s are left of the budget", 0.0, [])
            return
        begun, rows = time.monotonic(), list[Row]()
        known = {
            "numbers": self._numbers,
            "traced": self._traced.get(task.part.name.removeprefix("case ")),
            "host_memory": self._host_memory,
        }
        status, reason = worker.run(task.function, {**common, **known, **task.options}, limit, rows)
        if status == "done" and rows and all("skipped" in row for row in rows):
            status, reason = "skipped", rows[0]["skipped"]
        self.note(task.part, status, reason, time.monotonic() - begun, rows)
        if task.part.last:
            worker.close()


def perform(run: Run, chosen: Iterable[Task], common: Mapping[str, Any], worker: Worker) -> None:
    """All parts, one after the other; those that time nothing beside each other."""
    with_gpu = common["device"] == "cuda"
    possible: list[Task] = []
    for task in chosen:
        if not with_gpu and not task.part.on_cpu:
            run.note(task.part, "skipped", "it needs a CUDA GPU", 0.0, [])
        else:
            possible.append(task)

    for word, group in itertools.groupby(possible, lambda task: task.part.beside if with_gpu else ""):
        if word:
            _beside(run, list(group), common)
        else:
            for task in group:
                run.do(task, worker, common)


def _beside(run: Run, tasks: Sequence[Task], common: Mapping[str, Any]) -> None:
    """At the same time, each in a process of its own."""
    with contextlib.ExitStack() as ending:
        pool = ending.enter_context(ThreadPoolExecutor(len(tasks)))
        own = [ending.enter_context(contextlib.closing(Worker(run.log))) for _ in tasks]  # closed before the pool
        for waiting in [pool.submit(run.do, *pair, common) for pair in zip(tasks, own, strict=True)]:
            waiting.result()


@contextlib.contextmanager
def wheels_at_hand(wheels: Path | None) -> Iterator[None]:
    """With the packages of a folder of wheels, until the run ends."""
    if wheels is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="checkflow-wheels-") as target:
        install(wheels, Path(target))
        sys.path.insert(0, target)
        os.environ["PYTHONPATH"] = os.pathsep.join([target, *filter(None, [os.environ.get("PYTHONPATH")])])
        yield


def lines_of(targets: Sequence[Row]) -> Iterator[str]:
    """The figures beside their targets, for people."""
    for row in targets:
        bound = f"at most {row['most']:g}" if row["most"] is not None else f"at least {row['least']:g}"
        if row["met"] is None:
            yield f"  not measured  {row['figure']}: {bound}"
        else:
            verdict = "reached" if row["met"] else "MISSED"
            yield f"  {verdict:12}  {row['figure']}: {row['worst']:.4g} ({row['worst_case']}), {bound}"
        for case, reason in row.get("left_out", {}).items():
            yield f"                without {case}: {reason}"


def main(argv: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few iterations: whether it all works")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS",
        help=f"of the whole run; by default {BUDGET_SECONDS:.0f}, of one call {CALL_SECONDS:.0f}",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that this Python lacks")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="whose names begin so; of others, what the file has is kept"
    )
    parser.add_argument(
        "--call", type=int, choices=CALLS, help="a third of the parts; what the file has of others is kept"
    )
    parser.add_argument(
        "--join",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="results of other calls, to be kept with this one's",
    )
    asked = parser.parse_args(argv)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # its processes are ended too
    try:
        with wheels_at_hand(asked.wheels):
            return _main(asked, begun)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _main(asked: argparse.Namespace, begun: float) -> int:
    missing = lacking({"torch": LEAST_TORCH})
    if missing:
        version = ".".join(map(str, LEAST_TORCH))
        print(f"checkflow: {sys.executable} has no torch of version {version} or later", file=sys.stderr)
        return 2
    try:
        joined = {file: json.loads(file.read_text()) for file in asked.join}
    except (OSError, ValueError) as error:
        print(f"checkflow: cannot join: {error}", file=sys.stderr)
        return 2
    asked.output.mkdir(parents=True, exist_ok=True)
    output = asked.output.resolve()
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # to none of its processes
    log = output / "gpu.log"
    with contextlib.closing(Worker(log)) as worker:
        rows: list[Row] = []
        left_seconds = begun + FIRST_SECONDS - time.monotonic()
        status, reason = worker.run("benchmarks.gpu.parts:environment", {"output": str(output)}, left_seconds, rows)
        if status != "done":
            print(f"checkflow: this machine cannot be looked at: {reason}; see {log}", file=sys.stderr)
            return 1
        environment = rows[0]
        if asked.device == "cuda" and environment["gpu"] is None:
            print("there is no CUDA GPU here, and so nothing to test or measure on it")
            log.unlink(missing_ok=True)
            return 0
        if missing := lacking(minima()):
            print(how_to_bring(missing), file=sys.stderr)
            return 2
        rows = []
        left_seconds = begun + FIRST_SECONDS - time.monotonic()
        status, reason = worker.run("benchmarks.gpu.packages:try_imports", {}, left_seconds, rows)
        if rows or status != "done":
            said = how_to_mend(rows) if rows else f"checkflow: what a run needs cannot be imported: {reason}; see {log}"
            print(said, file=sys.stderr)
            return 2
        name = environment["gpu"] if asked.device == "cuda" else "cpu"
        card = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        every = tasks(card, output, quick=asked.quick)
        chosen = [
            t for t in every
            if (not asked.only or any(t.part.name.startswith(start) for start in asked.only))
            and asked.call in (None, t.part.call)
        ]  # fmt: skip
        unknown = [word for word in asked.only or () if not any(t.part.name.startswith(word) for t in every)]
        if unknown:
            names = ", ".join(t.part.name for t in every)
            print(f"checkflow: no part {', '.join(map(repr, unknown))}; there are: {names}", file=sys.stderr)
            return 2
        budget_seconds = asked.budget or (BUDGET_SECONDS if asked.call is None else CALL_SECONDS)
        run = Run(output / f"gpu-{card}.json", log, name, environment, budget_seconds, begun)
        for file, earlier in joined.items():
            if not run.recall(earlier):
                print(f"checkflow: {file} is not of this card and this version of the run: {name}", file=sys.stderr)
                return 2
        if (asked.only or asked.call) and run.file.is_file():
            run.recall(json.loads(run.file.read_text()))
        print(f"{name}, torch {environment['torch']}, Python {environment['python']}: {run.file}", flush=True)
        common = {"device": asked.device, "quick": asked.quick, "output": str(output)}
        perform(run, chosen, common, worker)
    print("\n".join(lines_of(run.result["targets"])))
    done = {task.part.name: run.result["parts"][task.part.name] for task in chosen}
    failed = [name for name, entry in done.items() if entry["status"] in ("failed", "ended")]
    print(f"{run.result['seconds']:.0f} s; " + (f"not well: {', '.join(failed)}" if failed else "all parts went well"))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
