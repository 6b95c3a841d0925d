"""What the measurements on a GPU mean: statistics, the order of blocks, the budget of time, and figures beside targets.

Pure functions on numbers and JSON; nothing here needs torch, a GPU, or another file of this project.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
Status = Literal["done", "failed", "ended", "skipped"]
PLAIN, CHECKPOINTED = "plain", "checkpointed"

MOST_NAMES = 40  # of a trace's events, that are kept
FOLLOWED = 10  # iterations after a checkpoint, in which its cost is looked for
LOCKED = ("shared", "anonymous", "allocated")  # kinds of host memory that staging buffers may lie in, and be locked


# --- how much time there is


@dataclass(frozen=True)
class Part:
    """One part of a run. It is ended when its time is over, and not begun where too little is left."""

    name: str
    what: str
    most_seconds: float
    least_seconds: float
    call: int = 1  # in which of the calls it is, where a run is divided into several
    needs: tuple[str, ...] = ()  # of the machine; where it was found unable to, the part is not begun
    beside: str = ""  # it times nothing: runs at the same time as those before and behind it that have the same word
    on_cpu: bool = False  # a run without a GPU has it too
    last: bool = False  # in its process: what it leaves there (a profiler's hooks in CUDA) slows what follows


def allowed_seconds(part: Part, left_seconds: float) -> float | None:
    """How long a part may take of what is left; None: it is not worth beginning."""
    return None if left_seconds < part.least_seconds else min(part.most_seconds, left_seconds)


RIGHT_COPIES, LOCKED_MEMORY, BATCHES = "right copies", "locked memory", "batches"  # what a part, or a test, may need
SHARED_LOCKED = "locked shared memory"
UNABLE = "CHECKFLOW_GPU_UNABLE"  # the environment's variable that tells tests: what :func:`unable` returns, as JSON


def unable(kinds: Mapping[str, Row]) -> dict[str, str]:
    """What this machine was found unable to, and why.

    Args:
        kinds: of host memory, by name. Of each why CUDA does not take it, ``refused``; or whether what arrived there
            was what left, by one copy and by many in a call, ``single`` and ``batched``; and whether the runtime takes
            ``batches``, which it is not asked where they may fault. Where nothing is known, there are none.
    """
    found: dict[str, str] = {}
    wrong = [
        f"{way} to {kind} memory" for kind, row in kinds.items() for way in ("single", "batched") if not row.get(way, 1)
    ]
    if wrong:
        found[RIGHT_COPIES] = f"what arrives is not what left: {', '.join(wrong)}"
    locked = {kind: row for kind, row in kinds.items() if kind in LOCKED}
    refused = {
        kind: f"CUDA does not take {kind} memory: {row['refused']}" for kind, row in locked.items() if "refused" in row
    }
    if "shared" in refused:
        found[SHARED_LOCKED] = refused["shared"]
    if locked and len(refused) == len(locked):
        found[LOCKED_MEMORY] = "; ".join(refused.values())
    elif locked and not any(row.get("batches") for row in locked.values()):
        found[BATCHES] = "many copies in a call are not to be had here"
    return found


def case_name(model: str, batch_size: int, optimizer: str | None = None, settings: Mapping[str, Any] = {}) -> str:
    """What a training step is called in results, as "gpt2 mixed batch 16"."""
    chosen = (key if value is True else f"{key}={value}" for key, value in settings.items())
    return " ".join((model, *chosen, *([optimizer] if optimizer else []), f"batch {batch_size}"))


# --- what was measured


def interleaved(rounds: int) -> tuple[str, ...]:
    """The order of blocks: each with checkpoints lies between two without, so that a steady drift cancels."""
    if rounds < 1:
        raise ValueError("at least one round")
    return (*(PLAIN, CHECKPOINTED) * rounds, PLAIN)


def quantile(samples: Sequence[float], share: float) -> float:
    """The value that this share of the samples does not exceed, interpolated.

    Raises:
        ValueError: there are no samples, or the share is not between 0 and 1.
    """
    if not samples or not 0 <= share <= 1:
        raise ValueError("a quantile needs samples, and a share from 0 to 1")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(samples: Sequence[float]) -> Row:
    """Seconds of one thing that was measured several times."""
    return {
        "count": len(samples),
        "least": min(samples),
        "median": statistics.median(samples),
        "p99": quantile(samples, 0.99),
        "most": max(samples),
    }


def overhead(blocks: Sequence[tuple[str, Sequence[float]]]) -> Row:
    """What checkpoints add to the time of an iteration, from interleaved blocks.

    Args:
        blocks: of each, what it was (``PLAIN`` or ``CHECKPOINTED``), and the seconds of its iterations.

    Returns:
        The spread of both kinds; what is added to the median and to the 99th percentile, as shares; the same of each
        block with checkpoints against its two neighbours; and ``noise``: how far the plain blocks' medians lie apart.
    """
    pooled = {
        kind: [one for name, seconds in blocks if name == kind for one in seconds] for kind in (PLAIN, CHECKPOINTED)
    }
    plain, checkpointed = spread(pooled[PLAIN]), spread(pooled[CHECKPOINTED])
    medians = [statistics.median(seconds) for _, seconds in blocks]
    pairs = [
        medians[i] / statistics.fmean((medians[i - 1], medians[i + 1])) - 1
        for i, (name, _) in enumerate(blocks)
        if name == CHECKPOINTED
    ]
    bare = [median for (name, _), median in zip(blocks, medians, strict=True) if name == PLAIN]
    return {
        "plain_seconds": plain,
        "checkpointed_seconds": checkpointed,
        "median_overhead": checkpointed["median"] / plain["median"] - 1,
        "p99_overhead": checkpointed["p99"] / plain["p99"] - 1,
        "block_overheads": pairs,
        "noise": max(bare) / min(bare) - 1,
    }


def following_cost(seconds: Sequence[float], every: int, settled: int) -> Row:
    """What one checkpoint costs at its boundary and in the ``FOLLOWED`` iterations after it: the median over several.

    Each is held against the iterations of the same stretch that come when it is over: over some seconds a GPU's clock
    drifts by more than a checkpoint costs.

    Args:
        seconds: of each iteration; the first one ends at a boundary that is captured, as each ``every``-th after it.
        settled: so many iterations after a boundary its checkpoint is over; at least ``FOLLOWED``.

    Raises:
        ValueError: no iteration is left to compare with.
    """
    if not FOLLOWED <= settled < every - 1 or len(seconds) < every:
        raise ValueError(f"{len(seconds)} iterations, with a checkpoint every {every}, leave none to compare with")
    stretches = [seconds[begin : begin + every] for begin in range(0, len(seconds) - every + 1, every)]
    usual = [statistics.fmean(stretch[1 + settled :]) for stretch in stretches]
    held = 1 + FOLLOWED
    costs = [sum(one[:held]) - held * plain for one, plain in zip(stretches, usual, strict=True)]
    return {"seconds": statistics.median(costs), "each": costs, "usual_seconds": statistics.fmean(usual)}


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, sorted, those that touch made one."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def copies(trace: Mapping[str, Any], iterations: int) -> Row:
    """What crossed the link while a profiler watched some iterations, by its trace (the format of Chrome's tracing).

    ``bytes_per_second`` is of the time in which copies ran; ``beside_kernels`` the share of that time in which kernels
    ran too. Of a trace without copies from device to host, by the names that they are known by, ``skipped`` says so,
    with the names that it has.
    """
    spans: dict[str, list[tuple[float, float]]] = {"DtoH": [], "HtoD": [], "DtoD": [], "kernel": []}
    sizes: dict[str, list[int]] = {name: [] for name in spans}
    for event in trace["traceEvents"]:
        category = event.get("cat")
        name = str(event.get("name", ""))
        kind = next((one for one in ("DtoH", "HtoD", "DtoD") if one in name), "") if category == "gpu_memcpy" else ""
        kind = "kernel" if category == "kernel" else kind
        if kind:
            begin = float(event["ts"]) / 1e6  # microseconds
            spans[kind].append((begin, begin + float(event["dur"]) / 1e6))
            sizes[kind].append(int(event.get("args", {}).get("bytes", 0)))
    if not spans["DtoH"]:
        names = {(str(event.get("cat")), str(event.get("name"))) for event in trace["traceEvents"] if "dur" in event}
        seen = sorted(names, key=lambda name: (not name[0].startswith("gpu_"), name))  # copies come first
        return {
            "skipped": "the profiler saw no copy from device to host",
            "seen": [f"{category}: {name[:80]}" for category, name in seen[:MOST_NAMES]],
        }
    out, kernels = _union(spans["DtoH"]), _union(spans["kernel"])
    busy = _length(out)
    alone = _length(_union([*out, *kernels])) - _length(kernels)
    return {
        "iterations": iterations,
        "bytes": sum(sizes["DtoH"]),
        "copies": len(sizes["DtoH"]),
        "largest_copy_bytes": max(sizes["DtoH"]),
        "busy_seconds": busy,
        "bytes_per_second": sum(sizes["DtoH"]) / busy,
        "beside_kernels": 1 - alone / busy,
        "snapshot_bytes": sum(sizes["DtoD"]),  # training's own copies within the device are among them
        "to_device_bytes": sum(sizes["HtoD"]),
    }


# --- beside the targets


@dataclass(frozen=True)
class Target:
    """A figure to reach: ``most`` or ``least``, whichever is given, in the figure's own unit."""

    figure: str
    section: str  # of a case's rows
    key: str
    most: float | None = None
    least: float | None = None
    every_iteration: bool = False  # asked only where the plan makes a checkpoint of every iteration, and each was made


TARGETS = (
    Target("added to the median iteration, a checkpoint every iteration", "step_time", "median_overhead", most=0.01,
           every_iteration=True),
    Target("added to the 99th percentile, likewise", "step_time", "p99_overhead", most=0.03, every_iteration=True),
    Target("seconds lost in the ten iterations after one checkpoint", "following", "seconds", most=0.05),
    Target("seconds for which the main thread is held an iteration", "step_time", "held_seconds", most=1e-3),
    Target("bytes per second from device to host, within the plan", "copies", "bytes_per_second", least=50e9),
    Target("share of the bare link's, in large copies", "copies", "large_of_bare_link", least=0.9),
    Target("bytes asked for that checkpoints add to the peak of memory beyond what the plan says", "memory",
           "unplanned_bytes", most=0),
    Target("peak of memory with checkpoints, share by which it differs from the plan's", "memory", "plan_error",
           most=0.02),
)  # fmt: skip


def uncaptured(step_time: Row) -> str:
    """Why blocks of iterations say nothing of a checkpoint at each interval of the plan; "" if they do."""
    wanted = step_time["iterations_a_block"] // step_time["interval"]
    made = step_time["captures_a_block"]
    if made and all(count == wanted for count in made):
        return ""
    return f"{', '.join(map(str, made)) or 'no'} captures a block, not {wanted}"


def hampered(ran: Row) -> str:
    """Why a Checkpointer on a GPU could not copy as it is meant to, by what ran; "" if it could."""
    if "batches" not in ran:  # no GPU
        return ""
    reasons = [] if ran["buffers_locked"] else ["its buffers were not locked in place"]
    reasons += [] if ran["batches"] else ["its copies were made one by one"]
    return ", and ".join(reasons)


def judge(cases: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Each target with the worst of the cases that have the figure; ``met`` is None where none has.

    A case that is to have a checkpoint of every iteration, and has not, does not count, nor does one whose copies were
    hampered; why is in ``left_out``.
    """
    judged: list[Row] = []
    for target in TARGETS:
        found: dict[str, float] = {}
        left_out: dict[str, str] = {}
        for case, rows in cases.items():
            sections = {row["section"]: row for row in rows if "section" in row}
            value = sections.get(target.section, {}).get(target.key)
            rare = target.every_iteration and sections.get("plan", {}).get("interval") != 1
            if value is None or rare:
                continue
            ran = sections[target.section].get("ran") or sections.get("step_time", {}).get("ran", {})
            reason = hampered(ran) or (uncaptured(sections["step_time"]) if target.every_iteration else "")
            if reason:
                left_out[case] = reason
            else:
                found[case] = value
        bound = target.most if target.most is not None else target.least
        row: Row = {"figure": target.figure, "most": target.most, "least": target.least, "met": None, "cases": found}
        if left_out:
            row["left_out"] = left_out
        if found:
            worst = max if target.most is not None else min
            name = worst(found, key=lambda case: found[case])
            assert bound is not None
            met = found[name] <= bound if target.most is not None else found[name] >= bound
            row |= {"worst": found[name], "worst_case": name, "met": met}
        judged.append(row)
    return judged


def incomplete(result: Mapping[str, Any], parts: Iterable[Part]) -> list[str]:
    """What is missing in a result that ought to be whole: each part is there, with rows or a reason."""
    faults = []
    for part in parts:
        entry = result["parts"].get(part.name)
        if entry is None:
            faults.append(f"{part.name}: missing")
        elif entry["status"] != "done" and not entry["reason"]:
            faults.append(f"{part.name}: {entry['status']}, no reason given")
        elif entry["status"] == "done" and not entry["rows"]:
            faults.append(f"{part.name}: done, and no rows")
    return faults
