"""How all ranks start together: rank 0's decision from all ranks' cards. Pure; a refusal of one is raised on all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checkflow.core import errors
from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MissingShardsError, StorageError
from checkflow.runtime.ranks.records import HIDDEN, Card, Refusal, Start, StartReport, name_ranks

_MOST_NAMED = 3  # of what differs


def go_on(
    start: Start, cards: Mapping[int, Card], world_size: int, silent: tuple[int, ...]
) -> tuple[Start, Refusal | None]:
    """The start as rank 0 is to publish it, from the one published before; or why nobody starts."""
    if start.stage == "train":
        return start, None
    for rank, card in sorted(cards.items()):
        if card.refusal is not None:
            return start, replace(card.refusal, ranks=(rank,))
    if silent:
        what = "did not come to the start, or ended" if start.stage == "reports" else "ended during the restore"
        return start, Refusal("MissingShardsError", f"{name_ranks(silent)} of {world_size} {what}", silent)
    reports = {rank: card.start for rank, card in sorted(cards.items()) if card.start is not None}
    if len(reports) < world_size:
        return start, None
    if start.stage == "reports" and (unlike := _unlike({rank: report.job for rank, report in reports.items()})):
        said = "; ".join(_differs(*one) for one in unlike[:_MOST_NAMED])
        more = f"; and {len(unlike) - _MOST_NAMED} more" if len(unlike) > _MOST_NAMED else ""
        ranks = tuple(sorted({rank for _, by_value in unlike for ranks in by_value.values() for rank in ranks}))
        return start, Refusal("MismatchError", f"the ranks differ: {said}{more}; make them alike", ranks)
    if start.stage == "restore" and all(report.restored for report in reports.values()):
        return replace(start, stage="train"), _disagreement(reports)
    return start, None


def _disagreement(reports: Mapping[int, StartReport]) -> Refusal | None:
    """Replicas that differ though they must not, or what no stage holds."""
    if nowhere := set.intersection(*(set(report.lacks) for report in reports.values())):
        return Refusal("MismatchError", f"the checkpoint's {min(nowhere)} is in the job of no rank", tuple(reports))
    for name, by_value in _unlike({rank: report.replicas for rank, report in reports.items()}):
        (first, *_), (other, *_) = list(by_value.values())[:2]
        message = f"{name} differs between rank {first} and rank {other}, which must hold the same"
        return Refusal("MismatchError", message, (first, other))
    return None


def _unlike(said: Mapping[int, Mapping[str, str]]) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
    """The subjects of which ranks say different things, with the ranks by what they say. Silence is no difference."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for rank, subjects in sorted(said.items()):
        for subject, value in subjects.items():
            by_value = found.setdefault(subject, {})
            by_value[value] = (*by_value.get(value, ()), rank)
    return [(subject, by_value) for subject, by_value in found.items() if len(by_value) > 1]


def _differs(subject: str, by_value: Mapping[str, tuple[int, ...]]) -> str:
    """ "the loader's batch_size is 4 on rank 0, 8 on ranks 1 and 2"."""
    what = subject.partition(HIDDEN)[0]
    (first, *_), *others = by_value.values()
    if any(value.startswith(HIDDEN) for value in by_value):
        unlike = tuple(sorted(rank for ranks in others for rank in ranks))
        return f"{what} on {name_ranks(unlike)} than on rank {first}".replace("the ", "other ", 1)
    return f"{what} is " + ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())


def refusal_of(error: BaseException, rank: int) -> Refusal:
    """What the other ranks are told of an error."""
    text = " ".join(str(error).split()) or type(error).__name__
    file, block = getattr(error, "block", None) or ("", 0)
    return Refusal(type(error).__name__, text, (rank,), file, block)


def error_of(refusal: Refusal) -> CheckflowError:
    """The error to raise for another rank's refusal."""
    who = f"{name_ranks(refusal.ranks)}: " if refusal.kind not in ("MissingShardsError", "MismatchError") else ""
    message = f"no rank starts: {who}{refusal.message}"
    if refusal.kind == "MissingShardsError":
        return MissingShardsError(message, refusal.ranks)
    if refusal.kind == "CorruptCheckpointError":
        return CorruptCheckpointError(message, (refusal.file, refusal.block) if refusal.file else None)
    kind = getattr(errors, refusal.kind, None)
    if isinstance(kind, type) and issubclass(kind, CheckflowError):
        return kind(message)
    return StorageError(message)
