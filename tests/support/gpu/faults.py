"""What a part of a run on a GPU may do: for the tests of the run itself. Nothing here needs torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.worker import scratch

Options = Mapping[str, Any]
Send = Callable[[dict[str, Any]], None]


def go_well(options: Options, send: Send) -> None:
    told = {name: options[name] for name in ("numbers", "traced", "host_memory")}
    send({"options": sorted(options), "process": os.getpid(), **told})


def fail(options: Options, send: Send) -> None:
    send({"before": "it"})
    raise ValueError("with\na reason")


def fail_in_a_section(options: Options, send: Send) -> None:
    send({"section": "one", "error": "it went wrong"})
    send({"section": "two"})


def hang(options: Options, send: Send) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    send({"child": child.pid})
    time.sleep(1000)


def crash(options: Options, send: Send) -> None:
    send({"before": "it"})
    os.kill(os.getpid(), signal.SIGSEGV)


def leave_out(options: Options, send: Send) -> None:
    send({"skipped": "not installed"})


def leave_a_folder(options: Options, send: Send) -> None:
    """As where a checkpoint is being written, by a process that the part started."""
    make = "import sys, tempfile; from benchmarks.gpu.worker import scratch; " + (
        "print(tempfile.mkdtemp(prefix=scratch(), dir=sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", make, options["folder"]], capture_output=True, text=True, check=True)
    folders = [Path(done.stdout.strip()), Path(tempfile.mkdtemp(prefix=scratch(), dir=options["folder"]))]
    for folder in folders:
        (folder / "file").write_text("half")
    send({"folders": [str(folder) for folder in folders]})
    os.kill(os.getpid(), signal.SIGKILL)


def leave_memory(options: Options, send: Send) -> None:
    """As a job with staging buffers."""
    from checkflow.runtime.memory_tier.records import RunLife
    from checkflow.runtime.memory_tier.tier import MemoryTier

    tier = MemoryTier(Path(tempfile.mkdtemp(prefix=scratch(), dir=options["folder"])), RunLife("run"))
    tier.allocate(1, 4096, None)
    send({"left": str(tier._path)})
    os.kill(os.getpid(), signal.SIGKILL)
