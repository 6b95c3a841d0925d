"""What a rank other than 0 knows of the directory of checkpoints: rank 0 alone holds its lock, and commits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from checkflow.runtime.store.retention import Known, Rules
from checkflow.runtime.store.trust import Trust


class SharedStore:
    """A directory that rank 0 has opened as a :class:`.store.Store`: what is to be done there is rank 0's to do.

    Args:
        run_id: rank 0's.
        trust: as for the store.
    """

    commits = False
    committed_at = 0.0, 0.0

    def __init__(self, directory: str | os.PathLike[str], *, run_id: str, rules: Rules, trust: str | None) -> None:
        self.directory = Path(directory).absolute().resolve()
        self.run_id, self.rules, self.locked = run_id, rules, True
        self.trust = Trust(self.directory, trust)

    @property
    def where(self) -> str:
        return str(self.directory)

    def known(self) -> tuple[Known, ...]:
        """None: rank 0 decides which checkpoints stay."""
        return ()

    look = known

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 keeps the metrics, of which all ranks have the same."""

    def went_on_from(self, step: int) -> None:
        """Rank 0 deletes older ones."""

    def rewind(self, step: int) -> None:
        """Rank 0 renames later ones."""

    def close(self) -> None:
        """Nothing is written here any more."""
        self.locked = False
