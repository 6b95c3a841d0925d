"""What ``checkflow ls``, ``verify``, ``diff``, ``memory`` and ``import`` print."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from checkflow.core.units import format_size

if TYPE_CHECKING:
    from checkflow.runtime.inspect import Changed, Differences, Listed, Running, Verified
    from checkflow.runtime.memory_tier.orphans import Left
    from checkflow.runtime.weights.importer import Imported

MOST_ROWS = 30  # of differences, in a table
MOST_NAMES = 8  # in a line
TIER = "storage"  # captures in host memory are not checkpoints yet


def listed_json(
    directory: str, listed: Sequence[Listed], running: Running | None = None, left: int | None = None
) -> dict[str, Any]:
    """For ``checkflow ls --json``; ``left``: the step that a dead run has left in host memory."""
    return {
        "directory": str(directory),
        "running": None if running is None else asdict(running),
        "left_in_memory": left,
        "entries": [{**asdict(one), "path": str(one.path), "tier": TIER, "valid": not one.fault} for one in listed],
    }


def listed_tables(
    directory: str, listed: Sequence[Listed], running: Running | None = None, left: int | None = None
) -> Iterable[Table | str]:
    """What a running job has in memory, or a dead one left there, checkpoints, then what else lies beside them."""
    if running is not None:
        age = _age(time.time() - running.written_unix_seconds)
        memory = "nothing yet" if running.memory_step is None else f"step {running.memory_step}"
        yield f"a job runs here; memory: {memory}, by its report of {age} ago"
    if left is not None:
        yield f"step {left} lies in this machine's memory, where a job left it that died; the next one here saves it"
    checkpoints = [one for one in listed if one.kind == "checkpoint"]
    others = [one for one in listed if one.kind != "checkpoint"]
    if not listed:
        yield f"{directory} holds no checkpoint"
        return
    table = Table(title=f"checkpoints in {directory}, {format_size(sum(one.size_bytes for one in checkpoints))} in all")
    table.title_justify = "left"
    for column in ("step", "epoch", "size", "tensors", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    ranked = any((one.ranks or 1) > 1 for one in checkpoints)
    if ranked:
        table.add_column("ranks", justify="right", no_wrap=True)
    measured = any(one.metrics for one in checkpoints)
    if measured:
        table.add_column("metrics", overflow="fold")
    faulty = any(one.fault for one in checkpoints)
    if faulty:
        table.add_column("", overflow="fold")
    now = time.time()
    for one in checkpoints:
        age = "-" if one.created_unix_seconds is None else _age(now - one.created_unix_seconds)
        table.add_row(
            str(one.step), _epoch(one), format_size(one.size_bytes), _or_dash(one.tensors), age, TIER,
            *([_or_dash(one.ranks)] if ranked else []), *([_metrics(one)] if measured else []),
            *([f"cannot be restored: {one.fault}" if one.fault else ""] if faulty else []),
        )  # fmt: skip
    yield table
    for owner in sorted({one.owner for one in checkpoints if one.owner is not None}):
        theirs = ", ".join(str(one.step) for one in checkpoints if one.owner == owner)
        yield f"of {owner}: step {theirs}; a job resumes from that only if its trust= allows it"
    for one in checkpoints:
        if one.stays is not None:
            yield f"step {one.step} stays: {one.stays}"
    words = {
        "broken": "damaged, set aside by a restore",
        "superseded": "later than the step that a run was asked to resume from",
        "leftover": "being written, or left by a run that was killed: the next run removes it",
    }
    for one in others:
        yield f"{one.path.name}: {format_size(one.size_bytes)}; {words[one.kind]}"


def memory_json(found: Sequence[Left], outcomes: Sequence[str | None] | None = None) -> dict[str, Any]:
    """For ``checkflow memory --json``. ``outcomes``: why each folder stays, None if it went; None: nothing to free."""
    rows = [{**asdict(one), "path": str(one.path), "only_copy": one.only_copy} for one in found]
    for row, reason in zip(rows, outcomes or (), strict=False):
        row.update(freed=reason is None, kept_because=reason)
    return {"folders": rows}


def memory_tables(found: Sequence[Left], outcomes: Sequence[str | None] | None = None) -> Iterable[Table | str]:
    """The folders, then what became of those to free; as :func:`memory_json`."""
    if not found:
        yield "no job has left anything in this machine's memory"
        return
    table = Table(title="jobs in this machine's memory", title_justify="left")
    table.add_column("checkpoints in", overflow="fold")
    table.add_column("owner", overflow="fold")
    for column in ("size", "age", "step", "on storage"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("job", overflow="fold")
    for one in found:
        process = "" if one.pid is None else f"process {one.pid}, "
        table.add_row(
            one.directory or "?", one.owner, "?" if one.size_bytes is None else format_size(one.size_bytes),
            _age(time.time() - one.changed_unix_seconds), _or_dash(one.step), _or_dash(one.stored_step),
            process + {True: "lives", False: "dead", None: "not known"}[one.lives],
        )  # fmt: skip
    yield table
    if outcomes is None:
        yield "--free frees what dead jobs hold; otherwise the next run in a job's directory resumes from its step"
        return
    for one, reason in zip(found, outcomes, strict=True):
        yield f"{one.path}: {'freed' if reason is None else f'stays: {reason}'}"


def imported_json(done: Imported) -> dict[str, Any]:
    return {**asdict(done), "path": str(done.path)}


def imported_lines(done: Imported) -> Iterable[str]:
    """What was made, how a job uses it, and what was left out."""
    of_optimizer = f" ({done.optimizer_tensors} of the optimizer)" if done.optimizer_tensors else ""
    yield (
        f"{done.source} ({done.form}) imported as {done.path}: {done.tensors} tensors{of_optimizer}, "
        f"{format_size(done.size_bytes)}"
    )
    if done.left_out:
        names = ", ".join(done.left_out[:MOST_NAMES]) + (", …" if len(done.left_out) > MOST_NAMES else "")
        yield f"left out: {names}"
    if done.optimizer_tensors:
        yield (
            "weights and optimizer state: a job starts from it with its own hyperparameters, and with new schedulers, "
            "data order and random numbers"
        )
    else:
        yield "weights only: a job starts from it with a new optimizer, schedulers, data order and random numbers"
    if done.newest != done.step:
        yield f'resume="auto" resumes from step {done.newest}, the newest: pass resume={done.step} to start from it'


def _epoch(one: Listed) -> str:
    return f"{one.epoch}{', its end' if one.epoch_end else ''}" if one.epoch is not None else "-"


def _metrics(one: Listed) -> str:
    metrics = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in one.metrics.items()
    )
    return f"{metrics} (the best)" if one.best else metrics


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _age(seconds: float) -> str:
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def verified_json(verified: Sequence[Verified]) -> dict[str, Any]:
    return {"checkpoints": [{**asdict(one), "path": str(one.path), "valid": not one.fault} for one in verified]}


def verified_lines(verified: Sequence[Verified]) -> Iterable[str]:
    for one in verified:
        outcome = one.fault if one.fault else "whole, every checksum fits"
        yield f"{one.path.name}: {format_size(one.size_bytes)}; {outcome}"


def differences_json(found: Differences) -> dict[str, Any]:
    return {
        "first": str(found.first),
        "second": str(found.second),
        "compared": found.compared,
        "tensors": [asdict(one) for one in found.tensors],
        "extra": [{"where": where, "first": first, "second": second} for where, first, second in found.extra],
    }


def differences_tables(found: Differences) -> Iterable[Table | str]:
    """Tensors, those that changed most first, then everything else."""
    yield (
        f"{found.first} and {found.second}: {len(found.tensors)} of {found.compared} tensors differ, "
        f"{len(found.extra)} other values"
    )
    if found.tensors:
        table = Table(title="tensors", title_justify="left")
        table.add_column("tensor", overflow="fold")
        for column in ("type", "elements that differ", "largest change"):
            table.add_column(column, justify="right")
        ordered = sorted(found.tensors, key=_rank)
        for one in ordered[:MOST_ROWS]:
            table.add_row(one.name, *_change(one))
        yield table
        yield from _more(len(ordered))
    if found.extra:
        table = Table(title="everything else", title_justify="left")
        for column in ("where", "first", "second"):
            table.add_column(column, overflow="fold")
        for row in found.extra[:MOST_ROWS]:
            table.add_row(*row)
        yield table
        yield from _more(len(found.extra))


def _rank(one: Changed) -> tuple[bool, bool, float, str]:
    """Other types and missing ones first, counters last; those between by their largest change."""
    counts = (one.first or "").startswith(("int", "uint", "bool")) or (one.first or "").endswith("[]")
    return one.differing is not None, counts, -(one.largest or 0.0), one.name


def _change(one: Changed) -> tuple[str, str, str]:
    if one.first is None or one.second is None:
        where = "first" if one.second is None else "second"
        return one.first or one.second or "-", f"only in the {where}", "-"
    if one.differing is None:
        return f"{one.first}, then {one.second}", "-", "-"
    largest = "-" if one.largest is None else f"{one.largest:.3g}"
    return one.first, f"{one.differing} of {one.elements}", largest


def _more(rows: int) -> Iterable[str]:
    if rows > MOST_ROWS:
        yield f"and {rows - MOST_ROWS} more: --json names all"
