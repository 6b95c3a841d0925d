"""File systems of one's own, for faults that only a real one has: images in memory, mounted in a namespace of its own.

Mounting needs root. Where it is not allowed the tests skip and say why; with ``CHECKFLOW_MUST_MOUNT=1`` (CI sets it)
they fail instead; ``CHECKFLOW_MUST_FUSE=1`` is for those that mount a bucket (:mod:`bucket_mounts`). Whatever a program
run by :func:`in_namespace` mounts is gone when it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUST_MOUNT, MUST_FUSE = "CHECKFLOW_MUST_MOUNT", "CHECKFLOW_MUST_FUSE"
# Sizes that the tools accept: xfs below 300 MiB is refused. The images have holes: they take what is written to them.
IMAGE_BYTES = {"ext4": 64 << 20, "xfs": 320 << 20}
MAKE = {"ext4": ("mkfs.ext4", "-q", "-F", "-b", "4096"), "xfs": ("mkfs.xfs", "-q", "-f", "-b", "size=4096")}
PACKAGE = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}
# _IOR('X', 125, u32) of linux/fs.h: from now on nothing reaches the disk; 2: not even what is in the journal's memory.
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2


def in_namespace(*command: str) -> list[str]:
    """The command, as it is to be run so that its mounts are its own."""
    return ["unshare", "--mount", "--propagation", "private", *command]


def scratch() -> Path:
    """A new folder, in memory where there is /dev/shm."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="checkflow-image-", dir=memory))


class Image:
    """A file system in a file, mounted at ``target`` by :meth:`mount`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._file, self.target = kind, folder / f"{kind}.image", folder / "mounted"
        with open(self._file, "wb") as file:
            file.truncate(IMAGE_BYTES[kind])
        _run(*MAKE[kind], str(self._file))
        self.target.mkdir()

    def mount(self, *options: str) -> None:
        """Attach it; after a power cut this recovers the journal."""
        _run("mount", "-t", self.kind, "-o", ",".join(("loop", *options)), str(self._file), str(self.target))

    def unmount(self) -> None:
        _run("umount", str(self.target))

    def cut_power(self) -> None:
        """What was not synced is lost; every later call fails with EIO."""
        fd = os.open(self.target, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def fail_read_only(self) -> None:
        """As after an error of the disk: ext4 (mounted with errors=remount-ro) turns read-only under its users."""
        device = os.stat(self.target).st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def why_not(kind: str) -> str | None:
    """Why an image of this kind cannot be made, mounted and cut off here; None: it can."""
    for tool in (MAKE[kind][0], "mount", "umount", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool}: apt-get install {PACKAGE[kind]} mount util-linux"
    done = subprocess.run(
        in_namespace(sys.executable, "-m", __spec__.name, kind),
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return None if done.returncode == 0 else f"mounting {kind} is not allowed here: {done.stderr.strip()[-300:]}"


def must_mount(flag: str = MUST_MOUNT) -> bool:
    """Whether tests that mount may not be skipped."""
    return os.environ.get(flag, "") not in ("", "0")


def need_mount(reason: str | None, flag: str = MUST_MOUNT) -> None:
    """Skip a test that cannot mount, for this reason, or fail it; None: it can."""
    import pytest

    if reason is not None and must_mount(flag):
        pytest.fail(f"{flag} is set, and {reason}")
    if reason is not None:
        pytest.skip(reason)


def main() -> int:
    folder = scratch()
    try:
        image = Image(sys.argv[1], folder)
        image.mount()
        image.cut_power()
        image.unmount()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
