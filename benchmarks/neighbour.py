"""A neighbour that takes from a job what both need: the disk, or the processor.

It begins with the first line of its standard input and ends with that input, so it dies with whoever started it; then
it says in one line of JSON what it did. :class:`Neighbour` starts it.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

BLOCK_BYTES = 8 * 2**20
FILE_BYTES = 32 * BLOCK_BYTES
Kind = Literal["disk", "cpu"]


class Neighbour:
    """One neighbour: there from ``with`` on, at work between ``begin`` and ``end``, which do not wait for anything.

    ``outcome`` is what it said in the end.

    Raises:
        RuntimeError: it failed.
    """

    def __init__(self, kind: Kind, directory: Path, threads: int) -> None:
        self._command = [sys.executable, "-m", "benchmarks.neighbour", kind, str(directory), "--threads", str(threads)]
        self.outcome: dict[str, Any] = {}

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parent.parent
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            self._command, cwd=root, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._process.stdout is None or self._process.stdout.readline() != "ready\n":
            self._process.communicate()
            raise RuntimeError("the neighbour did not start")
        return self

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdout is not None
        self.end()
        told = self._process.stdout.read()
        if self._process.wait():
            raise RuntimeError("the neighbour failed")
        self.outcome = json.loads(told)


def write_file(path: Path, block: mmap.mmap, ended: threading.Event) -> int:
    """Write one file, its fsync included, and remove it; ends early where it is to end. Returns the bytes written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags, 0o600)
    written = 0
    try:
        while not written or (written < FILE_BYTES and not ended.is_set()):
            written += os.write(fd, block)
        os.fsync(fd)
    finally:
        os.close(fd)
        path.unlink()
    return written


def write_on(directory: Path, number: int, ended: threading.Event) -> int:
    """Write files until told to end; returns the bytes written."""
    block = mmap.mmap(-1, BLOCK_BYTES)  # its address is a multiple of the page's size, as O_DIRECT wants
    block[:] = os.urandom(BLOCK_BYTES)
    written = write_file(path := directory / f"neighbour-{os.getpid()}-{number}", block, ended)
    while not ended.is_set():
        written += write_file(path, block, ended)
    return written


def compute_on(ended: threading.Event) -> int:
    """Multiply matrices until told to end; returns how often. numpy lets go of the interpreter meanwhile."""
    import numpy as np

    matrix = np.ones((512, 512), dtype=np.float32) / 512
    count = 0
    while not count or not ended.is_set():
        matrix = matrix @ matrix
        count += 1
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["disk", "cpu"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(argv)
    ended = threading.Event()
    done = [0] * chosen.threads
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            done[number] = write_on(chosen.directory, number, ended) if chosen.kind == "disk" else compute_on(ended)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(chosen.threads)]
    print("ready", flush=True)
    if not sys.stdin.readline():
        threads.clear()
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    if failed:
        print(f"neighbour: {failed[0]}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - begun
    unit = "bytes_per_second" if chosen.kind == "disk" else "products_per_second"
    print(json.dumps({"kind": chosen.kind, "seconds": seconds, unit: sum(done) / seconds}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
