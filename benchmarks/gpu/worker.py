"""Processes that do one part of a run after the other, and can be ended at any time."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import multiprocessing
import multiprocessing.process
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Row, Status

SHARED_MEMORY = Path("/dev/shm")
_SECONDS_TO_SAY = 0.5  # where its threads are
_SECONDS_TO_END = 15.0  # after it was killed: what a driver holds in the kernel may take longer, or for ever


def scratch(group: int | None = None) -> str:
    """What the names of a part's temporary folders begin with, so that they go even if the part is killed.

    Args:
        group: of processes: that of a worker and of all that it starts; by default the one that asks.
    """
    return f"checkflow-gpu-{os.getpgrp() if group is None else group}-"


def give_back_memory(belongs: Callable[[Path], bool]) -> bool:
    """Remove what dead jobs have left in shared memory (runtime/memory_tier/records.py says what lies there).

    Args:
        belongs: whether a job is one of the caller's, by the directory of its checkpoints.

    Returns:
        Whether one of these still lives; what it has stays.
    """
    living = False
    for folder in SHARED_MEMORY.glob(f"checkflow-{'?' * 32}"):
        try:
            with (folder / "owner.json").open() as file:
                if not belongs(Path(json.load(file)["directory"])):
                    continue
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # its job has locked it for as long as it lives
        except BlockingIOError:
            living = True
        except (OSError, ValueError, LookupError, TypeError):  # another user's, or damaged: whose it is cannot be told
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return living


def serve(connection: Any, log: str) -> None:
    """The other process: does what it is asked to, one thing after the other, until nobody asks any more."""
    os.setpgid(0, 0)  # whatever it starts is ended with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to write a whole GPU job's memory takes minutes
    faulthandler.enable()  # says where it was, if it crashes
    faulthandler.register(signal.SIGUSR2)  # and if it hangs, before it is ended

    def send(row: Row) -> None:
        connection.send(("row", json.dumps(row, default=str)))  # whatever is in it, the run must be able to keep it

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, options = connection.recv()
            try:
                module, _, function = name.partition(":")
                getattr(importlib.import_module(module), function)(options, send)
                _give_gpu_memory_back()
                connection.send(("done", ""))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and the others go on
                traceback.print_exc()
                connection.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _give_gpu_memory_back() -> None:
    """Other processes need what torch keeps for this one: commands, and those that run beside it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


class Worker:
    """A process that does parts. After one that failed it is another one: what CUDA breaks is broken for a process.

    Args:
        log: what they say is appended to it.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._scratch_in = {SHARED_MEMORY, Path(tempfile.gettempdir()), log.parent}  # and in no other folder
        self._process: Any = None
        self._connection: Any = None

    def run(
        self, function: str, options: Mapping[str, Any], limit_seconds: float, rows: list[Row]
    ) -> tuple[Status, str]:
        """Do one thing within its time; what it sends is appended to ``rows``. Returns how it ended, and why.

        Args:
            function: "module:function"; it is given the options, and what sends a row. A row with an "error" tells that
                something went wrong, and that it went on all the same.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        until = time.monotonic() + limit_seconds
        process, connection = self._process, self._connection
        try:
            connection.send((function, dict(options)))
            while connection.poll(max(0.0, until - time.monotonic())):
                kind, content = connection.recv()
                if kind != "row":
                    break
                rows.append(json.loads(content))
            else:
                os.kill(process.pid, signal.SIGUSR2)
                time.sleep(_SECONDS_TO_SAY)
                self.close()
                return "ended", f"it was ended after {limit_seconds:.0f} s; {self._log.name} says where it was"
        except (EOFError, OSError):
            process.join(5)
            code = process.exitcode
            self.close()
            return "failed", f"its process ended with {_ending(code)}"
        wrong = next((f"{row.get('section', 'row')}: {row['error']}" for row in rows if "error" in row), "")
        if kind == "failed" or wrong:
            self.close()
        return ("failed", content or wrong) if kind == "failed" or wrong else ("done", "")

    def close(self) -> None:
        """End the process, and what it started; what they had in temporary folders and shared memory goes with them."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(_SECONDS_TO_END)
        if process.is_alive():
            # The run goes on without it, and does not wait for it when it ends itself.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
            with self._log.open("a") as log:
                log.write(f"process {process.pid} was killed, and does not end\n")
        self._connection.close()
        self._connection = None
        until = time.monotonic() + _SECONDS_TO_END  # what it started may take a while to end, too
        while give_back_memory(lambda directory: scratch(process.pid) in str(directory)) and time.monotonic() < until:
            time.sleep(0.1)
        for folder in self._scratch_in:
            for left in folder.glob(f"{scratch(process.pid)}*"):
                shutil.rmtree(left, ignore_errors=True)

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, str(self._log)))
        self._process.start()
        theirs.close()


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
