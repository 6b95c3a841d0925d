"""The catalogue against public training throughputs; and whether the document that lists them is current."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from benchmarks import throughputs
from benchmarks.published import PUBLISHED
from benchmarks.sharded_llama import PUBLISHED_RUNS as RUNS
from benchmarks.throughput_models import TASKS, training_step
from checkflow.core.machine.device import CATALOGUE
from checkflow.planner.trace.trace import trace
from tests.benchmarks.test_paper_tables import assert_same, differences

DATA = json.loads(throughputs.RESULTS.read_text())
VERSION = torch.__version__.partition("+")[0]
SAME_TORCH = pytest.mark.skipif(DATA["inputs"]["torch"] != VERSION, reason="another torch may trace other operators")


def test_document_is_what_the_figures_render_to() -> None:
    assert throughputs.DOCUMENT.read_text() == throughputs.render(DATA), "run python -m benchmarks.throughputs"


def test_figures_are_those_of_the_published_rows() -> None:
    for row, found in zip(PUBLISHED, DATA["rows"], strict=True):
        given = {name: getattr(row, name) for name in throughputs._GIVEN}
        assert found == {**given, "published": row.per_second, "predicted": found["predicted"]}


@SAME_TORCH
def test_inputs_are_todays() -> None:
    assert_same(throughputs.inputs(), DATA["inputs"])


def test_all_are_within_the_factor() -> None:
    ratios = [(f"{row['card']}, {throughputs._what(row)}", row["predicted"] / row["published"]) for row in DATA["rows"]]
    for row in DATA["several_ranks"]:
        what = f"{row['ranks']} {row['card']}, {row['checkpointing']}"
        ratios.append((what, row["predicted"] / row["tokens_per_second"]))
    beyond = [f"{what}: {one:.2f}" for what, one in ratios if not 1 / throughputs.WITHIN <= one <= throughputs.WITHIN]
    assert not beyond, "\n".join(beyond)


@SAME_TORCH
def test_several_ranks_are_predicted_as_today() -> None:
    """By two layers of 32: what changes those figures changes these."""
    assert_same(throughputs.two_layers(), DATA["two_layers"])
    for row, run in zip(DATA["several_ranks"], RUNS, strict=True):
        assert asdict(run).items() <= row.items()


def test_three_figures_a_card_of_two_models_at_least() -> None:
    for name, card in CATALOGUE.items():
        if card.kind == "cuda" and name != "V100 32GB":  # which the V100 stands for
            rows = [row for row in PUBLISHED if row.card == name]
            assert len(rows) >= 3
            assert len({row.task for row in rows}) >= 2
            assert len({row.precision for row in rows}) >= 2


def test_no_figure_twice() -> None:
    """Several sources may have the same model and card, but a row stands for one run."""
    assert max(Counter(PUBLISHED).values()) == 1


# Rows made anew: quick to trace, and between them each rule of the cost model.
AGAIN = [
    row for row in PUBLISHED if row.task in ("AlexNet", "ResNet-18") or (row.task, row.layout) == ("VGG-16", "NHWC")
]


@SAME_TORCH
def test_figures_made_anew() -> None:
    lines: list[str] = []
    for row in AGAIN:
        what = f"{row.card}, {row.task}, {row.precision}"
        lines += differences(throughputs.measure(row), DATA["rows"][PUBLISHED.index(row)], what)
    assert not lines, "\n".join(lines)


# As their papers and sources count them.
PARAMETERS = {
    "ResNet-50 v1.5": 25_557_032,
    "ResNet-50 v1": 25_557_032,
    "ResNet-152 v1": 60_192_808,
    "VGG-16": 138_357_544,
    "VGG-11": 132_863_336,
    "ResNet-18": 11_689_512,
    "MNASNet 1.0": 4_383_312,
    "ViT-B/16": 86_567_656,
    "MPT-125M": 125_311_488,
    "MPT-350M": 355_985_408,
    "MPT-760M": 760_470_528,
    "MPT-1B": 1_315_950_592,
}


def test_parameters() -> None:
    found = {}
    for task in PARAMETERS:
        with torch.device("meta"):
            found[task] = sum(parameter.numel() for parameter in TASKS[task].build().parameters())
    assert found == PARAMETERS


@pytest.mark.slow
def test_resnet50_is_resnet50() -> None:
    graph = trace(training_step("ResNet-50 v1.5", "float32", 2), name="resnet50")
    # 4.09 billion multiply-adds forward, as published; backward twice that, but for the gradient of the images.
    assert graph.flops / 2 == pytest.approx(3 * 2 * 4.09e9, rel=0.02)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "float16 model"])
def test_precisions_are_what_they_are_called(precision: str) -> None:
    """Products and convolutions in that precision; parameters, or a copy of them, updated in float32."""
    graph = trace(training_step("AlexNet", precision, 2), name="alexnet")  # type: ignore[arg-type]
    assert {op.dtype for op in graph.operators if op.flops} == {precision.removesuffix(" model")}
    kept = {entry.dtype for entry in graph.state}
    assert kept == ({"float16", "float32"} if precision == "float16 model" else {"float32"})
    stepped = {op.dtype for op in graph.operators if op.phase == "optimizer" and "copy" not in op.target}
    assert stepped == {"float32"}
