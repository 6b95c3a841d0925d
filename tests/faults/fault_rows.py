"""What ``make faults`` tries: for every row of the table its parts, each a command that says what it tried."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from dataclasses import dataclass

PYTHON = sys.executable
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE)
SCENARIOS = ("a new step", "the same step again", "retention", "a start among leftovers", "a rewind")
TITLES = {
    "F1": "SIGKILL at random times: training, writer, loader workers, planner",
    "F2": "every call fails, is short or is the last one: commits, retention, starts, rewinds, plans",
    "F3": "power cuts after every call, on ext4 and xfs; disks that go under a running job",
    "F5": "flipped bits, truncation, zeroed and misplaced pages; swapped, missing, doubled shards",
    "F6": "full disks of every size, file size limits",
    "F7": "disks that turn read-only, other users' directories, small shared memory",
    "F8": "two writers, readers beside them, retention, the same step twice",
    "F9": "names that lead elsewhere, links, FIFOs",
    "F10": "checkpoints and plans that try to run code; what the source may not call",
    "F11": "safetensors headers made by an attacker",
    "F12": "plan files: any flipped bit, tricks, plans that do not hang together or fit",
    "F13": "solvers that are missing, fail, lie, or are killed; impossible costs",
    "F15": "a second fault during recovery",
    "F16": "the tests are tested: what protects data is deleted, one thing at a time",
}


@dataclass(frozen=True)
class Part:
    """One command. ``kind``: "json", it prints {"tried", "problems"} as its last line; "pytest", its tests are counted.

    ``mounts``: it needs a namespace of its own, and root.
    """

    fault: str
    name: str
    kind: str
    command: tuple[str, ...]
    mounts: bool = False


def _program(fault: str, name: str, module: str, *arguments: object, mounts: bool = False) -> Part:
    return Part(fault, name, "json", (PYTHON, "-m", f"tests.faults.{module}", *map(str, arguments)), mounts)


def _tests(fault: str, name: str, *arguments: str) -> Part:
    return Part(fault, name, "pytest", (PYTHON, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments))


def parts() -> list[Part]:
    """All of them, in the order in which they run: a row's own together, the long ones in pieces."""
    rows: list[Part] = []
    rows += [_program("F1", f"jobs {n}", "kills.run", "--kills", 50, "--seed", n, "--output", "{answer}")
             for n in range(40)]  # fmt: skip
    rows += [_program("F1", f"writers {n}", "kill_writer", "{folder}/checkpoints", 100, n) for n in range(10)]
    for name in SCENARIOS:
        rows += [_program("F2", f"{name}: kills", "fault_parts", "calls", name, 0, "{folder}")]
        rows += [_program("F2", f"{name}: {errno.errorcode[e]}", "fault_parts", "calls", name, e, "{folder}")
                 for e in ERRORS]  # fmt: skip
    rows += [_program("F2", "plans", "fault_parts", "plans", "-", 0, "{folder}")]
    rows += [_tests("F2", "the plan file's writer", "tests/core/test_plan_faults.py", "-k", "writer")]
    for kind in ("ext4", "xfs"):
        for more in ((), ("--direct",), ("--fresh",), ("--survives",), ("--fresh", "--survives")):
            rows += [_program("F3", " ".join((kind, *more)), "power_cuts", kind, *more, mounts=True)]
    rows += [_program("F5", f"random damage {n}", "damage", "{folder}", 1000, n) for n in range(20)]
    rows += [
        _tests(
            "F5",
            "every byte",
            "tests/runtime/store/test_reader.py",
            "-k",
            "flipped or length or files_of or later_block",
        )
    ]
    rows += [_program("F6", "full disks", "full_disks", "sizes", "--count", 512, mounts=True)]
    rows += [_program("F6", "file size limits", "full_disks", "limits", "--count", 512, mounts=True)]
    rows += [_program("F7", "read-only", "full_disks", "read-only", "--count", 30, mounts=True)]
    rows += [_program("F7", "strangers", "full_disks", "strangers", mounts=True)]
    rows += [_tests("F7", "directories, shared memory", "tests/runtime/store/test_store.py",
                    "tests/runtime/transfer/test_engine.py", "-k",
                    "read_only or cannot_be_used or volatile or memory")]  # fmt: skip
    rows += [_tests("F7", "host memory that outlives its job", "tests/runtime/memory_tier/test_records.py",
                    "tests/runtime/memory_tier/test_tier.py", "tests/runtime/memory_tier/test_orphans.py",
                    "tests/runtime/memory_tier/test_recovery.py")]  # fmt: skip
    rows += [_program("F8", f"rivals {n}", "rivals", "{folder}/checkpoints", 100, n * 1000) for n in range(10)]
    rows += [_tests("F8", "locks", "tests/runtime/store/test_store.py", "-k", "writer or forked or reader")]
    rows += [_tests("F9", "names", "tests/runtime/store/test_store.py", "tests/runtime/store/test_reader.py",
                    "tests/runtime/store/test_discovery.py", "-k",
                    "planted or linked or one_name or files_that_are_none or attacker or only_own or "
                    "impossible")]  # fmt: skip
    rows += [_tests("F10", "code", "tests/test_no_code.py")]
    rows += [
        _tests("F10", "extra state", "tests/runtime/format/test_codec.py", "-k", "refuse or mutated or random_bytes")
    ]
    rows += [_tests("F11", "headers", "tests/runtime/store/test_reader.py", "-k", "header or sparse_files")]
    rows += [_program("F12", "every bit", "fault_parts", "plan bits", "-", 0, "{folder}")]
    rows += [_tests("F12", "plans", "tests/core/test_plan_faults.py", "tests/core/test_plan.py",
                    "tests/planner/schedule/test_replay.py", "-k",
                    "not writer")]  # fmt: skip
    rows += [_tests("F13", "solvers", "tests/planner/ilp/test_solvers.py", "tests/planner/schedule/test_scheduler.py",
                    "tests/planner/ilp/test_highs.py", "-k",
                    "solver or licence or time_out or infeasible or missing or cbc or numbers or sense or unbounded "
                    "or lies or least or left_behind or fails")]  # fmt: skip
    rows += [_program("F15", f"pairs {n}", "fault_parts", "two", "-", n, "{folder}") for n in range(10)]
    rows += [_tests("F15", "recovery", "tests/runtime/store/test_store.py", "-k", "second_fault or settled")]
    rows += [_program("F16", kind, "mutations", "--kind", kind)
             for kind in ("fsync", "fsync of a file", "fsync of an exchange", "fsync of a new directory", "write",
                          "no-follow", "checksum", "digest", "plan: flush, fsync")]  # fmt: skip
    return rows


Runner = Callable[[Part], tuple[int, list[str]]]
