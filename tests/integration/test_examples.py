"""The examples: next to nothing changed, the same training, and the same end however often they are killed."""

from __future__ import annotations

import difflib
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from checkflow.runtime.inspect import compare
from checkflow.runtime.store.discovery import find
from tests.support import example_runs
from tests.support.oracle import same_bits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Example:
    """A script without checkflow, the same with it, and arguments by which they take a second."""

    folder: str
    before: str
    arguments: list[str]
    heading: int  # lines printed before the first iteration
    epoch: int  # iterations of an epoch; 0: there are none

    def script(self, *, changed: bool) -> Path:
        return EXAMPLES / self.folder / (self.before.replace(".py", "_checkflow.py") if changed else self.before)


MNIST = Example("mnist", "main.py", ["--epochs=3", "--log-interval=3", "--save-model"], 0, 23)
# The validation loss improves once, and then no more: what the best one was has to be known.
NANOGPT = Example(
    "nanogpt",
    "train.py",
    [
        *("--max_iters=42", "--eval_interval=10", "--eval_iters=2", "--log_interval=2", "--batch_size=4"),
        *("--learning_rate=0.03", "--warmup_iters=5", "--lr_decay_iters=40", "--dtype=float16"),
        *("--n_layer=2", "--n_embd=32"),
    ],
    6,
    0,
)
DDP = Example("mnist", "main_ddp.py", ["--epochs=8", "--log-interval=3", "--save-model"], 0, 23)
FSDP = Example(
    "nanogpt",
    "train_fsdp.py",
    [
        *("--max_iters=62", "--eval_interval=15", "--eval_iters=2", "--log_interval=2", "--batch_size=4"),
        *("--learning_rate=0.03", "--warmup_iters=5", "--lr_decay_iters=60", "--n_layer=2", "--n_embd=32"),
    ],
    6,
    0,
)
RANKS = 2
BOTH = pytest.mark.parametrize("example", [MNIST, NANOGPT], ids=lambda example: example.folder)
Run = tuple[dict[str, Any], list[str]]


def results(folder: Path) -> dict[str, Any]:
    """What a run that has ended left behind."""
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.rglob("*.pt"))}


def assert_same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert same_bits(value, expected)
    elif isinstance(expected, dict):
        assert value.keys() == expected.keys()
        for key in expected:
            assert_same(value[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            assert_same(one, other)
    else:
        assert value == expected


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """By folder, what the scripts without checkflow left and printed."""
    found = {}
    for example in (MNIST, NANOGPT):
        folder = tmp_path_factory.mktemp(example.folder)
        code, lines = example_runs.start(example.script(changed=False), example.arguments, folder)
        assert code == 0
        found[example.folder] = results(folder), lines
    assert set(found["mnist"][0]) == {"final.pt", "mnist_cnn.pt"}
    assert set(found["nanogpt"][0]["final.pt"]) == {"generator", "model", "optimizer", "scaler"}
    return found


def changed_lines(before: str, after: str) -> int:
    """Lines that were added, removed or changed; a line in the place of another one counts once, a blank one too.

    difflib may find more than the fewest, never less.
    """
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def test_changed_lines_are_counted() -> None:
    assert changed_lines("a\nb\nc\n", "a\nb\nc\n") == 0
    assert changed_lines("a\nb\nc\n", "a\nx\nc\n") == 1
    assert changed_lines("a\nb\nc\n", "a\nx\ny\nc\n") == 2
    assert changed_lines("a\nb\nc\n", "c\n") == 2
    assert changed_lines("a\nb\n", "x\na\n\nb\n") == 2


@pytest.mark.parametrize("example", [MNIST, NANOGPT, DDP, FSDP], ids=lambda example: example.before)
def test_fewer_than_ten_lines_are_changed(example: Example) -> None:
    before, after = (example.script(changed=changed).read_text() for changed in (False, True))
    assert "import checkflow" not in before
    assert "checkflow.Checkpointer(" in after
    assert 0 < changed_lines(before, after) < 10
    # All else is shared.
    files = {path.name for path in (EXAMPLES / example.folder).glob("*.py")}
    pairs = {one.before for one in (MNIST, NANOGPT, DDP, FSDP) if one.folder == example.folder}
    assert {name for name in files if name.replace(".py", "_checkflow.py") in files} == pairs


def test_the_page_shows_the_difference() -> None:
    names = [f"examples/mnist/{name}" for name in ("main.py", "main_checkflow.py")]
    before, after = ((ROOT / name).read_text().splitlines() for name in names)
    shown = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/how-to/own-loop.md").read_text(), re.DOTALL)
    assert shown == ["\n".join(difflib.unified_diff(before, after, *names, n=1, lineterm="")) + "\n"]


@BOTH
def test_adopting_changes_nothing(example: Example, originals: dict[str, Run], tmp_path: Path) -> None:
    expected, printed = originals[example.folder]
    code, lines = example_runs.start(example.script(changed=True), example.arguments, tmp_path)
    assert code == 0
    assert lines == printed
    assert_same(results(tmp_path), expected)


def test_adopting_changes_nothing_where_epochs_are_left_early(tmp_path: Path) -> None:
    ends = []
    for changed in (False, True):
        folder = tmp_path / str(changed)
        arguments = ["--epochs", "2", "--dry-run", "--save-model"]
        code, lines = example_runs.start(MNIST.script(changed=changed), arguments, folder)
        assert code == 0
        ends.append((results(folder), lines))
    assert ends[0][1] == ends[1][1]
    assert [line.split(" [")[0] for line in ends[1][1][::2]] == ["Train Epoch: 1", "Train Epoch: 2"]
    assert_same(ends[1][0], ends[0][0])


@BOTH
def test_killed_and_restarted_it_ends_the_same(example: Example, originals: dict[str, Run], tmp_path: Path) -> None:
    expected, printed = originals[example.folder]
    moments = random.Random(example.folder)
    script, arguments = example.script(changed=True), example.arguments
    training = printed[example.heading :]
    third = len(training) // 3
    # One kill in each third. With epochs, the first one waits for the plan, which the next process begins with, so that
    # training goes on within an epoch; without them, ``every`` saves before there is a plan. The third comes when it
    # comes: by then checkpoints may be rarer than epochs.
    for number, awaits in enumerate(("plan" if example.epoch else "nothing", "checkpoint", "nothing")):
        at = number * third + moments.randrange(2, third - 3)
        kill = example_runs.Kill(training[at], moments.uniform(0, 0.05), training[at + 3], awaits, example.epoch)
        code, lines = example_runs.start(script, arguments, tmp_path, kill)
        assert code == -9
        assert is_part(lines[example.heading :], training)
    assert not (tmp_path / "final.pt").exists()
    code, lines = example_runs.start(script, arguments, tmp_path)
    assert code == 0
    rest = lines[example.heading :]
    assert rest == training[-len(rest) :]
    assert len(rest) < len(training)
    assert_same(results(tmp_path), expected)
    # And once more, after its end.
    (tmp_path / "final.pt").unlink()
    code, lines = example_runs.start(script, arguments, tmp_path)
    assert code == 0
    rest = lines[example.heading :]
    assert len(rest) <= 5
    assert_same(results(tmp_path), expected)


def test_adopting_changes_nothing_on_several_ranks(tmp_path: Path) -> None:
    ends = []
    for changed in (False, True):
        folder = tmp_path / str(changed)
        code, lines = example_runs.start_ranks(FSDP.script(changed=changed), FSDP.arguments, folder, RANKS)
        assert code == 0
        ends.append((results(folder), lines))
    assert ends[1][1] == ends[0][1]
    assert set(ends[0][0]) == {"ckpt.pt"}
    assert_same(ends[1][0], ends[0][0])


@pytest.mark.parametrize("example", [DDP, FSDP], ids=lambda example: example.before)
def test_killed_on_all_ranks_it_ends_the_same(example: Example, tmp_path: Path) -> None:
    script, arguments, killed = example.script(changed=True), example.arguments, tmp_path / "killed"
    code, printed = example_runs.start_ranks(script, arguments, tmp_path / "whole", RANKS)
    assert code == 0
    training = printed[example.heading :]
    for number in (1, 2):
        at = training[number * len(training) // 5]
        code, lines = example_runs.start_ranks(script, arguments, killed, RANKS, at)
        assert code == -9
        assert is_part(lines[example.heading :], training)
    code, lines = example_runs.start_ranks(script, arguments, killed, RANKS)
    assert code == 0
    rest = lines[example.heading :]
    assert rest == training[-len(rest) :]
    assert len(rest) < len(training)
    assert_same(results(killed), results(tmp_path / "whole"))
    ends = [find(next(folder.glob("*/step-*")).parent)[0] for folder in (tmp_path / "whole", killed)]
    found = compare(*ends)
    assert not found.tensors
    # The scripts seed torch's generators alone.
    assert [where for where, *_ in found.extra if not re.search(r"generators\.(python|numpy)", where)] == []


def is_part(lines: list[str], whole: list[str]) -> bool:
    return any(whole[begin : begin + len(lines)] == lines for begin in range(len(whole) - len(lines) + 1))
