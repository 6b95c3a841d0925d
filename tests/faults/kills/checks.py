"""What must hold of a job that was killed: L1 to L6, from its notes and its directory.

**L1** nothing acknowledged is lost; **L2** a checkpoint is one noted state; **L3** damaged data is refused by a file's
name; **L4** the job ends bit-identical; **L5** the next save works, nothing is left over; **L6** few iterations are
replayed. Each check returns what is wrong, one line each that begins with the promise's name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.files import parse_step
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.torture import checks as torture_checks
from checkflow.torture.journal import Journal, read_journal
from tests.faults.kills.job import BATCHES, EPOCHS, KEEP, SAMPLES, Training, Variant
from tests.faults.kills.notes import Whereabouts, digest_tensors
from tests.support.oracle import read_tensor

MIB = 2**20
STATE = ("place", "tensors", "extra", "generators")


def state_of(note: Mapping[str, Any]) -> tuple[Any, ...]:
    """All of a state that was noted, as something to compare."""
    return tuple(json.dumps(note[part]) for part in STATE)


@dataclass(frozen=True)
class Record:
    """What all lives of a job have said so far."""

    boundaries: Mapping[int, tuple[tuple[Any, ...], ...]]  # by step: every different state that was noted there
    acknowledged: int  # the newest step; -1: none
    acknowledgements: int
    begun: Mapping[int, int]  # by life: iterations finished and under way, over all lives
    restored: Mapping[int, Mapping[str, Any]]  # by life: the note of what it went on from
    interval: Mapping[int, int]  # by life: the longest of a plan that ran
    batches: tuple[Mapping[str, Any], ...]
    end: Mapping[str, Any] | None


def make_record(notes: Iterable[Mapping[str, Any]]) -> Record:
    boundaries: dict[int, list[tuple[Any, ...]]] = {}
    acknowledged, count, end = -1, 0, None
    begun: dict[int, int] = {}
    interval: dict[int, int] = {}
    batches = []
    restored: dict[int, Mapping[str, Any]] = {}
    for note in notes:
        kind, life = note["event"], note["life"]
        if kind == "boundary":
            states = boundaries.setdefault(note["step"], [])
            if state_of(note) not in states:
                states.append(state_of(note))
        elif kind in ("durable", "committed"):
            acknowledged, count = max(acknowledged, note["step"]), count + (kind == "durable")
        elif kind == "batch":
            begun[life] = note["step"] + 1
            interval[life] = max(interval.get(life, 1), note["interval"])
            batches.append(note)
        elif kind == "restored":
            restored[life] = note
        elif kind == "end":
            end = note
    whole = {step: tuple(states) for step, states in boundaries.items()}
    return Record(whole, acknowledged, count, begun, restored, interval, tuple(batches), end)


def check_restored(restored: Mapping[str, Any] | None, record: Record, *, oldest: int | None = None) -> list[str]:
    """L1 and L2 of what a fresh process restored.

    Args:
        restored: as it noted it.
        oldest: the step that must be there at least; None: the last that was acknowledged.
    """
    if restored is None:
        return ["L5 a fresh process cannot go on from what is there"]
    least = record.acknowledged if oldest is None else oldest
    step = step_of(restored)
    if (-1 if restored["step"] is None else step) < least:
        return [f"L1 step {least} was acknowledged, and {restored['step']} is the newest that can be restored"]
    noted = record.boundaries.get(step, ())
    if not noted and restored["step"] is None:
        return []  # killed before it had begun
    equal = [at for at, states in record.boundaries.items() if state_of(restored) in states]
    if equal != [step]:
        found = zip(STATE, state_of(restored), zip(*noted, strict=True), strict=True) if noted else ()
        odd = [part for part, text, known in found if text not in known]
        return [f"L2 what is restored of step {step} is no state of that boundary: {', '.join(odd) or 'a mixture'}"]
    return []


def check_files(directory: Path, record: Record) -> list[str]:
    """L2 and L3 of every checkpoint in a directory, for our reader and for safetensors' own."""
    found = torture_checks.examine(directory, torture_checks.Found())
    wrong = [f"{one.promise} {one.text}" for one in torture_checks.check_found(None, found)]
    for path in find(directory):
        step = parse_step(path.name)
        if path.name not in found.whole:
            continue
        with open_checkpoint(path) as checkpoint:
            ours = digest_tensors({name: read_tensor(checkpoint, name) for name in checkpoint.tensors})
        public = {
            f"{file.name.partition('-')[0]}/{key}": tensor
            for file in path.glob("*.safetensors")
            for key, tensor in safetensors.torch.load_file(file).items()
        }
        expected = {json.loads(state[STATE.index("tensors")]) for state in record.boundaries.get(step or 0, ())}
        for reader, tensors in (("ours", ours), ("safetensors", digest_tensors(public))):
            if tensors not in expected:
                wrong.append(f"L2 the tensors of {path.name} ({reader}) are no state of that boundary")
    return wrong


def step_of(restored: Mapping[str, Any]) -> int:
    """What was gone on from; 0: from nothing."""
    return 0 if restored["step"] is None else int(restored["step"])


def check_reclaimed(restored: Mapping[str, Any], record: Record, stored: int) -> list[str]:
    """L1 and L2 of what the next life went on from: host memory had something newer than storage, or nothing.

    Args:
        record: of the lives before.
        stored: the step that storage alone gives.
    """
    if (step := step_of(restored)) < stored:
        return [f"L1 storage has step {stored}, and the next life went on from {step}"]
    return check_restored(restored, record)


def check_replayed(begun: int, restored: int, interval: int, every: int | None) -> list[str]:
    """L6. Without ``every`` storage takes the newest checkpoint as fast as it goes, and nothing bounds what that is."""
    if every is None:
        return []
    period = -(-every // interval) * interval
    most = 2 * period + 1
    if begun - restored > most:
        return [f"L6 {begun - restored} iterations are replayed, {restored} to {begun}, and {most} at most may be"]
    return []


def check_disk(used_bytes: int, checkpoint_bytes: int) -> list[str]:
    """L5: what the directory takes, at any instant."""
    most = (KEEP + 1) * checkpoint_bytes + MIB
    if checkpoint_bytes and used_bytes > most:
        return [f"L5 the directory has {used_bytes} bytes and may have {most}, {KEEP + 1} checkpoints and 1 MiB"]
    return []


def check_left(variant: Variant, directory: Path) -> list[str]:
    """L5: what lies in a directory when its job has come to its end."""
    steps = {path.name: parse_step(path.name) for path in find(directory)}
    wrong = []
    known = {".lock", "plans", "report.json", "captures.json", "profile.json"}
    if odd := sorted({path.name for path in directory.iterdir()} - steps.keys() - known):
        wrong.append(f"L5 left over in the directory: {', '.join(odd)}")
    if odd := sorted(path.name for path in directory.glob("plans/.*")):
        wrong.append(f"L5 left over among the plans: {', '.join(odd)}")
    if variant.steps not in steps.values():
        wrong.append(f"L5 the last boundary, {variant.steps}, is not saved")
    return wrong


def check_end(record: Record, expected: Record, variant: Variant) -> list[str]:
    """L4: held against an uninterrupted job. What was replayed counts as it was done last."""
    wrong = []
    assert expected.end is not None
    if record.end is None:
        return ["L4 the job did not come to its end"]
    if record.end["failed"] or record.end["breaches"]:
        wrong.append(f"L5 {record.end['failed']} checkpoints failed, {record.end['breaches']} were torn")
    odd = [part for part in STATE[1:] if record.end[part] != expected.end[part]]
    if odd or record.end["step"] != expected.end["step"]:
        wrong.append(f"L4 the job does not end as it does uninterrupted: {', '.join(odd) or 'another step'}")
    differing = [step for step, states in record.boundaries.items() if set(states) != set(expected.boundaries[step])]
    if differing:
        wrong.append(f"L4 {len(differing)} boundaries are not what they are uninterrupted, step {min(differing)} first")
    used = _used(record.batches)
    if used != _used(expected.batches):
        wrong.append("L4 the samples, their order or their bytes are not those of an uninterrupted job")
    for epoch in range(EPOCHS):
        indices = [index for one, row, _ in used if one == epoch for index in row]
        if sorted(indices) != list(range(SAMPLES)):
            wrong.append(f"L4 epoch {epoch} does not have every sample once")
    if len(used) != EPOCHS * BATCHES:
        wrong.append(f"L4 {len(used)} batches reached a step, not {EPOCHS * BATCHES}")
    return wrong


def _used(batches: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[int], str]]:
    """The batches of each iteration, in order; one that begins anew takes the place of all that it replays."""
    lives: dict[int, tuple[int, list[tuple[int, list[int], str]]]] = {}
    for note in batches:
        step, life = note["step"], note["life"]
        if step not in lives or lives[step][0] != life:
            lives = {at: kept for at, kept in lives.items() if at < step}
            lives[step] = life, []
        lives[step][1].append((note["epoch"], note["indices"], note["bytes"]))
    return [batch for step in sorted(lives) for batch in lives[step][1]]


# What a fresh process does


def link_copy(directory: Path, target: Path) -> None:
    """The same files under other names: what removes, renames or makes files there changes nothing here."""
    shutil.copytree(directory, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    if os.path.basename(source) == ".lock":  # is written in place
        shutil.copyfile(source, target)
    else:
        os.link(source, target)


def damage(path: Path, seed: int) -> Path:
    """Change one byte of a checkpoint, or cut a file short, or take one away; returns the file."""
    source = random.Random(seed)
    file = source.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    way = source.choice(("flip", "flip", "cut", "remove"))
    file.unlink()  # the other name of a linked file keeps its content
    if way != "remove":
        place = source.randrange(len(content))
        if way == "flip":
            content[place] ^= 1 << source.randrange(8)
        file.write_bytes(content if way == "flip" else content[:place])
    return file


def restore_somewhere(
    variant: Variant, directory: Path, plan: Path | None, folder: Path, *, iterations: int
) -> tuple[Mapping[str, Any] | None, Record]:
    """Go on for some iterations from what is in a directory, without loader workers, whatever the job had.

    Returns:
        What was restored, and what was noted then.
    """
    file = folder / f"{directory.name}.notes"
    Training(variant, directory, plan, Journal(file, life=0), Whereabouts(), iterations=iterations, workers=0).run()
    notes = read_journal(file)
    return next((note for note in notes if note["event"] == "restored"), None), make_record(notes)


def examine(
    variant: Variant, directory: Path, plan: Path | None, record: Record, folder: Path, damage_seed: int | None,
    break_runtime: Callable[[], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All that a fresh process can find out about a killed job's directory, which is left as it is.

    Args:
        folder: empty, on the same file system.
        damage_seed: whether the newest checkpoint is also damaged, in a copy, and in which way.
        break_runtime: takes something away of it first.

    Returns:
        "problems"; the step that was "restored", 0 for none; whether one was "damaged".
    """
    if break_runtime is not None:
        break_runtime()
    problems = check_files(directory, record)
    copy = folder / "copy"
    link_copy(directory, copy)
    restored, after = restore_somewhere(variant, copy, plan, folder, iterations=2)
    problems += check_restored(restored, record)
    step = 0 if restored is None else step_of(restored)
    if step < variant.steps:
        newest = find(copy)[:1]
        if not newest or parse_step(newest[0].name) != min(step + 2, variant.steps):
            problems.append(f"L5 the next save does not work: {[path.name for path in newest]} after step {step}")
        problems += check_files(copy, merged(record, after))
    damaged = damage_seed is not None and len(find(directory)) > 1
    if damage_seed is not None and damaged:
        problems += _examine_damaged(variant, directory, plan, record, folder, damage_seed)
    return {"problems": problems, "restored": step, "damaged": damaged}


def merged(one: Record, other: Record) -> Record:
    """The states of both."""
    steps = one.boundaries.keys() | other.boundaries.keys()
    states = {step: one.boundaries.get(step, ()) + other.boundaries.get(step, ()) for step in steps}
    return dataclasses.replace(one, boundaries=states)


def _examine_damaged(
    variant: Variant, directory: Path, plan: Path | None, record: Record, folder: Path, seed: int
) -> list[str]:
    copy = folder / "damaged"
    link_copy(directory, copy)
    newest, older = find(copy)[:2]
    file = damage(newest, seed)
    fault = dict(torture_checks.examine(copy, torture_checks.Found()).damaged).get(newest.name)
    if fault is None:
        return [f"L3 {file.name} of {newest.name} is damaged, and the checkpoint passes for good"]
    if file.name not in fault:
        return [f"L3 {file.name} is damaged, and the error does not say so: {fault}"]
    step = parse_step(older.name)
    restored, _ = restore_somewhere(variant, copy, plan, folder, iterations=1)
    if restored is None or restored["step"] != step:
        return [f"L3 {newest.name} is damaged, and what is restored is not {older.name}"]
    return check_restored(restored, record, oldest=step)
