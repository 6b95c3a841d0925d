"""From the figures of ``benchmarks/results/paper-tables.json`` to ``docs/development/paper-tables.md``,
by the template beside it.

The paper: "Checkflow: Low-Overhead Checkpointing for Deep Learning Training", Liu, Luo, Li, Xing, Peng. Its own figures
are written down here once, each with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from checkflow.core.units import format_seconds, format_size

Data = dict[str, Any]

NAMES = {
    "alexnet": "AlexNet",
    "bert": "BERT",
    "mnasnet": "MNASNet",
    "resnet18": "ResNet",
    "resnet3d": "ResNet3D",
    "transformer": "Transformer",
    "vgg11": "VGG",
    "vit": "ViT",
}
# Table I: whether a checkpoint of every iteration fits, by model and batch, at 63, 40 and 20 GB/s.
PAPER_FEASIBILITY = {
    ("alexnet", 32): (True, False, False),
    ("alexnet", 1024): (True, True, True),
    ("bert", 32): (True, True, True),
}
# Section IV-B on Figure 2, in the order of SUMMARY.
PAPER_SUMMARY = ("16 of 16", "1 … 42", "12.8", "over 35", "over 35", "5 of 8", "over 90", "BERT, MNASNet, ViT")
# Section IV-B: bytes per second that storage must take for a checkpoint of every iteration.
PAPER_ALEXNET_1_RATE = 37e9  # "larger than"
PAPER_LARGE_RATE = 5e9  # "as the model and/or batch size increase" it "would be smaller than"

CASES = (("direct", "segment"), ("direct", "operator"), ("snapshot", "segment"), ("snapshot", "operator"))
BASELINES = {"kept": "checkfreq_extra_bytes", "released": "checkfreq_released_extra_bytes"}
OPTIMIZERS = ("sgd", "adam")
SUMMARY = (
    "policy, granularity, against",
    "plans of every iteration",
    "saved, range",
    "saved, mean at batch 32",
    "saved, BERT at 32",
    "saved, Transformer at 32",
    "fully hidden at 32",
    "hidden, least of the rest at 32",
    "fully hidden at 1",
)
STORAGE = ("model, batch", "state", "iteration", "every iteration needs", "the paper", "planned every", "which needs")
TEMPLATE = Path(__file__).with_name("paper_tables_template.md")


def render(data: Data) -> str:
    """The whole document."""
    given = data["inputs"]
    return TEMPLATE.read_text().format(
        torch=given["torch"],
        device=given["device"],
        memory_bandwidth=rate(given["memory_bandwidth_bytes_per_second"]),
        memory_limit=format_size(given["memory_limit_bytes"]),
        compute_efficiency=given["compute_efficiency"],
        matrix_efficiency=given["matrix_efficiency"],
        winograd_gain=given["winograd_gain"],
        memory_efficiency=given["memory_efficiency"],
        launch=format_seconds(given["launch_seconds"]),
        overhead=f"{100 * given['overhead']:g} %",
        link=rate(given["links_bytes_per_second"][0]),
        **_feasibility(data),
        **{f"memory_{optimizer}": _memory(data, optimizer) for optimizer in OPTIMIZERS},
        **_peaks_in_states(data),
        **{f"storage_{optimizer}": _storage(data, optimizer) for optimizer in OPTIMIZERS},
        **_storage_notes(data),
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns flush left, the others right."""
    lines = [header, ["---" if column < left else "---:" for column in range(len(header))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rate(bytes_per_second: float) -> str:
    return f"{format_size(bytes_per_second)}/s"


def subject(data: Data, model: str, batch_size: int, optimizer: str) -> Data:
    """One of the planned training steps."""
    (found,) = (
        entry
        for entry in data["subjects"]
        if (entry["model"], entry["batch_size"], entry["optimizer"]) == (model, batch_size, optimizer)
    )
    return dict(found)


def case(entry: Data, policy: str, granularity: str, link: float) -> Data:
    """One plan of a training step."""
    (found,) = (
        one
        for one in entry["cases"]
        if (one["policy"], one["granularity"], one["link_bytes_per_second"]) == (policy, granularity, link)
    )
    return dict(found)


def fits(one: Data) -> bool:
    """Whether a checkpoint of every iteration fits without any wait."""
    return bool(one["every_iteration"]["status"] != "infeasible")


def turning_seconds(entry: Data, one: Data) -> float:
    """The least iteration time at which a checkpoint of every iteration fits the link of this plan.

    Without waits, bandwidth and time count by their product alone: the same timeline, stretched or squeezed evenly.
    """
    iteration: float = entry["iteration_seconds"]
    return iteration * float(one["least_bandwidth_bytes_per_second"]) / float(one["link_bytes_per_second"])


def _name(entry: Data) -> str:
    return f"{NAMES[entry['model']]}, {entry['batch_size']}"


def _feasibility(data: Data) -> dict[str, str]:
    links = data["inputs"]["links_bytes_per_second"]
    rows: list[list[str]] = []
    times: list[list[str]] = []
    differences: list[str] = []
    for (model, batch_size), verdicts in PAPER_FEASIBILITY.items():
        entry = subject(data, model, batch_size, "sgd")
        rows.append([_name(entry), "the paper", "", *("✓" if verdict else "✗" for verdict in verdicts)])
        for policy, granularity in CASES:
            found = [case(entry, policy, granularity, link) for link in links]
            least = rate(found[0]["least_bandwidth_bytes_per_second"])
            rows.append(["", f"{policy}, {granularity}", least, *(_verdict(entry, one) for one in found)])
        times.append([_name(entry), format_seconds(entry["iteration_seconds"]), _papers_times(entry, links, verdicts)])
        for link, verdict in zip(links, verdicts, strict=True):
            other = [f"{policy}, {granularity}" for policy, granularity in CASES
                     if fits(case(entry, policy, granularity, link)) != verdict]  # fmt: skip
            if other:
                differences.append(_difference(entry, link, verdict, other))
    header = ["model, batch", "policy, granularity", "least bandwidth", *(rate(link) for link in links)]
    return {
        "feasibility": table(header, rows, left=2),
        "times": table(["model, batch", "iteration here", "the paper's verdicts hold for an iteration of"], times),
        "differences": "\n".join(differences) or "All verdicts are the paper's.",
    }


def _verdict(entry: Data, one: Data) -> str:
    return "✓" if fits(one) else f"✗, {_within_overhead(entry, one)}"


def _within_overhead(entry: Data, one: Data) -> str:
    """What is planned where a checkpoint of every iteration does not fit."""
    facts = one["within_overhead"]
    if facts["interval"] is None:
        return "no plan"
    share = facts["stall_seconds"] / (facts["interval"] * entry["iteration_seconds"])
    every = "every iteration" if facts["interval"] == 1 else f"every {facts['interval']} iterations"
    added = format_size(facts["extra_bytes"]) if facts["extra_bytes"] else "nothing"
    return f"{every}: {format_seconds(facts['stall_seconds'])} ({100 * share:.2g} %), {added} added"


def _papers_times(entry: Data, links: Sequence[float], verdicts: Sequence[bool]) -> str:
    """The iteration times that give all of the paper's verdicts."""
    turns = [turning_seconds(entry, case(entry, "direct", "segment", link)) for link in links]
    least = max(turn for turn, verdict in zip(turns, verdicts, strict=True) if verdict)
    below = [turn for turn, verdict in zip(turns, verdicts, strict=True) if not verdict]
    return f"{format_seconds(least)} or more" + (f", but less than {format_seconds(min(below))}" if below else "")


def _difference(entry: Data, link: float, verdict: bool, cases: Sequence[str]) -> str:
    which = "all four" if len(cases) == len(CASES) else "; ".join(cases)
    turn = turning_seconds(entry, case(entry, "direct", "segment", link))
    return (
        f"- **{_name(entry)} at {rate(link)}** ({which}): ✗ here and ✓ in the paper."
        if verdict
        else f"- **{_name(entry)} at {rate(link)}** ({which}): ✓ here and ✗ in the paper."
    ) + (
        f" The {format_size(entry['device_state_bytes'])} of state cross this link in {format_seconds(turn)}, and the"
        f" roofline's iteration takes {format_seconds(entry['iteration_seconds'])}. The paper's verdict needs an"
        f" iteration {'of at least that' if verdict else f'shorter than {format_seconds(turn)}'}: its own time"
        " must have been so."
    )


def _memory(data: Data, optimizer: str) -> str:
    """The tables of one optimizer."""
    link = data["inputs"]["links_bytes_per_second"][0]
    entries = [subject(data, model, batch_size, optimizer) for batch_size in (1, 32) for model in NAMES]
    found = [[case(entry, *which, link) for which in CASES] for entry in entries]
    four = [f"{policy}, {granularity}" for policy, granularity in CASES]
    head = ["model, batch", "training's peak", "state", "kept", "released, segment", "released, operator", *four]
    parts = [table(head, (_peak_row(entry, plans) for entry, plans in zip(entries, found, strict=True)))]
    for word, share in (("saved", saved), ("hidden", hidden)):
        rows = (
            [_name(entry), *(_shares(entry, one, share) for one in plans)]
            for entry, plans in zip(entries, found, strict=True)
        )
        parts.append(table([f"{word}: model, batch", *four], rows))
    parts.append(table(SUMMARY, [["the paper", *PAPER_SUMMARY], *_summaries(data, optimizer, link)]))
    rarer = [
        [_name(entry), *("✓" if fits(one) else _within_overhead(entry, one) for one in plans)]
        for entry, plans in zip(entries, found, strict=True)
        if not all(map(fits, plans))
    ]
    if rarer:
        parts.append(
            "Where no checkpoint of every iteration fits (✓: one does), what is planned within the overhead: the"
            " interval, the stall of one checkpoint with its share of training's time, and what it adds to the peak."
        )
        parts.append(table(["model, batch", *four], rarer))
    return "\n\n".join(parts)


def _peak_row(entry: Data, found: Sequence[Data]) -> list[str]:
    segment, operator = found[:2]
    return [
        _name(entry),
        format_size(entry["training_peak_bytes"]),
        format_size(entry["device_state_bytes"]),
        _size(segment[BASELINES["kept"]]),
        _size(segment[BASELINES["released"]]),
        _size(operator[BASELINES["released"]]),
        *(_size(one["every_iteration"]["extra_bytes"]) if fits(one) else "✗" for one in found),
    ]


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "0"


def saved(entry: Data, one: Data, baseline: str) -> float | None:
    """Percent of CheckFreq's peak that the plan's is below it."""
    theirs = entry["training_peak_bytes"] + one[BASELINES[baseline]]
    return 100 * (one[BASELINES[baseline]] - one["every_iteration"]["extra_bytes"]) / theirs if theirs else None


def hidden(entry: Data, one: Data, baseline: str) -> float | None:
    """Percent of what CheckFreq adds to the peak that the plan does not add; None: it adds nothing."""
    extra = one[BASELINES[baseline]]
    return 100 * (extra - one["every_iteration"]["extra_bytes"]) / extra if extra else None


Share = Callable[[Data, Data, str], float | None]


def _shares(entry: Data, one: Data, share: Share) -> str:
    return " / ".join(_percent(share(entry, one, baseline)) for baseline in BASELINES) if fits(one) else "✗"


def _percent(value: float | None) -> str:
    """In at most three digits; 100 is said only of all."""
    if value is None:
        return "–"
    text = f"{value:.3g}"
    return "99.9" if text == "100" and value < 100 else text


def _summaries(data: Data, optimizer: str, link: float) -> Iterable[list[str]]:
    for policy, granularity in CASES:
        for baseline in BASELINES:
            row = _summary(data, optimizer, policy, granularity, link, baseline)
            yield [f"{policy}, {granularity}, {baseline}", *row]


def _summary(data: Data, optimizer: str, policy: str, granularity: str, link: float, baseline: str) -> list[str]:
    """The columns of ``PAPER_SUMMARY``, over the models that have a plan of every iteration."""
    planned: dict[int, dict[str, tuple[Data, Data]]] = {1: {}, 32: {}}
    for batch_size, chosen in planned.items():
        for model in NAMES:
            entry = subject(data, model, batch_size, optimizer)
            one = case(entry, policy, granularity, link)
            if fits(one):
                chosen[model] = (entry, one)
    both = [pair for chosen in planned.values() for pair in chosen.values()]
    ranged = [value for pair in both if (value := saved(*pair, baseline)) is not None]
    large = {model: value for model, pair in planned[32].items() if (value := saved(*pair, baseline)) is not None}
    at_32, at_1 = (
        {model: value for model, pair in planned[size].items() if (value := hidden(*pair, baseline)) is not None}
        for size in (32, 1)
    )
    rest = [value for value in at_32.values() if value < 100]
    return [
        f"{len(both)} of {2 * len(NAMES)}",
        f"{_percent(min(ranged))} … {_percent(max(ranged))}" if ranged else "–",
        _percent(mean(large.values()) if large else None),
        _percent(large.get("bert")),
        _percent(large.get("transformer")),
        f"{sum(value == 100 for value in at_32.values())} of {len(at_32)}",
        _percent(min(rest)) if rest else "no rest",
        _named([NAMES[model] for model, value in at_1.items() if value == 100], len(at_1)),
    ]


def _named(names: Sequence[str], of: int) -> str:
    return f"{len(names)} of {of}: {', '.join(names)}" if names else f"none of {of}"


def _peaks_in_states(data: Data) -> dict[str, str]:
    """Training's peak in multiples of the state, and below which multiple the paper's "over 35 %" holds."""
    figures = {"ratio": f"{1 / 0.35 - 1:.2f}"}
    for model in ("bert", "transformer"):
        for optimizer in OPTIMIZERS:
            entry = subject(data, model, 32, optimizer)
            ratio = float(entry["training_peak_bytes"]) / float(entry["device_state_bytes"])
            figures[f"{model}_{optimizer}"] = f"{ratio:.3g}"
    return figures


def _storage(data: Data, optimizer: str) -> str:
    link = data["inputs"]["links_bytes_per_second"][0]
    entries = sorted(
        (entry for entry in data["subjects"] if entry["optimizer"] == optimizer),
        key=lambda entry: (list(NAMES).index(entry["model"]), entry["batch_size"]),
    )
    rows = []
    for entry in entries:
        interval = case(entry, "direct", "segment", link)["within_overhead"]["interval"]
        demanded = durable_rate(entry)
        rows.append(
            [
                _name(entry),
                format_size(entry["state_bytes"]),
                format_seconds(entry["iteration_seconds"]),
                rate(demanded),
                _papers_rate(entry),
                "no plan" if interval is None else "1 iteration" if interval == 1 else f"{interval} iterations",
                "–" if interval is None else rate(demanded / interval),
            ]
        )
    return table(STORAGE, rows)


def durable_rate(entry: Data) -> float:
    """Bytes per second that storage must take for a checkpoint of every iteration."""
    return float(entry["state_bytes"]) / float(entry["iteration_seconds"])


def _papers_rate(entry: Data) -> str:
    alexnet_1 = entry["model"] == "alexnet" and entry["batch_size"] == 1 and entry["optimizer"] == "sgd"
    return f"over {rate(PAPER_ALEXNET_1_RATE)}" if alexnet_1 else ""


def _storage_notes(data: Data) -> dict[str, str]:
    entries = [entry for entry in data["subjects"] if entry["optimizer"] == "sgd" and entry["batch_size"] > 1]
    below = [entry for entry in entries if durable_rate(entry) < PAPER_LARGE_RATE]
    above = [entry for entry in entries if durable_rate(entry) >= PAPER_LARGE_RATE]
    alexnet = subject(data, "alexnet", 1, "sgd")
    return {
        "alexnet_1_rate": rate(durable_rate(alexnet)),
        "alexnet_1_seconds": format_seconds(alexnet["iteration_seconds"]),
        "paper_alexnet_1_seconds": format_seconds(alexnet["state_bytes"] / PAPER_ALEXNET_1_RATE),
        "below": "; ".join(map(_name, below)) or "none",
        "above": "; ".join(f"{_name(entry)} ({rate(durable_rate(entry))})" for entry in above) or "none",
    }
