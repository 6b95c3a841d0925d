"""Damage at random: whatever it hits, a checkpoint is refused by the name of a file, or its data is as it was written.

``python -m tests.faults.damage DIRECTORY COUNT SEED`` prints one line of JSON. Free of torch.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from checkflow.core.errors import CorruptCheckpointError
from checkflow.runtime.format.layout import make_layout
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.support.store_tools import fill, read_all, record

PAGE_BYTES = 4096
LAYOUT = make_layout(
    [
        record("model/weight", (70, 33), order=(1, 0)),
        record("model/bias", (9000,), "float16"),
        record("model/step", (), "int64"),
        record("optimizer/weight.momentum", (70, 33)),
        record("optimizer/bias.momentum", (3, 5), "complex128"),
    ]
)


def make(directory: Path) -> tuple[Path, dict[str, bytes], bytes]:
    """Two checkpoints; the path of the newer one, its tensors and its extra state."""
    with Store(directory, run_id="run") as store:
        for step in (1, 2):
            path = store.commit(step, LAYOUT, fill(LAYOUT, step)[0], bytes([step]) * 700, {"seed": step})
    return path, fill(LAYOUT, 2)[1], bytes([2]) * 700


def _flip(path: Path, file: Path, source: random.Random) -> str:
    data = bytearray(file.read_bytes())
    if not data:
        return "nothing to flip"
    at = source.randrange(len(data))
    data[at] ^= 1 << source.randrange(8)
    file.write_bytes(data)
    return f"a bit of byte {at} of {file.name}"


def _truncate(path: Path, file: Path, source: random.Random) -> str:
    data = file.read_bytes()
    length = source.choice((0, source.randrange(len(data) + 1), max(0, len(data) - source.randint(1, 9))))
    file.write_bytes(data[:length])
    return f"{file.name} cut to {length} bytes"


def _zero(path: Path, file: Path, source: random.Random) -> str:
    data = bytearray(file.read_bytes())
    page = source.randrange(len(data) // PAGE_BYTES + 1)
    part = data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
    data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes(len(part))
    file.write_bytes(data)
    return f"page {page} of {file.name} zeroed"


def _misplace(path: Path, file: Path, source: random.Random) -> str:
    """A page of it lands where another one belongs."""
    data = bytearray(file.read_bytes())
    pages = len(data) // PAGE_BYTES
    if pages < 2:
        return "no two pages"
    one, other = source.sample(range(pages), 2)
    data[one * PAGE_BYTES : (one + 1) * PAGE_BYTES] = data[other * PAGE_BYTES : (other + 1) * PAGE_BYTES]
    file.write_bytes(data)
    return f"page {other} of {file.name} at page {one}"


def _miss(path: Path, file: Path, source: random.Random) -> str:
    file.unlink()
    return f"{file.name} missing"


def _double(path: Path, file: Path, source: random.Random) -> str:
    other = source.choice(sorted(path.iterdir()))
    shutil.copy(file, path / "copy")
    (path / "copy").rename(other)
    return f"{file.name} in place of {other.name}"


def _swap(path: Path, file: Path, source: random.Random) -> str:
    other = source.choice(sorted(path.iterdir()))
    file.rename(path / "held")
    if other != file:
        other.rename(file)
    (path / "held").rename(other)
    return f"{file.name} and {other.name} exchanged"


def _older(path: Path, file: Path, source: random.Random) -> str:
    shutil.copy(path.with_name("step-00000001") / file.name, file)
    return f"{file.name} of another checkpoint"


def _append(path: Path, file: Path, source: random.Random) -> str:
    with file.open("ab") as end:
        end.write(source.randbytes(source.choice((1, 8, PAGE_BYTES))))
    return f"{file.name} longer"


def _stranger(path: Path, file: Path, source: random.Random) -> str:
    """A file that nobody names: harmless."""
    (path / f"extra-{source.randrange(9)}.safetensors").write_bytes(source.randbytes(100))
    return "a file more"


KINDS: tuple[Callable[[Path, Path, random.Random], str], ...] = (
    _flip, _flip, _flip, _flip, _flip, _flip, _truncate, _zero, _misplace, _miss, _double, _swap, _older, _append,
    _stranger,
)  # fmt: skip


def try_damage(pristine: Path, directory: Path, count: int, seed: int) -> tuple[int, list[str]]:
    """How often a checkpoint was refused, of ``count`` times, and what was wrong."""
    path, tensors, extra = make(pristine)
    good = {file.name: file.read_bytes() for file in path.iterdir()}
    source, refused, problems = random.Random(seed), 0, []
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(pristine, directory)
    target = directory / path.name
    for number in range(count):
        for file in target.iterdir():
            file.unlink()
        for name, data in good.items():
            (target / name).write_bytes(data)
        what = []
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            file = source.choice(sorted(target.iterdir()))
            if not file.name.startswith("extra-"):
                what.append(source.choice(KINDS)(target, file, source))
        changed = any((target / name).read_bytes() != data if (target / name).exists() else True
                      for name, data in good.items())  # fmt: skip
        try:
            with open_checkpoint(target) as checkpoint:
                checkpoint.verify()
                found = read_all(checkpoint), checkpoint.extra_bytes
        except CorruptCheckpointError as error:
            refused += 1
            if not changed:
                problems.append(f"{number}: refused although nothing was changed ({what}): {error}")
            elif str(target) not in str(error) or "\n" in str(error):
                problems.append(f"{number}: no file is named ({what}): {error}")
        except Exception as error:  # noqa: BLE001 - anything else is what is looked for
            problems.append(f"{number}: {type(error).__name__} ({what}): {error}")
        else:
            if found != (tensors, extra):
                problems.append(f"{number}: returned as good ({what})")
            elif changed:
                problems.append(f"{number}: not noticed ({what})")
    return refused, problems


def main() -> int:
    directory, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    refused, problems = try_damage(directory / "pristine", directory / "damaged", count, seed)
    sys.stdout.write(json.dumps({"tried": count, "refused": refused, "problems": problems}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
