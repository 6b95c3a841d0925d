"""Give damaged and hostile files to everything that reads files, and accept a valid result or a CheckflowError alone.

``make fuzz [INPUTS=100000] [SEED=n]``, or ``python tests/faults/fuzz.py --help``: a table of what each target made of
its inputs, and the same as JSON. The tests run a short form (``test_fuzz.py``).

Inputs are changed real files (:mod:`fuzz_mutation`), nine of ten from a generator of our own that knows their structure
and seals most of them anew, so that they get past digests and checksums; one of ten from hypothesis, a value of its at
some place of a real file. Each follows from the seed, the target and its number: ``--only TARGET:NUMBER`` gives one to
its reader again.

They are made here, and read in another process (:mod:`fuzz_reader`). What must hold: no other exception, and no other
end of that process; a valid result encodes to bytes that give the same result again, and damage that nobody sealed
gives what was written, or an error; no input takes more than some seconds of its time; and its memory grows by less
than 64 MiB from the end of the warm-up to the highest moment of all that follows. ``--break NAME`` gives it a fault
first (:mod:`fuzz_breaks`), and the run must fail.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import collections
import gc
import hashlib
import json
import os
import random
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))  # it is a program, too

import hypothesis.strategies as st
from fuzz_breaks import BREAKS
from fuzz_feeds import make_feeds
from fuzz_mutation import Raw
from fuzz_process import Reader, ReaderDied, reading
from fuzz_targets import Target, make_corpus, make_targets
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as hypothesis_seed
from hypothesis import settings as hypothesis_settings

MOST_GROWTH_BYTES = 64 * 2**20
MOST_SECONDS = 5.0  # of processor time, for one input
MOST_FINDINGS = 20
HYPOTHESIS_SHARE = 10  # of so many inputs one comes from hypothesis
_HYPOTHESIS_BATCH = 250  # examples; it remembers them
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
    """One run: what was found, and where inputs that found it are kept.

    Args:
        warm_bytes: what the reader held at the end of the warm-up; None: before it, or that reader is gone.
        highest_bytes: the most that it held since then, first after the input ``highest``.
    """

    seed: int
    findings_folder: Path
    reader: Reader
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    warm_bytes: int | None = None
    highest_bytes: int = 0
    highest: str = ""
    deaths: int = 0
    _seen: set[str] = field(default_factory=set)

    def give(self, target: Target, item: Any, name: str) -> None:
        """Give one input to its reader. One that dies of it is followed by another, where there are more inputs."""
        tally = self.tallies.setdefault(target.name, Tally())
        tally.inputs += 1
        if not self.reader.running:
            self.reader.start()
        try:
            answer = self.reader.give(target.name, item)
        except ReaderDied as end:
            tally.outcomes[f"!{end.how}"] += 1
            self._note(name, item, f"{target.name}: the reader {end.how}", end.details)
            self.warm_bytes = None
            self.deaths += 1
            return
        tally.outcomes[answer.outcome] += 1
        if answer.found:
            self._note(name, item, answer.found, answer.details)
        if answer.seconds > tally.slowest_seconds:
            tally.slowest_seconds, tally.slowest = answer.seconds, name
        if answer.seconds > MOST_SECONDS:
            self._note(name, item, f"slow: {target.name}", f"{name} took {answer.seconds:.1f} s of processor time")
        self._weigh(item, name)

    @property
    def enough(self) -> bool:
        """Whether so much was found that more would tell nothing new."""
        return len(self.findings) + self.deaths >= MOST_FINDINGS

    def warm(self) -> None:
        """From here on memory counts."""
        self.warm_bytes = self.reader.resident_bytes()
        self.reader.forget_highest()

    @property
    def growth_bytes(self) -> int | None:
        """By how much memory has grown at most since the warm-up; None: its reader did not live to the end."""
        return None if self.warm_bytes is None else self.highest_bytes - self.warm_bytes

    def _weigh(self, item: Any, name: str) -> None:
        if self.warm_bytes is None or (highest_bytes := self.reader.highest_bytes()) <= self.highest_bytes:
            return
        self.highest_bytes, self.highest = highest_bytes, name
        if (growth_bytes := highest_bytes - self.warm_bytes) >= MOST_GROWTH_BYTES:
            self._note(name, item, "too much memory", f"{growth_bytes} bytes more than after the warm-up")

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
        if fuzz.enough:
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
        if not fuzz.enough:
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
    while any(left.values()) and not fuzz.enough:
        for target in targets:
            count = min(left[target.name], _HYPOTHESIS_BATCH * HYPOTHESIS_SHARE)
            theirs = 0 if target.graft is None else count // HYPOTHESIS_SHARE
            before = fuzz.tallies.setdefault(target.name, Tally()).inputs
            run_hypothesis(fuzz, target, numbers[target.name], theirs)
            given_by_it = fuzz.tallies[target.name].inputs - before  # it may stop before its count, or overshoot
            run_own(fuzz, target, numbers[target.name], max(0, count - given_by_it))
            numbers[target.name] += count
            left[target.name] -= count


# The command


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: 100,000)")
    parser.add_argument("--seed", type=int, help="what all inputs follow from (default: drawn, and printed)")
    parser.add_argument(
        "--only", metavar="TARGET:NUMBER", help="give this one input to its reader, and raise its error"
    )
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder for inputs that found one")
    parser.add_argument("--break", dest="fault", choices=BREAKS, help="give the reader this fault first")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory() as kept:
        targets = make_targets(make_corpus(Path(kept) / "corpus"))
        if arguments.only:
            name, _, number = arguments.only.partition(":")
            target = next(target for target in targets if target.name == name)
            print(make_feeds(Path(kept) / "inputs")[name](draw(target, seed, int(number))))
            return 0
    print(f"seed {seed}", flush=True)
    with reading(arguments.fault) as reader:
        return _run(Fuzz(seed, arguments.findings, reader), targets, arguments)


def run_measured(fuzz: Fuzz, targets: tuple[Target, ...], inputs: int) -> None:
    """So many inputs, memory measured from the first tenth on."""
    done = max(inputs // 10, len(targets))
    run_all(fuzz, targets, done)
    if fuzz.reader.running:
        fuzz.warm()
    while done < inputs and not fuzz.enough:
        count = min(5_000, inputs - done)
        run_all(fuzz, targets, count, first=done)
        done += count
        if fuzz.warm_bytes is not None:
            now, most = fuzz.reader.resident_bytes() - fuzz.warm_bytes, fuzz.highest_bytes - fuzz.warm_bytes
            print(f"{done} inputs, memory {now / 2**20:+.1f} MiB, at most {most / 2**20:+.1f}", flush=True)


def _run(fuzz: Fuzz, targets: tuple[Target, ...], arguments: argparse.Namespace) -> int:
    begun = time.perf_counter()
    run_measured(fuzz, targets, arguments.inputs)
    figures = figures_of(fuzz, time.perf_counter() - begun)
    show(figures)
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if fuzz.findings else 0


def figures_of(fuzz: Fuzz, seconds: float) -> dict[str, Any]:
    return {
        "seed": fuzz.seed,
        "inputs": sum(tally.inputs for tally in fuzz.tallies.values()),
        "seconds": round(seconds, 1),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "findings": [finding.what for finding in fuzz.findings],
        "memory_after_warm_up_bytes": fuzz.warm_bytes,
        "memory_growth_bytes": fuzz.growth_bytes,
        "memory_highest": fuzz.highest,
        "memory_at_the_end_bytes": fuzz.reader.resident_bytes() if fuzz.reader.running else None,
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
    growth = figures["memory_growth_bytes"]
    memory = "unknown: its reader died" if growth is None else f"at most {growth / 2**20:+.1f} MiB after the warm-up"
    print(f"{figures['inputs']} inputs in {figures['seconds']} s, {len(figures['findings'])} findings, memory {memory}")


if __name__ == "__main__":
    sys.exit(main())
