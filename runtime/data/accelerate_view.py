"""Accelerate hears of a resumable loader what its own loaders tell it: that one is iterated, and its last batch.

``accelerator.accumulate`` takes an optimizer step at the end of an epoch even where fewer batches than usual have been
accumulated. ``accelerator.prepare`` gives back a resumable loader as it is, and would not know where that is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def told_to_accelerate(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """The loader's batches; while they are iterated Accelerate knows of it, where it is in use.

    Args:
        loader: its ``end_of_dataloader`` says whether the batch that was handed out last is the last one, and its
            ``remainder`` how many samples were added to fill it.
    """
    return _Told(loader, batches) if "accelerate.state" in sys.modules else batches


class _Told(Iterator[Any]):
    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches
        self._known = False

    def __next__(self) -> Any:
        if not self._known:
            sys.modules["accelerate.state"].GradientState()._add_dataloader(self._loader)
            self._known = True
        try:
            return next(self._batches)
        except StopIteration:
            self._forget()
            raise

    def _forget(self) -> None:
        if self._known:
            self._known = False
            # Asked for anew: tests of users reset this shared state.
            if module := sys.modules.get("accelerate.state"):
                module.GradientState()._remove_dataloader(self._loader)

    def __del__(self) -> None:  # the loop was left in its middle
        self._forget()
