"""The lines of checkflow's log, visible where nobody has configured logging.

Libraries do not configure logging, and Python shows no line below a warning unless somebody does: a person who starts a
job would not see which plan runs, and what was restored. So the logger "checkflow" has a handler for as long as nobody
else takes its lines, as :data:`logging.lastResort` is one for warnings: it writes to standard error, and is silent
wherever a handler of the user's, of the root logger or of ours, gets the line, even one that came later. (Lightning
decides once, when it is imported, and stops its lines from reaching handlers that come after.) A level that was set is
left alone: ``logging.getLogger("checkflow").setLevel(logging.WARNING)`` makes it quiet.
"""

from __future__ import annotations

import logging
import sys

from checkflow.core.small_files import visible

_LOGGER = logging.getLogger("checkflow")


class _LastResort(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _taken():
            return
        try:
            sys.stderr.write(f"checkflow: {visible(self.format(record))}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # closed, or there is none: nobody reads it
            self.handleError(record)


_HANDLER = _LastResort()


def show_lines() -> None:
    """From here on the log's lines are seen, one way or another."""
    if _taken() or _HANDLER in _LOGGER.handlers:
        return
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.addHandler(_HANDLER)


def _taken() -> bool:
    """Whether another handler gets the lines."""
    logger: logging.Logger | None = _LOGGER
    while logger is not None:
        if any(handler is not _HANDLER for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
