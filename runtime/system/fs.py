"""Every system call that writes, moves or reads checkpoints, one plain function each.

The store reaches the file system through this module alone (``fs.pwrite(…)``), so that tests can make any call fail.
Errors are OSError; callers give them a meaning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import stat
from collections.abc import Callable, Iterator, Sequence

from checkflow.core import small_files
from checkflow.core.small_files import refuse_irregular

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW
_CLAIM = os.O_RDWR | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MODE = 0o664  # of new files, less the umask: no job trusts what everyone may write to
_passing: set[int] = set()  # descriptors that forked children must close
# Errors of a file system that has no direct I/O, or none with this alignment.
NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)
# Less goes through the page cache: two disk accesses for a small file take longer than the copy.
LEAST_DIRECT_BYTES = 1 << 20


def open_folder(path: str, *, dir_fd: int | None = None) -> int:
    """Open a directory that is not a symbolic link."""
    return os.open(path, _FOLDER | os.O_NOFOLLOW, dir_fd=dir_fd)


@contextlib.contextmanager
def folder(path: str, *, dir_fd: int | None = None) -> Iterator[int]:
    """:func:`open_folder` for a block. Nothing is written through it, so errors of its closing are ignored."""
    fd = open_folder(path, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        close_quietly(fd)


def make_folders(path: str) -> None:
    """Make a directory and its parents. If something else is in the way, the error says what."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise type(error)(error.errno, _obstacle(path) or error.strerror, path) from None


def make_durably(path: str, sync: Callable[[int], None]) -> None:
    """:func:`make_folders` with durable names: otherwise a power cut takes the directories with all they hold.

    ``sync`` makes the names in an open directory durable.
    """
    made = pathlib.Path(path)
    parents = {made.parent}
    for above in made.parents:
        if os.path.lexists(above):
            break
        parents.add(above.parent)
    make_folders(path)
    for parent in parents:
        try:
            fd = open_folder(str(parent.resolve()))
        except PermissionError:  # made for us, in a directory that we may not read
            continue
        try:
            sync(fd)
        finally:
            close_quietly(fd)


def _obstacle(path: str) -> str | None:
    """Name the first part of a path that is not a directory."""
    parts = pathlib.Path(path)
    for part in (*reversed(parts.parents), parts):
        if os.path.islink(part) and not os.path.exists(part):
            return f"{part} is a symbolic link to {os.readlink(part)}, which is not there"
        if os.path.exists(part) and not os.path.isdir(part):
            return f"{part} is a file, not a directory"
    return None


def mkdir(name: str, *, dir_fd: int) -> None:
    os.mkdir(name, dir_fd=dir_fd)


def open_new(name: str, *, dir_fd: int, mode: int = MODE) -> int:
    """Make a new file for writing. Fails if the name is taken, even by a dangling symbolic link."""
    return pass_by(os.open(name, _NEW, mode, dir_fd=dir_fd))


def publish(name: str, data: bytes, *, dir_fd: int, mode: int = MODE, synced: bool = False) -> None:
    """Replace a small file, whole or not at all if the process dies. IrregularError names a directory in the way.

    ``synced``: its bytes are on the disk before it gets its name, which the caller makes durable.
    """
    draft = f".{name.lstrip('.')}.tmp"
    make_way(draft, name, dir_fd=dir_fd)
    try:
        fd = open_new(draft, dir_fd=dir_fd, mode=mode)
        try:
            write_all(fd, memoryview(data), 0)
            if synced:
                fsync(fd)
        finally:
            close(fd)
        rename(draft, name, dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            unlink(draft, dir_fd=dir_fd)
        raise


def make_way(draft: str, name: str, *, dir_fd: int) -> None:
    """Remove a stale or planted draft before it is made anew and renamed to ``name``; IrregularError for
    directories.
    """
    for taken in (draft, name):
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(taken, dir_fd=dir_fd, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                refuse_irregular(mode, f": remove {taken}")
            elif taken == draft:
                unlink(draft, dir_fd=dir_fd)


def read_small(name: str, most_bytes: int, *, dir_fd: int) -> bytes:
    """The beginning of a regular file of a fixed name, ``most_bytes`` of it at most; no link is followed.

    Raises:
        IrregularError: something else has its name.
        OSError: it cannot be read.
    """
    fd, size_bytes = open_regular(name, dir_fd=dir_fd, advice=": remove it")
    try:
        return read_begin(fd, min(size_bytes, most_bytes))
    finally:
        close_quietly(fd)


def read_begin(fd: int, size_bytes: int) -> bytes:
    """The first bytes of an open file; fewer where it has become shorter."""
    data = bytearray(size_bytes)
    return bytes(data[: read_all(fd, memoryview(data), 0)])


def open_regular(name: str, *, dir_fd: int | None = None, advice: str = "") -> tuple[int, int]:
    """An existing regular file for reading, and its size; as :func:`.small_files.open_regular`, following no link."""
    return small_files.open_regular(name, _READ, dir_fd=dir_fd, advice=advice)


def open_direct(fd: int) -> int:
    """Open the same file again, for direct reads of whole pages."""
    flag = getattr(os, "O_DIRECT", 0)  # Linux
    if not flag:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return pass_by(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flag))


def open_direct_if_large(fd: int, size_bytes: int) -> int | None:
    """:func:`open_direct`; None: the file is small, or it is refused, and reads through the cache say what is wrong."""
    if size_bytes < LEAST_DIRECT_BYTES:
        return None
    try:
        return open_direct(fd)
    except OSError:
        return None


def open_claimed(name: str, *, dir_fd: int) -> int:
    """An existing file to lock for oneself: over a network that takes the right to write.

    Raises:
        IrregularError: something else has its name; a device is not opened.
    """
    try:
        fd, _ = small_files.open_regular(name, _CLAIM, dir_fd=dir_fd)
    except PermissionError:
        fd, _ = open_regular(name, dir_fd=dir_fd)
    return pass_by(fd)


def open_lock(path: str, mode: int = 0o600, group: int = -1) -> int:
    """Open a file to lock, made if it is missing; IrregularError for anything else. Whoever can open it can lock it.

    ``mode`` and ``group`` are set whatever the umask, if the file is this user's; group -1: left as it is.
    """
    try:
        fd = pass_by(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode))
    except OSError:  # a system's own words for links, sockets and directories are hard to understand
        with contextlib.suppress(FileNotFoundError):
            refuse_irregular(os.stat(path, follow_symlinks=False).st_mode, ": remove it")
        raise
    try:
        found = os.fstat(fd)
        refuse_irregular(found.st_mode, ": remove it")
        if found.st_uid == os.geteuid() and (stat.S_IMODE(found.st_mode) != mode or group not in (-1, found.st_gid)):
            with contextlib.suppress(PermissionError):  # a disk without modes or groups can still be locked
                os.fchown(fd, -1, group)
                os.fchmod(fd, mode)
    except BaseException:
        close_quietly(fd)
        raise
    return fd


def flock(fd: int) -> None:
    """Take an exclusive lock, or raise BlockingIOError at once."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def flock_shared(fd: int) -> None:
    """Take a shared lock, or raise BlockingIOError at once."""
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def set_direct(fd: int, direct: bool) -> None:
    """Switch direct I/O of an open file. Not a flag of the open: some file systems make the new file and then
    refuse.
    """
    flag = getattr(os, "O_DIRECT", 0)  # Linux
    if direct and not flag:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)


def truncate(fd: int, size_bytes: int = 0) -> None:
    os.ftruncate(fd, size_bytes)


def pwrite(fd: int, data: memoryview, offset: int) -> int:
    """Write some of ``data``; returns how many bytes, which may be fewer."""
    return os.pwrite(fd, data, offset)


def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read into buffers; fewer bytes than asked for near the end of the file."""
    return os.preadv(fd, buffers, offset)


def fsync(fd: int) -> None:
    os.fsync(fd)


def pass_by(fd: int) -> int:
    """Have forked children (loader workers) close a descriptor, or they would keep locks and deleted files alive."""
    _passing.add(fd)
    return fd


def close(fd: int) -> None:
    _passing.discard(fd)
    os.close(fd)


def close_quietly(fd: int) -> None:
    """Close a descriptor that nothing was written through, or after an error that matters more."""
    with contextlib.suppress(OSError):
        close(fd)


def rename(old: str, new: str, *, dir_fd: int) -> None:
    """Rename within one directory."""
    os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def move(name: str, *, old_dir_fd: int, dir_fd: int) -> None:
    """Rename to the same name in another directory."""
    os.rename(name, name, src_dir_fd=old_dir_fd, dst_dir_fd=dir_fd)


def link(name: str, *, old_dir_fd: int, dir_fd: int) -> None:
    """Link an existing file under the same name in another directory."""
    os.link(name, name, src_dir_fd=old_dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)


def unlink(name: str, *, dir_fd: int) -> None:
    os.unlink(name, dir_fd=dir_fd)


def rmdir(name: str, *, dir_fd: int) -> None:
    os.rmdir(name, dir_fd=dir_fd)


def names(fd: int) -> list[str]:
    """The names in a directory, sorted."""
    return sorted(os.listdir(fd))


def entries(fd: int) -> Iterator[tuple[str, os.stat_result]]:
    """The entries of a directory, in no order; those that vanish meanwhile are skipped."""
    with os.scandir(fd) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield entry.name, status


def folder_names(path: str) -> list[str]:
    """The names in a directory, sorted."""
    return sorted(os.listdir(path))


def status(name: str, *, dir_fd: int) -> os.stat_result:
    """An entry's status; no link is followed."""
    return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)


def may_read(name: str, *, dir_fd: int) -> bool:
    """Whether this process may open a regular file."""
    return os.access(name, os.R_OK, dir_fd=dir_fd, effective_ids=True)


def exists(name: str, *, dir_fd: int) -> bool:
    """Whether the name is taken, even by a dangling symbolic link."""
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def changed_seconds(path: str) -> float:
    """When a file was last written, by the clock of its file system."""
    return os.stat(path, follow_symlinks=False).st_mtime


def is_at(fd: int, path: str) -> bool:
    """Whether an open file or directory is the one at this path now."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(there, os.fstat(fd))


def path_of(fd: int) -> str | None:
    """Where an open directory is now; None: it was deleted, or the system does not say."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
    return path if is_at(fd, path) else None


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, continuing after short writes."""
    while data:
        written = pwrite(fd, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        data, offset = data[written:], offset + written


def read_all(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer``; returns how many bytes the file gave, fewer only at its end."""
    done = 0
    while done < len(buffer) and (count := preadv(fd, [buffer[done:]], offset + done)):
        done += count
    return done


def read_pages(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` with whole pages by direct I/O; returns how many bytes: fewer at the end, or if that is
    refused.
    """
    done = 0
    while done < len(buffer) and not done % mmap.PAGESIZE:
        try:
            count = preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            if error.errno not in NOT_DIRECT:
                raise
            break
        if not count:
            break
        done += count
    return done


def user_name(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def user_of_process(pid: int) -> str | None:
    """The user of a process; None: it has ended."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return None


def _close_in_child() -> None:
    while _passing:
        close_quietly(_passing.pop())


os.register_at_fork(after_in_child=_close_in_child)
