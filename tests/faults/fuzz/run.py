"""Give damaged and hostile files to everything that reads files, and accept a valid result or a CheckflowError alone.

Nine of ten inputs come from our own generator, which seals most of them anew; hypothesis makes the others. Another
process reads them: it must not end, raise anything else, take seconds, or grow by 64 MiB. ``--only TARGET:NUMBER``
reads one again; ``--break NAME`` adds a fault first, and the run must fail.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import collections
import gc
import hashlib
import itertools
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as hypothesis_seed
from hypothesis import settings as hypothesis_settings
from xxhash import xxh3_128_hexdigest

from checkflow.core.small_files import MOST_TIMES
from tests.faults.fuzz.breaks import BREAKS
from tests.faults.fuzz.feeds import make_feeds
from tests.faults.fuzz.mutation import Raw
from tests.faults.fuzz.process import Reader, ReaderDied, reading
from tests.faults.fuzz.targets import Corpus, Target, make_corpus, make_targets

MOST_GROWTH_BYTES = 64 * 2**20
MOST_SECONDS = 5.0  # of processor time, for one input, or for a MiB of a large one; a twentieth of it is usual
LARGE_BYTES = 2**20
FREE_BYTES = 16 * 2**20  # that reading takes of any file: code that is first imported, what the allocator keeps
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
    "captures": 1,
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
    most_times: float = 0.0  # its own size, that a large file took of memory, and which
    most_times_of: str = ""
    slowest_large: float = 0.0  # seconds a MiB
    slowest_large_of: str = ""
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

    def give_large(self, target: str, item: Any, name: str) -> None:
        """Give an input whose size is what its memory and its time are held against."""
        if not self.reader.running:
            self.reader.start()
        size = len(item[0] if isinstance(item, tuple) else item)
        before = self.reader.resident_bytes()
        self.reader.forget_highest()
        try:
            answer = self.reader.give(target, item)
        except ReaderDied as end:
            self._note(name, item, f"{target}: the reader {end.how}", end.details)
            self.deaths += 1
            return
        if answer.found:
            self._note(name, item, answer.found, answer.details)
        times = max(0, self.reader.highest_bytes() - before - FREE_BYTES) / size
        rate = answer.seconds / max(1.0, size / 2**20)
        if times > self.most_times:
            self.most_times, self.most_times_of = times, name
        if rate > self.slowest_large:
            self.slowest_large, self.slowest_large_of = rate, name
        if times > MOST_TIMES:
            self._note(name, item, f"memory of a large {target}", f"{times:.0f} bytes a byte, at most {MOST_TIMES}")
        if rate > MOST_SECONDS:
            self._note(name, item, f"slow: a large {target}", f"{rate:.1f} s of processor time a MiB")

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


# What is repeated in a large file, a comma after each; spaces make a file no denser than real ones are.
_UNITS = (
    *("[]", "{}", "1", "1e999", "1.5", '"a"', '{"a":0}', "[]      ", "{}      ", '{"a":0}       ', "1    "),
    *("9" * 4000, '"' + "a" * 4000 + '"', "[" * 900 + "]" * 900),
)


def large_files(corpus: Corpus) -> Iterator[tuple[str, str, Any]]:
    """Target, name and input of files that are a MiB of the same, alone and as one field of a real file."""
    shapes = {unit[:14]: f"[{f'{unit},' * (LARGE_BYTES // (len(unit) + 1))}0]" for unit in _UNITS}
    shapes["members"] = "{" + ",".join(f'"{n}":0' for n in range(LARGE_BYTES // 11)) + "}"
    shapes |= {"text": f'"{"a" * LARGE_BYTES}"', "digits": "9" * LARGE_BYTES, "deep": "[" * LARGE_BYTES}
    plan, report, manifest = (json.loads(data) for data in (corpus.plans[0], corpus.report, corpus.manifests[0]))
    del manifest["digest"]
    run, tensor = report["runs"][0], next(iter(manifest["tensors"].values()))
    header = {"a": {"shape": [2], "dtype": "U8", "data_offsets": [0, 2]}}
    real: list[tuple[str, Any, tuple[tuple[dict[str, Any], str], ...]]] = [
        ("plan", plan, ((plan, "chunks"), (plan, "wait"), (plan["timeline"], "steps"), (plan["chunks"][0], "tensor"))),
        ("report", report, ((report, "runs"), (run, "phases"), (run["frequency"], "changes"))),
        ("manifest", manifest, ((manifest, "info"), (manifest, "tensors"), (tensor, "pieces"), (tensor, "shape"))),
        ("safetensors header", header, ((header, "a"), (header["a"], "shape"))),
    ]
    for (target, whole, places), (what, shape) in itertools.product(real, shapes.items()):
        yield target, f"{what} alone", _input(target, shape)
        for held, name in places:
            kept = dict(held)
            for others in (kept, {}):  # of each field that is not there, an error could hold all that is
                held.clear()
                held.update({**others, name: "?"})
                text = json.dumps(whole).replace('"?"', shape)
                yield target, f"{what} in {name}, {len(held)} fields", _input(target, text)
            held.clear()
            held.update(kept)


def _input(target: str, text: str) -> Any:
    data = text.encode()
    if target == "manifest":
        return data[:-1] + b',"digest":"' + xxh3_128_hexdigest(data[:-1]).encode() + b'"}\n'
    return (data, 8 + len(data) + 2) if target == "safetensors header" else data


def run_large(fuzz: Fuzz, files: Iterable[tuple[str, str, Any]]) -> None:
    """Each large file may take so many times its own size of memory, and so much time."""
    for target, what, item in files:
        if fuzz.enough:
            return
        fuzz.give_large(target, item, f"{target}:{what}")


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
        corpus = make_corpus(Path(kept) / "corpus")
        targets = make_targets(corpus)
        if arguments.only:
            name, _, number = arguments.only.partition(":")
            target = next(target for target in targets if target.name == name)
            print(make_feeds(Path(kept) / "inputs")[name](draw(target, seed, int(number))))
            return 0
    print(f"seed {seed}", flush=True)
    with reading(arguments.fault) as reader:
        return _run(Fuzz(seed, arguments.findings, reader), corpus, targets, arguments)


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


def _run(fuzz: Fuzz, corpus: Corpus, targets: tuple[Target, ...], arguments: argparse.Namespace) -> int:
    begun = time.perf_counter()
    run_large(fuzz, large_files(corpus))
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
        "most_times_its_size": round(fuzz.most_times, 1),
        "most_times_its_size_of": fuzz.most_times_of,
        "slowest_large_seconds_a_mib": round(fuzz.slowest_large, 3),
        "slowest_large_of": fuzz.slowest_large_of,
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
        f"large files: at most {figures['most_times_its_size']} times their size of memory"
        f" ({figures['most_times_its_size_of']}), {figures['slowest_large_seconds_a_mib']} s a MiB"
        f" ({figures['slowest_large_of']})"
    )
    growth = figures["memory_growth_bytes"]
    memory = "unknown: its reader died" if growth is None else f"at most {growth / 2**20:+.1f} MiB after the warm-up"
    print(f"{figures['inputs']} inputs in {figures['seconds']} s, {len(figures['findings'])} findings, memory {memory}")


if __name__ == "__main__":
    sys.exit(main())
