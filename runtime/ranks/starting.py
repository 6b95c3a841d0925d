"""How all ranks start together: rank 0's decision from all ranks' cards. Pure; a refusal of one is raised on all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from checkflow.core import errors
from checkflow.core.errors import CheckflowError, CorruptCheckpointError, MissingShardsError, StorageError
from checkflow.runtime.ranks.records import Card, Refusal, Start, StartReport, name_ranks


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
    unlike = tuple(rank for rank, report in reports.items() if report.job != reports[0].job)
    if unlike:
        message = f"{name_ranks(unlike)} and rank 0 have other arguments or another model: make them the same"
        return start, Refusal("MismatchError", message, unlike)
    if start.stage == "restore" and all(report.restored for report in reports.values()):
        return replace(start, stage="train"), _disagreement(reports)
    return start, None


def _disagreement(reports: Mapping[int, StartReport]) -> Refusal | None:
    """Replicas that differ though they must not, or what no stage holds."""
    if nowhere := set.intersection(*(set(report.lacks) for report in reports.values())):
        return Refusal("MismatchError", f"the checkpoint's {min(nowhere)} is in the job of no rank", tuple(reports))
    first: dict[str, tuple[int, str]] = {}
    for rank, report in sorted(reports.items()):
        for name, digest in sorted(report.replicas.items()):
            other, known = first.setdefault(name, (rank, digest))
            if digest != known:
                message = f"{name} differs between rank {other} and rank {rank}, which must hold the same"
                return Refusal("MismatchError", message, (other, rank))
    return None


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
