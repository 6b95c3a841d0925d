"""Shows checkflow's log lines on standard error if nobody has configured logging, like :data:`logging.lastResort`.

Without it Python would hide which plan runs and what was restored. It asks anew for each line whether another handler
gets it, because libraries (Lightning) may add handlers later.
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
        except (OSError, ValueError, AttributeError):  # stderr is closed or missing
            self.handleError(record)


_HANDLER = _LastResort()


def show_lines() -> None:
    """Make the log's lines visible from now on."""
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
