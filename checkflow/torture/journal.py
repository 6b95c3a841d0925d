"""What a job says of itself before it is killed: one JSON object a line, readable after its death and before.

A line is in the page cache when ``write`` returns: SIGKILL loses none of them.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """Appends to a file; a later life of the job goes on in it.

    Args:
        always: content of each line.
    """

    def __init__(self, path: Path, **always: Any) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._always = always

    def write(self, event: str, **content: Any) -> None:
        # The first line feed ends what a kill has cut off.
        os.write(self._fd, f"\n{json.dumps({**self._always, 'event': event, **content})}\n".encode())


class JournalReader:
    """Follows a journal while another process writes it.

    Args:
        from_the_end: what is there already is none of the ``lines``.
    """

    def __init__(self, path: Path, *, from_the_end: bool = False) -> None:
        self.lines: list[Line] = []
        self._path = path
        self._offset = path.stat().st_size if from_the_end and path.exists() else 0

    def look(self) -> None:
        """Add the lines that are new; one that is not finished waits, one that a kill cut off is no line."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # empty, or cut off
                self.lines.append(json.loads(line))


def read_journal(path: Path) -> list[Line]:
    """All whole lines, oldest first."""
    reader = JournalReader(path)
    reader.look()
    return reader.lines
