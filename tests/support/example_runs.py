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

import psutil
import torch

from tests.support import jobs
from tests.support.waiting import PATIENCE_SECONDS, wait_for

ROOT = Path(__file__).parents[2]


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
    return code, _lines(folder)


def start_ranks(
    script: Path, arguments: list[str], folder: Path, ranks: int, kill_at: str | None = None
) -> tuple[int, list[str]]:
    """Run a script under torchrun; returns as :func:`start` does.

    Args:
        kill_at: the launcher and all ranks get SIGKILL when this line is printed and storage holds a checkpoint.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "output").open("w") as output, (folder / "log").open("a") as log:
        launcher = psutil.Popen([*command, *arguments], cwd=folder, env=environment, stdout=output, stderr=log)
        try:
            if kill_at is not None:
                wait_for(lambda: _has_printed(folder, kill_at) and any(folder.glob("*/step-*")))
            else:
                wait_for(lambda: launcher.poll() is not None)
        finally:
            found = [launcher, *launcher.children(recursive=True)] if launcher.poll() is None else []
            for one in found:  # the launcher first, so that it starts nothing again
                one.kill()
            psutil.wait_procs(found)
    return launcher.wait(), _lines(folder)


def _has_printed(folder: Path, line: str) -> bool:
    return any(one.startswith(line) for one in _lines(folder))


def _lines(folder: Path) -> list[str]:
    lines = (folder / "output").read_text(encoding="utf-8").splitlines()
    return [line.partition(", time")[0] for line in lines if line]
