"""The process that reads what fuzzing gives it, and does nothing else: what its memory does is the readers' own doing.

``python -m tests.faults.fuzz.reader CONNECTION DIRECTORY [BREAK]`` is started by ``process``. It says "ready",
and answers each [target, input] with [outcome, what was found or "", details, seconds of processor time], all in
msgpack. It ends when the connection does.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack

from checkflow.core.errors import CheckflowError
from tests.faults.fuzz.breaks import BREAKS
from tests.faults.fuzz.feeds import Feed, make_feeds

READY = b"ready"
_ADDRESS_SPACE_BYTES = 4 * 2**30  # beyond what is there at the start: memory that nobody touches counts here


def read(feed: Feed, item: Any) -> tuple[str, str, str]:
    """What comes of an input: the outcome, and where it must not be, what was found and its details."""
    try:
        return feed(item), "", ""
    except CheckflowError as error:
        if "\n" in str(error):
            return type(error).__name__, "an error of more than one line", traceback.format_exc()
        return type(error).__name__, "", ""
    except Exception as error:  # noqa: BLE001 - any is a find
        name, place = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
        return f"!{name}", f"{name} in {place.name}", traceback.format_exc()


def bound_address_space() -> None:
    """Memory that is asked for and never touched is not resident; from here on it is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + _ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    connection, feeds = Connection(int(sys.argv[1])), make_feeds(Path(sys.argv[2]))
    for name in sys.argv[3:]:
        BREAKS[name](feeds)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound_address_space()
    connection.send_bytes(READY)
    while True:
        try:
            name, item = msgpack.unpackb(connection.recv_bytes())
        except EOFError:
            return 0
        begun = time.process_time()
        answer = read(feeds[name], item)
        connection.send_bytes(msgpack.packb([*answer, time.process_time() - begun], unicode_errors="backslashreplace"))


if __name__ == "__main__":
    sys.exit(main())
