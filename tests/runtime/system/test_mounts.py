"""What a directory lies on, by real and made-up tables of mounts; what that does not promise; commits on it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkflow.cli.main import main
from checkflow.core.errors import LockedError, StorageError
from checkflow.runtime.store import store
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from checkflow.runtime.system import fs, mounts
from checkflow.runtime.system.mounts import Mount, file_system, mount_of
from tests.faults.mounting import in_namespace, need_mount
from tests.support.store_tools import fill, small_layout

ROOT = Path(__file__).parents[3]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mounts, "TABLE", str(tmp_path / "mountinfo"))
    return tmp_path / "mountinfo"


def write(table: Path, *rows: str) -> None:
    """Rows of "point kind source options device", of which the last three may be left out."""
    lines = []
    for row in rows:
        given = row.split(" ")
        point, kind, source, options, device = given + ["x", "rw", "9:9"][len(given) - 2 :]
        lines.append(f"22 1 {device} / {point} rw,relatime shared:1 - {kind} {source} {options}\n")
    table.write_text("".join(lines))


def device_of(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def test_the_longest_mount_point_that_leads_there(table: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "bc").mkdir(parents=True)
    here = f"{tmp_path}/a"
    write(table, "/ ext4 /dev/vda", f"{here} xfs /dev/vdb", f"{here}/b nfs4 s:/b", "/elsewhere btrfs /dev/vdc")
    assert mount_of(here) == Mount("xfs", "/dev/vdb", frozenset({"rw", "relatime"}))
    assert mount_of(f"{here}/bc") == Mount("xfs", "/dev/vdb", frozenset({"rw", "relatime"}))  # b is no part of bc
    assert mount_of(tmp_path) == Mount("ext4", "/dev/vda", frozenset({"rw", "relatime"}))
    (tmp_path / "link").symlink_to(here)
    assert str(mount_of(tmp_path / "link" / "bc")) == "xfs (/dev/vdb)"
    write(table, "/ overlay overlay", f"{here} overlay overlay rw,upperdir=/u")
    assert str(mount_of(here)) == "overlay (overlay)"


def test_of_mounts_at_one_place_the_last_counts(table: Path, tmp_path: Path) -> None:
    write(table, "/ ext4", f"{tmp_path} nfs4", f"{tmp_path} fuse.rclone")
    assert str(mount_of(tmp_path)) == "fuse.rclone (x)"


def test_a_mount_above_hides_what_was_mounted_below(table: Path, tmp_path: Path) -> None:
    """The directory's device tells which it is, where the device is a mount's at all."""
    (tmp_path / "a").mkdir()
    device = device_of(tmp_path)
    write(table, f"{tmp_path}/a fuse.rclone x rw 0:77", f"{tmp_path} tmpfs x rw {device}")
    assert str(mount_of(tmp_path / "a")) == "tmpfs (x)"
    write(table, f"/ ext4 x rw {device}", f"{tmp_path} ext4 x rw,bind {device}")  # a bind mount: the same device
    assert "bind" in mount_of(tmp_path).options  # type: ignore[union-attr]


def test_names_with_blanks_and_other_signs(table: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a b\t\\040\u2028c - d"
    odd.mkdir()
    (tmp_path / "a\rb").mkdir()
    point = str(odd).replace("\\", r"\134").replace(" ", r"\040").replace("\t", r"\011")
    write(table, "/ ext4", f"{point} fuse.rclone w\\040x:")
    assert mount_of(odd) == Mount("fuse.rclone", "w x:", frozenset({"rw", "relatime"}))
    write(table, "/ ext4", f"{tmp_path}/a\rb nfs4")
    assert str(mount_of(tmp_path / "a\rb")) == "nfs4 (x)"
    write(table, f"{tmp_path}/a\\040 nfs4")  # a beginning of its name, not a folder above it
    assert mount_of(odd) is None


def test_real_mounts(tmp_path: Path) -> None:
    """Of a namespace: a disk in memory, a bind mount of a folder in it, and one over both."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "bound").mkdir()
    script = """
import os, subprocess, sys
from checkflow.runtime.system.mounts import mount_of
base = sys.argv[1]
def mount(*words): subprocess.run(["mount", *words], check=True)
mount("-t", "tmpfs", "first", base + "/a b")
os.mkdir(base + "/a b/c")
print(mount_of(base + "/a b/c"))
mount("--bind", base + "/a b/c", base + "/bound")
print(mount_of(base + "/bound"))
mount("-t", "ramfs", "second", base)
os.makedirs(base + "/a b/c")
print(mount_of(base + "/a b/c"))
"""
    done = subprocess.run(
        in_namespace(sys.executable, "-c", script, str(tmp_path)),
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    need_mount(f"mounting is not allowed here: {done.stderr.strip()[-200:]}" if done.returncode else None)
    assert done.stdout.splitlines() == ["tmpfs (first)", "tmpfs (first)", "ramfs (second)"]


def test_where_the_system_does_not_say(table: Path, tmp_path: Path) -> None:
    assert mount_of(tmp_path) is None  # no table
    kind, size_bytes = file_system(tmp_path)
    assert kind is None
    assert size_bytes > 0
    assert file_system(tmp_path / "nothing") == (None, 0)


COMMIT, LOCK = "that a commit outlives this machine", "that the lock keeps other machines out"
BOTH = f"{COMMIT}, nor {LOCK}"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "options", "lacks", "late"),
    [
        *[(kind, "rw", None, False) for kind in ("ext4", "xfs", "btrfs", "zfs", "fuseblk", "lustre", "ceph", "9p")],
        *[(kind, "rw", BOTH, True) for kind in ("fuse", "fuse.rclone", "fuse.gcsfuse", "fuse.s3fs", "fuse.sshfs")],
        ("fuse.juicefs", "rw", COMMIT, True),
        ("nfs4", "rw,vers=4.2,local_lock=none", None, True),
        ("nfs", "rw,vers=3,local_lock=posix", None, True),
        ("nfs", "rw,vers=3,nolock,local_lock=all", LOCK, True),
        ("nfs", "rw,local_lock=flock", LOCK, True),
        ("cifs", "rw,cache=strict", None, True),
        ("smb3", "rw,nobrl", LOCK, True),
        ("lustre", "rw,localflock", LOCK, False),
        ("lustre", "rw,flock", None, False),
    ],
)
def test_what_a_kind_does_not_promise(kind: str, options: str, lacks: str | None, late: bool) -> None:
    mount = Mount(kind, "server:/x", frozenset(options.split(",")))
    assert mount.unpromised == (
        None if lacks is None else f"lies on {kind} (server:/x), which does not promise {lacks}"
    )
    assert mount.late == late


def test_what_may_be_a_secret_stands_in_no_log() -> None:
    assert str(Mount("fuse.rclone", ":s3,secret_access_key=abc:bucket", frozenset())) == "fuse.rclone"
    assert str(Mount("fuse.rclone", "w{SALaH}:ckpt/run", frozenset())) == "fuse.rclone (w{SALaH}:ckpt/run)"
    assert str(Mount("cifs", "//user:pw@server/x", frozenset())) == "cifs"


# A store on them


@pytest.fixture
def told(table: Path, tmp_path: Path) -> Iterator[Path]:
    """A directory that seems to lie on FUSE."""
    write(table, "/ ext4", f"{tmp_path} fuse.rclone w:b")
    store._refuse_without_rename.cache_clear()
    store._warn_unpromised.cache_clear()
    yield tmp_path / "checkpoints"
    store._refuse_without_rename.cache_clear()


def commit(into: Store, step: int) -> None:
    layout = small_layout()
    into.commit(step, layout, fill(layout, step)[0], b"", {})


def test_it_is_said_once_what_is_not_promised(told: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        with Store(told, run_id="r") as opened:
            commit(opened, step)
    assert [record.message for record in caplog.records] == [
        f"{told} lies on fuse.rclone (w:b), which does not promise {BOTH}"
    ]
    assert sorted(path.name for path in told.iterdir()) == [".lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EXDEV])
def test_where_no_folder_is_renamed_no_job_starts(
    told: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As mountpoint-s3 answers: files may be written and removed, a folder's rename fails."""

    def rename(old: str, new: str, *, dir_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fs, "rename", rename)
    with pytest.raises(StorageError) as refused:
        Store(told, run_id="r")
    assert str(refused.value) == (
        f"cannot use the checkpoint directory {told}: it lies on fuse.rclone (w:b), where no folder can be renamed "
        f"({os.strerror(number)}), and every commit renames one: choose a directory on another file system"
    )
    assert not any(told.iterdir())  # not even a lock
    assert not caplog.records


@pytest.mark.parametrize("call", ["mkdir", "write_all", "fsync", "rename", "unlink"])
def test_a_full_disk_is_none_of_those(told: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start may free some: by what is deleted, first of all."""

    def full(*args: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(fs, call, full)
        store._refuse_without_rename(told, Mount("nfs", "s:/x", frozenset()))
    with Store(told, run_id="r") as opened:
        commit(opened, 1)
    assert sorted(path.name for path in told.iterdir()) == [".lock", "step-00000001"]


def test_elsewhere_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(mounts, "rename_fault", lambda *names: tried.append(names[0]))
    Store(tmp_path / "checkpoints", run_id="r").close()
    assert tried == []


def test_a_running_job_may_clean_up_what_another_tries(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused by the lock, as ever."""
    real = fs.rename
    with Store(told, run_id="r") as first:
        store._refuse_without_rename.cache_clear()

        def rename(old: str, new: str, *, dir_fd: int) -> None:
            if "probe" in old:
                monkeypatch.setattr(fs, "rename", real)
                commit(first, 1)  # removes leftovers
            real(old, new, dir_fd=dir_fd)

        monkeypatch.setattr(fs, "rename", rename)
        with pytest.raises(LockedError):
            Store(told, run_id="s", lock_wait_seconds=0.0)
    assert sorted(path.name for path in told.iterdir()) == [".lock", "step-00000001"]


def test_a_store_keeps_what_may_not_be_stored_yet(
    told: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A commit each ten seconds of the mount: the newest two, one older than a minute, and one that grows to it."""
    monkeypatch.setattr(fs, "changed_seconds", lambda path: 10.0 * int(Path(path).parent.name.removeprefix("step-")))
    left = []
    for number in range(20):
        with Store(told, run_id="r") as opened:  # which knows only what lies there
            commit(opened, number)
        left.append([int(path.name.removeprefix("step-")) for path in find(told)])
    assert left[:3] == [[0], [1, 0], [2, 1, 0]]
    assert left[4:7] == [[4, 3, 0], [5, 4, 0], [6, 5, 4, 0]]  # 0 is old enough, 4 is to be
    assert left[9:11] == [[9, 8, 4, 0], [10, 9, 8, 4]]  # 4 is, and 0 goes
    assert left[18:] == [[18, 17, 16, 12], [19, 18, 16, 12]]
    assert main(["ls", str(told)]) == 0
    said = capsys.readouterr().out
    assert "step 16 stays: fuse.rclone stores late, and this is the next to be 60 s older than the newest" in said
    assert "step 12 stays: fuse.rclone stores late, and no newer one is 60 s older than the newest" in said
    assert said.count("stays") == 2
    assert main(["ls", "--json", str(told)]) == 0
    reasons = [one["stays"] is not None for one in json.loads(capsys.readouterr().out)["entries"]]
    assert reasons == [False, False, True, True]
