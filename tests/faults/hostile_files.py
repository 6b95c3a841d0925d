"""Checkpoints and plans that try to run code, read by a process that watches itself. Run as a program by test_no_code.

``python -m tests.faults.hostile_files DIRECTORY`` makes each of them, reads it as a job would, and prints one line of
JSON: what became of each, and every attempt to unpickle or to start something that Python's audit events told of.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from checkflow.core import plan as plans
from checkflow.core.errors import CheckflowError
from checkflow.runtime.format.codec import decode, encode
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.runtime.store.test_reader import reseal
from tests.support.store_tools import fill, read_all, small_layout

LAYOUT = small_layout()
MODEL = LAYOUT.files[0].name
WATCHED = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")


class Payload:
    """What unpickling turns into a file at ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def torch_file(payload: bytes) -> bytes:
    """As torch.save would write it."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", b"3\n")
    return target.getvalue()


def hostile(payload: bytes) -> dict[str, Callable[[Path], object]]:
    """What is done to a checkpoint whose checksums are then made to fit."""

    def extra(data: bytes) -> Callable[[Path], object]:
        return lambda path: (path / "state.msgpack").write_bytes(data)

    def hidden(value: bytes) -> bytes:
        return encode({"scheduler": value, "text": value.decode("latin-1")}, name="extra")

    return {
        "a pickle for the extra state": extra(payload),
        "an old pickle for the extra state": extra(pickle.dumps({"a": 1}, 0)),
        "torch.save's file for the extra state": extra(torch_file(payload)),
        "a pickle in every extension type": extra(
            msgpack.packb([msgpack.ExtType(code, payload) for code in range(128)])
        ),
        "a pickle in a datetime": extra(b"\xc7\x0c\xff" + payload[:12].ljust(12)),
        "a pickle as bytes and as text": extra(hidden(payload)),
        "a pickle for tensors": lambda path: (path / MODEL).write_bytes(payload),
        "torch.save's file for tensors": lambda path: (path / MODEL).write_bytes(torch_file(payload)),
        "a pickle after tensors": lambda path: (path / MODEL).write_bytes((path / MODEL).read_bytes() + payload),
        "code beside the files": lambda path: [
            (path / name).write_text("raise SystemExit('run')") for name in ("sitecustomize.py", "msgpack.py")
        ],
    }


def main() -> int:
    directory = Path(sys.argv[1])
    marker = directory / "marker"
    payload = pickle.dumps(Payload(marker))
    with Store(directory / "good", run_id="run") as store:
        path = store.commit(1, LAYOUT, fill(LAYOUT, 1)[0], encode({"epoch": 1}, name="extra"), {})
    found: dict[str, str] = {}
    told: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in WATCHED:
            told.append(f"{event} {str(arguments)[:200]}")

    good = {file.name: file.read_bytes() for file in path.iterdir()}
    with open_checkpoint(path) as checkpoint:  # imports what it needs
        decode(checkpoint.extra_bytes)
    sys.addaudithook(watch)
    for name, change in hostile(payload).items():
        for file in path.iterdir():
            file.unlink()
        for file_name, data in good.items():
            (path / file_name).write_bytes(data)
        change(path)
        reseal(path)
        watching = True
        try:
            with open_checkpoint(path) as checkpoint:
                checkpoint.verify()
                read_all(checkpoint)
                found[name] = repr(decode(checkpoint.extra_bytes))[:200]
        except CheckflowError as error:
            found[name] = f"{type(error).__name__}: {error}"
        watching = False
    plan = directory / "plan.json"
    for name, data in (("a pickle for a plan", payload), ("torch.save's file for a plan", torch_file(payload))):
        plan.write_bytes(data)
        watching = True
        try:
            found[name] = repr(plans.load(plan))
        except CheckflowError as error:
            found[name] = f"{type(error).__name__}: {error}"
        watching = False
    # The watch is awake: what all this tries to do is seen when it is done.
    ran, seen = marker.exists(), list(told)
    watching = True
    pickle.loads(payload)
    watching = False
    awake = marker.exists() and len(told) > len(seen)
    sys.stdout.write(json.dumps({"found": found, "told": seen, "ran": ran, "awake": awake}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
