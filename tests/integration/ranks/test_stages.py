"""Jobs in pipeline stages save, and go on in the same stages, in others, or in one process, as if never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkflow
from checkflow.core.errors import CheckflowError
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.weights.exporter import state_dicts
from checkflow.runtime.weights.source import open_weights
from tests.support.programs import stage_jobs
from tests.support.ranks.processes import run_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
Values = dict[str, torch.Tensor]


def run(rank: int, ranks: int, stages: int, directory: Path, end: int, renumbered: bool, first: int) -> Values | str:
    """Train to a step, or go on to it; what this stage then holds, or what was refused."""
    job = stage_jobs.Job(ranks, stages, renumbered=renumbered, first=first)
    try:
        checkpointer = checkflow.Checkpointer(job.model, job.optimizer, directory=directory, every=1)
    except CheckflowError as error:
        return f"{type(error).__name__}: {error}"
    with checkpointer:
        for step in checkpointer.steps(end):
            job.train(step)
    assert checkpointer.report()["failed"] == 0
    return job.everything()


def start(
    folder: Path, ranks: int, stages: int, end: int, *, renumbered: bool = False, first: int = 0
) -> list[Values | str]:
    rendezvous = folder / f"{ranks} in {stages} to {end}, {first}"
    rendezvous.mkdir()
    return run_ranks(rendezvous, ranks, run, stages, folder / "checkpoints", end, renumbered, first)


def together(found: list[Values | str]) -> Values:
    """What all stages hold; ranks of one stage hold the same."""
    values: Values = {}
    for one in found:
        assert isinstance(one, dict), one
        for name, value in one.items():
            assert torch.equal(values.setdefault(name, value), value), name
    return values


def assert_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Values:
    """One process that is never stopped."""
    return together(start(tmp_path_factory.mktemp("whole"), 1, 1, 6))


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2), (2, 2)), ((2, 2), (1, 1)), ((2, 2), (4, 4)), ((1, 1), (2, 2)), ((3, 3), (2, 2)), ((4, 2), (2, 2)),
     ((2, 2), (4, 2)), ((2, 1), (2, 2))],
    ids=lambda one: f"{one[0]} in {one[1]}",
)  # fmt: skip
def test_stages_go_on_as_if_never_stopped(
    tmp_path: Path, expected: Values, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Ranks, and the stages that they make."""
    start(tmp_path, *before, 3)
    assert_equal(together(start(tmp_path, *after, 6)), expected)
    with open_checkpoint(find(tmp_path / "checkpoints")[0]) as checkpoint:
        found = state_dicts(checkpoint)
    model = stage_jobs.Layers(range(stage_jobs.LAYERS))
    model.load_state_dict(found["model"])
    optimizer = stage_jobs.optimizer_of(model)
    optimizer.load_state_dict(found["optimizer"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
    with open_weights(tmp_path / "checkpoints") as weights:
        assert set(weights.tensors) == set(model.state_dict())


def test_a_layer_that_no_stage_holds(tmp_path: Path) -> None:
    start(tmp_path, 2, 2, 1)
    for one in start(tmp_path, 2, 2, 2, first=1):
        assert isinstance(one, str)
        assert "MismatchError: no rank starts: the checkpoint's model/layers.0.0.bias is in the job of no rank" in one


def test_names_that_two_stages_have_in_common(tmp_path: Path, expected: Values) -> None:
    """Layers that each stage numbers from 0: the same stages go on, others cannot know whose is whose."""
    start(tmp_path, 2, 2, 3, renumbered=True)
    for ranks in (1, 4):
        for one in start(tmp_path, ranks, ranks, 6, renumbered=True):
            assert isinstance(one, str)
            assert "MismatchError" in one
    found = start(tmp_path, 2, 2, 6, renumbered=True)
    for stage, one in enumerate(found):
        assert isinstance(one, dict)
        for name, value in one.items():
            layers, number, rest = name.split(".", 2)
            assert torch.equal(value, expected[f"{layers}.{int(number) + 2 * stage}.{rest}"]), name
