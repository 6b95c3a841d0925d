"""What a part of a run on a GPU may do: for the tests of the run itself. Nothing here needs torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Options = Mapping[str, Any]
Send = Callable[[dict[str, Any]], None]


def go_well(options: Options, send: Send) -> None:
    told = {name: options[name] for name in ("numbers", "traced")}
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
