"""The public Checkpointer: the runtime's, with the planner's replay of plans and a planner for jobs that bring no plan.

The wings do not know each other; this module, which stands outside of both, is where they meet.
"""

from __future__ import annotations

from checkflow.core.plan import Plan
from checkflow.core.planner_api import Planner
from checkflow.planner.schedule.replay import check_plan
from checkflow.runtime import checkpointer


def make_planner() -> Planner:
    """The planner of a job that makes its own plan. Jobs that bring one do not import it."""
    from checkflow.planner.live.planner import LivePlanner

    return LivePlanner()


class Checkpointer(checkpointer.Checkpointer):
    __doc__ = checkpointer.Checkpointer.__doc__

    @staticmethod
    def _check_plan(plan: Plan) -> None:
        check_plan(plan)

    @staticmethod
    def _make_planner() -> Planner:
        return make_planner()
