"""How a start ends where a part is damaged: rank 0 checks what the rank has named, and the other ranks wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkflow.core.errors import CorruptCheckpointError
from checkflow.runtime.start.memory import LeftMemory
from checkflow.runtime.start.ranks import RankStart
from checkflow.runtime.store.discovery import find
from checkflow.runtime.store.store import Store
from tests.support.ranks.dead import arrays_of, extra_of
from tests.support.ranks.tools import arranged, save


class Council:
    """Stands for rank 0's, and notes what is said."""

    rank, world_size = 0, 2

    def __init__(self, block: tuple[str, int] | None) -> None:
        self.block, self.said = block, list[str]()

    def agree_restored(self, *_: Any) -> None:
        raise CorruptCheckpointError("no rank starts", self.block)

    def settle(self) -> None:
        self.said.append("settled")


@pytest.mark.parametrize(
    ("named", "stays"), [("model-00000-of-00002.safetensors", True), ("model-00001-of-00002.safetensors", False),
                         (None, False)],
)  # fmt: skip
def test_only_the_block_that_a_rank_has_named_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, stays: bool
) -> None:
    """A checkpoint may take minutes to read, and a launcher does not wait. If no block is named, all is read."""
    monkeypatch.setattr("checkflow.runtime.start.ranks.replica_digests", lambda *_: {})
    council = Council((named, 0) if named else None)
    with Store(tmp_path, run_id="r") as store:
        save(store, 5, arranged("fsdp 2", arrays_of(5)), arrays_of(5), extra=extra_of(5, 0))
        path = find(tmp_path)[0] / "model-00001-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        start = RankStart(council, store, 5, LeftMemory(tmp_path, 0), ())  # type: ignore[arg-type]
        with pytest.raises(CorruptCheckpointError, match="no rank starts"):
            start.agree(None)  # type: ignore[arg-type]
        assert [one.name for one in find(tmp_path)] == (["step-00000005"] if stays else [])
    assert council.said == ["settled"]
