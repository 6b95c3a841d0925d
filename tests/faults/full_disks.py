"""Disks that are full, files that may not grow, and directories that turn read-only or are another user's.

``unshare -m python -m tests.faults.full_disks sizes|limits|read-only|strangers [--count N]`` prints one line of JSON.
Free of torch. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from checkflow.core.errors import StorageError
from checkflow.runtime.store.discovery import find_valid
from checkflow.runtime.store.store import Store
from tests.faults.mounting import Image, scratch
from tests.faults.power_cuts import wrap_calls
from tests.runtime.store.test_store import commit, new_store, newest

PAGE_BYTES = 4096
FULL_KIB = 200  # room for whatever four commits need


def _mount_tmpfs(target: Path, options: str) -> None:
    target.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)], check=True)


def _remount(target: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(target)], check=True)


def _commits(directory: Path, reason: str) -> tuple[tuple[int, int] | None, list[str]]:
    """Four attempts at a commit; what was acknowledged last, and what was said of the others that is wrong."""
    acknowledged, problems = None, []
    with new_store(directory) as store:
        for step in range(1, 5):
            try:
                commit(store, step, step)
                acknowledged = (step, step)
            except StorageError as error:
                if reason not in str(error):
                    problems.append(f"step {step}: {error}")
    return acknowledged, problems


def full(folder: Path, count: int) -> tuple[int, list[str]]:
    """File systems of every size from a page to enough, ``count`` of them."""
    problems: list[str] = []
    target = folder / "small"
    _mount_tmpfs(target, "size=1m,nr_inodes=1000")
    outcomes = set()
    for number in range(count):
        directory = target / "checkpoints"
        shutil.rmtree(directory, ignore_errors=True)
        # A page more each time; then the same sizes with fewer and fewer names.
        pages = number % (FULL_KIB * 1024 // PAGE_BYTES) + 1
        inodes = 1000 if number < FULL_KIB * 1024 // PAGE_BYTES else 3 + number % 30
        _remount(target, f"size={pages * PAGE_BYTES},nr_inodes={inodes}")
        where = f"{pages} pages, {inodes} names"
        acknowledged = None
        try:
            acknowledged, found = _commits(directory, "No space left")
            problems += [f"{where}: {one}" for one in found]
        except StorageError as error:
            if "No space left" not in str(error):
                problems.append(f"{where}: {error}")
        outcomes.add(acknowledged)
        _remount(target, "size=1m,nr_inodes=1000")
        if (left := newest(directory)) != acknowledged:
            problems.append(f"{where}: {left} instead of {acknowledged}")
        with new_store(directory) as store:
            commit(store, 9, 9)
        if newest(directory) != (9, 9):
            problems.append(f"{where}: the next save is not there")
    if not {None, (4, 4)} <= outcomes and count >= FULL_KIB * 1024 // PAGE_BYTES:
        problems.append(f"the sizes were all too small, or none was: {outcomes}")
    subprocess.run(["umount", "-l", str(target)], check=True)
    return count, problems


def limited(folder: Path, count: int) -> tuple[int, list[str]]:
    """Files may have so many bytes and no more (RLIMIT_FSIZE), for ``count`` numbers."""
    problems = []
    directory = folder / "checkpoints"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(count):
        shutil.rmtree(directory, ignore_errors=True)
        limit = 200 + number * 8192 // max(1, count)
        with new_store(directory) as store:
            commit(store, 1, 1)
            acknowledged = (1, 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                commit(store, 2, 2)
                acknowledged = (2, 2)
            except StorageError as error:
                if "too large" not in str(error):
                    problems.append(f"{limit} bytes: {error}")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if (left := newest(directory)) != acknowledged:
            problems.append(f"{limit} bytes: {left} instead of {acknowledged}")
        with new_store(directory) as store:
            commit(store, 3, 3)
        if newest(directory) != (3, 3):
            problems.append(f"{limit} bytes: the next save is not there")
    return count, problems


def read_only(folder: Path, count: int) -> tuple[int, list[str]]:
    """An ext4 that turns read-only at a call of a commit, as after an error of its disk; then it is mounted anew."""
    problems = []
    image = Image("ext4", folder)
    directory = image.target / "checkpoints"
    refused = 0
    for number in range(count):
        image.mount("errors=remount-ro")
        with new_store(directory) as store:
            commit(store, 1, 1)
        image.unmount()
        image.mount("errors=remount-ro")
        child = os.fork()
        if child == 0:
            _commit_then_exit(directory, image, 1 + number * 2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, 10):
            problems.append(f"read-only after call {1 + number * 2}: the writer ended with {code}")
        refused += code == 10
        if (found := find_valid(directory)) is None:
            problems.append(f"read-only after call {1 + number * 2}: nothing can be read")
        else:
            found.close()
        image.unmount()
        image.mount()
        left = newest(directory)
        if left != (2, 2) and (code == 0 or left != (1, 1)):
            problems.append(f"read-only after call {1 + number * 2}: {left} is left")
        with new_store(directory) as store:
            commit(store, 3, 3)
        if newest(directory) != (3, 3):
            problems.append(f"read-only after call {1 + number * 2}: the next save is not there")
        shutil.rmtree(directory)
        image.unmount()
    if not refused:
        problems.append("it never turned read-only in time")
    return count, problems


def _commit_then_exit(directory: Path, image: Image, at: int) -> None:
    """In a child: 0, a commit was acknowledged; 10, it was refused for the right reason."""
    try:
        with new_store(directory) as store:
            wrap_calls(at, image.fail_read_only)
            commit(store, 2, 2)
        os._exit(0)
    except StorageError as error:
        os._exit(10 if "Read-only" in str(error) else 11)
    except BaseException:  # noqa: BLE001 - a child must end here, whatever it is
        os._exit(12)


def strangers(folder: Path, count: int) -> tuple[int, list[str]]:
    """Directories that another user owns, or that lie where nobody may write: refused in one line, nothing left."""
    problems = []
    os.chmod(folder, 0o755)
    with new_store(folder / "theirs") as store:
        commit(store, 1, 1)
    (folder / "hidden").mkdir(mode=0o700)
    (folder / "hidden" / "checkpoints").mkdir()
    tries = ("theirs", "theirs/below", "new", "hidden/checkpoints")
    for name in tries:
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            code = 1
            try:
                with contextlib.suppress(BaseException):
                    try:
                        Store(folder / name, run_id="stranger", lock_wait_seconds=0).close()
                    except StorageError as error:
                        code = 0 if "Permission denied" in str(error) and "\n" not in str(error) else 2
                    if name == "theirs":  # it may be read all the same
                        found = find_valid(folder / name)
                        code = 3 if found is None else code
            finally:
                os._exit(code)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            problems.append(f"{name}: ended with {code}")
    if newest(folder / "theirs") != (1, 1) or sorted(os.listdir(folder)) != ["hidden", "theirs"]:
        problems.append("something was changed")
    return len(tries), problems


WAYS: dict[str, tuple[Callable[[Path, int], tuple[int, list[str]]], int]] = {
    "sizes": (full, 32), "limits": (limited, 16), "read-only": (read_only, 6), "strangers": (strangers, 1),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("way", choices=sorted(WAYS))
    parser.add_argument("--count", type=int, default=None)
    chosen = parser.parse_args()
    logging.getLogger("checkflow").setLevel(logging.CRITICAL)
    work, count = WAYS[chosen.way]
    folder = scratch()
    try:
        tried, problems = work(folder, count if chosen.count is None else chosen.count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps({"tried": tried, "problems": problems}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
