"""A page of the documentation, run block by block, with what its reader would have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import checkflow
from tests.support import wandb_stand_in

_BLOCK = re.compile(r'```(python|sh)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)
_LONG = """
import torch
import checkflow

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with checkflow.Checkpointer(model, optimizer, directory="long", every=5) as checkpointer:
    for _ in checkpointer.steps(10**9):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
"""


def reader() -> dict[str, Any]:
    """The names that pages use."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(320, 8), torch.randint(0, 3, (320,)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train_step(x: torch.Tensor = dataset.tensors[0], y: torch.Tensor = dataset.tensors[1]) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {
        "torch": torch, "checkflow": checkflow, "dataset": dataset, "model": model, "optimizer": optimizer,
        "train_step": train_step, "evaluate": lambda: 0.5,
    }  # fmt: skip


def run_page(page: Path, directory: Path) -> None:
    """Run all blocks of Python and of the shell, in their order; a block with a title is a file."""
    os.chdir(directory)
    torch.set_num_threads(1)
    sys.modules["wandb"] = wandb_stand_in  # in a process of its own; the real one needs an account
    names = reader()
    if "checkpoints" in page.read_text() and 'directory="checkpoints"' not in page.read_text():
        with checkflow.Checkpointer(names["model"], names["optimizer"], directory="checkpoints") as checkpointer:
            for _ in checkpointer.steps(10):
                names["train_step"]()
    Path("train_long.py").write_text(_LONG)
    for kind, title, text in _BLOCK.findall(page.read_text()):
        if title:
            Path(title).write_text(text)
        elif kind == "python":
            exec(text, names)
        else:
            path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
            subprocess.run(["bash", "-euc", text], check=True, env={**os.environ, "PATH": path})
