"""Calls listeners in a thread of its own when a signal comes, whatever the main thread does.

By the descriptor of ``signal.set_wakeup_fd``, which is shared with whoever set it before; docs/explanation/signals.md
says why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable

_END = b"\0"  # no signal has this number
_READ_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_KNOWS_SENDER = hasattr(socket, "SO_PASSCRED")  # Linux

Listener = Callable[[int], None]


class _WakeupSocket:
    """The descriptor, and the thread that reads it."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        if _KNOWS_SENDER:
            self._read.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._process = os.getpid()
        self._before = self._forward = -1
        self._replaced: bool | None = None  # by somebody else's; None: it was not given back yet
        self._thread = threading.Thread(target=self._listen, name="checkflow-wakeup", daemon=True)

    def open(self) -> None:
        """In the main thread."""
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        if self._before >= 0:
            # Of our own: its owner may close it meanwhile, and the number would be another file's.
            try:
                self._forward = os.dup(self._before)
            except OSError:
                self._put_back(self._before)
                raise
        self._thread.start()

    @property
    def is_set(self) -> bool:
        """Whether signals are written here; asked in the main thread."""
        found = signal.set_wakeup_fd(-1)
        ours = found == self._write.fileno()
        _set(found, warn=not ours)
        return ours

    def close(self) -> None:
        """In the main thread: put back what was there before; once more is harmless."""
        if self._write.fileno() < 0:  # a handler has been here meanwhile
            return
        self._put_back()
        if self._thread.is_alive():
            self._write.setblocking(True)
            self._write.send(_END)
            self._thread.join()
        if self._write.fileno() >= 0:
            self._write.setblocking(False)
        if self._replaced:  # who has done so may put it back: its number must not be another file's by then
            self._read.detach()
            self._write.detach()
        self._drop()

    def forked(self) -> None:
        """In a forked child, which has no thread that would read."""
        self._put_back()
        self._drop()

    def _put_back(self, before: int | None = None) -> None:
        if self._replaced is not None:
            return
        found = signal.set_wakeup_fd(-1)
        ours = found == self._write.fileno()
        self._replaced = found >= 0 and not ours
        if self._replaced:
            _set(found, warn=True)
        elif before is not None:
            _set(before, warn=True)
        elif ours and self._forward >= 0 and _same(self._before, self._forward):
            # Not where somebody took ours away: the one before may be closed soon, without being taken away again.
            _set(self._before, warn=True)

    def _drop(self) -> None:
        self._read.close()
        self._write.close()
        forward, self._forward = self._forward, -1
        if forward >= 0:
            os.close(forward)

    def _listen(self) -> None:
        while True:
            received, ancillary, _, _ = self._read.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            if not received:  # nobody can write any more
                return
            if ancillary and _CREDENTIALS.unpack(ancillary[0][2])[0] != self._process:
                continue
            numbers = received.removesuffix(_END)
            if self._forward >= 0 and numbers:
                with contextlib.suppress(OSError):  # full, or nobody reads there any more
                    os.write(self._forward, numbers)
            for number in numbers:
                for listener in tuple(_listeners):
                    listener(number)
            if numbers != received:
                return


def subscribe(listener: Listener) -> None:
    """In the main thread: have it called, in another one, with the number of every signal that has a handler.

    Raises:
        OSError: there are no descriptors left for it.
    """
    _listeners.append(listener)
    if not any(opened.is_set for opened in _sockets):
        added = _WakeupSocket()
        added.open()
        _sockets.append(added)


def unsubscribe(listener: Listener) -> None:
    """Call this one no more. With the last one everything is given back, if this is the main thread."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and threading.current_thread() is threading.main_thread():
        for opened in reversed(tuple(_sockets)):
            opened.close()
            if opened in _sockets:  # a handler may have been here meanwhile
                _sockets.remove(opened)


def _set(descriptor: int, *, warn: bool) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile: nothing is lost with it
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=warn)


def _same(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _forked() -> None:
    _listeners.clear()
    while _sockets:
        _sockets.pop().forked()


_listeners: list[Listener] = []
# The last one is written to, unless somebody has put another one in its place, or back.
_sockets: list[_WakeupSocket] = []

os.register_at_fork(after_in_child=_forked)
