"""Programs on a terminal of their own (a pty), and what stays on its screen."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *command: str, cwd: Path, stdout: int | None = None) -> None:
        self._fd, child = pty.openpty()
        self.before = termios.tcgetattr(child)
        self._child = child
        self.text = ""
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child if stdout is None else stdout, stderr=child, cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "160"},
            start_new_session=True,
        )  # fmt: skip

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, pattern: str) -> None:
        while re.search(pattern, self.text) is None:
            assert self._read(), f"{pattern} never came: {self.text!r}"

    def end(self) -> tuple[int, str]:
        while self._read():  # first: a full terminal would hold the program
            pass
        out = self.process.stdout
        return self.process.wait(), out.read().decode() if out is not None else ""

    def _read(self) -> bool:
        """Read what is there; False at the end of the program."""
        while not select.select([self._fd], [], [], 0.05)[0]:
            if self.process.poll() is not None and not select.select([self._fd], [], [], 0.05)[0]:
                return False
        self.text += os.read(self._fd, 65536).decode(errors="replace")
        return True

    @property
    def settings(self) -> object:
        return termios.tcgetattr(self._child)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)
        os.close(self._child)


@contextlib.contextmanager
def terminal(*command: str, cwd: Path, stdout: int | None = None) -> Iterator[Terminal]:
    """Closed at the end; standard output is the terminal, too, unless it is another descriptor, such as a pipe."""
    opened = Terminal(*command, cwd=cwd, stdout=stdout)
    try:
        yield opened
    finally:
        opened.close()


def left_on_screen(text: str) -> list[str]:
    """The lines that stay, by what rich uses of a terminal: return, up a line, erase a line."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            lines[row] += part
    return [line for line in lines if line.strip()]
