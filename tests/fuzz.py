"""Give damaged and hostile files to everything that reads files, and accept a valid result or a CheckflowError alone.

``make fuzz [INPUTS=100000] [SEED=n]``, or ``python tests/fuzz.py --help``: a table of what each target made of its
inputs, and the same as JSON. The tests run a short form (``test_fuzz.py``).

Inputs are changed real files (:mod:`fuzz_mutation`), nine of ten from a generator of our own that knows their structure
and seals most of them anew, so that they get past digests and checksums; one of ten from hypothesis, a value of its at
some place of a real file. Each follows from the seed, the target and its number: ``--only TARGET:NUMBER`` gives one to
its reader again.

What must hold: no other exception; a valid result encodes to bytes that give the same result again, and damage that
nobody sealed gives what was written, or an error; no input takes more than some seconds of this process's time; and
memory grows by less than 64 MiB from the end of the warm-up to the highest moment of all that follows.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import hashlib
import json
import os
import random
import resource
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from fuzz_mutation import Raw
from fuzz_targets import Target, make_corpus, make_targets
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as hypothesis_seed
from hypothesis import settings as hypothesis_settings

from checkflow.errors import CheckflowError

MOST_GROWTH_BYTES = 64 * 2**20
MOST_SECONDS = 5.0  # of processor time, for one input
HANG_SECONDS = 300  # then the process says where it is, and ends
MOST_FINDINGS = 20
HYPOTHESIS_SHARE = 10  # of so many inputs one comes from hypothesis
_HYPOTHESIS_BATCH = 250  # examples; it remembers them
_ADDRESS_SPACE_BYTES = 4 * 2**30  # beyond what is there at the start: memory that nobody touches counts here
# What a target takes of the inputs: the checkpoint, whose files are written each time, less.
WEIGHTS = {
    "manifest": 4,
    "safetensors header": 4,
    "extra state": 5,
    "plan": 3,
    "report": 2,
    "profile": 1,
    "checkpoint": 1,
}

_PLAIN = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.floats().map(lambda f: Raw(repr(f).encode()))
    | st.binary(max_size=8).map(Raw)
)  # fmt: skip
VALUES = st.recursive(
    _PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


@dataclass
class Tally:
    """What came of one target's inputs."""

    inputs: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_seconds: float = 0.0
    slowest: str = ""


@dataclass
class Finding:
    where: str  # the input's name
    what: str
    file: str


@dataclass
class Fuzz:
    """One run: what was found, and where inputs that found it are kept."""

    seed: int
    findings_folder: Path
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def give(self, target: Target, item: Any, name: str) -> None:
        """Give one input to its reader."""
        tally = self.tallies.setdefault(target.name, Tally())
        tally.inputs += 1
        begun = time.process_time()
        try:
            outcome = target.feed(item)
        except CheckflowError as error:
            outcome = type(error).__name__
            if "\n" in str(error):
                self._note(name, item, "an error of more than one line", traceback.format_exc())
        except Exception as error:  # noqa: BLE001 - any is a find
            outcome = f"!{type(error).__name__}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._note(name, item, f"{type(error).__name__} in {place.name}", traceback.format_exc())
        seconds = time.process_time() - begun
        tally.outcomes[outcome] += 1
        if seconds > tally.slowest_seconds:
            tally.slowest_seconds, tally.slowest = seconds, name
        if seconds > MOST_SECONDS:
            self._note(name, item, f"slow: {target.name}", f"{name} took {seconds:.1f} s of processor time")

    def _note(self, name: str, item: Any, what: str, details: str) -> None:
        if what in self._seen:
            return
        self._seen.add(what)
        self.findings_folder.mkdir(parents=True, exist_ok=True)
        data = item if isinstance(item, bytes) else repr(item).encode()
        path = (
            self.findings_folder / f"{name.partition(':')[0].replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:8]}"
        )
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{name}, seed {self.seed}: {what}\n\n{details}", errors="backslashreplace")
        self.findings.append(Finding(name, what, str(path)))
        print(f"found: {name}: {what} ({path})", file=sys.stderr, flush=True)


def draw(target: Target, seed: int, number: int) -> Any:
    """The input of this number, from our own generator."""
    return target.make(random.Random(f"{seed}/{target.name}/{number}"))


def run_own(fuzz: Fuzz, target: Target, first: int, count: int) -> None:
    for number in range(first, first + count):
        if len(fuzz.findings) >= MOST_FINDINGS:
            return
        fuzz.give(target, draw(target, fuzz.seed, number), f"{target.name}:{number}")


def run_hypothesis(fuzz: Fuzz, target: Target, first: int, count: int) -> None:
    """Values of hypothesis's making, each at some place of a real file."""
    graft = target.graft
    if graft is None or not count:
        return

    @hypothesis_seed(f"{fuzz.seed}/{target.name}/{first}")
    @hypothesis_settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(VALUES, st.integers(0, 2**32 - 1))
    def each(value: Any, place: int) -> None:
        if len(fuzz.findings) < MOST_FINDINGS:
            fuzz.give(target, graft(random.Random(place), value), f"{target.name}:hypothesis {first}+")

    each()
    gc.collect()  # what it remembers of these, it remembers in circles


def shares(targets: tuple[Target, ...], inputs: int) -> dict[str, int]:
    """How many inputs each target gets; they add up to ``inputs``."""
    whole = sum(WEIGHTS[target.name] for target in targets)
    found = {target.name: inputs * WEIGHTS[target.name] // whole for target in targets}
    found[targets[0].name] += inputs - sum(found.values())
    return found


def run_all(fuzz: Fuzz, targets: tuple[Target, ...], inputs: int, first: int = 0) -> None:
    """So many inputs in all, the targets taking turns in short batches."""
    left = shares(targets, inputs)
    numbers = dict.fromkeys(left, first)
    while any(left.values()) and len(fuzz.findings) < MOST_FINDINGS:
        for target in targets:
            count = min(left[target.name], _HYPOTHESIS_BATCH * HYPOTHESIS_SHARE)
            theirs = 0 if target.graft is None else count // HYPOTHESIS_SHARE
            before = fuzz.tallies.setdefault(target.name, Tally()).inputs
            run_hypothesis(fuzz, target, numbers[target.name], theirs)
            given_by_it = fuzz.tallies[target.name].inputs - before  # it may stop before its count, or overshoot
            run_own(fuzz, target, numbers[target.name], max(0, count - given_by_it))
            numbers[target.name] += count
            left[target.name] -= count


# Memory


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the system does not tell {key}")


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def highest_bytes() -> int:
    """The most memory that was resident since the last :func:`forget_highest`."""
    return _status_bytes("VmHWM")


def forget_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def bounded_address_space() -> Iterator[None]:
    """Memory that is asked for and never touched is not resident; here it is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + _ADDRESS_SPACE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# The command


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: 100,000)")
    parser.add_argument("--seed", type=int, help="what all inputs follow from (default: drawn, and printed)")
    parser.add_argument(
        "--only", metavar="TARGET:NUMBER", help="give this one input to its reader, and raise its error"
    )
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder for inputs that found one")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory() as kept:
        targets = make_targets(make_corpus(Path(kept) / "corpus"), Path(kept) / "inputs")
        if arguments.only:
            name, _, number = arguments.only.partition(":")
            target = next(target for target in targets if target.name == name)
            print(target.feed(draw(target, seed, int(number))))
            return 0
        print(f"seed {seed}", flush=True)
        return _run(targets, seed, arguments)


def _run(targets: tuple[Target, ...], seed: int, arguments: argparse.Namespace) -> int:
    fuzz = Fuzz(seed, arguments.findings)
    faulthandler.dump_traceback_later(HANG_SECONDS, repeat=False, exit=True)
    warm_up = max(arguments.inputs // 10, len(targets))
    begun = time.perf_counter()
    with bounded_address_space():
        run_all(fuzz, targets, warm_up)
        warm_bytes = resident_bytes()
        forget_highest()
        done = warm_up
        while done < arguments.inputs and len(fuzz.findings) < MOST_FINDINGS:
            faulthandler.dump_traceback_later(HANG_SECONDS, repeat=False, exit=True)
            count = min(5_000, arguments.inputs - done)
            run_all(fuzz, targets, count, first=done)
            done += count
            print(f"{done} inputs, memory {(resident_bytes() - warm_bytes) / 2**20:+.1f} MiB", flush=True)
    faulthandler.cancel_dump_traceback_later()
    figures = figures_of(fuzz, time.perf_counter() - begun, warm_bytes)
    show(figures)
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["memory_growth_bytes"] >= MOST_GROWTH_BYTES:
        print(f"memory grew by {figures['memory_growth_bytes']} bytes", file=sys.stderr)
        return 1
    return 1 if fuzz.findings else 0


def figures_of(fuzz: Fuzz, seconds: float, warm_bytes: int) -> dict[str, Any]:
    return {
        "seed": fuzz.seed,
        "inputs": sum(tally.inputs for tally in fuzz.tallies.values()),
        "seconds": round(seconds, 1),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "findings": [finding.what for finding in fuzz.findings],
        "memory_after_warm_up_bytes": warm_bytes,
        "memory_growth_bytes": highest_bytes() - warm_bytes,
        "targets": {
            name: {
                "inputs": tally.inputs,
                "outcomes": dict(tally.outcomes.most_common()),
                "slowest_seconds": round(tally.slowest_seconds, 3),
                "slowest": tally.slowest,
            }
            for name, tally in fuzz.tallies.items()
        },
    }


def show(figures: dict[str, Any]) -> None:
    for name, row in figures["targets"].items():
        outcomes = ", ".join(f"{count} {what}" for what, count in row["outcomes"].items())
        print(f"{name:19s}{row['inputs']:8d}  slowest {row['slowest_seconds']:6.3f} s  {outcomes}")
    print(
        f"{figures['inputs']} inputs in {figures['seconds']} s, {len(figures['findings'])} findings, "
        f"memory at most {figures['memory_growth_bytes'] / 2**20:+.1f} MiB after the warm-up"
    )


if __name__ == "__main__":
    sys.exit(main())
