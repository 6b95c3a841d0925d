"""Shows checkflow's log lines if nobody has configured logging.

Python hides lines below a warning by default, so a user would not see which plan runs or what was restored. This
handler writes to standard error only while no other handler gets the lines, like :data:`logging.lastResort`. It leaves
levels alone, and is asked anew for each line, because libraries (Lightning) may add handlers later.
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
