"""Every error that checkflow raises on purpose. Each message is one line that says what is wrong and what to do.

Also two exceptions that are not errors: :class:`Preempted` and :class:`StoppedError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


_MOST_PLACE = 200  # characters of a message's place


class CheckflowError(Exception):
    """The root: ``except CheckflowError`` catches everything that checkflow reports on purpose."""


class ModelError(CheckflowError):
    """A model file cannot be used: it is missing, has no ``build``, raises, or returns something else."""


class TraceError(CheckflowError):
    """A training step cannot be traced; the message names the operator and the user's source line."""


class PlanError(CheckflowError):
    """A plan, or its input, is damaged or breaks a rule."""


class InfeasibleError(PlanError):
    """No plan keeps the limits; the message names the tight interval and the least bandwidth."""


class SolverError(PlanError):
    """A solver is missing, failed, or ran out of time before it found any schedule."""


class MismatchError(CheckflowError):
    """A plan or a checkpoint was made for another job; the message says what differs."""


class UnsupportedError(CheckflowError):
    """The job does something on the closed list of refusals; the message says what to change."""


class StorageError(CheckflowError):
    """A checkpoint directory cannot be written or read."""


class LockedError(StorageError):
    """Another process writes to this checkpoint directory; the message names it."""


class MissingShardsError(StorageError):
    """Some processes did not write their parts of a checkpoint, so it does not exist.

    Attributes:
        ranks: those processes.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class VoidCheckpointError(MissingShardsError):
    """Not all of several ranks captured a boundary, or rank 0 saves a later one. That is no failure."""


class CorruptCheckpointError(StorageError):
    """A checkpoint is damaged; the message names the file.

    Attributes:
        block: a file's name, and the number of its block that does not match its checksum; None: another fault.
    """

    def __init__(self, message: str, block: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.block = block


class ReportError(CheckflowError):
    """A run's report cannot be read: the file is missing, damaged, or of another version."""


class ViewError(CheckflowError):
    """A page or another view cannot be made or written."""


class ConsistencyError(CheckflowError):
    """An audit found staged bytes that differ from the state at the boundary; the message names the tensor."""


class Preempted(SystemExit):
    """A signal asked the job to end: training ends here. Its state is saved if time and storage allow; the log says so.

    It is a SystemExit, so a script without any code for it unwinds (``with`` blocks and ``finally`` clauses run, what
    follows the loop does not) and exits with 75: EX_TEMPFAIL of sysexits.h, "try again later".

    Attributes:
        signal_name: such as "SIGTERM".
    """

    EXIT_CODE = 75

    def __init__(self, signal_name: str) -> None:
        super().__init__(self.EXIT_CODE)
        self.signal_name = signal_name


class StoppedError(BaseException):
    """A signal asks this command to end.

    Not an Exception, KeyboardInterrupt or SystemExit, since models and libraries catch those.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def first_fault(error: ValidationError) -> str:
    """Return the first fault in a file as "place: reason", without pydantic's prefixes."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = " ".join(".".join(str(part) for part in first["loc"]).split()) or "file"  # keys come from the file
    reason = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{place[:_MOST_PLACE]}: {' '.join(reason.split())}"
