"""docs/development/paper-tables.md is what its figures render to, and the figures are what the planner says today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import paper_document, paper_tables
from checkflow.core.machine.device import find_device
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.pipeline import default_memory_limit_bytes
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.roofline import durations_seconds
from checkflow.planner.timeline.steps import make_timeline
from checkflow.planner.trace.trace import trace

DATA = json.loads(paper_tables.RESULTS.read_text())
VERSION = torch.__version__.partition("+")[0]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a JSON value, with where it lies."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}.{key}")
    else:
        yield path, value


def differences(found: Any, expected: Any, what: str = "") -> list[str]:
    """Where two JSON values differ, but for the last digits of floats, which a Python may add up otherwise."""
    ours, theirs = dict(leaves(json.loads(json.dumps(found)))), dict(leaves(expected))
    lines = [f"{what}{path} is there once" for path in ours.keys() ^ theirs.keys()]
    for path in ours.keys() & theirs.keys():
        one, other = ours[path], theirs[path]
        number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
        if one != (pytest.approx(other, rel=1e-9, abs=0) if number else other):
            lines.append(f"{what}{path}: {one}, and {other} in the file")
    return sorted(lines)


def assert_same(found: Any, expected: Any) -> None:
    lines = differences(found, expected)
    assert not lines, "\n".join(lines)


def test_document_is_what_the_figures_render_to() -> None:
    assert paper_tables.DOCUMENT.read_text() == paper_document.render(DATA), "run python -m benchmarks.paper_tables"


def test_figures_are_complete() -> None:
    found = [(entry["model"], entry["batch_size"], entry["optimizer"]) for entry in DATA["subjects"]]
    assert found == list(paper_tables.subjects())
    for entry, subject in zip(DATA["subjects"], found, strict=True):
        keys = {(one["link_bytes_per_second"], one["policy"], one["granularity"]) for one in entry["cases"]}
        assert len(keys) == len(entry["cases"]) == 4 * len(paper_tables.links(*subject))


@pytest.mark.skipif(DATA["inputs"]["torch"] != VERSION, reason="another torch may trace other operators")
def test_inputs_are_todays() -> None:
    assert_same(paper_tables.inputs(), DATA["inputs"])


@pytest.mark.skipif(DATA["inputs"]["torch"] != VERSION, reason="another torch may trace other operators")
def test_figures_of_alexnet_made_anew() -> None:
    """tests/planner/test_plans.py looks at the steps of all other models."""
    lines: list[str] = []
    for subject in (row for row in paper_tables.subjects() if row[0] == "alexnet"):
        lines += differences(paper_tables.measure(*subject), paper_document.subject(DATA, *subject), str(subject))
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("batch_size", [32, 1024])
def test_verdicts_turn_at_the_named_iteration_time(batch_size: int) -> None:
    """AlexNet's timeline, stretched to just above and just below the time in the document."""
    device = find_device(paper_tables.DEVICE)
    name, step = load_training_step("alexnet", batch_size=batch_size, settings={}, optimizer="sgd")
    graph = trace(step, name=name, target="cuda")
    timeline = make_timeline(graph, durations_seconds(graph, device), "segment")
    entry = paper_document.subject(DATA, "alexnet", batch_size, "sgd")
    for link in paper_tables.LINKS_BYTES_PER_SECOND:
        request = PlanRequest(
            bandwidth_bytes_per_second=link,
            memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second,
            memory_limit_bytes=default_memory_limit_bytes(device),
            max_interval=1,
        )
        turn = paper_document.turning_seconds(entry, paper_document.case(entry, "direct", "segment", link))
        for factor, fits in ((1 + 1e-6, True), (1 - 1e-6, False)):
            scale = factor * turn / timeline.iteration_seconds
            steps = tuple(replace(one, duration_seconds=one.duration_seconds * scale) for one in timeline.steps)
            outcome = make_plan(
                replace(timeline, steps=steps), fingerprint_of(graph, device), request, graph_peak_bytes=0
            )  # fmt: skip
            assert (outcome.plan is not None) == fits, link


def plan_of(extra: int, kept: int, released: int) -> dict[str, Any]:
    return {
        "checkfreq_extra_bytes": kept,
        "checkfreq_released_extra_bytes": released,
        "every_iteration": {"status": "optimal", "extra_bytes": extra},
    }


def test_shares() -> None:
    for extra, kept, released, saved, hidden in (
        (0, 100, 25, (25.0, 100 * 25 / 325), (100.0, 100.0)),
        (25, 100, 25, (75 / 4, 0.0), (75.0, 0.0)),
        (50, 100, 25, (12.5, -100 * 25 / 325), (50.0, -100.0)),  # worse than a CheckFreq that frees as it goes
        (0, 100, 0, (25.0, 0.0), (100.0, None)),  # nothing to hide
    ):
        entry, one = {"training_peak_bytes": 300}, plan_of(extra, kept, released)
        for index, baseline in enumerate(("kept", "released")):
            assert paper_document.saved(entry, one, baseline) == pytest.approx(saved[index])
            expected = hidden[index]
            found = paper_document.hidden(entry, one, baseline)
            assert found == (None if expected is None else pytest.approx(expected))
    named = [paper_document._percent(value) for value in (100.0, 99.97, 99.4, 0.0, None)]
    assert named == ["100", "99.9", "99.4", "0", "–"]  # only all is called 100 percent


def test_summary_by_hand() -> None:
    """Two models hidden in part, the others whole; one without a plan at batch 1."""
    subjects = []
    for model in paper_document.NAMES:
        for batch_size in (1, 32):
            extra = {("bert", 32): 10, ("vit", 32): 60, ("vit", 1): 1}.get((model, batch_size), 0)
            one = plan_of(extra, 100, 50) | {"policy": "direct", "granularity": "segment", "link_bytes_per_second": 1.0}
            if (model, batch_size) == ("vgg11", 1):
                one["every_iteration"] = {"status": "infeasible", "extra_bytes": None}
            entry = {"model": model, "batch_size": batch_size, "optimizer": "sgd", "training_peak_bytes": 400}
            subjects.append(entry | {"cases": [one]})
    row = paper_document._summary({"subjects": subjects}, "sgd", "direct", "segment", 1.0, "kept")
    assert row == [
        "15 of 16",
        "8 … 20",
        "18.2",  # (6 * 20 + 18 + 8) / 8 = 18.25
        "18",
        "20",
        "6 of 8",
        "40",
        "6 of 7: AlexNet, BERT, MNASNet, ResNet, ResNet3D, Transformer",
    ]
