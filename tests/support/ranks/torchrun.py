"""torchrun starts here without imports: its agent and its ranks are forked from a process that has imported everything.

The agent runs as ``python -m torch.distributed.run`` does, except that it forks where it would execute Python. Before a
rank's program begins, the rank loses what it has inherited by the fork and a new process would not have.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver, process, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support.ranks.processes import preload

_SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT  # that the agent handles, besides SIGINT
_MAIN = multiprocessing.current_process()  # where this is imported: as a new process sees itself


class Torchrun(ForkServerProcess):
    """A run of torchrun leads a session of its own in ``folder``; it is polled as ``subprocess.Popen`` is.

    Args:
        output: the file in ``folder`` that gets what it and its ranks print.
        arguments: of torchrun, with those of the program.
    """

    def __init__(self, folder: Path, output: str, arguments: list[str], environment: dict[str, str]) -> None:
        preload()
        super().__init__(target=_launch, args=(folder, output, arguments, environment))
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int:
        self.join()
        assert self.exitcode is not None
        return self.exitcode


def _launch(folder: Path, output: str, arguments: list[str], environment: dict[str, str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    starter: Any = subprocess_handler
    os.setsid()
    os.chdir(folder)
    _set_environment(environment)
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    starter.Popen = _Forked
    run.main(arguments)


class _Forked(subprocess.Popen[bytes]):
    """A command of Python is forked instead of executed."""

    def _execute_child(
        self, args: tuple[str, ...], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
        env: dict[str, str], *rest: Any,
    ) -> None:  # fmt: skip
        python, unbuffered, *program = args
        assert (python, unbuffered) == (sys.executable, "-u")
        ready, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(program, env)
        os.close(tell)
        os.read(ready, 1)  # nothing comes: it has its session now, and closes the other end
        os.close(ready)
        self._child_created = True


def _become(program: list[str], environment: dict[str, str]) -> None:
    """The forked process becomes the program; this never returns."""
    code = 1
    try:
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        _forget_what_was_forked()
        _set_environment(environment)
        code = _run(program)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _forget_what_was_forked() -> None:
    """Modules forget the process before, and random numbers are not those that others draw."""
    import numpy
    import torch

    torch.default_generator.seed()
    numpy.random.seed()
    torch.multiprocessing._set_thread_name("python")
    faulthandler.disable()
    tempfile.tempdir = None
    modules: Any = process
    modules._current_process, modules._parent_process, _MAIN.name = _MAIN, None, "MainProcess"
    multiprocessing.set_start_method(None, force=True)
    server: Any = forkserver
    server._forkserver.__init__()
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    util._finalizer_registry.clear()  # type: ignore[attr-defined]


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _run(program: list[str]) -> int:
    """Run a file or a module to its end, as Python runs its main program; returns the exit code."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    is_module = program[0] == "-m"
    paths = [os.getcwd() if is_module else os.path.dirname(program[0]), *os.environ["PYTHONPATH"].split(os.pathsep)]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    code = 0
    try:
        if is_module:
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code
