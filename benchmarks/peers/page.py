"""The page of docs/ and its plots, from the figures alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.paper_document import table
from benchmarks.peers.figures import BARS, Figures, missed, spread
from benchmarks.peers.kills import MIXTURE, NEW, NOTHING, OLD
from benchmarks.peers.peers import OURS
from checkflow.core.units import format_rate, format_seconds, format_size

Content = Mapping[str, Any]
USAGE = """\
- **torch.save**: to a file beside its place, fsynced, then renamed. "In place" writes straight to the path, as most scripts do.
- **dcp.save** and **dcp.async_save** (thread, process): a stager that is kept copies the state beside forward and backward; the optimizer waits for it. The files are flushed by DCP, their names by the benchmark.
- **torchsnapshot** and **torch_checkpointing** flush nothing, so the benchmark flushes their files and names, beside training where they save beside training. torch_checkpointing runs, on a CPU, as its troubleshooting page says, with `manager.lock()` around the optimizer's step and without O_DIRECT, which fails on ext4.
- **CheckFreq**: its own code needs libraries of 2019, so its mechanism runs on checkflow's store and copies: "synchronous"; "persist beside", which copies in the foreground and writes in the background; "pipelined", which also copies behind the next forward and backward, until the optimizer's step.
- **checkflow**: `Checkpointer(every=…)` as it comes. It makes its plan before anything is timed.
- **raw copy and write** is no peer, but what they are to be compared with: one thread copies the tensors beside forward and backward, then writes them around the page cache, from large pages if the kernel has them. There are no names, no checksums, and nothing that tells a whole version from a torn one. It is a plain way, not the limit: other ways may take less.

Where training has one thread of two cores, as with `--threads 1`, saves have the other core, as the host of a GPU has some to spare. Where training takes all cores, whatever a save computes or copies takes its time.

A version counts when its bytes, its folders and its names are flushed. "Durable after" is measured while training goes on, from the beginning of the save; "durable write" while it stands still, from when the state is in host memory. checkflow, CheckFreq, dcp.async_save and torchsnapshot async_take copy it there first; torch_checkpointing does not tell when it has, and the others make no copy: for them it counts from the beginning. "Raw" there is the fastest of three plain ways at that moment, with blocks of 8 MiB from common pages: through the page cache, and around it with one thread and with four. From large pages, which checkflow uses, the disk gives more than that. "Hold" is how long the training thread waits or copies for one checkpoint: timed around the library's calls, and for checkflow as its [run report](../reference/run-report.md) counts it. "Host memory" is what a peer's processes add to training at most, each shared page counted once; without checkflow's planner, which has ended by then. "GPU memory" is what the allocator's peak rises by. All peers keep two versions, each at a new path. Each restore brings all bytes into memory, from files that the page cache was told to forget, and is compared bit for bit. For checkflow this is the part of `Checkpointer()` that restores; to read its plan takes further time.
"""  # noqa: E501


@dataclass(frozen=True)
class Column:
    """A figure in a table, and the direction that is better."""

    name: str
    title: str
    kind: str  # "share", "change" or "seconds"
    error: str = ""  # the name of its standard error

    def text(self, value: float) -> str:
        if self.kind == "seconds":
            return format_seconds(value)
        return f"{100 * value:+.1f} %" if self.kind == "change" else f"{100 * value:.0f} %"

    def cell(self, figures: Figures) -> str:
        found = spread(figures, self.name)
        if found.count == 1:
            error = f" ± {100 * figures[self.error][0]:.1f} %" if self.error in figures else ""
            return self.text(found.median) + error
        return f"{self.text(found.median)} ({self.text(found.lower)} to {self.text(found.upper)})"


TRAINING = (
    Column("inflation_mean", "mean iteration", "change", "inflation_error"),
    Column("inflation_median", "median", "change"),
    Column("inflation_p99", "99th percentile", "change"),
    Column("hold_seconds", "hold of a checkpoint", "seconds"),
)
STORAGE = (
    Column("durable_seconds", "durable after", "seconds"),
    Column("durable_share", "durable write, of raw", "share"),
    Column("restore_share", "restore, of raw", "share"),
    Column("memory_share", "host memory, of the state", "share"),
    Column("device_memory_share", "GPU memory, of the state", "share"),
    Column("made_share", "made, of asked", "share"),
)
PLOTTED = (TRAINING[0], TRAINING[3], STORAGE[1], STORAGE[2])


def _sized(columns: Sequence[Column], peers: Mapping[str, Figures]) -> str:
    rows = []
    columns = [column for column in columns if any(column.name in figures for figures in peers.values())]
    for name, figures in peers.items():
        if "failed" not in figures:
            rows.append([name, *(column.cell(figures) for column in columns)])
    return table(["", *(column.title for column in columns)], rows)


def _failures(found: Mapping[str, Figures]) -> list[str]:
    return [f"{name} is missing: {one['failed']}" for name, one in found.items() if "failed" in one]


def _kills(kills: Mapping[str, Any]) -> str:
    header = ["", "kills", "state before", "its own", "a mixture", "nothing loads"]
    rows = [
        [name, str(one["count"]), *(str(one["left"].get(what, 0)) for what in (OLD, NEW, MIXTURE, NOTHING))]
        for name, one in kills.items()
        if "failed" not in one
    ]
    return table(header, rows)


def _on(environment: Mapping[str, Any]) -> str:
    """What a part was measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    memory = format_size(environment["memory_bytes"])
    return f"{environment['machine']}, {memory} of memory, {environment['filesystem']}; {versions}."


def render(content: Content, name: str = "peers", images: str = "../images") -> str:
    """The page ``name``, which its plots are named after; ``images``: where they are, seen from it."""
    parts = [
        "# Beside other checkpointers",
        "`make peers` (`benchmarks/peers`) makes this page. All peers train the same GPT-2 with AdamW, save as "
        "often, and do the same durable work. In each round each has a process of its own, and they take turns.",
        "A figure is the median of the rounds, with its quartiles if there are several. With one round, ± is the "
        "standard error that its turns show. Percentages of time compare with the same loop without checkpoints: in "
        "one process, the two take turns from checkpoint to checkpoint. Objects made before these turns are excluded "
        "from Python's garbage collection, since a full one would fall on a single turn.",
    ]
    for state, found in content["states"].items():
        iteration, writes, reads = (
            _median_of(found["peers"], name)
            for name in ("iteration_seconds", "raw_write_bytes_per_second", "raw_read_bytes_per_second")
        )
        rounds = max((len(one["made_share"]) for one in found["peers"].values() if "failed" not in one), default=0)
        parts += [
            f"## {format_size(found['state_bytes'])} of state",
            f"{rounds} round{'s' * (rounds > 1)}. A checkpoint every {found['environment']['every']} iterations, each "
            f"of {format_seconds(iteration)}. Raw, the disk writes durably {format_rate(writes)} and reads "
            f"{format_rate(reads)}. {_on(found['environment'])}" + (f" {found['note']}" if "note" in found else ""),
            f"![What checkpoints of {state} GB cost]({images}/{name}-{state}.svg)",
            _sized(TRAINING, found["peers"]),
            _sized(STORAGE, found["peers"]),
            *_failures(found["peers"]),
        ]
    if content["kills"]:
        parts += [
            "## Killed during a re-save",
            f"SIGKILL at random moments while a job of {content['kills']['state']} GB saves again over what it saved "
            "before: to the same path. torch_checkpointing refuses that and gets a new one, and checkflow's store "
            "always makes a new version. Another process then restores, and compares bit for bit. "
            + _on(content["kills"]["environment"]),
            _kills(content["kills"]["peers"]),
            *_failures(content["kills"]["peers"]),
        ]
    parts += ["## Bars", *_bars(content), "## How each is used", USAGE.rstrip()]
    return "\n\n".join(parts) + "\n"


def _bars(content: Content) -> list[str]:
    named = "; ".join(f"{bar.what} at {'most' if bar.at_most else 'least'} {bar.limit:.0%}" for bar in BARS)
    lines = missed(content) or ["It reaches all that are measured here."]
    return [f"checkflow is to reach: {named}; no kill loses the state.", *lines]


def _median_of(peers: Mapping[str, Figures], name: str) -> float:
    """The median over the rounds of all peers."""
    values = sorted(value for one in peers.values() if "failed" not in one for value in one[name])
    return values[len(values) // 2]


# Plots

WIDTH, LABEL, PANEL, LINE, TOP = 1000, 190, 195, 24, 46


def plot(peers: Mapping[str, Figures]) -> str:
    """An SVG: a panel for each of four figures, a bar for each peer, a line from quartile to quartile."""
    shown = {name: one for name, one in peers.items() if "failed" not in one}
    height = TOP + LINE * len(shown) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    ]
    for row, name in enumerate(shown):
        weight = ' font-weight="bold"' if name == OURS else ""
        parts.append(f'<text x="8" y="{TOP + LINE * row + 15}" fill="#222222"{weight}>{escape(name)}</text>')
    for number, column in enumerate(PLOTTED):
        parts += _panel(column, shown, LABEL + 10 + number * (PANEL + 5))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(column: Column, peers: Mapping[str, Figures], left: int) -> list[str]:
    found = {name: spread(figures, column.name) for name, figures in peers.items()}
    longest = max([one.upper for one in found.values()] + [1e-9])
    scale = (PANEL - 65) / longest  # room for the number
    parts = [f'<text x="{left}" y="28" fill="#222222" font-weight="bold">{escape(column.title)}</text>']
    for row, (name, one) in enumerate(found.items()):
        y, bar = TOP + LINE * row, max(0.0, one.median) * scale
        lower, upper = (left + max(0.0, end) * scale for end in (one.lower, one.upper))
        colour = "#2c7fb8" if name == OURS else "#b8c4ce"
        parts += [
            f'<rect x="{left}" y="{y + 3}" width="{bar:.1f}" height="{LINE - 8}" fill="{colour}"/>',
            f'<path d="M{lower:.1f} {y + 11}H{upper:.1f}" stroke="#444444"/>',
            f'<text x="{max(left + bar, upper) + 4:.1f}" y="{y + 15}" fill="#222222">{column.text(one.median)}</text>',
        ]
    return parts
