"""What a job measured of itself, kept beside its checkpoints: ``<directory>/profile.json``.

A job that starts again chooses its intervals by it and is not profiled (CheckFreq, section 4.4), as long as it is the
same job on the same machine and the same file system. It is a hint: whatever cannot be read is passed over, and the job
profiled anew; and nothing waits until it is durable.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkflow.core.errors import first_fault
from checkflow.core.graph import STRICT
from checkflow.runtime.interval.algorithm import Costs
from checkflow.runtime.system import fs

logger = logging.getLogger("checkflow")

NAME = "profile.json"
_MOST_BYTES = 65536
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e9  # of an iteration, and of anything: beyond them quotients may overflow


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile holds for."""

    __pydantic_config__ = STRICT
    model: str  # a digest of all state by name, shape and dtype, and of the optimizers
    batch: str
    plan: str  # its digest; "" where there is none
    device: str
    ranks: int
    file_system: str


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """The file. Seconds, as in :class:`.algorithm.Costs`."""

    __pydantic_config__ = STRICT
    identity: Identity
    iteration_seconds: float
    capture_seconds: float
    persist_seconds: float
    interference_seconds: float
    standing_seconds: float = 0.0
    format: Literal["checkflow-profile"] = "checkflow-profile"
    version: Literal[1] = 1


class ProfileCache:
    """The profile of one checkpoint directory, which exists and is locked by this process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._known: KeptProfile | None = None
        self._looked = False  # nobody else writes the file

    def find(self, identity: Identity) -> Costs | None:
        """What was measured of such a job, if anything was."""
        if not self._looked:
            self._known, self._looked = self._read(), True
        kept = self._known
        if kept is None or kept.identity != identity:
            return None
        return Costs(
            kept.iteration_seconds, kept.capture_seconds, kept.persist_seconds, kept.interference_seconds,
            kept.standing_seconds,
        )  # fmt: skip

    def keep(self, identity: Identity, costs: Costs) -> None:
        """Replace what is kept. A failure costs another profile at the next start, and is no reason to fail."""
        from pydantic import TypeAdapter

        self._known = kept = KeptProfile(identity, **dataclasses.asdict(costs))
        self._looked = True
        data = TypeAdapter(KeptProfile).dump_json(kept, indent=1) + b"\n"
        try:
            with fs.folder(str(self.path.parent)) as folder:
                fs.publish(NAME, data, dir_fd=folder)
        except OSError as error:
            logger.warning("cannot keep the profile in %s: %s", self.path, error.strerror or error)

    def _read(self) -> KeptProfile | None:
        from pydantic import TypeAdapter, ValidationError

        try:
            with fs.folder(str(self.path.parent)) as folder:
                data = fs.read_small(NAME, _MOST_BYTES, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("passing over %s: %s", self.path, error.strerror or error)
            return None
        try:
            kept: KeptProfile = TypeAdapter(KeptProfile).validate_json(data)
        except ValidationError as error:
            logger.warning("passing over %s: %s", self.path, first_fault(error))
            return None
        times = (kept.capture_seconds, kept.persist_seconds, kept.interference_seconds, kept.standing_seconds)
        if not max(kept.iteration_seconds, *times) <= _MOST_SECONDS:
            logger.warning("passing over %s: a time in it is more than %g s", self.path, _MOST_SECONDS)
            return None
        if not kept.iteration_seconds >= _LEAST_SECONDS or not min(times) >= 0:
            logger.warning("passing over %s: a time in it is negative, or an iteration takes none", self.path)
            return None
        return kept
