"""Scripts of examples/ as processes of their own, which may be killed at a moment of their output."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tests.support import jobs
from tests.support.waiting import PATIENCE_SECONDS


@dataclass(frozen=True)
class Kill:
    """SIGKILL some time after one line of output, at the latest with another one.

    Lines are known by their beginnings.
    """

    line: str
    seconds: float
    last_line: str
    awaits: Literal["nothing", "plan", "checkpoint"] = "nothing"  # training stands still until storage holds it
    epoch: int = 0  # iterations of an epoch; the checkpoint that is awaited is within one


class Output:
    """Standard output into a file, a line at a time, and the eye of the killer."""

    def __init__(self, path: Path, kill: Kill | None) -> None:
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - lives as long as the process
        self._kill = kill

    def write(self, text: str) -> int:
        line = text.lstrip("\n")
        if self._kill is not None and line.startswith(self._kill.line):
            end = time.monotonic() + PATIENCE_SECONDS
            while not _is_there(self._kill):
                assert time.monotonic() < end, f"there is no {self._kill.awaits}"
                time.sleep(0.001)
            threading.Timer(self._kill.seconds, _kill).start()
        if self._kill is not None and line.startswith(self._kill.last_line):
            _kill()
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()


def _is_there(kill: Kill) -> bool:
    if kill.awaits == "plan":
        return bool(list(Path().glob("*/plans/*.json")))
    steps = [int(path.name[5:]) for path in Path().glob("*/step-*")]
    return kill.awaits == "nothing" or any(not kill.epoch or step % kill.epoch for step in steps)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(script: Path, arguments: list[str], folder: Path, kill: Kill | None) -> None:
    """Run a script in a folder to its end, or to the kill; leaves what it printed, and at the end "final.pt"."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.stdout = Output(folder / "output", kill)  # type: ignore[assignment]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    variables = runpy.run_path(str(script), run_name="__main__")
    final = {"generator": torch.get_rng_state()}
    for name in ("model", "optimizer", "scaler"):  # of a script whose variables are global
        if name in variables:
            final[name] = variables[name].state_dict()
    torch.save(final, "final.pt")


def start(script: Path, arguments: list[str], folder: Path, kill: Kill | None = None) -> tuple[int, list[str]]:
    """Run a script in a process of its own; returns its exit code and the lines that it printed, blank ones left out.

    Of a line that ends with times, only what is before them.
    """
    code = jobs.in_a_process(run, script, arguments, folder, kill)
    lines = (folder / "output").read_text(encoding="utf-8").splitlines()
    return code, [line.partition(", time")[0] for line in lines if line]
