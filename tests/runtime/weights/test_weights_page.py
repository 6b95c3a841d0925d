"""docs/how-to/weights.md: its blocks are run, one after the other, in a folder with checkpoints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import checkflow
from checkflow.cli.main import main
from checkflow.runtime.store.discovery import find

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "weights.md"


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.ModuleDict({"backbone": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 3)})
    optimizer = torch.optim.Adam(model.parameters())
    with checkflow.Checkpointer(model, optimizer, directory="checkpoints") as checkpointer:
        for _ in checkpointer.steps(20):
            model["head"](model["backbone"](torch.ones(1, 4))).sum().backward()
            optimizer.step()
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "sh"]
    for kind, text in blocks:
        if kind == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert program == "checkflow"
                assert main(arguments) == 0, capsys.readouterr().err
        else:
            names = {"torch": torch, "checkflow": checkflow}
            exec(text, names)
    assert "misshapen, 2: head.weight (float32[3, 4], in the model float32[10, 4])" in capsys.readouterr().out
    loaded = names["model"]["encoder"].weight  # type: ignore[index]
    assert torch.equal(loaded, model["backbone"].weight)
    assert [path.name for path in find("begin")] == ["step-00000006", "step-00000005", "step-00000000"]
    other = torch.nn.ModuleDict({"backbone": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 3)})
    with checkflow.Checkpointer(other, torch.optim.Adam(other.parameters()), directory="begin") as checkpointer:
        assert checkpointer.iteration == 6
        assert torch.equal(other["head"].weight, model["head"].weight)
