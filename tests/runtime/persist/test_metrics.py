"""Several ranks judge states by their metrics, each by itself, and come to the same."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from checkflow.runtime.persist.metrics import Metrics
from checkflow.runtime.store import retention
from checkflow.runtime.store.retention import Known, Rules
from checkflow.runtime.store.shared import SharedStore

RULES = Rules(keep_best=2, monitor="loss")
LOSSES = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, math.nan]), max_size=12)


def known(losses: list[float], first: int = 1) -> list[Known]:
    return [Known(first + number, False, {"loss": loss}) for number, loss in enumerate(losses)]


@given(before=LOSSES, since=LOSSES)
def test_a_state_is_saved_if_it_is_one_of_the_best_so_far(before: list[float], since: list[float]) -> None:
    """Though a rank knows only the best checkpoints at the start, and not what became of captures since."""
    stored = known(before)
    best = retention.best(RULES, stored)[: RULES.keep_best]
    store = SharedStore(Path("/"), run_id="run", rules=RULES, trust=None)
    metrics = Metrics(store, [one for one in stored if one.step in best])
    for number, one in enumerate(known(since, len(before) + 1)):
        metrics.record(one.step, "loss", one.metrics["loss"], late=False)
        all_so_far = [*stored, *known(since[: number + 1], len(before) + 1)]
        assert metrics.ranks(one.step) == (one.step in retention.best(RULES, all_so_far)[: RULES.keep_best])
