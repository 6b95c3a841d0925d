"""The parts of a run on a GPU (``benchmarks/gpu``): functions that send rows, in processes of their own.

A part may fail, hang or crash: what it has sent by then is kept.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.figures import LOCKED, UNABLE, Row, unable
from benchmarks.gpu.worker import scratch

ROOT = Path(__file__).parents[2]
_HOST = ("MemTotal:", "MemAvailable:", "SwapFree:", "Unevictable:")
BARE_WRITES = 3  # before checkpoints, and after them
CUDA_PROGRAMS = Path("/usr/local/cuda/bin")  # where its packages put them, often without a word in PATH
WENT_WELL = "the short run went well"
Options = Mapping[str, Any]
Send = Callable[[Row], None]


def _device(options: Options) -> Any:
    import torch

    return torch.device("cuda", 0) if options["device"] == "cuda" else torch.device("cpu")


def _numbers(options: Options) -> Any:
    """What plans are made for: the probed device; if that failed, the catalogue's entry for the card, or any card's."""
    import torch

    from checkflow.core.errors import CheckflowError
    from checkflow.core.machine.device import CATALOGUE, Device, find_device

    if options["numbers"] is not None:
        return Device(**options["numbers"])
    if options["device"] == "cpu":
        return CATALOGUE["cpu"]
    try:
        return find_device(torch.cuda.get_device_name(0))
    except CheckflowError:
        return CATALOGUE["A100 40GB"]


def environment(options: Options, send: Send) -> None:
    """What this machine is. Needs torch and nothing else."""
    import torch

    row: Row = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": None,
        "state": gpu_state(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        row["gpu"] = properties.name
        row["capability"] = list(torch.cuda.get_device_capability(0))
        row["memory_bytes"] = properties.total_memory
        row["processors_of_gpu"] = properties.multi_processor_count
    memory = Path("/proc/meminfo")
    if memory.is_file():
        lines = (line.split() for line in memory.read_text().splitlines())
        row["host_memory_bytes"] = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[0] in _HOST}
    places = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path(options["output"])]
    row["free_bytes"] = {str(place): shutil.disk_usage(place).free for place in places if place.is_dir()}
    send(row)


def gpu_state() -> Row | str:
    """Clocks, temperature and power as the driver tells them; they are read, and left as they are."""
    asked = (
        "driver_version", "pstate", "persistence_mode", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu",
        "power.draw", "power.limit", "pcie.link.gen.current", "pcie.link.width.current", "utilization.gpu",
    )  # fmt: skip
    import torch

    # Torch's device 0 need not be the driver's: by what is visible to this process, it may be any.
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None) if torch.cuda.is_available() else None
    said = "nvidia-smi was not asked"
    for which in ([] if uuid is None else [f"GPU-{str(uuid).removeprefix('GPU-')}"]) + ["0"]:  # a part has none there
        command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader", f"--id={which}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-smi does not answer: {error}"
        if not done.returncode:
            return dict(zip(asked, (part.strip() for part in done.stdout.split(",")), strict=False))
        said = f"nvidia-smi: {(done.stderr or done.stdout).strip()}"
    return said


def smoke(options: Options, send: Send) -> None:
    """Within seconds: what this machine allows, whether copies arrive as they left, and a short job with checkpoints.

    What it finds of host memory decides what later parts try (:func:`benchmarks.gpu.figures.unable`).
    """
    from benchmarks.gpu.case import section
    from benchmarks.gpu.link import try_host_memory, what_it_allows
    from checkflow.runtime.log_handler import show_lines

    show_lines()  # why the runtime refuses something goes to the log
    device = _device(options)
    with section(send, "device") as row:
        row |= what_it_allows(device) if device.type == "cuda" else {"skipped": "there is no GPU"}
    for kind in (*LOCKED, "unlocked") if device.type == "cuda" else ():
        with section(send, f"{kind} memory") as row:
            row |= try_host_memory(kind, device)
    with section(send, "short job") as row:
        row["report"] = short_run(device.type)


def tests(options: Options, send: Send) -> None:
    """Every test with the marker "cuda", one row each: those that are to be alone in their process, or all others.

    A test is told by the environment what the machine was found unable to, and skips where it needs that.
    """
    import pytest

    class Reporter:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                row: Row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
                if report.outcome != "passed":
                    row["reason"] = str(report.longrepr)[-4000:]
                send(row)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                send({"test": report.nodeid, "outcome": "not collected", "reason": str(report.longrepr)[-4000:]})

    # Only these files are imported: collecting all tests takes longer than running those of a GPU.
    wanted, word = ("cuda and alone", "mark.alone") if options["alone"] else ("cuda and not alone", "mark.cuda")
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if word in path.read_text()]
    if not marked:
        raise RuntimeError(f"no test is {wanted}")
    os.chdir(ROOT)
    # The first test to use a library waits until its kernels are loaded.
    arguments = ["-m", wanted, "-p", "no:cacheprovider", "--timeout=120", "--continue-on-collection-errors"]
    told = {UNABLE: json.dumps(unable(options["host_memory"]))}
    with (
        tempfile.TemporaryDirectory(prefix=scratch(), ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, told),
    ):
        arguments.append(f"--basetemp={folder}/tests")
        code = pytest.main([*arguments, *map(str, marked)], plugins=[Reporter()])
    send({"exit": int(code), "files": [path.name for path in marked]})
    if code:
        raise RuntimeError(f"pytest ended with {code!r}")


def short_run(device: str = "cuda") -> Row:
    """A few checkpointed iterations, audited: what memory checkers watch on a GPU. Returns the Checkpointer's report.

    Raises:
        RuntimeError: a checkpoint failed, or is not what it should be.
    """
    import torch

    import checkflow
    from benchmarks.gpu.case import QUICK, make_case_plan
    from benchmarks.gpu.loop import Case, TrainingJob
    from checkflow.core.machine.device import find_device

    job = TrainingJob(Case("digits", 4, settings={"width": 8}), torch.device(device))
    job.iterate()
    plan = make_case_plan(job, find_device("H200"), QUICK, {})
    with (
        tempfile.TemporaryDirectory(prefix=scratch()) as directory,
        checkflow.Checkpointer(
            job.step.models, job.step.optimizers, directory=directory, plan=plan,
            every=plan.interval, audit=1, on_error="raise",
        ) as checkpointer,
    ):  # fmt: skip
        for _ in checkpointer.steps(6 * plan.interval):
            job.iterate()
    report = checkpointer.report()
    if (report["committed"], report["failed"], report["breaches"]) != (6, 0, 0):
        raise RuntimeError(f"6 checkpoints were to be committed: {report}")
    print(WENT_WELL, flush=True)
    return report


def sanitized(options: Options, send: Send) -> None:
    """``short_run`` under NVIDIA's compute-sanitizer, where it is installed.

    Raises:
        RuntimeError: the run failed; or memcheck found something. What racecheck finds is kept: it looks at memory that
            the threads of a kernel share, and the kernels are others'.
    """
    tool = options["tool"]
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(CUDA_PROGRAMS))
    if program is None:
        send({"tool": tool, "skipped": f"compute-sanitizer is neither on PATH nor in {CUDA_PROGRAMS}"})
        return
    run = "from benchmarks.gpu.parts import short_run; short_run()"
    command = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
    if tool == "memcheck":  # torch asks the driver for what it may not have, and takes the error for an answer
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-c", run]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout + done.stderr
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", said) or re.findall(r"RACECHECK SUMMARY: (\d+) hazard", said)
    send(
        {
            "tool": tool,
            "exit": done.returncode,
            "errors": int(summary[-1]) if summary else None,
            "went_well": WENT_WELL in said,
            "seconds": time.perf_counter() - begun,
            "said": said[-4000:],
        }
    )
    found = tool == "memcheck" and (done.returncode or not summary)
    if found or WENT_WELL not in said:
        raise RuntimeError(f"compute-sanitizer ended with {done.returncode}: {said.strip()[-300:]}")


def traces(options: Options, send: Send) -> None:
    """What each case takes by its trace, which needs no GPU: several processes at once."""
    from benchmarks.gpu.loop import Case
    from checkflow.planner.measure.machine import this_machine

    cases = [Case(**given) for given in options["cases"]]
    capability = this_machine().compute_capability if options["device"] == "cuda" else None
    count = max(1, min(len(cases), (os.cpu_count() or 1) - 2, 8))
    if count == 1 and options["quick"]:  # not worth a process
        for case in cases:
            send(_trace(case, options["device"], capability))
        return
    with concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_trace, case, options["device"], capability): case for case in cases}
        for done in concurrent.futures.as_completed(waiting):
            try:
                send(done.result())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is kept
                send({"case": waiting[done].name, "error": f"{type(error).__name__}: {error}"})


def _trace(case: Any, target: str, capability: Any) -> Row:
    import torch

    from benchmarks.gpu.case import traced_graph
    from checkflow.planner.measure.torch_settings import torch_settings_kept

    torch.set_num_threads(1)
    with torch_settings_kept():
        graph = traced_graph(case, target, capability)
    during, _ = graph.live_bytes(eager=True)
    index = max(range(len(during)), key=during.__getitem__)
    operator = graph.operators[index]
    return {
        "case": case.name,
        "training_peak_bytes": during[index],
        "peak_operator": f"{operator.target} of {operator.phase} in {operator.module or 'no module'}",
        "state_bytes": graph.state_bytes,
        "operators": len(graph.operators),
        "flops": graph.flops,
    }


def link(options: Options, send: Send) -> None:
    """The probe of this machine, which plans are made for; what a live job measures; and the bare link by size."""
    from benchmarks.gpu.case import section
    from benchmarks.gpu.link import bare_link, both_ways
    from checkflow.cli.tables.measurement import probe_json
    from checkflow.planner.live.bandwidth import measure_bandwidths
    from checkflow.planner.measure.probe import QUICK, probe

    device = _device(options)
    effort = QUICK
    if options["quick"]:
        effort = dataclasses.replace(QUICK, repetitions=3, seconds=0.01, array_bytes=8 * 2**20, product_seconds=1e-4)
    with section(send, "probe") as row:
        row |= probe_json(probe(None, effort))
    with section(send, "bandwidths of a live job") as row:
        row |= dataclasses.asdict(measure_bandwidths(device))
    for mebibytes in (8, 64, 256, 1024):
        with section(send, f"bare link, {mebibytes} MiB") as row:
            if device.type == "cuda":
                row |= bare_link(device, mebibytes * 2**20)
            else:
                row["skipped"] = "without a GPU there is no link"
    with section(send, "both ways at once") as row:
        if device.type == "cuda":
            row |= both_ways(device)
        else:
            row["skipped"] = "without a GPU there is no link"


def case(options: Options, send: Send) -> None:
    """One training step with and without checkpoints (:mod:`benchmarks.gpu.case`)."""
    import torch

    from benchmarks.gpu.case import QUICK, Effort, measure_case
    from benchmarks.gpu.loop import Case

    if options["quick"]:
        torch.set_num_threads(1)
    device = _device(options)
    send({"section": "before", "gpu": gpu_state() if device.type == "cuda" else None})
    effort = QUICK if options["quick"] else Effort()
    measure_case(Case(**options["case"]), device, _numbers(options), effort, options["traced"], send)
    send({"section": "after", "gpu": gpu_state() if device.type == "cuda" else None})


def copies(options: Options, send: Send) -> None:
    """What crosses the link by one case's plan, before anything that takes longer."""
    from benchmarks.gpu.case import QUICK, Effort, measure_copies
    from benchmarks.gpu.loop import Case

    effort = QUICK if options["quick"] else Effort()
    measure_copies(Case(**options["case"]), _device(options), _numbers(options), effort, send)


def live(options: Options, send: Send) -> None:
    """A job that brings no plan: recorded, planned beside training, put in place, and run by it."""
    import checkflow
    from benchmarks.gpu.case import choose_storage
    from benchmarks.gpu.loop import Case, TrainingJob

    job = TrainingJob(Case(**options["case"]), _device(options))
    begun = time.perf_counter()
    planned_at = None
    with (
        tempfile.TemporaryDirectory(
            dir=choose_storage(4 * 2**30), prefix=scratch(), ignore_cleanup_errors=True
        ) as directory,
        checkflow.Checkpointer(
            job.step.models, job.step.optimizers, directory=directory, on_error="raise", resume="never"
        ) as checkpointer,
    ):
        for n in checkpointer.steps(100_000):
            job.iterate()
            job.marks.wait()  # so that iterations are counted as they pass, not as they are enqueued
            report = checkpointer.report()
            planned_at = n if planned_at is None and report["plan"] is not None else planned_at
            late = time.perf_counter() - begun > options["seconds"]
            if (planned_at is not None and n >= planned_at + 30) or late or report["planning"]["stage"] == "given up":
                break
    report = checkpointer.report()
    send({"seconds": time.perf_counter() - begun, "iterations_until_planned": planned_at, "report": report})
    if planned_at is None or report["failed"] or report["breaches"]:
        raise RuntimeError(f"no checkpoints by a plan of its own: {report['planning']}")


def command(options: Options, send: Send) -> None:
    """A module that is run as a command, in a process of its own; its files go to the output folder."""
    begun = time.perf_counter()
    arguments = [sys.executable, "-m", *options["arguments"]]
    with tempfile.TemporaryDirectory(prefix=scratch(), ignore_cleanup_errors=True) as folder:
        places = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, env=places)
    row: Row = {"arguments": options["arguments"], "exit": done.returncode, "seconds": time.perf_counter() - begun}
    with contextlib.suppress(ValueError):
        row["json"] = json.loads(done.stdout)
    if "json" not in row:
        row["said"] = done.stdout[-8000:]
    row["complained"] = done.stderr[-4000:]
    send(row)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")


def disk(options: Options, send: Send) -> None:
    """Durable checkpoints as fast as training waits for them, beside bare fsynced writes of as many bytes."""
    from benchmarks.cpu_overhead import RawLimits
    from benchmarks.gpu.case import QUICK, Effort, file_system, make_case_plan, section
    from benchmarks.gpu.loop import Case, Phases, TrainingJob, checkpointing, train, warm_up_iterations

    job = TrainingJob(Case(**options["case"]), _device(options))
    job.iterate()
    folders = tempfile.TemporaryDirectory(dir=options["output"], prefix=scratch())
    with folders as folder, section(send, "durable") as row:
        storage = Path(folder)
        plan = make_case_plan(job, _numbers(options), QUICK if options["quick"] else Effort(), {})
        size_bytes = sum(spec.size_bytes for spec in plan.fingerprint.state)
        raw = RawLimits(storage, size_bytes)
        bare = [raw.write_seconds() for _ in range(BARE_WRITES)]
        iterations = (4 if options["quick"] else 20) * plan.interval
        with Phases(job) as phases, checkpointing(job, plan, storage, every=plan.interval) as checkpointer:
            found = train(
                job, checkpointer, warm_up=warm_up_iterations(plan.interval), iterations=iterations, phases=phases
            )
        bare += [raw.write_seconds() for _ in range(BARE_WRITES)]
        written_bytes = found.stored * (found.report["checkpoint_bytes"] or 0)
        row |= {
            "file_system": file_system(storage),
            "state_bytes": size_bytes,
            "durable_bytes_per_second": written_bytes / found.loop_seconds,
            "bare_bytes_per_second": size_bytes / statistics.median(bare),
            "of_bare_writes": written_bytes / found.loop_seconds * statistics.median(bare) / size_bytes,
            "waited_for_storage_seconds": found.report["held_seconds"]["buffers"] / iterations,
            **{name: found.report[name] for name in ("captures", "committed", "failed", "breaches")},
        }
