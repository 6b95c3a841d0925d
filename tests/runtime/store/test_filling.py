"""A rank's tensors that cannot be read into directly: through host memory, a bounded part at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from checkflow.core.boxes import Box
from checkflow.runtime.store import filling
from checkflow.runtime.store.parts import narrow_to
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.store.store import Store
from tests.support.ranks.tools import arranged, part, save

ARRAY = np.random.default_rng(2).standard_normal((9, 6, 4, 10))
BOX = Box(ARRAY.shape, (1, 2, 0, 3), (7, 4, 4, 5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Store(tmp_path / "versions", run_id="r") as store:
        return save(store, 1, arranged("fsdp-tp 2x2", {"model/x": ARRAY}), {"model/x": ARRAY})


MEMORIES: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.zeros(BOX.lengths, dtype=torch.float64),
    "channels last": lambda: torch.zeros(BOX.lengths, dtype=torch.float64).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.zeros((*BOX.lengths[:3], 10), dtype=torch.float64)[..., ::2],
}


@pytest.mark.parametrize("at_once", [8, 100, 1000, 1 << 20])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_part_in_any_memory(path: Path, memory: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = 0, 0
    real = torch.empty

    def counted(*arguments: object, **keywords: object) -> torch.Tensor:
        nonlocal held, most
        made = real(*arguments, **keywords)  # type: ignore[call-overload]
        held += made.nbytes
        most = max(most, held)
        return made  # type: ignore[no-any-return]

    def read_boxes(targets: object) -> None:
        nonlocal held
        real_read(targets)
        held = 0

    monkeypatch.setattr(filling, "_APART_BYTES", at_once)
    monkeypatch.setattr(torch, "empty", counted)
    tensor = MEMORIES[memory]()
    with open_checkpoint(path, lambda described: narrow_to(described, {"model/x": BOX})) as checkpoint:
        real_read = checkpoint.read_boxes_into
        monkeypatch.setattr(checkpoint, "read_boxes_into", read_boxes)
        filling.fill_all(checkpoint, [("model/x", tensor, BOX)])
    assert np.array_equal(tensor.numpy(), part(ARRAY, BOX))
    assert most < 2 * at_once  # what waits is less, and one part joins it
    assert (most == 0) == (memory == "row-major")


def test_nothing_is_read_for_an_empty_part(path: Path) -> None:
    empty = Box(ARRAY.shape, (9, 0, 0, 0), (0, 6, 4, 10))
    tensor = torch.zeros(empty.lengths, dtype=torch.float64)
    with open_checkpoint(path, lambda described: narrow_to(described, {"model/x": empty})) as checkpoint:
        filling.fill_all(checkpoint, [("model/x", tensor, empty)])
        assert len(checkpoint.manifest.tensors["model/x"].pieces) == 1
